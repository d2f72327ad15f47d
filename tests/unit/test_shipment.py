"""Trajectories survive the trip, and what does not add up never reaches the objective."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.shipment import join, split
from areal_hpc.trajectory import BadTrajectory, Trajectory


def trajectory(group_id=7, sample=1, prompt=3, response=4, **changes) -> Trajectory:
    parts = {
        "tokens": np.arange(prompt + response, dtype=np.int32),
        "num_prompt": prompt,
        "logprobs": -np.arange(1, response + 1, dtype=np.float32),
        "versions": np.arange(response, dtype=np.int32) // 2,
    } | changes
    return Trajectory(group_id, sample, **parts)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 99), st.integers(1, 9), st.integers(1, 9)), max_size=8))
def test_round_trip(shapes):
    sent = [trajectory(g, s, p, r) for g, s, p, r in shapes]
    got = split(join(sent))
    assert [t.key for t in got] == [t.key for t in sent]
    for a, b in zip(sent, got, strict=True):
        assert a.num_prompt == b.num_prompt
        for name in ("tokens", "logprobs", "versions"):
            assert (
                np.array_equal(getattr(a, name), getattr(b, name)) and getattr(a, name).dtype == getattr(b, name).dtype
            )


def test_turns_travel_only_where_there_are_any():
    turns = np.array([0, -1, -1, 1], np.int16)
    assert join([trajectory(), trajectory(sample=2)])["turns"].nbytes == 0
    one, other = split(join([trajectory(turns=turns), trajectory(sample=2)]))
    assert one.turns.dtype == np.int16 and one.turns.tolist() == [0, -1, -1, 1]
    assert one.sampled.tolist() == [True, False, False, True]
    assert other.turns.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ["tokens", "logprobs", "versions", "turns", "sample", "num_prompt"])
def test_an_array_that_is_too_short_is_refused(name):
    arrays = join([trajectory(turns=np.zeros(4, np.int16)), trajectory(sample=2)])
    arrays[name] = arrays[name][:-1]
    with pytest.raises(BadTrajectory):
        split(arrays)


def test_lengths_that_add_up_but_are_negative_are_refused():
    arrays = join([trajectory(), trajectory(sample=2)])
    arrays["num_response"] = np.array([9, -1], np.int32)
    with pytest.raises(BadTrajectory, match="no tokens"):
        split(arrays)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"versions": np.array([1, 0, 0, 0], np.int32)}, "must not fall"),
        ({"versions": np.array([-1, 0, 0, 0], np.int32)}, "must not fall"),
        ({"versions": np.zeros(3, np.int32)}, "4 response tokens but 4 log-probs and 3 versions"),
        ({"logprobs": np.array([-1, -1, 0.5, -1], np.float32)}, "none may be above 0"),
        ({"num_prompt": 7}, "need at least one"),
        ({"turns": np.zeros(3, np.int16)}, "4 response tokens but 3 of them have a turn"),
        ({"turns": np.full(4, -1, np.int16)}, "hold a token"),
        ({"turns": np.array([0, 1, 0, 1], np.int16)}, "count up"),
        ({"turns": np.array([-2, 0, 0, 1], np.int16)}, "count up"),
    ],
)
def test_contradictions_are_named(changes, message):
    with pytest.raises(BadTrajectory, match=message):
        trajectory(**changes).validate()


def test_a_log_prob_that_is_not_a_number_is_left_to_the_trainers():
    trajectory(logprobs=np.array([-1, np.nan, -1, -1], np.float32)).validate()
