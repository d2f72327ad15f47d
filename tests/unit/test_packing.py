"""Algorithm 1 against a literal transcription of the paper, and the promises of a plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.packing import Plan, allocate, lower_bound, plan

CAPACITY = 20
lengths_lists = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=60)


def literal_algorithm_1(lengths: list[int], capacity: int, min_groups: int) -> list[list[int]]:
    """Paper, appendix B.3, as slow as it reads."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):  # stable: equal lengths keep their order
        with_room = [g for g in groups if sum(lengths[i] for i in g) + lengths[index] <= capacity]
        if len(groups) < min_groups or not with_room:
            groups.append([index])
        else:
            fewest = min(len(g) for g in with_room)
            candidates = [g for g in with_room if len(g) == fewest]
            lightest = min(sum(lengths[i] for i in g) for g in candidates)
            next(g for g in candidates if sum(lengths[i] for i in g) == lightest).append(index)
    return groups


@given(lengths_lists, st.data())
@settings(max_examples=300, deadline=None)
def test_allocate_is_algorithm_1(lengths: list[int], data: st.DataObject) -> None:
    min_groups = data.draw(st.integers(1, len(lengths)))
    groups = allocate(lengths, CAPACITY, min_groups)
    assert groups == literal_algorithm_1(lengths, CAPACITY, min_groups)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in group) <= CAPACITY for group in groups)
    assert len(groups) >= max(min_groups, lower_bound(lengths, CAPACITY))


def test_allocate_by_hand() -> None:
    # Longest first: 7 (seq 1), 6 (seq 3), 5 (seq 0), 3 (seq 2), 2 (seq 4), 1 (seq 5); capacity 10, two groups at least.
    # 7 opens A, 6 opens B (two groups wanted), 5 fits neither (12, 11) and opens C. 3 fits all, one sequence each: the
    # smallest sum is C (5) -> C = 8. 2 fits A (9), B (8), C (10); A and B have one sequence, B is the lighter -> B = 8.
    # 1 fits all three; A has one sequence, B and C two -> A = 8.
    assert allocate([5, 7, 3, 6, 2, 1], 10, min_groups=2) == [[1, 5], [3, 4], [0, 2]]


def test_fewest_sequences_wins_over_smallest_sum() -> None:
    # 6 opens A. 2 joins A (8); 2 joins A (10, full). 2 opens B, 2 joins B (4, two sequences).
    assert allocate([6, 2, 2, 2, 2], 10) == [[0, 1, 2], [3, 4]]
    # With three groups: 6 -> A, 2 -> B, 2 -> C, then 2 -> B (sum 2, opened before C), then 2 -> C: one sequence, sum 2.
    # The last 1 goes to A: one sequence, although A holds 6 tokens and B and C 4 each.
    assert allocate([6, 2, 2, 2, 2, 1], 10, min_groups=3) == [[0, 5], [1, 3], [2, 4]]


def test_lower_bound() -> None:
    assert lower_bound([10, 10], 10) == 2
    assert lower_bound([10, 11], 10) == 3
    assert lower_bound([], 10) == 0


@pytest.mark.parametrize("length", [0, -3, 33])
def test_a_sequence_no_micro_batch_can_hold_is_named(length: int) -> None:
    with pytest.raises(ValueError, match=rf"sequence 2 has {length} tokens.* 32 "):
        allocate([5, 32, length, 40], 32)
    with pytest.raises(ValueError, match=rf"sequence 2 has {length} tokens.* 32 "):
        plan([5, 32, length, 40], capacity=32, num_ranks=1, num_minibatches=1, rng_seed=0)


@pytest.mark.parametrize("min_groups", [0, 3])
def test_min_groups_needs_as_many_sequences(min_groups: int) -> None:
    with pytest.raises(ValueError, match=f"2 sequences cannot fill min_groups = {min_groups}"):
        allocate([1, 1], 32, min_groups=min_groups)


@pytest.mark.parametrize(("num_ranks", "num_minibatches"), [(0, 1), (1, 0), (1, 4)])
def test_plan_refuses_counts_it_cannot_serve(num_ranks: int, num_minibatches: int) -> None:
    with pytest.raises(ValueError, match=f"3 sequences as {num_minibatches} minibatches for {num_ranks} trainer ranks"):
        plan([1, 2, 3], capacity=9, num_ranks=num_ranks, num_minibatches=num_minibatches, rng_seed=0)


def indices(of_minibatch: list[list[list[int]]]) -> list[int]:
    return sorted(index for rank in of_minibatch for micro_batch in rank for index in micro_batch)


@given(lengths_lists, st.integers(1, 9), st.integers(0, 2**32), st.data())
@settings(max_examples=300, deadline=None)
def test_plan_keeps_its_promises(lengths: list[int], num_ranks: int, seed: int, data: st.DataObject) -> None:
    num_minibatches = data.draw(st.integers(1, min(4, len(lengths))))
    made = plan(lengths, capacity=CAPACITY, num_ranks=num_ranks, num_minibatches=num_minibatches, rng_seed=seed)
    parts = [indices(ranks) for ranks in made.micro_batches]
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for part, ranks, rank_tokens in zip(parts, made.micro_batches, made.rank_tokens, strict=True):
        assert len(ranks) == num_ranks
        (per_rank,) = {len(micro_batches) for micro_batches in ranks}
        sums = [[sum(lengths[index] for index in mb) for mb in micro_batches] for micro_batches in ranks]
        assert max(total for of_rank in sums for total in of_rank) <= CAPACITY
        assert rank_tokens == [sum(of_rank) for of_rank in sums]
        num_empty = sum(not mb for micro_batches in ranks for mb in micro_batches)
        assert num_empty == max(0, num_ranks * per_rank - len(part))  # no more than there are too few sequences
        # No round too many: Algorithm 1 could not do with one micro-batch per rank fewer.
        assert num_ranks * (per_rank - 1) < len(literal_algorithm_1([lengths[index] for index in part], CAPACITY, 1))


def test_the_seed_decides_the_minibatches() -> None:
    lengths = list(range(1, 41))

    def parts(seed: int) -> list[list[int]]:
        made = plan(lengths, capacity=64, num_ranks=2, num_minibatches=4, rng_seed=seed)
        return [indices(ranks) for ranks in made.micro_batches]

    assert parts(7) == parts(7)
    assert parts(7) != parts(8)
    assert parts(7)[0] != list(range(10))  # random, not the first ten


def test_six_full_sequences_on_four_ranks_leave_two_empty_micro_batches() -> None:
    made = plan([8] * 6, capacity=8, num_ranks=4, num_minibatches=1, rng_seed=0)
    assert sorted(map(sorted, (map(len, rank) for rank in made.micro_batches[0]))) == [[0, 1], [0, 1], [1, 1], [1, 1]]


def test_figures_of_a_plan() -> None:
    # Two minibatches on two ranks, capacity 10. First: 9 + 9 + 8 + 4 = 30 tokens, bound 3, four micro-batches, ranks 17
    # and 13, mean 15. Second: 12 tokens, bound 2, two micro-batches, ranks 6 and 6.
    made = Plan([[[[0], [1]], [[2], [3]]], [[[4]], [[5]]]], [[17, 13], [6, 6]], capacity=10)
    assert made.num_micro_batches == [4, 2]
    assert made.lower_bounds == [3, 2]
    assert made.waste == pytest.approx([1 / 3, 0.0])
    assert made.imbalance == pytest.approx([2 / 15, 0.0])


@pytest.mark.parametrize(("num_ranks", "capacity"), [(4, 9), (2, 9), (4, 36), (2, 36)])
def test_ranks_get_equal_tokens_where_sequences_allow_it(num_ranks: int, capacity: int) -> None:
    # 8 + 1, 7 + 2, 6 + 3, 5 + 4 tokens: nine in each of four micro-batches, on four ranks or two. Also if one would do.
    made = plan([1, 2, 3, 4, 5, 6, 7, 8], capacity=capacity, num_ranks=num_ranks, num_minibatches=1, rng_seed=0)
    assert made.rank_tokens == [[36 // num_ranks] * num_ranks]


def test_the_lightest_rank_takes_the_heaviest_micro_batch_left() -> None:
    # Round one: 10 and 9. Round two: 8 to the rank with 9, 7 to the rank with 10.
    made = plan([10, 9, 8, 7], capacity=10, num_ranks=2, num_minibatches=1, rng_seed=0)
    assert made.micro_batches == [[[[0], [3]], [[1], [2]]]]
    assert made.rank_tokens == [[17, 17]]


def test_spreading_that_needs_more_micro_batches_is_not_taken() -> None:
    # Packed: 20 | 11 + 9 | 7 + 6 + 5, three micro-batches. Asked for three groups, Algorithm 1 spreads 20 | 11 | 9
    # first, then come 9 + 7 and 11 + 6, and 5 fits none of 20, 17, 16: four.
    lengths = [5, 6, 9, 7, 11, 20]
    assert len(allocate(lengths, 20, min_groups=3)) == 4
    made = plan(lengths, capacity=20, num_ranks=1, num_minibatches=1, rng_seed=0)
    assert made.micro_batches == [[[[5], [4, 2], [3, 1, 0]]]]


# 36 sequences that pack into 17 groups, but spread over 19 when 18 are asked for, so six ranks get 17 with one cut.
CUT = [5, 18, 6, 20, 5, 1, 7, 16, 11, 11, 7, 9, 16, 1, 10, 3, 3, 7]
CUT += [11, 7, 9, 5, 8, 10, 18, 5, 1, 2, 9, 5, 15, 15, 17, 16, 2, 16]


def test_packed_groups_are_cut_to_an_even_number() -> None:
    assert (len(allocate(CUT, 20)), len(allocate(CUT, 20, min_groups=18))) == (17, 19)
    made = plan(CUT, capacity=20, num_ranks=6, num_minibatches=1, rng_seed=0)
    assert made.num_micro_batches == [18]
    assert indices(made.micro_batches[0]) == list(range(36))
    assert all(micro_batch for rank in made.micro_batches[0] for micro_batch in rank)


def test_a_reasoning_batch_is_packed_and_balanced() -> None:
    """512 prompts x 16 samples as in the paper, lengths of a reasoning model: what min_groups alone fails to do."""
    drawn = np.random.default_rng(0).lognormal(np.log(12000), 0.6, 8192)
    lengths = np.clip(drawn, 1, 27648).astype(np.int64)
    made = plan(lengths.tolist(), capacity=32768, num_ranks=8, num_minibatches=1, rng_seed=0)
    needed = len(allocate(lengths.tolist(), 32768))
    assert made.num_micro_batches == [-(-needed // 8) * 8]
    assert indices(made.micro_batches[0]) == list(range(8192))
    assert made.imbalance[0] < 0.01
