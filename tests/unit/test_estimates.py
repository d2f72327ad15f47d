"""pass@k and maj@k against their definitions: every choice of k of the n answers is looked at."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.estimates import majority_at, mean_and_error, pass_at_k, powers_of_two


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 2, 1) == 0.5
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)  # one of the six pairs holds no correct answer
    assert pass_at_k(4, 2, 4) == 1.0 and pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(5, 1, 2) == pytest.approx(0.4)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_choices_with_a_correct_answer(n):
    for c in range(n + 1):
        right = [i < c for i in range(n)]
        for k in range(1, n + 1):
            choices = list(combinations(right, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 2), (0, 0, 1), (4, -1, 1)])
def test_pass_at_k_outside_its_range(n, c, k):
    with pytest.raises(ValueError, match=f"pass@{k} of {n} answers, {c} of them"):
        pass_at_k(n, c, k)


def test_powers_of_two_end_with_the_limit():
    assert powers_of_two(0) == [] and powers_of_two(1) == [1] and powers_of_two(32) == [1, 2, 4, 8, 16, 32]
    assert powers_of_two(6) == [1, 2, 4, 6]


def brute(answers, correct, k: int) -> float:
    """Count the votes of every choice; tied answers share the win."""
    share = {a: np.mean([c for b, c in zip(answers, correct, strict=True) if b == a]) for a in set(answers)}
    won = []
    for choice in combinations(range(len(answers)), k):
        votes = Counter(answers[i] for i in choice if answers[i] is not None)
        best = [a for a, n in votes.items() if n == max(votes.values())]
        won.append(np.mean([share[a] for a in best]) if best else 0.0)
    return float(np.mean(won))


def test_majority_by_hand():
    curve = majority_at(["4", "4", "5"], [True, True, False])
    assert math.isnan(curve[0])
    assert curve[1:].tolist() == pytest.approx([2 / 3, (1 + 0.5 + 0.5) / 3, 1.0])
    assert majority_at(["5", "5", "4"], [False, False, True])[3] == 0.0, "a minority that is right loses"
    assert majority_at([None, None, "4"], [False, False, True])[1:].tolist() == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert majority_at([None, None], [False, False])[1:].tolist() == [0.0, 0.0]
    assert len(majority_at([], [])) == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.booleans()), min_size=1, max_size=8))
def test_majority_is_the_mean_over_all_choices(pairs):
    answers, correct = [a for a, _ in pairs], [c and a is not None for a, c in pairs]
    curve = majority_at(answers, correct)
    assert curve[1:].tolist() == pytest.approx([brute(answers, correct, k) for k in range(1, len(pairs) + 1)])


def test_majority_of_many_answers_stays_in_range():
    curve = majority_at([str(i % 7) for i in range(256)], [i % 7 == 0 for i in range(256)])
    assert np.isfinite(curve[1:]).all()
    assert curve[256] == 0.25, "0 to 3 tie with 37 votes each, one of them is right"


def test_mean_and_error_over_prompts():
    mean, error = mean_and_error([0.0, 1.0, 1.0, 0.0])
    assert mean == 0.5 and error == pytest.approx(math.sqrt(1 / 3) / 2)
    assert mean_and_error([0.25])[0] == 0.25 and math.isnan(mean_and_error([0.25])[1])
    assert all(map(math.isnan, mean_and_error([])))
