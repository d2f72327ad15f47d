"""The transformers engine: every token is checked against an ordinary forward of the weights that sampled it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from areal_hpc.engines.base import NOT_BEGUN, Begun, Completion, Request
from areal_hpc.engines.transformers_engine import TransformersEngine
from areal_hpc.sampling import uniforms
from areal_hpc.trajectory import Key
from tests.unit.tiny_models import (
    FAMILIES,
    VOCAB,
    by_key,
    certain,
    engine_of,
    largest_error,
    mixed_requests,
    request,
    run,
    tiny_model,
    weights_of,
)

EOS = 1


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # with more, MKL splits products by batch size and the last bit may differ


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_a_full_forward(family: str, temperature: float) -> None:
    engine, requests = engine_of(family), [replace(r, temperature=temperature) for r in mixed_requests()]
    engine.submit(requests)
    completions = run(engine)
    assert {c.key: len(c.tokens) for c in completions} == {r.key: r.max_new_tokens for r in requests}
    assert all(c.tokens.dtype == np.int32 and c.logprobs.dtype == np.float32 for c in completions)
    assert largest_error(completions, requests, {0: tiny_model(family)}, temperature) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_each_token_belongs_to_its_version_across_three_swaps(family: str) -> None:
    engine, requests = engine_of(family), mixed_requests()
    engine.submit(requests)
    completions = run(engine, 5)
    for version in (1, 2, 5):
        engine.load_weights(version, weights_of(family, version))
        assert engine.version == version
        completions += run(engine, 6)
    completions += run(engine)
    policies = {0: tiny_model(family)} | {v: tiny_model(family, v) for v in (1, 2, 5)}
    assert largest_error(completions, requests, policies) < 1e-5
    assert max(len(set(c.versions.tolist())) for c in completions) == 4  # one sample lived through all of them
    assert all((np.diff(c.versions) >= 0).all() for c in completions)


def test_stale_entries_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above fails when an engine goes on with the KV entries of the old weights."""
    engine, requests = engine_of(), [request(g, budget=40) for g in range(4)]
    engine.submit(requests)
    run(engine, 10)
    real = TransformersEngine._load

    def keep_entries(self: TransformersEngine, *args: Any) -> Any:
        kept = self._cache
        swap = real(self, *args)
        self._cache = kept
        return swap

    monkeypatch.setattr(TransformersEngine, "_load", keep_entries)
    engine.load_weights(1, weights_of("qwen2", 1))
    assert largest_error(run(engine), requests, {0: tiny_model("qwen2"), 1: tiny_model("qwen2", 1)}) > 0.1


def test_swaps_report_what_they_interrupted() -> None:
    engine = engine_of(num_slots=3)
    engine.submit([request(g, prompt_len=5 + g, budget=9) for g in range(4)])
    run(engine, 4)
    swap = certain(engine.load_weights(1, weights_of("qwen2", 1)))
    assert (swap.version, swap.interrupted) == (1, 3) and swap.pause_s > 0
    assert swap.reprefilled_tokens == (5 + 6 + 7) + 3 * 3  # the newest of 4 tokens has no entry yet
    run(engine, 1)
    engine.load_weights(2, weights_of("qwen2", 2))
    done = by_key(run(engine))
    assert [done[g, 0].interruptions for g in range(4)] == [2, 2, 2, 0]
    assert done[0, 0].versions.tolist() == [0] * 4 + [1] + [2] * 4
    assert done[3, 0].versions.tolist() == [2] * 9
    assert certain(engine.load_weights(3, weights_of("qwen2", 3))).interrupted == 0


@pytest.mark.parametrize("version", [0, 3, 4])
def test_versions_must_rise(version: int) -> None:
    engine = engine_of()
    engine.load_weights(4, weights_of("qwen2", 4))
    with pytest.raises(ValueError, match="must rise"):
        engine.load_weights(version, weights_of("qwen2", 1))
    assert engine.version == 4


def test_an_incomplete_set_of_weights_leaves_the_old_policy_at_work() -> None:
    engine, requests = engine_of(), mixed_requests()
    engine.submit(requests)
    completions = run(engine, 3)
    with pytest.raises(ValueError, match="missing"):
        engine.load_weights(1, weights_of("qwen2", 1)[:-1])
    completions += run(engine)
    assert engine.version == 0 and largest_error(completions, requests, {0: tiny_model("qwen2")}) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_do_not_depend_on_slots_neighbours_or_order(family: str) -> None:
    requests = mixed_requests()
    shuffled = [requests[i] for i in np.random.default_rng(5).permutation(len(requests))]
    outcomes = []
    setups = ((8, requests, 64), (1, requests, 64), (5, shuffled, 1), (40, shuffled, 64))
    for num_slots, order, prefill_tokens in setups:
        engine = engine_of(family, num_slots=num_slots, prefill_tokens=prefill_tokens, eos_ids=(EOS,))
        engine.submit(order)
        outcomes.append(by_key(run(engine)))
    for outcome in outcomes[1:]:
        assert outcome.keys() == outcomes[0].keys()
        for key, done in outcome.items():
            assert np.array_equal(done.tokens, outcomes[0][key].tokens), key
            assert np.array_equal(done.logprobs, outcomes[0][key].logprobs), key  # bit for bit


def test_a_long_sample_uses_each_number_of_its_stream_once() -> None:
    """With all logits 0 the token is floor(u * V), so the stream can be read off, across its blocks of 64."""
    engine = engine_of(max_len=256)
    zeros = [(name, torch.zeros_like(tensor)) for name, tensor in weights_of("qwen2", 0)]
    engine.load_weights(1, zeros)
    engine.submit([request(3, budget=200)])
    run(engine, 70)
    engine.load_weights(2, zeros)
    (done,) = run(engine)
    assert done.tokens.tolist() == np.floor(uniforms(3000, 0, 200) * VOCAB).astype(int).tolist()


def test_groups_share_the_prefill_of_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, requests = engine_of(num_slots=6), [request(2, s, prompt_len=30, budget=6 + s) for s in range(9)]
    prefilled: list[int] = []
    real = TransformersEngine._forward

    def forward(self: TransformersEngine, prompts: list[int], *args: Any, **options: Any) -> torch.Tensor:
        prefilled.extend(prompts)
        return real(self, prompts, *args, **options)

    monkeypatch.setattr(TransformersEngine, "_forward", forward)
    engine.submit(requests)
    completions = run(engine)
    assert len(prefilled) == 1 and len(completions) == 9
    assert largest_error(completions, requests, {0: tiny_model("qwen2")}) < 1e-5


def test_a_prompt_of_another_text_in_the_same_group_is_not_shared() -> None:
    engine, requests = engine_of(), [request(2), Request((2, 1), request(3).prompt, 20, seed=1)]
    engine.submit(requests)
    assert largest_error(run(engine), requests, {0: tiny_model("qwen2")}) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_starting_beside_an_interrupted_sibling_changes_nothing(family: str) -> None:
    lengths = range(20, 36)
    siblings = [request(g, 0, prompt_len=n, budget=40) for g, n in enumerate(lengths)]
    late = [request(g, 1, prompt_len=n, budget=3) for g, n in enumerate(lengths)]
    outcomes = []
    for first in (siblings, []):
        engine = engine_of(family, num_slots=2 * len(lengths), prefill_tokens=4096)
        engine.submit(first)
        run(engine, 9)
        engine.load_weights(1, weights_of(family, 1))
        engine.submit(late)
        outcomes.append(by_key(run(engine)))
    for each in late:
        assert np.array_equal(outcomes[0][each.key].logprobs, outcomes[1][each.key].logprobs), each.key


def test_freed_slots_are_filled_at_once() -> None:
    engine, requests = engine_of(num_slots=4), mixed_requests(8, 4)
    engine.submit(requests)
    steps = decoded = 0
    while engine.num_waiting:
        before = engine.num_waiting
        finished = engine.step()
        steps, decoded = steps + 1, decoded + 4
        assert engine.num_running + len(finished) == 4 and engine.num_free == 4 - engine.num_running
        assert before - engine.num_waiting <= 4
    assert steps > 10


def test_prefill_budget_spreads_the_start() -> None:
    engine = engine_of(num_slots=8, prefill_tokens=20)
    engine.submit([request(g, prompt_len=11, budget=30) for g in range(4)] + [request(9, prompt_len=50, budget=30)])
    running = []
    for _ in range(3):
        engine.step()
        running.append(engine.num_running)
    assert running == [2, 4, 5]  # 10 new entries a prompt; the long prompt goes through alone


def test_min_version_holds_a_request_back_but_nobody_behind_it() -> None:
    engine = engine_of()
    engine.submit([request(0, min_version=2), request(1, min_version=1), request(2), request(3, min_version=1)])
    completions = run(engine, 3)
    assert (engine.num_running, engine.num_waiting) == (1, 3)
    engine.load_weights(1, weights_of("qwen2", 1))
    run(engine, 1)
    assert (engine.num_running, engine.num_waiting) == (3, 1)
    engine.load_weights(2, weights_of("qwen2", 2))
    done = by_key(completions + run(engine))
    assert {key[0]: int(c.versions[0]) for key, c in done.items()} == {0: 2, 1: 1, 2: 0, 3: 1}
    assert done[1, 0].started_s <= done[3, 0].started_s < done[0, 0].started_s


def test_held_back_requests_keep_their_place() -> None:
    engine = engine_of(num_slots=1)
    engine.submit([request(g, budget=3, min_version=1 if g < 2 else 0) for g in range(4)])
    completions = run(engine, 2)
    engine.load_weights(1, weights_of("qwen2", 1))
    assert [c.key[0] for c in completions + run(engine)] == [2, 0, 1, 3]


def test_only_gated_requests_is_an_idle_step() -> None:
    engine = engine_of()
    engine.submit([request(0, min_version=1)])
    assert engine.step() == [] and (engine.num_running, engine.num_waiting) == (0, 1)


def test_eos_ends_a_response_and_is_part_of_it() -> None:
    engine, requests = engine_of(eos_ids=(EOS, 5), num_slots=8), [request(g, budget=100) for g in range(20)]
    engine.submit(requests)
    completions = run(engine)
    assert {c.finish for c in completions} == {"eos", "length"} or all(c.finish == "eos" for c in completions)
    assert any(c.finish == "eos" for c in completions)
    for done in completions:
        ended = np.isin(done.tokens, (EOS, 5))
        assert not ended[:-1].any() and bool(ended[-1]) == (done.finish == "eos")
        assert done.finish == "eos" or len(done.tokens) == 100
    assert largest_error(completions, requests, {0: tiny_model("qwen2")}) < 1e-5


def test_end_token_on_the_last_of_the_budget_counts_as_eos() -> None:
    engine = engine_of(eos_ids=tuple(range(VOCAB)))
    engine.submit([request(0, budget=1)])
    assert run(engine)[0].finish == "eos"


def test_a_request_may_fill_max_len_exactly() -> None:
    engine = engine_of(max_len=33)
    requests = [request(0, prompt_len=13, budget=20), request(1, prompt_len=32, budget=1)]
    engine.submit(requests)
    completions = run(engine)
    assert [len(c.tokens) for c in completions] == [1, 20]
    assert largest_error(completions, requests, {0: tiny_model("qwen2")}) < 1e-5


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (request(0), "in flight"),
        (request(7), "in flight"),
        (Request((8, 0), (), 4, 0), "at least one"),
        (Request((8, 0), (2,), 0, 0), "at least one"),
        (request(8, prompt_len=120, budget=9), "exceed max_len 128"),
        (Request((8, 0), (2, VOCAB), 4, 0), "outside 0 .. 28"),
        (Request((8, 0), (-1, 2), 4, 0), "outside 0 .. 28"),
        (Request((8, 0), (2,), 4, -5), "seed"),
        (Request((8, 0), (2,), 4, 0, temperature=-0.5), "temperature"),
        (Request((8, 0), (2,), 4, 0, temperature=float("nan")), "temperature"),
    ],
)
def test_bad_requests_are_refused_and_nothing_with_them(bad: Request, complaint: str) -> None:
    engine = engine_of()
    engine.submit([request(0), request(1)])
    engine.step()
    with pytest.raises(ValueError, match=complaint):
        engine.submit([request(7), bad])
    assert engine.num_waiting == 0 and len(run(engine)) == 2
    engine.submit([request(0)])  # a finished key may come again
    assert len(run(engine)) == 1


@pytest.mark.parametrize("options", [{"num_slots": 0}, {"max_len": 1}, {"prefill_tokens": 0}, {"max_len": 257}])
def test_impossible_engines_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        engine_of(**options)


def test_started_and_finished_are_in_order() -> None:
    engine, begin = engine_of(num_slots=2), time.monotonic()
    engine.submit([request(0, budget=3), request(1, budget=9), request(2, budget=2), request(3, budget=4)])
    completions = run(engine)
    # 0 ends at step 3, 2 (steps 4-5) at 5, then 3 (steps 6-9) ends together with 1 at step 9: older first
    assert [c.key[0] for c in completions] == [0, 2, 1, 3]
    done = by_key(completions)
    starts = [done[g, 0].started_s for g in range(4)]
    assert begin <= starts[0] == starts[1] < done[0, 0].finished_s <= starts[2] < done[2, 0].finished_s <= starts[3]
    assert done[1, 0].finished_s == done[3, 0].finished_s <= time.monotonic()


def test_samples_that_end_together_come_oldest_first() -> None:
    engine = engine_of(num_slots=3)
    engine.submit([request(g, budget=budget) for g, budget in enumerate([2, 6, 6, 9])])
    assert [c.key[0] for c in run(engine)] == [0, 1, 2, 3]  # when 0 ended, 2 moved into its row, in front of 1


def test_without_interruption_running_samples_end_on_the_old_weights() -> None:
    engine, requests = engine_of(num_slots=2, interrupt=False), [request(g, budget=6 + g) for g in range(4)]
    engine.submit(requests)
    completions = run(engine, 2)
    received = [(name, tensor.clone()) for name, tensor in weights_of("qwen2", 1)]
    assert engine.load_weights(1, received) is None
    for _, tensor in received:
        tensor.fill_(float("nan"))  # the receive buffer may be used again
    completions += run(engine, 5)
    assert engine.version == 1 and engine.num_running == 0 and engine.num_waiting == 2  # nothing new started meanwhile
    swap = certain(engine.take_swap())
    assert (swap.version, swap.interrupted, swap.reprefilled_tokens) == (1, 0, 0) and engine.take_swap() is None
    completions += run(engine)
    done = by_key(completions)
    assert [set(done[g, 0].versions.tolist()) for g in range(4)] == [{0}, {0}, {1}, {1}]
    assert all(c.interruptions == 0 for c in completions)
    assert largest_error(completions, requests, {0: tiny_model("qwen2"), 1: tiny_model("qwen2", 1)}) < 1e-5


def test_without_interruption_a_newer_set_replaces_the_one_kept_aside() -> None:
    engine = engine_of(interrupt=False)
    assert certain(engine.load_weights(1, weights_of("qwen2", 1))).version == 1  # idle: at once
    engine.submit([request(0, budget=4)])
    engine.step()
    assert engine.load_weights(2, weights_of("qwen2", 2)) is None
    with pytest.raises(ValueError, match="must rise"):
        engine.load_weights(2, weights_of("qwen2", 2))
    with pytest.raises(ValueError, match="missing"):
        engine.load_weights(3, weights_of("qwen2", 3)[:-1])
    assert engine.load_weights(4, weights_of("qwen2", 4)) is None
    run(engine)
    assert engine.version == 4 and certain(engine.take_swap()).version == 4


def test_cancelled_samples_leave_no_trace() -> None:
    engine, requests = engine_of(num_slots=3), [request(g, prompt_len=4 + g, budget=20) for g in range(6)]
    undisturbed = engine_of(num_slots=3)
    for each in (engine, undisturbed):
        each.submit(requests)
        each.step()
    assert engine.cancel([(0, 0), (4, 0), (99, 0)]) == 2
    assert (engine.num_running, engine.num_waiting) == (2, 2)
    done, expected = by_key(run(engine)), by_key(run(undisturbed))
    assert done.keys() == {(g, 0) for g in (1, 2, 3, 5)}
    assert all(np.array_equal(done[key].logprobs, expected[key].logprobs) for key in done)
    engine.submit([requests[0]])
    assert np.array_equal(run(engine)[0].tokens, expected[0, 0].tokens)


def test_cancelling_the_last_running_sample_swaps() -> None:
    engine = engine_of(interrupt=False)
    engine.submit([request(0)])
    engine.step()
    engine.load_weights(1, weights_of("qwen2", 1))
    assert engine.cancel([(0, 0)]) == 1
    assert engine.version == 1 and certain(engine.take_swap()).version == 1


def test_broken_weights_are_named() -> None:
    engine = engine_of()
    engine.submit([request(5, 2)])
    engine.step()
    engine.load_weights(3, [(name, torch.full_like(tensor, float("nan"))) for name, tensor in weights_of("qwen2", 0)])
    with pytest.raises(FloatingPointError, match=r"version 3 .*\(5, 2\)"):
        engine.step()


def test_greedy_takes_the_most_likely_token() -> None:
    engine = engine_of()
    engine.submit([replace(request(0, budget=12), temperature=0.0)])
    (done,) = run(engine)
    context = list(request(0).prompt)
    for token in done.tokens.tolist():
        with torch.no_grad():
            assert token == int(tiny_model("qwen2")(torch.tensor([context])).logits[0, -1].argmax())
        context.append(token)
    assert (done.logprobs == 0).all()


def test_every_sample_has_its_own_temperature() -> None:
    """Three side by side, rows moved as others end: the tokens of each are those it draws alone."""
    temperatures = [0.0, 0.4, 1.0, 1.7]
    requests = [replace(r, temperature=temperatures[sum(r.key) % 4]) for r in mixed_requests()]
    engine = engine_of()
    engine.submit(requests)
    together = by_key(run(engine))
    for r in requests:
        alone = engine_of()
        alone.submit([r])
        (done,) = run(alone)
        assert done.tokens.tolist() == together[r.key].tokens.tolist()
    for temperature in temperatures[1:]:
        some = [r for r in requests if r.temperature == temperature]
        assert largest_error([together[r.key] for r in some], some, {0: tiny_model("qwen2")}, temperature) < 1e-5


# --------------------------------------------------------------------------------- samples that had begun elsewhere
def moved(requests: list[Request], engine: TransformersEngine) -> list[Request]:
    """Requests for what is in flight on `engine`, with its beginnings."""
    partials = engine.partials()
    return [replace(r, begun=partials.get(r.key, NOT_BEGUN)) for r in requests if r.key in engine._keys]


def assert_same(done: dict[Key, Completion], expected: dict[Key, Completion]) -> None:
    assert done.keys() == expected.keys()
    for key, one in done.items():
        other = expected[key]
        assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.versions, other.versions), key
        assert np.abs(one.logprobs - other.logprobs).max() < 1e-5, key
        assert (one.finish, one.interruptions) == (other.finish, other.interruptions), key
        assert (one.tokens.dtype, one.logprobs.dtype, one.versions.dtype) == (np.int32, np.float32, np.int32)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [0, 1, 37, 64, 70, 90])
def test_samples_go_on_in_another_engine(family: str, steps: int) -> None:
    """Before, at and behind a block of 64 random numbers; 12 samples on 5 slots, so some wait, run or are done."""
    requests = [request(g, s, prompt_len=1 + 5 * g, budget=96 - 20 * s) for g in range(4) for s in range(3)]
    options: dict[str, Any] = dict(num_slots=5, max_len=200, eos_ids=(EOS,) if steps == 37 else ())
    undisturbed, first, second = (engine_of(family, **options) for _ in range(3))
    undisturbed.submit(requests)
    first.submit(requests)
    done = run(first, steps)
    begun = first.partials()
    assert len(begun) == first.num_running and bool(begun) == bool(steps)
    rest = moved(requests, first)
    second.submit([*rest[::-1]])
    assert_same(by_key(done + run(second)), by_key(run(undisturbed)))


def test_a_sample_moved_before_its_first_token_is_a_new_one() -> None:
    engine, undisturbed = engine_of(), engine_of()
    engine.submit([replace(request(0), begun=replace(NOT_BEGUN, interruptions=2))])
    undisturbed.submit([request(0)])
    (done,), (expected,) = run(engine), run(undisturbed)
    assert np.array_equal(done.logprobs, expected.logprobs) and done.interruptions == 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("when", ["before", "after", "between"])
def test_moving_and_new_weights(family: str, when: str) -> None:
    """Version 1 comes before the move, after it, or while nobody has the samples; 2 comes later in any case."""
    requests = [request(g, prompt_len=3 + 5 * g, budget=40) for g in range(4)]
    undisturbed, first, second = (engine_of(family, prefill_tokens=4096) for _ in range(3))
    for engine in (undisturbed, first):
        engine.submit(requests)
        run(engine, 9)
    undisturbed.load_weights(1, weights_of(family, 1))
    if when == "before":
        first.load_weights(1, weights_of(family, 1))
        run(first, 4)
    rest = moved(requests, first)
    if when == "after":
        second.submit(rest)
        second._start_waiting()  # the samples have rows and version 0, and version 1 interrupts them
    second.load_weights(1, weights_of(family, 1))
    if when != "after":
        second.submit(rest)
    run_all = []
    for engine, steps in ((undisturbed, 13), (second, 9 if when == "before" else 13)):
        run(engine, steps)
        engine.load_weights(2, weights_of(family, 2))
        run_all.append(by_key(run(engine)))
    assert_same(run_all[1], run_all[0])
    policies = {0: tiny_model(family)} | {v: tiny_model(family, v) for v in (1, 2)}
    assert largest_error(list(run_all[1].values()), requests, policies) < 1e-5
    assert all(set(c.versions.tolist()) == {0, 1, 2} and c.interruptions == 2 for c in run_all[1].values())


def test_a_sample_does_not_go_on_with_older_weights_than_it_has_seen() -> None:
    engine, begun = engine_of(), Begun(*(np.array([5, 6], t) for t in ("i4", "f4", "i4")), interruptions=1)
    begun = replace(begun, logprobs=np.array([-1, -2], np.float32), versions=np.array([0, 2], np.int32))
    engine.submit([replace(request(0, budget=5), begun=begun)])
    engine.load_weights(1, weights_of("qwen2", 1))
    assert engine.step() == [] and engine.num_waiting == 1
    assert list(engine.partials()) == [(0, 0)] and engine.partials()[0, 0] is begun
    engine.load_weights(2, weights_of("qwen2", 2))
    (done,) = run(engine)
    assert done.versions.tolist() == [0, 2, 2, 2, 2] and done.interruptions == 1
    assert done.tokens[:2].tolist() == [5, 6] and done.logprobs[:2].tolist() == [-1, -2]


def test_partials_are_copies_and_disturb_nothing() -> None:
    requests = mixed_requests()
    watched, undisturbed = engine_of(), engine_of()
    for engine in (watched, undisturbed):
        engine.submit(requests)
    done, early = run(watched, 3), watched.partials()
    kept = {key: begun.tokens.copy() for key, begun in early.items()}
    while watched.num_running or watched.num_waiting:
        done += watched.step()
        watched.partials()
    assert all(np.array_equal(early[key].tokens, tokens) for key, tokens in kept.items())
    expected = by_key(run(undisturbed))
    for key, one in by_key(done).items():
        assert np.array_equal(one.logprobs, expected[key].logprobs)
        assert key not in kept or np.array_equal(one.tokens[: len(kept[key])], kept[key])


def test_a_beginning_is_neither_source_nor_target_of_a_shared_prompt() -> None:
    """Samples 0 had begun, or only those of the first four groups did: slots were few. Everything else is shared."""
    first = engine_of(num_slots=4, max_len=200)
    siblings = [request(g, 0, prompt_len=20 + g, budget=60) for g in range(8)]
    first.submit(siblings)
    run(first, 9)
    late = [request(g, s, prompt_len=20 + g, budget=30) for g in range(8) for s in (1, 2)]
    second, rest = engine_of(num_slots=24, max_len=200, prefill_tokens=4096), moved(siblings, first)
    second.submit([*rest[:2], *late, *rest[2:]])
    prompts, copies = second._start_waiting()
    second._forward(prompts, copies, decode=False)
    begun = {row for row, run in enumerate(second._rows.running) if len(run.request.begun.tokens)}
    assert len(begun) == 4 and begun <= set(prompts) and len(prompts) == 4 + 8
    assert len(copies) == 4 + 2 * 4 and not begun & {row for pair in copies for row in pair}
    assert largest_error(run(second), siblings + late, {0: tiny_model("qwen2")}) < 1e-5


def test_beginnings_count_as_prefill() -> None:
    engine = engine_of(num_slots=8, prefill_tokens=20)
    begun = Begun(np.full(6, 3, np.int32), np.zeros(6, np.float32), np.zeros(6, np.int32))
    engine.submit([replace(request(g, prompt_len=5, budget=30), begun=begun) for g in range(4)])
    running = [engine.step() or engine.num_running for _ in range(2)]
    assert running == [2, 4]  # 5 + 6 tokens without the newest: 10 entries each


@pytest.mark.parametrize("last, finish", [(4, "length"), (EOS, "eos")])
def test_a_beginning_that_is_all_of_it_ends_at_once(last: int, finish: str) -> None:
    engine = engine_of(num_slots=1, eos_ids=(EOS,))
    arrays = (np.array([7, last], np.int32), np.array([-1, -3], np.float32), np.array([0, 9], np.int32))
    whole = replace(request(0, budget=2 if finish == "length" else 20), begun=Begun(*arrays, 3, 100.0))
    engine.submit([request(1, budget=2), whole])
    assert (engine.num_running, engine.num_waiting) == (1, 1) and engine.partials()[0, 0].tokens is arrays[0]
    with pytest.raises(ValueError, match="in flight"):
        engine.submit([whole])
    (done,) = engine.step()
    assert done.key == (0, 0) and done.tokens.tolist() == [7, last] and done.versions.tolist() == [0, 9]
    assert (done.finish, done.interruptions) == (finish, 3)
    assert done.finished_s - done.started_s == pytest.approx(100.0)
    assert [c.key for c in run(engine)] == [(1, 0)]
    engine.submit([whole])
    assert engine.cancel([(0, 0)]) == 1 and engine.num_running == 0 and run(engine) == []


def test_time_spent_before_counts() -> None:
    engine = engine_of()
    engine.submit([request(0)])
    run(engine, 3)
    spent_s = engine.partials()[0, 0].spent_s
    assert 0 < spent_s < 10
    second = engine_of()
    second.submit([replace(r, begun=replace(r.begun, spent_s=500.0)) for r in moved([request(0)], engine)])
    (done,) = run(second)
    assert 500 < done.finished_s - done.started_s < 510


@pytest.mark.parametrize(
    ("sizes", "token", "complaint"), [((2, 1, 2), 3, "not as many"), ((2, 2, 2), VOCAB, "outside 0 .. 28")]
)
def test_broken_beginnings_are_refused(sizes: tuple[int, int, int], token: int, complaint: str) -> None:
    types = zip(sizes, (np.int32, np.float32, np.int32), strict=True)
    arrays = [np.zeros(size, dtype) for size, dtype in types]
    arrays[0][:] = token
    with pytest.raises(ValueError, match=complaint):
        engine_of().submit([replace(request(0), begun=Begun(*arrays))])


# -------------------------------------------------------------------------------------------------- several turns
def test_a_request_can_say_where_it_ends() -> None:
    """With the first token 5 of its response; the others go on, and nobody's tokens change."""
    plain = by_key(run_all(engine_of(), [request(0, budget=40), request(1, budget=40)]))
    wanted = int(plain[0, 0].tokens[7])
    cut = int(np.flatnonzero(plain[0, 0].tokens == wanted)[0]) + 1
    seen: list[int] = []

    def stop(response: np.ndarray) -> bool:
        seen.append(len(response))
        return bool(response[-1] == wanted)

    done = by_key(run_all(engine_of(), [replace(request(0, budget=40), stop=stop), request(1, budget=40)]))
    assert done[0, 0].finish == "stop" and done[1, 0].finish == "length"
    assert done[0, 0].tokens.tolist() == plain[0, 0].tokens[:cut].tolist() and seen == list(range(1, cut + 1))
    assert np.array_equal(done[1, 0].tokens, plain[1, 0].tokens)


def test_what_was_given_does_not_end_a_turn_but_what_it_has_of_its_own_does() -> None:
    """A turn begins after an end of sequence; a turn that had ended when it was saved ends at once."""
    arrays = (np.array([7, EOS], np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32))
    begun = Begun(*arrays)
    engine = engine_of(eos_ids=(EOS,))
    (done,) = run_all(engine, [replace(request(0, budget=6), begun=begun, given=2)])
    assert len(done.tokens) > 2 and done.tokens[:2].tolist() == [7, EOS]
    assert largest_error([drop_first(done, 2)], [with_prompt(request(0), [7, EOS])], {0: tiny_model("qwen2")}) < 1e-5
    (done,) = run_all(engine, [replace(request(0, budget=6), begun=begun, given=1)])
    assert len(done.tokens) == 2 and done.finish == "eos"
    never, always = (lambda response: False), (lambda response: True)
    (done,) = run_all(engine_of(), [replace(request(0, budget=6), begun=begun, given=1, stop=always)])
    assert len(done.tokens) == 2 and done.finish == "stop"
    (done,) = run_all(engine_of(), [replace(request(0, budget=6), begun=begun, given=2, stop=always)])
    assert len(done.tokens) == 3 and done.finish == "stop"
    (done,) = run_all(engine_of(), [replace(request(0, budget=6), begun=begun, given=1, stop=never)])
    assert len(done.tokens) == 6 and done.finish == "length"


def run_all(engine: TransformersEngine, requests: list[Request]) -> list[Completion]:
    engine.submit(requests)
    return run(engine)


def drop_first(done: Completion, count: int) -> Completion:
    arrays = (done.tokens[count:], done.logprobs[count:], done.versions[count:])
    return replace(done, tokens=arrays[0], logprobs=arrays[1], versions=arrays[2])


def with_prompt(request: Request, more: list[int]) -> Request:
    return replace(request, prompt=(*request.prompt, *more))
