"""Advantages against numbers worked out by hand and against a token-by-token transcription."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.advantages import GroupNorm, advantages, discounted_returns

EPS = 1e-5


def test_raw_reward_without_normalisation() -> None:
    result = advantages([5.0, -5.0, 5.0], [0, 0, 1], [3, 9, 2], group_norm="none", batch_norm=False)
    assert result.dtype == np.float64
    assert result.tolist() == [5.0, -5.0, 5.0]


def test_batch_step_weighs_sequences_by_tokens() -> None:
    # Tokens: 5, -5 -5 -5. mean = (5 - 15) / 4 = -2.5; var = (7.5^2 + 3 * 2.5^2) / 4 = (56.25 + 18.75) / 4 = 18.75.
    std = math.sqrt(18.75)
    result = advantages([5, -5], [0, 1], [1, 3], group_norm="none", batch_norm=True)
    assert result == pytest.approx([7.5 / (std + EPS), -2.5 / (std + EPS)], rel=1e-12)


def test_groups_of_three_two_three_in_any_order() -> None:
    # Group 7: 5, -5, 5   mean 5/3, deviations 10/3, -20/3, 10/3, var (100 + 400 + 100) / 27 = 200 / 9.
    # Group 2: 5, -5      mean 0,   deviations 5, -5,              var 25, std 5.
    # Group 9: -5, -5, -5 no spread: exactly 0.
    groups = [7, 2, 9, 7, 9, 2, 7, 9]
    rewards = [5, 5, -5, -5, -5, -5, 5, -5]
    std = math.sqrt(200) / 3
    lengths = [4, 1, 2, 8, 5, 1, 1, 3]
    mean_std = advantages(rewards, groups, lengths, group_norm="mean_std", batch_norm=False)
    third = 10 / 3 / (std + EPS)
    fifth = 5 / (5 + EPS)
    assert mean_std == pytest.approx([third, fifth, 0, -2 * third, 0, -fifth, third, 0], rel=1e-12, abs=0)
    mean = advantages(rewards, groups, lengths, group_norm="mean", batch_norm=False)
    assert mean == pytest.approx([10 / 3, 5, 0, -20 / 3, 0, -5, 10 / 3, 0], rel=1e-12, abs=0)


@pytest.mark.parametrize("group_norm", ["mean", "mean_std"])
def test_singletons_and_groups_without_spread_are_exactly_zero(group_norm: GroupNorm) -> None:
    # The mean of three times 0.1 is not 0.1 in float64; the result must be 0 all the same, not 1e-17 / 1e-5.
    result = advantages([0.1, 0.1, 0.1, 3.7], [4, 4, 4, 5], [1, 1, 1, 1], group_norm=group_norm, batch_norm=False)
    assert result.tolist() == [0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("group_norm", ["none", "mean", "mean_std"])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_singleton_never_explodes(group_norm: GroupNorm, batch_norm: bool) -> None:
    rewards, groups, lengths = [5, -5, 5, -5, 5], [0, 0, 1, 1, 2], [3, 1, 2, 2, 7]
    result = advantages(rewards, groups, lengths, group_norm=group_norm, batch_norm=batch_norm)
    assert np.abs(result).max() < 10


@pytest.mark.parametrize("group_norm", ["none", "mean", "mean_std"])
def test_equal_rewards_give_zeros(group_norm: GroupNorm) -> None:
    result = advantages([0.1] * 7, [0, 0, 0, 1, 1, 2, 2], [1, 2, 3, 4, 5, 6, 7], group_norm=group_norm, batch_norm=True)
    assert result.tolist() == [0.0] * 7


def test_a_sequence_without_tokens_has_no_say_in_the_batch_step() -> None:
    with_it = advantages([5, -5, 1e6], [0, 1, 2], [1, 3, 0], group_norm="none", batch_norm=True)
    without = advantages([5, -5], [0, 1], [1, 3], group_norm="none", batch_norm=True)
    assert with_it.tolist() == [*without.tolist(), 0.0]
    # Without it there is no spread: exact zeros, although (0.1 + 0.2) / 3 is not 0.1 in float64.
    alone = advantages([0.1, 0.1, -5], [0, 1, 2], [1, 2, 0], group_norm="none", batch_norm=True)
    assert alone.tolist() == [0.0, 0.0, 0.0]


def literal(
    rewards: list[float], groups: list[int], lengths: list[int], group_norm: GroupNorm, batch_norm: bool
) -> list[float]:
    """Every token on its own, Python floats."""
    values = list(rewards)
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        mean = math.fsum(rewards[i] for i in members) / len(members)
        std = math.sqrt(math.fsum((rewards[i] - mean) ** 2 for i in members) / len(members))
        for i in members:
            if group_norm == "mean":
                values[i] = rewards[i] - mean
            elif group_norm == "mean_std":
                values[i] = (rewards[i] - mean) / (std + EPS)
    if not batch_norm:
        return values
    tokens = [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]
    mean = math.fsum(tokens) / len(tokens)
    std = math.sqrt(math.fsum((token - mean) ** 2 for token in tokens) / len(tokens))
    return [(value - mean) / (std + EPS) for value in values]


rewards_seen = st.sampled_from([-5.0, 5.0, 0.0, 0.25, 1.0])
sequences = st.lists(st.tuples(rewards_seen, st.integers(0, 4), st.integers(1, 30)), min_size=1, max_size=24)


@given(sequences, st.sampled_from(["none", "mean", "mean_std"]), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_against_the_transcription(batch: list, group_norm: GroupNorm, batch_norm: bool, random) -> None:
    rewards, groups, lengths = map(list, zip(*batch, strict=True))
    result = advantages(rewards, groups, lengths, group_norm=group_norm, batch_norm=batch_norm)
    assert result == pytest.approx(literal(rewards, groups, lengths, group_norm, batch_norm), rel=1e-9, abs=1e-9)
    # Order means nothing: a shuffled batch gives the same numbers to the same sequences.
    order = random.sample(range(len(batch)), len(batch))
    shuffled = advantages(
        [rewards[i] for i in order], [groups[i] for i in order], [lengths[i] for i in order],
        group_norm=group_norm, batch_norm=batch_norm,
    )  # fmt: skip
    assert shuffled == pytest.approx(result[order], rel=1e-9, abs=1e-9)


def test_the_input_is_left_alone() -> None:
    rewards = np.array([1.0, 2.0])
    result = advantages(rewards, [0, 0], [1, 1], group_norm="none", batch_norm=False)
    result[0] = 9.0
    assert rewards.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_named(bad: float) -> None:
    with pytest.raises(ValueError, match=r"sequence 2 \(group 41\) has reward"):
        advantages([1.0, 2.0, bad], [40, 40, 41], [1, 1, 1], group_norm="none", batch_norm=False)


@pytest.mark.parametrize(
    ("rewards", "groups", "lengths", "group_norm", "message"),
    [
        ([1.0, 2.0], [0], [1, 1], "none", "all must be"),
        ([[1.0]], [[0]], [[1]], "none", "all must be"),
        ([1.0], [0.5], [1], "none", "group ids must be integers"),
        ([1.0], [0], [1.0], "none", "lengths must be integers"),
        ([1.0, 1.0], [3, 4], [1, -1], "none", r"sequence 1 \(group 4\) has -1 response tokens"),
        ([1.0, 1.0], [3, 4], [0, 0], "none", "2 sequences has no response tokens"),
        ([], [], [], "none", "0 sequences has no response tokens"),
        ([1.0], [0], [1], "std", "choose none, mean or mean_std"),
    ],
)
def test_what_is_refused(rewards, groups, lengths, group_norm, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        advantages(rewards, groups, lengths, group_norm=group_norm, batch_norm=True)


def test_returns_of_turns_by_hand() -> None:
    # gamma 1/2. Three turns 1, 2, 4: G2 = 4, G1 = 2 + 4/2 = 4, G0 = 1 + 4/2 = 3. One turn 10. Two turns 3, 5: 5.5, 5.
    rewards, num_turns = [1, 2, 4, 10, 3, 5], [3, 1, 2]
    assert discounted_returns(rewards, num_turns, 0.5).tolist() == [3, 4, 4, 10, 5.5, 5]
    assert discounted_returns(rewards, num_turns, 1.0).tolist() == [7, 6, 4, 10, 8, 5]
    assert discounted_returns(rewards, num_turns, 0.0).tolist() == rewards
    assert discounted_returns([], [], 0.5).tolist() == []
    with pytest.raises(ValueError, match="6 rewards for 5 turns"):
        discounted_returns(rewards, [3, 1, 1], 0.5)


def test_every_episode_has_the_same_say_in_its_group() -> None:
    # Group 0: an episode of 2 turns with return 6 each and one of a single turn with 0. Mean (6 + 0) / 2 = 3, not 4;
    # var (9 + 9) / 2, std 3. Group 1: turns 1, 2, 6 of one episode (weights 1/3) and 5 of another: mean (3 + 5) / 2.
    returns, groups, weights = [6, 6, 0, 1, 2, 6, 5], [0, 0, 0, 1, 1, 1, 1], [0.5, 0.5, 1, 1 / 3, 1 / 3, 1 / 3, 1]
    mean = advantages(returns, groups, [1] * 7, weights, group_norm="mean", batch_norm=False)
    assert mean == pytest.approx([3, 3, -3, -3, -2, 2, 1], rel=1e-12)
    both = advantages(returns, groups, [1] * 7, weights, group_norm="mean_std", batch_norm=False)
    std = math.sqrt((9 / 3 + 4 / 3 + 4 / 3 + 1) / 2)
    assert both == pytest.approx(
        [*np.array([3, 3, -3]) / (3 + EPS), *np.array([-3, -2, 2, 1]) / (std + EPS)], rel=1e-12
    )


@pytest.mark.parametrize("group_norm", ["none", "mean", "mean_std"])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_single_turns_are_the_plain_case_bit_for_bit(group_norm: GroupNorm, batch_norm: bool) -> None:
    rng = np.random.default_rng(3)
    rewards, groups, lengths = rng.normal(size=24), rng.integers(0, 5, 24), rng.integers(1, 9, 24)
    norms = {"group_norm": group_norm, "batch_norm": batch_norm}
    returns = discounted_returns(rewards, np.ones(24, np.int32), 0.3)
    turns = advantages(returns, groups, lengths, np.ones(24), **norms)  # type: ignore[arg-type]
    assert turns.tolist() == advantages(rewards, groups, lengths, **norms).tolist()  # type: ignore[arg-type]
