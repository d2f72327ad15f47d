"""One held-out evaluation of one policy version: which samples are out, what came back."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_hpc.controller_state import Credits
from areal_hpc.data import Prompt
from areal_hpc.logschema import Outcome


class Evaluation:
    """`samples` answers to each held-out prompt.

    Each answer is a group of one, with ids -1, -2, ... so that they never meet those of training; the random stream of
    an answer depends on its id alone, so two versions are compared on the same random numbers.
    """

    def __init__(self, prompts: Sequence[Prompt], samples: int, version: int) -> None:
        self.version = version
        self.prompts = prompts
        self.samples = samples
        total = len(prompts) * samples
        self.pending = deque((-1 - i, prompts[i // samples]) for i in range(total))
        self.missing = {-1 - i for i in range(total)}
        self.answers: dict[int, dict[str, NDArray]] = {}
        self.rank_of: dict[int, int] = {}

    def take(self, rank: int) -> tuple[int, Prompt]:
        """The next answer to ask for, and note whom."""
        group_id, prompt = self.pending.popleft()
        self.rank_of[group_id] = rank
        return group_id, prompt

    def lose(self, rank: int) -> int:
        """This rank is lost: what it still owes has to come from others. Returns how many answers that are."""
        owed = sorted((g for g in self.missing if self.rank_of.get(g) == rank), reverse=True)
        for group_id in owed:
            del self.rank_of[group_id]
        self.pending.extend((group_id, self.prompts[(-1 - group_id) // self.samples]) for group_id in owed)
        return len(owed)

    @property
    def is_complete(self) -> bool:
        return not self.missing

    def can_go_on(self, credits: Credits) -> bool:
        """More samples can be sent, or nothing is left to wait for."""
        return self.is_complete or bool(self.pending and any(credits.free.values()))

    def finished(self, group_id: int, figures: Mapping[str, NDArray]) -> None:
        self.answers[group_id] = dict(figures)
        self.missing.discard(group_id)

    def refused(self, group_id: int) -> None:
        """A prompt that cannot be generated from has no answer; it is not counted as wrong."""
        self.missing.discard(group_id)

    def _outcomes(self) -> NDArray[np.uint8]:
        return np.array([int(figures["outcome"][0]) for figures in self.answers.values()], np.uint8)

    @property
    def num_scored(self) -> int:
        return int((~np.isin(self._outcomes(), (Outcome.TIMEOUT, Outcome.ERROR))).sum())

    @property
    def num_unscored(self) -> int:
        """Answers without a reward (time-out, error) and prompts without an answer."""
        return len(self.prompts) * self.samples - self.num_scored

    @property
    def pass_at_1(self) -> float:
        """Share of correct answers among the scored ones; NaN if there are none."""
        return float((self._outcomes() == Outcome.CORRECT).sum() / self.num_scored) if self.num_scored else float("nan")

    @property
    def mean_response(self) -> float:
        """Mean response length in tokens."""
        return (
            float(np.mean([figures["num_response"][0] for figures in self.answers.values()]))
            if self.answers
            else float("nan")
        )

    def waiting_for(self) -> str:
        return f"{len(self.missing)} of {len(self.prompts) * self.samples} held-out answers with version {self.version}"

    def rows(self) -> dict[str, Any]:
        """Rows of the evaluation table."""
        ids = sorted(self.answers, reverse=True)
        number = [-1 - i for i in ids]
        return {
            "version": [self.version] * len(ids),
            "prompt_id": [self.prompts[n // self.samples].prompt_id for n in number],
            "sample": [n % self.samples for n in number],
            "reward": [self.answers[i]["reward"][0] for i in ids],
            "outcome": [self.answers[i]["outcome"][0] for i in ids],
            "num_response": [self.answers[i]["num_response"][0] for i in ids],
        }
