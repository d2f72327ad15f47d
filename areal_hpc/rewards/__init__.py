"""Rewards of finished answers, computed in processes that can be killed, never in the rank itself.

A reward is a plain function `(prompt: str, completion: str, metadata: dict)` that returns a finite number (> 0 is
correct, else wrong), or `(number, "correct" | "wrong" | "unparsed")`, or, for votes, both of it and the answer that it
has read, as text or None. Further parameters are filled from the configuration (`kwargs`) and, where they have the name
of a fact of the answer (recipe.FACTS), from that fact:

    def brief(prompt, completion, metadata, *, num_tokens, limit=500): ...

    recipe.py     what is to be computed: functions, weights, rules        both sides
    wire.py       frames between a rank and its processes                  both sides
    service.py    `RewardService`, with child.py for each process          in a rollout or reward rank
    process.py    calls the functions (functions.py)                       in the process
    shaping.py    ready-made functions: length penalty, format
    remote.py     the same promises over MPI, for runs with reward ranks   in a rollout rank
    backlog.py    when too many answers wait                               in a rollout rank

Nothing here needs torch, MPI or numpy but remote.py.
"""

from areal_hpc.rewards.recipe import Recipe, RewardError, Term
from areal_hpc.rewards.service import NO_FACTS, RewardResult, RewardService

__all__ = ["NO_FACTS", "Recipe", "RewardError", "RewardResult", "RewardService", "Term"]
