"""Simulated compute on a clock that only moves when somebody sleeps: every time below is worked out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from areal_hpc import simulation
from areal_hpc.compute import Batch
from areal_hpc.config import SimulationConfig
from areal_hpc.engines.base import NOT_BEGUN, Begun, Completion, Request
from areal_hpc.simulation.backend import encode
from areal_hpc.simulation.clock import Clock
from areal_hpc.simulation.engine import Decoding, SimulatedEngine, response_length
from areal_hpc.simulation.rewards import SimulatedRewards
from areal_hpc.simulation.training import SimulatedLearner
from areal_hpc.simulation.weights import SimulatedReceiver, SimulatedSender
from areal_hpc.trajectory import Trajectory

START_S = 100.0
FREE = {"decode_sequence_s": 0.0, "decode_context_s": 0.0, "prefill_tokens_per_s": 1e15, "load_s": 0.0}
LONG = {"response_median": 1e9, "response_sigma": 0.0}  # every response runs into its budget


class Time:
    """Real time as the simulation sees it."""

    def __init__(self) -> None:
        self.now_s = START_S
        self.slept: list[float] = []

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


def settings(**values) -> SimulationConfig:
    return SimulationConfig(**({"gpus_per_rank": 1, "decode_s": 0.01} | FREE | LONG | values))


def make(slots: int = 8, interrupt: bool = True, speedup: float = 1.0, **values) -> tuple[SimulatedEngine, Time]:
    """An engine with version 0 at START_S."""
    time = Time()
    clock = Clock(speedup, time.now, time.sleep)
    engine = SimulatedEngine(settings(**values), clock, num_slots=slots, max_len=10_000, interrupt=interrupt)
    engine.version = 0
    return engine, time


def request(name: int, tokens: int, prompt: int = 1, seed: int = 0, min_version: int = 0) -> Request:
    return Request((name, 0), (1,) * prompt, tokens, seed, min_version)


def finish(engine: SimulatedEngine) -> dict[int, Completion]:
    """Step until nothing runs; completions by name."""
    done: dict[int, Completion] = {}
    while True:
        done |= {completion.key[0]: completion for completion in engine.step()}
        if not engine.num_running:
            return done


def ends(done: dict[int, Completion]) -> dict[int, float]:
    return {name: pytest.approx(completion.finished_s - START_S, abs=1e-7) for name, completion in done.items()}


# ---------------------------------------------------------------------------------------------------- decoding
@pytest.mark.parametrize("naps", [[], [0.003, 0.05, 0.0999, 0.0001], [5.0]])
def test_sequences_end_where_their_tokens_say(naps):
    """10 and 20 steps of 10 ms, no matter when anybody looks."""
    engine, time = make()
    engine.submit([request(1, 10), request(2, 20)])
    done = {}
    for nap in naps:
        time.now_s += nap
        done |= {completion.key[0]: completion for completion in engine.step()}
    done |= finish(engine)
    assert ends(done) == {1: 0.1, 2: 0.2}
    assert [len(done[name].tokens) for name in (1, 2)] == [10, 20]
    assert {c.finish for c in done.values()} == {"length"} and all(c.started_s == START_S for c in done.values())
    assert engine.num_free == 8 and not engine.num_waiting


def test_nobody_looks_before_the_end():
    """A step that finishes nothing sleeps for 5 to 20 ms, so that messages are handled and the core is left alone."""
    engine, time = make()
    engine.submit([request(1, 103)])
    finish(engine)
    assert sum(time.slept) == pytest.approx(1.03, abs=0.005) and all(0.005 <= s <= 0.02 for s in time.slept)


def test_every_running_sequence_slows_the_others():
    """3 steps of 10 + 2 * 1 ms, then 3 of 10 + 1 ms."""
    engine, _ = make(decode_sequence_s=0.001)
    engine.submit([request(1, 3), request(2, 6)])
    assert ends(finish(engine)) == {1: 0.036, 2: 0.069}


@pytest.mark.parametrize(
    "gpus, end",
    [
        (1, 0.0516),  # prefill 5 / 1000; 4 (0.01 + 0.001) + 1e-4 (5 + 6 + 7 + 8)
        (2, 0.0458),  # 0.0025 + 0.04 + (0.004 + 0.0026) / 2
    ],
)
def test_prefill_and_context_take_their_time(gpus, end):
    engine, _ = make(gpus_per_rank=gpus, decode_sequence_s=0.001, decode_context_s=1e-4, prefill_tokens_per_s=1000.0)
    engine.submit([request(1, 4, prompt=5)])
    assert ends(finish(engine)) == {1: end}


@pytest.mark.parametrize("looks", [1, 40])
def test_leaping_and_walking_give_the_same(looks):
    """Contexts of 1 to 60 and of 1 to 40 tokens, 1 ms each: closed form of the sum, whatever the leaps are."""
    engine, time = make(decode_context_s=0.001)
    engine.submit([request(1, 60), request(2, 40)])
    done = {}
    for _ in range(looks):
        time.now_s += 10.0 / looks
        done |= {completion.key[0]: completion for completion in engine.step()}
    both = 40 * 0.01 + 0.001 * 2 * (40 * 41 / 2)
    alone = 20 * 0.01 + 0.001 * sum(range(41, 61))
    assert ends(done) == {2: both, 1: both + alone}


def test_the_most_steps_within_a_budget():
    decoding = Decoding(settings(decode_context_s=3e-5, decode_sequence_s=7e-4, gpus_per_rank=2), context=300)
    decoding.running = dict.fromkeys([(i, 0) for i in range(7)])
    for budget_s in np.geomspace(0.001, 500.0, 200):
        steps = decoding.steps_within(budget_s)
        assert decoding.seconds(steps) <= budget_s * (1 + 1e-6) and decoding.seconds(steps + 1) > budget_s
    assert decoding.steps_within(-1.0) == 0


def test_simulated_time_is_real_time_times_speedup():
    engine, time = make(speedup=20.0)
    engine.submit([request(1, 400)])
    assert ends(finish(engine)) == {1: 400 * 0.01 / 20}
    assert time.now_s - START_S == pytest.approx(0.2, abs=0.005)


# ------------------------------------------------------------------------------------------------------- slots
def test_who_finds_no_slot_waits():
    engine, _ = make(slots=1)
    engine.submit([request(1, 10), request(2, 5)])
    assert (engine.num_running, engine.num_waiting, engine.num_free) == (0, 2, 1)
    engine.step()
    assert (engine.num_running, engine.num_waiting, engine.num_free) == (1, 1, 0)
    done = finish(engine)
    done |= finish(engine)
    assert ends(done) == {1: 0.1, 2: 0.15}
    assert done[2].started_s - START_S == pytest.approx(0.1)


def test_a_late_comer_starts_with_the_next_token():
    """Submitted 4 ms into a step of 10 ms."""
    engine, time = make()
    engine.submit([request(1, 10)])
    engine.step()
    time.now_s = START_S + 0.034
    engine.submit([request(2, 3)])
    done = finish(engine)
    assert done[2].started_s - START_S == pytest.approx(0.04) and ends(done) == {1: 0.1, 2: 0.07}


def test_an_idle_engine_starts_at_once():
    engine, time = make()
    time.now_s += 50.0
    engine.submit([request(1, 10)])
    assert ends(finish(engine)) == {1: 50.1}


def test_what_ended_unseen_is_still_returned():
    """`submit` brings decoding up to date; the completion must not be lost, and the engine must not look idle."""
    engine, time = make()
    engine.submit([request(1, 1)])
    engine.step()
    time.now_s += 1.0
    engine.submit([])
    assert engine.num_running == 1
    assert [c.key for c in engine.step()] == [(1, 0)] and engine.num_running == 0


@pytest.mark.parametrize(
    "bad, reason",
    [
        (request(1, 5), "in flight already"),
        (request(2, 0), "at least one"),
        (request(2, 5, prompt=0), "at least one"),
        (request(2, 9_999, prompt=2), "at most 10000"),
    ],
)
def test_unusable_requests_are_refused_together(bad, reason):
    engine, _ = make()
    engine.submit([request(1, 5)])
    with pytest.raises(ValueError, match=reason):
        engine.submit([request(3, 5), bad])
    assert engine.num_running + engine.num_waiting == 1


# ----------------------------------------------------------------------------------------------------- versions
def test_new_weights_interrupt():
    """3 tokens by 35 ms; load 1 s and prefill 5 + 3 tokens at 100 /s; then the other 7."""
    engine, time = make(load_s=1.0)
    engine.submit([request(1, 10, prompt=5)])
    engine.step()
    engine._settings = engine._settings.model_copy(update={"prefill_tokens_per_s": 100.0})
    time.now_s = START_S + 0.035
    swap = engine.load_weights(1, [])
    assert (swap.version, swap.interrupted, swap.reprefilled_tokens) == (1, 1, 8)
    assert swap.pause_s == pytest.approx(1.08) and time.now_s == pytest.approx(START_S + 1.115)
    done = finish(engine)
    assert ends(done) == {1: 1.185}
    assert done[1].versions.tolist() == [0] * 3 + [1] * 7 and done[1].interruptions == 1


def test_versions_before_the_first_token_and_between_two():
    """Versions 1 and 2 come before any token, 5 after two tokens, 7 at once after it."""
    engine, time = make()
    engine.submit([request(1, 4)])
    engine._advance()
    for version in (1, 2):
        engine.load_weights(version, [])
    time.now_s += 0.02
    for version in (5, 7):
        engine.load_weights(version, [])
    done = finish(engine)
    assert done[1].versions.tolist() == [2, 2, 7, 7] and done[1].interruptions == 4


@pytest.mark.parametrize("interrupt", [True, False])
def test_versions_must_rise(interrupt):
    engine, _ = make(interrupt=interrupt)
    engine.submit([request(1, 4)])
    engine.step()
    engine.load_weights(3, [])
    with pytest.raises(ValueError, match="have 3, got 3"):
        engine.load_weights(3, [])


def test_without_interruption_running_sequences_end_on_their_version():
    """The last ends at 0.2 s, loading takes 1 s, only then the waiting one starts; version 2 replaced version 1."""
    engine, time = make(interrupt=False, load_s=1.0)
    engine.submit([request(1, 10), request(2, 20)])
    engine.step()
    time.now_s = START_S + 0.05
    assert engine.load_weights(1, []) is None and engine.load_weights(2, []) is None
    engine.submit([request(3, 5)])
    done = {}
    while len(done) < 2:
        assert engine.take_swap() is None and engine.version == 0
        done |= {completion.key[0]: completion for completion in engine.step()}
    swap = engine.take_swap()
    assert (swap.version, swap.pause_s, swap.interrupted, swap.reprefilled_tokens) == (2, 1.0, 0, 0)
    assert engine.take_swap() is None
    done |= finish(engine)
    assert ends(done) == {1: 0.1, 2: 0.2, 3: 1.25}
    assert [set(done[name].versions.tolist()) for name in (1, 2, 3)] == [{0}, {0}, {2}]
    assert all(completion.interruptions == 0 for completion in done.values())


def test_without_interruption_an_idle_engine_loads_at_once():
    engine, time = make(interrupt=False, load_s=1.0)
    assert engine.load_weights(1, []).pause_s == 1.0 and time.now_s == START_S + 1.0


def test_a_sample_waits_for_its_version():
    engine, time = make(load_s=1.0)
    engine.submit([request(1, 5, min_version=1), request(2, 5)])
    done = finish(engine)
    assert ends(done) == {2: 0.05} and engine.num_waiting == 1
    time.now_s = START_S + 3.0
    engine.load_weights(1, [])
    engine.step()
    done = finish(engine)
    assert ends(done) == {1: 4.05} and done[1].versions.tolist() == [1] * 5


# ------------------------------------------------------------------------------------------------------- cancel
def test_the_cancelled_no_longer_slow_the_others():
    """3 steps of 10 + 2 * 10 ms, then 7 of 10 + 10 ms; the waiting and the unknown are handled, too."""
    engine, time = make(slots=2, decode_sequence_s=0.01)
    engine.submit([request(1, 10), request(2, 10), request(3, 10)])
    engine.step()
    time.now_s = START_S + 0.09
    assert engine.cancel([(2, 0), (3, 0), (9, 0)]) == 2
    assert (engine.num_running, engine.num_waiting, engine.num_free) == (1, 0, 1)
    assert ends(finish(engine)) == {1: 0.23}
    assert engine._decoding.context == 0


def test_cancelling_the_last_one_swaps():
    engine, _ = make(interrupt=False, load_s=1.0)
    engine.submit([request(1, 10)])
    engine.step()
    assert engine.load_weights(1, []) is None
    assert engine.cancel([(1, 0)]) == 1 and engine.take_swap().version == 1 and engine.version == 1


# --------------------------------------------------------------------------------- samples that had begun elsewhere
def beginning(*versions: int, interruptions: int = 0, spent_s: float = 0.0) -> Begun:
    k = len(versions)
    return Begun(np.ones(k, np.int32), np.zeros(k, np.float32), np.array(versions, np.int32), interruptions, spent_s)


COSTLY = {"decode_context_s": 1e-4, "prefill_tokens_per_s": 1000.0}


def test_what_is_in_flight_has_its_tokens_so_far():
    """Prefill of 5 + 2 tokens takes 7 ms, then 3 steps of 10 ms, contexts 7 + 9 + 11 at 0.1 ms: number 2 ends at 39.7.

    Number 3 starts, 1 ms; 4 steps at 9 + 11 + 13 + 15, then number 1 is alone at 12 + 13 + 14: 40.7 + 78.7 ms.
    """
    engine, time = make(slots=2, **COSTLY)
    engine.submit([request(1, 10, prompt=5), request(2, 3, prompt=2), request(3, 4)])
    engine._advance()
    assert {key[0]: len(begun.tokens) for key, begun in engine.partials().items()} == {1: 0, 2: 0}
    time.now_s = START_S + 0.0398
    engine._advance()
    partials = {key[0]: begun for key, begun in engine.partials().items()}
    assert {name: len(begun.tokens) for name, begun in partials.items()} == {1: 3, 2: 3, 3: 0}
    one = partials[1]
    assert [len(one.tokens), len(one.logprobs), one.versions.tolist()] == [3, 3, [0, 0, 0]]
    assert one.tokens.dtype == one.versions.dtype == np.int32 and one.logprobs.dtype == np.float32
    assert [c.key[0] for c in engine.step()] == [2] and 2 not in {key[0] for key in engine.partials()}
    assert ends(finish(engine))[1] == 0.1194


def test_the_rest_takes_its_time():
    """Prefill of 5 + 3 tokens at 1000 /s, 7 steps of 10 ms, contexts 8 to 14 (77) at 0.1 ms; it had spent 30 ms."""
    engine, _ = make(**COSTLY)
    engine.submit([replace(request(1, 10, prompt=5), begun=beginning(0, 0, 0, spent_s=0.03))])
    done = finish(engine)
    assert ends(done) == {1: 0.008 + 0.07 + 0.0077}
    assert START_S - done[1].started_s == pytest.approx(0.03)
    assert [len(done[1].tokens), len(done[1].logprobs)] == [10, 10] and done[1].versions.tolist() == [0] * 10
    assert done[1].interruptions == 0 and engine._decoding.context == 0


def test_time_spent_before_is_real_time():
    engine, _ = make(speedup=20.0)
    engine.submit([replace(request(1, 10), begun=beginning(0, 0, spent_s=0.5))])
    done = finish(engine)
    assert done[1].finished_s - done[1].started_s == pytest.approx(0.5 + 8 * 0.01 / 20)


def test_versions_of_a_sample_that_moves_twice():
    """2 tokens of version 0, 3 of version 2 on another engine, 4 of 2 on a third until version 5 takes the last one."""
    first, time = make()
    first.submit([request(1, 10)])
    first._advance()
    time.now_s += 0.02
    first._advance()
    (begun,) = first.partials().values()
    assert begun.versions.tolist() == [0, 0] and begun.spent_s == pytest.approx(0.02)
    second, time = make()
    second.version = 2
    second.submit([replace(request(1, 10), begun=begun)])
    second._advance()
    time.now_s += 0.03
    second._advance()
    (begun,) = second.partials().values()
    assert begun.versions.tolist() == [0, 0, 2, 2, 2] and begun.interruptions == 1
    assert begun.spent_s == pytest.approx(0.05)
    third, time = make()
    third.version = 2
    third.submit([replace(request(1, 10), begun=begun)])
    third._advance()
    time.now_s += 0.04
    third.load_weights(5, [])
    (done,) = finish(third).values()
    assert done.versions.tolist() == [0] * 2 + [2] * 7 + [5] and done.interruptions == 2
    assert done.finished_s - done.started_s == pytest.approx(0.1)


def test_a_beginning_waits_for_its_version():
    engine, _ = make()
    engine.submit([replace(request(1, 5), begun=beginning(0, 3)), request(2, 5)])
    assert list(finish(engine)) == [2] and engine.num_waiting == 1
    assert engine.partials()[1, 0].versions.tolist() == [0, 3]
    engine.load_weights(3, [])
    engine.step()
    (done,) = finish(engine).values()
    assert done.versions.tolist() == [0, 3, 3, 3, 3] and done.interruptions == 0


def test_a_cancelled_beginning_leaves_the_cache():
    engine, _ = make(slots=2)
    engine.submit([replace(request(name, 9, prompt=4), begun=beginning(0, 0, 0)) for name in (1, 2, 3)])
    engine._advance()
    assert engine._decoding.context == 14 and engine.cancel([(1, 0), (3, 0)]) == 2
    assert engine._decoding.context == 7
    finish(engine)
    assert engine._decoding.context == 0


@pytest.mark.parametrize("count, finish_as, median", [(5, "length", 1e9), (4, "eos", 4.0)])
def test_what_had_ended_unseen_ends_at_once(count, finish_as, median):
    """It ended on the first engine and was not returned before the end: nothing is decoded again."""
    first, time = make(response_median=median)
    first.submit([request(1, 5)])
    first._advance()
    time.now_s += 1.0
    first._advance()
    (begun,) = first.partials().values()
    assert len(begun.tokens) == count and first.num_running == 1
    second, time = make(response_median=median)
    second.submit([replace(request(1, 5), begun=begun)])
    assert (second.num_running, second.num_waiting, second.num_free) == (1, 0, 8)
    assert len(second.partials()[1, 0].tokens) == count
    (done,) = second.step()
    assert len(done.tokens) == count and done.finish == finish_as and not second.num_running
    assert time.now_s == START_S and START_S - done.started_s == pytest.approx(count * 0.01)


def test_lengths_stay_those_of_the_seeds():
    """20 samples move every 50 ms until all have ended; none is lost and none is longer or shorter for it."""
    values = {"response_median": 20.0, "response_sigma": 0.7}
    requests = [request(name, 60, seed=name) for name in range(20)]
    done: dict[int, Completion] = {}
    while len(done) < 20:
        engine, time = make(slots=6, **values)
        engine.submit([r for r in requests if r.key[0] not in done])
        engine._advance()
        time.now_s += 0.055
        done |= {c.key[0]: c for c in engine.step()}
        partials = engine.partials()
        requests = [replace(r, begun=partials.get(r.key, NOT_BEGUN)) for r in requests]
    for name, completion in done.items():
        length, ends_itself = response_length(settings(**values), name, 60)
        assert (len(completion.tokens), completion.finish) == (length, "eos" if ends_itself else "length")
        assert completion.finished_s - completion.started_s == pytest.approx(length * 0.01)


# ------------------------------------------------------------------------------------------------------ lengths
def test_lengths_depend_on_the_seed_alone():
    """One slot, or eight with interruptions every 30 ms: the same tokens."""

    def lengths(slots: int, period_s: float) -> dict[int, int]:
        engine, time = make(slots=slots, response_median=20.0, response_sigma=0.7)
        engine.submit([request(name, 60, seed=name) for name in range(20)])
        done, version, next_s = {}, 0, START_S + period_s
        while engine.num_running or engine.num_waiting:
            done |= {c.key[0]: len(c.tokens) for c in engine.step()}
            if time.now_s > next_s:
                version, next_s = version + 1, next_s + period_s
                engine.load_weights(version, [])
        return done

    assert lengths(1, 1e9) == lengths(8, 0.03)


def test_lengths_are_log_normal_and_cut():
    """Median 6000, one in 22.6 above 6000 exp(0.9 * 1.7) = 27648: 4.4 % of 4000 are 177 +- 13."""
    drawn = [response_length(SimulationConfig(), seed, 27648) for seed in range(4000)]
    lengths = np.array([length for length, _ in drawn])
    assert np.median(lengths) == pytest.approx(6000, rel=0.06)
    assert np.std(np.log(lengths[lengths < 27648])) == pytest.approx(0.9, abs=0.1)
    cut = sum(not ends_itself for _, ends_itself in drawn)
    assert 130 < cut < 225 and (lengths == 27648).sum() == cut
    assert response_length(settings(response_median=0.001), 0, 5) == (1, True)


def test_a_response_that_ends_itself_says_so():
    engine, _ = make(response_median=7.0)
    engine.submit([request(1, 7), request(2, 6)])
    done = finish(engine)
    assert (done[1].finish, done[2].finish) == ("eos", "length")
    assert [len(done[1].tokens), len(done[1].logprobs), len(done[1].versions)] == [7] * 3


# ----------------------------------------------------------------------------------------------------- training
def batch(logprob: float = -0.5) -> Batch:
    """Samples 0 and 2 are mine: 40 and 60 tokens; sample 1 is somebody else's."""

    def trajectory(num_tokens: int) -> Trajectory:
        response = num_tokens - 10
        arrays = (np.full(response, logprob, np.float32), np.zeros(response, np.int32))
        return Trajectory(0, num_tokens, np.ones(num_tokens, np.int32), 10, *arrays)

    return Batch([trajectory(40), None, trajectory(60)], np.zeros(3), [[[0], [2]]], [140])


def learner(time: Time, slowest_s: float = 0.0, others: bool = True, speedup: float = 1.0):
    calls: list[str] = []

    def agree(mine, between):
        calls.append("agree")
        time.sleep(slowest_s)
        return mine and others

    clock = Clock(speedup, time.now, time.sleep)
    values = settings(train_tokens_per_s=50.0, train_step_s=0.25, gpus_per_rank=2)
    made = SimulatedLearner(values, clock, agree, lambda: calls.append("between"), nullcontext)
    return made, calls


def test_a_step_takes_what_the_slowest_rank_takes():
    """Mine: 100 tokens at 2 * 50 /s; the others need 2 s more; then 0.25 s. Messages move on all the time."""
    time = Time()
    made, calls = learner(time, slowest_s=2.0)
    result = made.train(batch())
    assert time.now_s - START_S == pytest.approx(3.25, abs=1e-6)
    assert not result.skipped and result.stats == {} and set(result.phases) == {"proximal_s", "update_s", "total_s"}
    assert calls.index("agree") >= 1.0 / 0.02 and len(calls) - calls.index("agree") >= 0.25 / 0.02


def test_training_is_sped_up_as_well():
    time = Time()
    learner(time, speedup=10.0)[0].train(batch())
    assert time.now_s - START_S == pytest.approx(0.125, abs=1e-6)


def test_a_log_prob_that_is_not_finite_skips_the_step_everywhere():
    assert learner(Time())[0].train(batch(float("nan"))).skipped
    assert learner(Time(), others=False)[0].train(batch()).skipped


def test_a_sample_that_is_missing_is_an_error():
    broken = Batch([None], np.zeros(1), [[[0]]], [1])
    with pytest.raises(KeyError, match="sample 0 of the batch"):
        learner(Time())[0].train(broken)


# ---------------------------------------------------------------------------------------------- weights, rewards
def test_weights_leave_and_arrive_after_bytes_over_rate():
    """Copying takes 0.5 s, 100 bytes at 50 /s take 2 s; the next version waits for this one."""
    time = Time()
    clock = Clock(1.0, time.now, time.sleep)
    values = settings(publish_s=0.5, model_bytes=100, broadcast_bytes_per_s=50.0)
    sender, receiver = SimulatedSender(values, clock), SimulatedReceiver(values, clock)
    assert sender.poll() and sender.last is None and receiver.poll() is None
    sender.publish(0, {})
    assert time.now_s == START_S + 0.5 and not sender.poll()
    receiver.begin(0)
    with pytest.raises(ValueError, match="version 0 is still arriving"):
        receiver.begin(1)
    time.now_s = START_S + 2.49
    assert not sender.poll() and receiver.poll() is None
    time.now_s = START_S + 2.5
    arrived = receiver.poll()
    assert (arrived.version, arrived.receive_s, dict(arrived.tensors)) == (0, 2.0, {}) and receiver.poll() is None
    assert sender.poll() and (sender.last.version, sender.last.num_bytes) == (0, 100)
    assert (sender.last.snapshot_s, sender.last.broadcast_s) == (0.5, 2.5)
    sender.publish(1, {})
    sender.publish(2, {})
    assert time.now_s == START_S + 2.5 + 2.5 + 0.5 and sender.last.version == 1
    sender.wait()
    assert time.now_s == START_S + 7.5 and sender.last.version == 2


def test_rewards_come_when_they_are_due_and_by_chance():
    time = Time()
    clock = Clock(2.0, time.now, time.sleep)
    rewards = SimulatedRewards(settings(reward_s=3.0, success=0.25), clock, seed=1)
    for group in range(1000):
        rewards.submit((group, 0), "", "", {})
    time.now_s = START_S + 1.49
    assert rewards.poll() == []
    time.now_s = START_S + 1.5
    results = rewards.poll()
    assert [r.key for r in results] == [(group, 0) for group in range(1000)] and rewards.poll() == []
    right = [r for r in results if r.outcome == "correct"]
    assert 200 < len(right) < 300 and {r.reward for r in right} == {5.0}  # 250 +- 14
    assert {(r.outcome, r.reward) for r in results} == {("correct", 5.0), ("wrong", -5.0)}
    assert {r.seconds for r in results} == {1.5}


@pytest.mark.parametrize("success, outcome", [(0.0, "wrong"), (1.0, "correct")])
def test_certain_rewards(success, outcome):
    time = Time()
    rewards = SimulatedRewards(settings(reward_s=0.0, success=success), Clock(1.0, time.now), seed=1)
    for group in range(50):
        rewards.submit((group, 0), "", "", {})
    assert {r.outcome for r in rewards.poll()} == {outcome}


# ----------------------------------------------------------------------------------------- what a user can name
def test_prepare_writes_the_same_prompts_every_time(tmp_path):
    simulation.prepare(tmp_path / "a")
    simulation.prepare(tmp_path / "b")
    names = {"train.jsonl": 8192, "heldout.jsonl": 64}
    for name, count in names.items():
        text = (tmp_path / "a" / name).read_text()
        assert text == (tmp_path / "b" / name).read_text()
        lengths = [len(encode(json.loads(line)["prompt"])) for line in text.splitlines()]
        assert len(lengths) == count and min(lengths) >= 40 and max(lengths) <= 400 and len(set(lengths)) > 20
    assert {path.name for path in (tmp_path / "a").iterdir()} == set(names)
    (tmp_path / "a" / "train.jsonl").write_text("mine")
    simulation.prepare(tmp_path / "a")
    assert (tmp_path / "a" / "train.jsonl").read_text() == "mine"


def test_a_token_is_four_characters():
    assert [len(encode(text)) for text in ("", "a", "abcd", "abcde")] == [0, 1, 1, 2]


def test_the_reward_that_scores_nothing_says_so():
    with pytest.raises(RuntimeError, match="name the reward function of your task"):
        simulation.reward("", "", {})


def test_a_simulated_rank_imports_neither_torch_nor_transformers():
    code = (
        "import sys, areal_hpc.rank, areal_hpc.trainer, areal_hpc.rollout, areal_hpc.controller\n"
        "import areal_hpc.simulation.backend\n"
        "print(sorted({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


CONFIG = Path(__file__).parents[2] / "configs" / "simulated.yaml"


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["trainer.engine=transformers"], "trainer.engine: is transformers but rollout.engine is simulated"),
        (["rollout.engine=transformers", "model.path=."], "set both to simulated, or neither"),
        (
            ["rollout.engine=transformers", "trainer.engine=transformers"],
            "reward.function: areal_hpc.simulation:reward scores nothing; name the function of your task",
        ),
        (["rollout.engine=transformers", "trainer.engine=transformers"], "model.path: no such directory: none"),
        (["simulation.speedup=0"], "simulation.speedup"),
        (["simulation.success=2"], "simulation.success"),
    ],
)
def test_what_does_not_fit_is_refused(overrides, said, tmp_path):
    from areal_hpc.config.check import ConfigErrors, check_config

    with pytest.raises(ConfigErrors) as caught:
        check_config(CONFIG, [*overrides, f"run_dir={tmp_path}"])
    assert said in str(caught.value)


def test_the_example_is_fine_and_says_that_it_is_simulated(tmp_path):
    from areal_hpc.check import facts
    from areal_hpc.config.check import check_config

    checked = check_config(CONFIG, [f"run_dir={tmp_path}"])
    assert checked.config.is_simulated and not checked.warnings
    assert "compute  simulated at speedup 40" in facts(checked) and "64 GPUs" in facts(checked)
