"""Held-out evaluation of one policy version: which answers are wanted, which are out, what came back."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from areal_hpc.answers import Answer, AnswerKey
from areal_hpc.controller_state import Credits
from areal_hpc.data import Prompt
from areal_hpc.messages import GroupFinished
from areal_hpc.scorecard import Scorecard, scorecards

HeldOut = Mapping[str, Sequence[Prompt]]
"""Data sets by name; the name of a single one is up to whoever reads it."""


class Evaluation:
    """`samples` answers to each prompt of each data set.

    Each answer is a group of one, with ids that count down from `first_id`, so that they never meet those of training.
    The random stream of an answer follows from the run's seed, the id of its prompt and its sample number alone
    (rollout.py), so that versions, runs and `areal-hpc evaluate` are compared on the same random numbers.

    Args:
        heldout: data sets by name.
        version: newest policy version at its beginning; every first token is of this version or a newer one.
        first_id: id of the first answer.
        answered: answers that an earlier attempt has got already.
    """

    def __init__(
        self,
        heldout: HeldOut,
        samples: int,
        version: int,
        first_id: int = -1,
        answered: Iterable[Answer] = (),
    ) -> None:
        self.version = version
        self.heldout = heldout
        self.samples = samples
        wanted = [(name, prompt, s) for name, prompts in heldout.items() for prompt in prompts for s in range(samples)]
        self.wanted = {first_id - i: one for i, one in enumerate(wanted)}
        self.next_id = first_id - len(wanted)
        self.place = {(name, prompt.prompt_id, s): i for i, (name, prompt, s) in enumerate(wanted)}
        self.answers: dict[AnswerKey, Answer] = {a.key: a for a in answered if a.key in self.place}
        self.pending = deque(i for i in self.wanted if self._key(i) not in self.answers)
        self.missing = set(self.pending)
        self.refused_ids: set[int] = set()
        self.rank_of: dict[int, int] = {}

    def _key(self, group_id: int) -> AnswerKey:
        name, prompt, sample = self.wanted[group_id]
        return name, prompt.prompt_id, sample

    @property
    def is_complete(self) -> bool:
        return not self.missing

    def admit(self, credits: Credits, most_per_rank: int | None = None) -> tuple[int, int] | None:
        """(Id, rank) of the next answer to ask for; None if nothing is left or no rank has room.

        Args:
            most_per_rank: most answers out on one rank at a time; None: as many as it has places.
        """
        if not self.pending:
            return None
        out = Counter(self.rank_of.values())
        ranks = [r for r in credits.free if most_per_rank is None or out[r] < most_per_rank]
        rank = credits.take(1, ranks)
        if rank is None:
            return None
        group_id = self.pending.popleft()
        self.rank_of[group_id] = rank
        return group_id, rank

    def finished(self, header: GroupFinished, figures: Mapping[str, NDArray]) -> Answer | None:
        """Take an answer; None if it is not one of those that are missing."""
        if header.group_id not in self.missing:
            return None
        name, prompt, sample = self.wanted[header.group_id]
        answer = Answer.of(name, prompt.prompt_id, sample, header, figures)
        self.answers[answer.key] = answer
        self._settled(header.group_id)
        return answer

    def refused(self, group_id: int) -> None:
        """A prompt that cannot be generated from has no answer; it is not counted as wrong."""
        if group_id in self.missing:
            self.refused_ids.add(group_id)
            self._settled(group_id)

    def lost(self, rank: int) -> int:
        """A rank is gone: what it was asked for is asked anew, before everything else. Returns how many that is."""
        again = sorted(i for i, owner in self.rank_of.items() if owner == rank)  # ids count down: latest first
        for group_id in again:
            del self.rank_of[group_id]
            self.pending.appendleft(group_id)
        return len(again)

    def _settled(self, group_id: int) -> None:
        self.missing.discard(group_id)
        self.rank_of.pop(group_id, None)

    # ------------------------------------------------------------------------------------------------- figures
    def in_order(self) -> list[Answer]:
        """All answers so far: by data set, prompt and sample, whatever order they came in."""
        return sorted(self.answers.values(), key=lambda answer: self.place[answer.key])

    def cards(self) -> dict[str, Scorecard]:
        """The figures of every data set."""
        refused = Counter(self.wanted[i][0] for i in self.refused_ids)
        return scorecards(self.heldout, self.in_order(), refused)

    @property
    def pass_at_1(self) -> float:
        """Mean over all prompts of all data sets; NaN without a score."""
        return Scorecard.over("all", self.in_order()).pass_at_1

    def waiting_for(self) -> str:
        return f"{len(self.missing)} of {len(self.wanted)} held-out answers with version {self.version}"

    def rows(self) -> dict[str, Any]:
        """Rows of the evaluation table."""
        answers = self.in_order()
        return {"version": [self.version] * len(answers)} | {
            name: [getattr(answer, name) for answer in answers] for name in Answer.LOGGED
        }

    def snapshot(self) -> dict[str, Any]:
        """What the next attempt needs to know; answers that are out are not in it and will be asked for anew."""
        return {"version": self.version, "answers": [answer.as_json() for answer in self.in_order()]}
