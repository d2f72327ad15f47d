"""The figures of an evaluation: pass@1 with its error, pass@k, maj@k, lengths, outcomes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_hpc.answers import Answer
from areal_hpc.estimates import majority_at, mean_and_error, pass_at_k, powers_of_two
from areal_hpc.logcodes import Finish, Outcome

MOST_FOR_MAJORITY = 1000
"""maj@k of more answers to a prompt is left out: its counts would leave the range of float64."""


@dataclass(frozen=True, slots=True)
class Scorecard:
    """The figures of one data set.

    Every figure is the mean over prompts of the estimate from that prompt's scored answers (estimates.py), so for
    pass@1, where all answers are scored, it is the mean over all answers. Errors are standard errors over prompts: the
    answers to one prompt are one cluster. A time-out or an error is no wrong answer; it is counted in `outcomes`.

    Attributes:
        data: name of the data set.
        num_prompts: prompts with at least one scored answer.
        num_answers: answers, scored or not.
        num_scored: answers with a reward.
        num_missing: answers that could not be had, because their prompt was refused.
        pass_at, maj_at: k -> (mean, standard error, number of prompts with at least k scored answers); maj_at is empty
            where no reward function said what it read.
        lengths: mean, median, p90 and max of response tokens, and the share `truncated` by the budget.
        outcomes: number of answers by outcome.
        tokens: response tokens of all answers.
    """

    data: str
    num_prompts: int
    num_answers: int
    num_scored: int
    num_missing: int
    pass_at: dict[int, tuple[float, float, int]]
    maj_at: dict[int, tuple[float, float, int]]
    lengths: dict[str, float]
    outcomes: dict[str, int]
    tokens: int

    @classmethod
    def over(cls, data: str, answers: Sequence[Answer], num_missing: int = 0) -> Scorecard:
        """The figures of these answers."""
        by_prompt: dict[tuple[str, str], list[Answer]] = {}
        for answer in answers:
            if answer.is_scored:
                by_prompt.setdefault((answer.data, answer.prompt_id), []).append(answer)
        groups = list(by_prompt.values())
        found = Counter(answer.outcome for answer in answers)
        return cls(
            data=data,
            num_prompts=len(groups),
            num_answers=len(answers),
            num_scored=sum(map(len, groups)),
            num_missing=num_missing,
            pass_at=_pass_at(groups),
            maj_at=_maj_at(groups),
            lengths=_lengths(answers),
            outcomes={label: found[label] for label in Outcome.labels()},
            tokens=sum(answer.num_response for answer in answers),
        )

    @property
    def pass_at_1(self) -> float:
        return self.pass_at[1][0] if self.pass_at else math.nan

    @property
    def pass_at_1_error(self) -> float:
        return self.pass_at[1][1] if self.pass_at else math.nan

    @property
    def num_unscored(self) -> int:
        """Answers without a reward, and answers that could not be had."""
        return self.num_answers - self.num_scored + self.num_missing

    def as_json(self) -> dict[str, Any]:
        """A JSON object; null for what is not defined (the error of one prompt, say)."""

        def plain(value: float) -> float | None:
            return round(value, 6) if math.isfinite(value) else None

        def figures(at: Mapping[int, tuple[float, float, int]]) -> dict[str, Any]:
            return {str(k): {"mean": plain(m), "error": plain(e), "prompts": n} for k, (m, e, n) in at.items()}

        return {
            "data": self.data,
            "prompts": self.num_prompts,
            "answers": self.num_answers,
            "scored": self.num_scored,
            "refused": self.num_missing,
            "pass_at_1": plain(self.pass_at_1),
            "pass_at_1_error": plain(self.pass_at_1_error),
            "pass_at": figures(self.pass_at),
            "maj_at": figures(self.maj_at),
            "length": {name: plain(value) for name, value in self.lengths.items()},
            "outcomes": self.outcomes,
            "rates": {name: plain(count / max(1, self.num_answers)) for name, count in self.outcomes.items()},
            "tokens": self.tokens,
        }


def scorecards(names: Iterable[str], answers: Sequence[Answer], refused: Mapping[str, int]) -> dict[str, Scorecard]:
    """One card per data set, in the order of `names`."""
    return {
        name: Scorecard.over(name, [answer for answer in answers if answer.data == name], refused.get(name, 0))
        for name in names
    }


def _pass_at(groups: Sequence[Sequence[Answer]]) -> dict[int, tuple[float, float, int]]:
    counts = [(len(group), sum(answer.outcome == "correct" for answer in group)) for group in groups]
    values = {k: [pass_at_k(n, c, k) for n, c in counts if n >= k] for k in _ks(groups)}
    return {k: (*mean_and_error(found), len(found)) for k, found in values.items()}


def _maj_at(groups: Sequence[Sequence[Answer]]) -> dict[int, tuple[float, float, int]]:
    if not any(answer.answer is not None for group in groups for answer in group):
        return {}
    if max(map(len, groups)) > MOST_FOR_MAJORITY:
        return {}
    curves = [majority_at([a.answer for a in group], [a.outcome == "correct" for a in group]) for group in groups]
    values = {k: [float(curve[k]) for curve in curves if len(curve) > k] for k in _ks(groups)}
    return {k: (*mean_and_error(found), len(found)) for k, found in values.items()}


def _ks(groups: Sequence[Sequence[Answer]]) -> list[int]:
    return powers_of_two(max(map(len, groups), default=0))


def _lengths(answers: Sequence[Answer]) -> dict[str, float]:
    if not answers:
        return dict.fromkeys(("mean", "median", "p90", "max", "truncated"), math.nan)
    tokens = np.array([answer.num_response for answer in answers])
    return {
        "mean": float(tokens.mean()),
        "median": float(np.median(tokens)),
        "p90": float(np.percentile(tokens, 90)),
        "max": float(tokens.max()),
        "truncated": sum(answer.finish == Finish.LENGTH.label for answer in answers) / len(answers),
    }
