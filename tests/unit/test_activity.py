"""Intervals of one rank: an unbroken series, told apart by kind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.activity import ActivityRecorder, Interval
from areal_hpc.logschema import Activity

IDLE, GENERATE, SWAP = Activity.IDLE, Activity.GENERATE, Activity.SWAP


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_each_interval_begins_where_the_one_before_ends(clock):
    recorder = ActivityRecorder(clock)
    clock.now = 1.0
    recorder.switch("generate")
    clock.now = 3.0
    with recorder("swap"):
        clock.now = 3.5
    assert recorder.kind is GENERATE
    clock.now = 5.0
    assert recorder.drain() == [
        Interval(IDLE, 0.0, 1.0), Interval(GENERATE, 1.0, 3.0), Interval(SWAP, 3.0, 3.5), Interval(GENERATE, 3.5, 5.0)
    ]  # fmt: skip


def test_nested_blocks_return_to_the_outer_kind_also_after_an_exception(clock):
    recorder = ActivityRecorder(clock)
    with pytest.raises(KeyError), recorder("train_update"):
        clock.now = 1.0
        with recorder("publish"):
            clock.now = 2.0
            raise KeyError
    clock.now = 3.0
    ends = [(i.kind.label, i.stop_s) for i in recorder.drain()]
    assert ends == [("train_update", 1.0), ("publish", 2.0), ("idle", 3.0)]


def test_neighbours_of_the_same_kind_are_one_interval(clock):
    recorder = ActivityRecorder(clock, GENERATE)
    for second in (1.0, 2.0, 3.0):
        clock.now = second
        recorder.switch("generate")
        with recorder("swap"):
            pass  # takes no time
    clock.now = 4.0
    assert recorder.drain() == [Interval(GENERATE, 0.0, 4.0)]


def test_drain_hands_over_each_instant_once(clock):
    recorder = ActivityRecorder(clock, "generate")
    clock.now = 1.0
    assert recorder.drain() == [Interval(GENERATE, 0.0, 1.0)]
    assert recorder.drain() == []
    clock.now = 2.0
    assert recorder.drain() == [Interval(GENERATE, 1.0, 2.0)]


@pytest.mark.parametrize("kind", ["sleeping", "", 99])
def test_an_unknown_kind_is_refused_with_the_known_ones(clock, kind):
    recorder = ActivityRecorder(clock)
    with pytest.raises(ValueError, match="unknown activity .*generate, swap"):
        recorder.switch(kind)
    assert recorder.kind is IDLE


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(list(Activity)), st.integers(-2, 5), st.booleans()), max_size=30))
def test_whatever_happens_the_intervals_cover_the_time_without_overlap(moves):
    """Also with a clock that is sometimes set back."""
    clock = Clock()
    recorder = ActivityRecorder(clock)
    latest, drained = 0.0, []
    for kind, advance, drain in moves:
        clock.now += advance
        latest = max(latest, clock.now)
        recorder.switch(kind)
        if drain:
            drained.append(recorder.drain())
    clock.now = latest = latest + 1
    drained.append(recorder.drain())
    flat = [interval for part in drained for interval in part]
    assert flat[0].start_s == 0.0 and flat[-1].stop_s == latest
    assert all(a.stop_s == b.start_s for a, b in zip(flat, flat[1:], strict=False))
    assert all(i.start_s < i.stop_s for i in flat)
    assert all(a.kind is not b.kind for part in drained for a, b in zip(part, part[1:], strict=False))
