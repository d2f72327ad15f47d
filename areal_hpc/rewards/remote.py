"""Scoring on reward ranks: a `Rewards` that sends answers out over MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_hpc.comm import World
from areal_hpc.messages import Score, Scored
from areal_hpc.rewards.recipe import RewardError
from areal_hpc.rewards.service import NO_FACTS, RewardResult
from areal_hpc.trajectory import Key


class RemoteRewards:
    """One rollout rank's share of the reward ranks. The rank with fewest of its answers gets the next one.

    A reward rank does not come back to life: its death ends the attempt, and the next attempt has scored anew what was
    not scored.
    """

    num_restarts = 0  # the reward ranks report theirs

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self._world = world
        self._outstanding = dict.fromkeys(ranks, 0)
        self._rank_of: dict[Key, int] = {}
        self._results: list[RewardResult] = []
        self._turn = world.rank  # so that the first answers of all rollout ranks do not go to the same one

    @property
    def num_pending(self) -> int:
        return len(self._rank_of)

    def submit(
        self, key: Key, prompt: str, completion: str, metadata: dict[Any, Any], facts: Mapping[str, Any] = NO_FACTS
    ) -> None:
        """Send one answer out; never blocks.

        Raises:
            RewardError: an answer with this key is pending.
        """
        if key in self._rank_of:
            raise RewardError(f"answer {key} was submitted again while it is pending; keys must be unique")
        rank = self._next_rank()
        self._rank_of[key] = rank
        self._outstanding[rank] += 1
        message = Score(*key, metadata=metadata, facts=dict(facts))
        self._world.post(rank, message, {"prompt": to_bytes(prompt), "completion": to_bytes(completion)})

    def arrived(self, scored: Scored) -> None:
        """Take a reward rank's answer; `poll` returns it."""
        key = (scored.group_id, scored.sample)
        self._outstanding[self._rank_of.pop(key)] -= 1
        self._results.append(
            RewardResult(key, scored.reward, scored.outcome, scored.seconds, scored.detail, scored.answer)
        )

    def poll(self) -> list[RewardResult]:
        results, self._results = self._results, []
        return results

    def _next_rank(self) -> int:
        """Fewest outstanding answers; among equals each in turn."""
        ranks = list(self._outstanding)
        turn = self._turn % len(ranks)
        rank = min(ranks[turn:] + ranks[:turn], key=self._outstanding.__getitem__)
        self._turn = ranks.index(rank) + 1
        return rank


def to_bytes(text: str) -> NDArray[np.uint8]:
    """UTF-8; lone surrogates, which a tokenizer may leave, stay."""
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)


def to_text(array: NDArray[np.uint8]) -> str:
    return array.tobytes().decode("utf-8", "surrogatepass")
