"""What several answers to each of many questions say about a model: pass@k, maj@k, and how sure that is.

All take the prompts one by one; a figure of a data set is the mean over its prompts. Answers without a score (time-out,
error) are not among the n of a prompt: they are not wrong answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that one of k answers, drawn without replacement from n of which c are correct, is correct.

    1 - C(n - c, k) / C(n, k), which estimates without bias how often k fresh answers hold a correct one. For k = 1 it
    is c / n.

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} of {n} answers, {c} of them correct, is not defined")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to `limit`, and `limit` itself; empty for 0."""
    powers = [1 << i for i in range(limit.bit_length())]
    return powers if not limit or powers[-1] == limit else [*powers, limit]


def majority_at(answers: Sequence[str | None], correct: Sequence[bool]) -> NDArray[np.float64]:
    """How often the most frequent of k answers is correct: float64 [n + 1], entry k is maj@k (entry 0 is NaN).

    The exact expectation over all C(n, k) choices of k of the n answers; nothing is drawn. Equal texts are one answer,
    whose correctness is the share of its correct copies. A tie counts as the mean over the tied answers, which is what
    breaking it in favour of the one that was given first comes to on average. None (no answer could be read) takes a
    place among the k but has no vote; where nobody votes the result is 0.

    With v the votes of the winners: for every v the choices are counted by size s and number t of tied answers, one
    answer after the other (an answer given m times is chosen i times in C(m, i) ways, i <= v, and is tied if i = v).
    """
    n = len(answers)
    copies: dict[str, list[bool]] = {}
    for answer, is_correct in zip(answers, correct, strict=True):
        if answer is not None:
            copies.setdefault(answer, []).append(is_correct)
    groups = sorted(((len(c), sum(c) / len(c)) for c in copies.values()), reverse=True)
    silent = n - sum(m for m, _ in groups)
    won = np.zeros(n + 1)  # ways to choose s answers, times the correctness of what wins
    for votes in range(1, max((m for m, _ in groups), default=0) + 1):
        won += _won_with(votes, groups, n)
    won = np.convolve(won, [float(math.comb(silent, i)) for i in range(silent + 1)])[: n + 1]
    all_ways = np.array([float(math.comb(n, k)) for k in range(n + 1)])
    result = won / all_ways
    result[0] = np.nan
    return result


def _won_with(votes: int, groups: Sequence[tuple[int, float]], n: int) -> NDArray[np.float64]:
    """[n + 1]: over the choices of s voting answers whose winners have `votes` votes each, the sum of correctness."""
    most_tied = sum(m >= votes for m, _ in groups)
    ways = np.zeros((n + 1, most_tied + 1))  # [s, t]
    right = np.zeros_like(ways)  # the same, each choice times the sum of the correctness of its tied answers
    ways[0, 0] = 1.0
    for m, share in groups:
        new_ways, new_right = np.zeros_like(ways), np.zeros_like(right)
        for i in range(min(m, votes) + 1):
            c, end = float(math.comb(m, i)), n + 1 - i
            if i < votes:
                new_ways[i:] += c * ways[:end]
                new_right[i:] += c * right[:end]
            else:
                new_ways[i:, 1:] += c * ways[:end, :-1]
                new_right[i:, 1:] += c * (right[:end, :-1] + share * ways[:end, :-1])
        ways, right = new_ways, new_right
    tied = np.arange(1, most_tied + 1)
    return (right[:, 1:] / tied).sum(axis=1)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and its standard error: that of independent prompts, s / sqrt(P) with s over P - 1; NaN for too few.

    Given one mean per prompt, the error takes the answers to one prompt as one cluster: they are not independent
    evidence, and with many samples of few prompts the naive error is much too small.
    """
    if not len(values):
        return math.nan, math.nan
    array = np.asarray(values, np.float64)
    error = float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else math.nan
    return float(array.mean()), error
