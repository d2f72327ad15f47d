"""The staleness rule against tables made by hand, and the properties that the controller builds on."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.staleness import counted_at_resume, lag, may_admit, room

ETAS = st.sampled_from([0, 1, 4, math.inf])
COUNTS = st.integers(0, 200)
BATCHES = st.integers(1, 17)
VERSIONS = st.integers(0, 20)


# B = 4. Group number N may be admitted iff N <= (i + eta + 1) * 4, counted out by hand.
@pytest.mark.parametrize(
    ("version", "eta", "last_admitted"),
    [
        (0, 0, 4),
        (1, 0, 8),
        (2, 0, 12),
        (0, 1, 8),
        (1, 1, 12),
        (5, 1, 28),
        (0, 4, 20),
        (1, 4, 24),
        (7, 4, 48),
    ],
)
def test_the_last_group_admitted_at_a_version(version: int, eta: int, last_admitted: int) -> None:
    decisions = [may_admit(number, 4, version, eta) for number in range(1, 101)]
    assert decisions == [True] * last_admitted + [False] * (100 - last_admitted)


@pytest.mark.parametrize("number", [1, 4, 5, 10**9])
def test_without_a_limit_everything_is_admitted(number: int) -> None:
    assert may_admit(number, 4, 0, math.inf)
    assert room(number, 4, 0, math.inf) == math.inf


def test_a_whole_batch_enters_at_eta_0() -> None:
    """floor(N / B) instead of floor((N - 1) / B) admits B - 1 groups here, and the trainer waits for ever."""
    assert [may_admit(number, 3, 0, 0) for number in (1, 2, 3, 4)] == [True, True, True, False]


def test_a_batch_of_one_group() -> None:
    assert [may_admit(number, 1, 0, 0) for number in (1, 2)] == [True, False]
    assert [may_admit(number, 1, 2, 1) for number in (3, 4, 5)] == [True, True, False]


@pytest.mark.parametrize(
    ("counted", "version", "eta", "expected"),
    [
        (0, 0, 0, 4),
        (3, 0, 0, 1),
        (4, 0, 0, 0),
        (4, 1, 0, 4),
        (5, 1, 0, 3),
        (9, 0, 1, 0),  # groups restored under a smaller eta: over the limit, and nothing is owed
        (6, 0, 1, 2),
        (17, 0, 4, 3),
        (17, 2, 4, 11),
    ],
)
def test_room_by_hand(counted: int, version: int, eta: int, expected: int) -> None:
    assert room(counted, 4, version, eta) == expected
    assert room(counted, 4, version, float(eta)) == expected  # the configuration gives eta as a float


@settings(deadline=None, max_examples=300)
@given(COUNTS, BATCHES, VERSIONS, ETAS)
def test_room_says_how_often_the_rule_admits(counted: int, batch: int, version: int, eta: float) -> None:
    admitted = 0
    while admitted <= 500 and may_admit(counted + admitted + 1, batch, version, eta):
        admitted += 1
    assert min(room(counted, batch, version, eta), 501) == admitted


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 400), BATCHES, VERSIONS, ETAS)
def test_a_group_is_never_staler_than_eta_when_consumed_in_admission_order(
    number: int, batch: int, version: int, eta: float
) -> None:
    """Group N is in batch floor((N - 1) / B), which is trained on at exactly that policy version."""
    trained_at = (number - 1) // batch
    assert may_admit(number, batch, version, eta) == (lag(trained_at, version) <= eta)


@settings(deadline=None, max_examples=100)
@given(BATCHES, ETAS, st.integers(1, 12), st.data())
def test_a_run_neither_deadlocks_nor_exceeds_the_bound(batch: int, eta: float, steps: int, data: st.DataObject) -> None:
    """Admit as much as is allowed (or at most 40 groups ahead), sometimes reject a group, consume batch by batch."""
    counted, waiting = 0, 0
    for version in range(steps):
        while waiting < batch:
            admitted = int(min(room(counted, batch, version, eta), 40))
            assert admitted > 0, "no full batch to train on, and nothing may be admitted"
            counted, waiting = counted + admitted, waiting + admitted
            rejected = data.draw(st.integers(0, min(waiting, 2)))
            if rejected:
                counted, waiting = counted - rejected, waiting - rejected
        assert counted - version * batch <= (eta + 1) * batch
        waiting -= batch


@pytest.mark.parametrize(
    ("version", "restored", "expected_count", "expected_room"),
    [(0, 0, 0, 8), (5, 0, 20, 8), (5, 3, 23, 5), (5, 8, 28, 0), (5, 9, 29, 0)],
)
def test_resume_by_hand(version: int, restored: int, expected_count: int, expected_room: int) -> None:
    """B = 4, eta = 1: at most 8 groups ahead of the trainer, of which the restored ones are some, each once."""
    counted = counted_at_resume(version, 4, restored)
    assert counted == expected_count
    assert room(counted, 4, version, 1) == expected_room


@settings(deadline=None, max_examples=200)
@given(BATCHES, VERSIONS, st.sampled_from([0, 1, 4]), COUNTS)
def test_a_resumed_run_has_the_room_of_one_that_never_stopped(batch: int, version: int, eta: int, waiting: int) -> None:
    never_stopped = 0
    for _ in range(version):  # every step consumed one batch that had been counted
        never_stopped += batch
    never_stopped += waiting
    assert room(counted_at_resume(version, batch, waiting), batch, version, eta) == room(
        never_stopped, batch, version, eta
    )


def test_lag_counts_versions() -> None:
    assert lag(7, 3) == 4
    assert lag(3, 3) == 0
