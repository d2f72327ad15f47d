"""Workflows driven by a scripted engine and by a real one, interrupted and begun again anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from areal_hpc.comm import Received
from areal_hpc.compute import RolloutCompute
from areal_hpc.config import Config
from areal_hpc.engines.base import Completion, Request
from areal_hpc.exits import Exit, RunError
from areal_hpc.group_files import read_groups
from areal_hpc.logschema import Outcome
from areal_hpc.messages import AdmitGroup, Credits, DropGroups, Event, GroupFinished
from areal_hpc.preflight import RunClock
from areal_hpc.rewards import RewardResult
from areal_hpc.rollout import Rollout
from areal_hpc.saving_messages import GroupsRestored, GroupsSaved, RestoreGroups, SaveGroups
from areal_hpc.workflows import ToolTimeout
from areal_hpc.workflows import episode as episode_module
from areal_hpc.workflows.api import Generate, Prompt, Run
from areal_hpc.workflows.episode import Episode, Language
from areal_hpc.workflows.episodes import Episodes, WorkflowCompute, load_workflow
from areal_hpc.workflows.journal import Journal, turns_of
from areal_hpc.workflows.tools import ToolPool, ToolResult, reference
from tests import episodes as users
from tests.unit.tiny_models import engine_of, plain_logprobs, run, tiny_model, weights_of

BUDGET = 12
EOS_TEXT = "\x01"


def spelt(tokens) -> str:
    """Token n is the n-th character; 1 is the end of sequence, which is not text."""
    return "".join(chr(token) for token in np.asarray(tokens).tolist())


LANGUAGE = Language(
    more=lambda text: [ord(letter) for letter in text],
    read=lambda tokens: spelt(tokens).replace(EOS_TEXT, ""),
)
REQUEST = Request((3, 1), (5, 6), BUDGET, seed=77, min_version=2)


class Script:
    """An engine that writes what it is told, one character a token, and obeys the request; a tool that answers.

    `texts` holds what each turn would become without any limit.
    """

    def __init__(self, workflow, *texts: str, version: int = 2, request: Request = REQUEST, journal=None) -> None:
        self.texts, self.version, self.asked = list(texts), version, []
        prompt = Prompt("what?", {"answer": "42"}, 1, "train", request.seed)
        self.episode = Episode(workflow, prompt, request, LANGUAGE, lambda: self.version, journal)

    def write(self, request: Request, text: str) -> Completion:
        """What an engine makes of a request, token by token."""
        begun, finish = request.begun, "length"
        tokens, logprobs, versions = (list(x) for x in (begun.tokens, begun.logprobs, begun.versions))
        if len(tokens) > request.given and request.stop is not None and request.stop(begun.tokens):
            text, finish = "", "stop"
        for letter in text:
            if len(tokens) >= request.max_new_tokens:
                break
            tokens.append(ord(letter))
            logprobs.append(-len(tokens) / 8)
            versions.append(self.version)
            if letter == EOS_TEXT or request.stop is not None and request.stop(np.array(tokens, np.int32)):
                finish = "eos" if letter == EOS_TEXT else "stop"
                break
        arrays = (np.array(tokens, np.int32), np.array(logprobs, np.float32), np.array(versions, np.int32))
        interruptions = request.interruptions(self.version)
        return Completion(request.key, *arrays, finish, interruptions, 10.0 - begun.spent_s, 20.0)

    def go(self, steps: int = 99) -> Script:
        """Answer so many requests."""
        episode = self.episode
        if not hasattr(episode, "_coroutine"):
            episode.begin()
        for _ in range(steps):
            if isinstance(episode.asks, Generate):
                request = episode.request()
                self.asked.append(request)
                episode.turned(self.write(request, self.texts.pop(0)))
            elif isinstance(episode.asks, Run):
                args = msgspec.msgpack.decode(episode.asks.args)
                value = msgspec.msgpack.encode({"text": f"<{'|'.join(map(str, args))}>"})
                episode.ran(ToolResult(episode.key, "done", value, "", 0.1))
        return self

    @property
    def failure(self) -> str:
        result = self.episode.end.result
        assert result.outcome == "error" and np.isnan(result.reward)
        return result.detail


async def two_turns(prompt, engine):
    first = await engine.generate(stop="ok")
    found = await engine.run(users.neighbours, first.text)
    assert engine.append(found["text"]) > 0
    second = await engine.generate(max_new_tokens=2)
    return [float(len(first.text)), -float(len(second.text))]


# ------------------------------------------------------------------------------------------------------ one episode
def test_an_episode_from_beginning_to_end():
    script = Script(two_turns, "abokxyz", "uvw").go()
    end = script.episode.end
    assert spelt(end.done.tokens) == "abok<abok>uv"
    assert end.done.logprobs.tolist() == [-1 / 8, -2 / 8, -3 / 8, -4 / 8] + [0] * 6 + [-11 / 8, -12 / 8]
    assert turns_of(end.journal.entries).tolist() == [0] * 4 + [-1] * 6 + [1] * 2
    assert end.journal.rewards == [4.0, -2.0] and end.journal.turn_tokens == [4, 2]
    assert (end.result.reward, end.result.outcome) == (2.0, "correct")
    assert (end.done.key, end.done.finish, end.done.started_s, end.done.finished_s) == ((3, 1), "length", 10.0, 20.0)
    first, second = script.asked
    assert (first.max_new_tokens, first.given, len(first.begun.tokens)) == (BUDGET, 0, 0)
    assert (second.max_new_tokens, second.given, spelt(second.begun.tokens)) == (12, 10, "abok<abok>")
    assert first.seed == second.seed == 77 and first.prompt == second.prompt == (5, 6)


def test_new_weights_between_turns_are_one_interruption_and_tags_never_fall():
    script = Script(two_turns, "abok", "uv").go(1)
    assert isinstance(script.episode.asks, Run)
    script.version = 5
    end = script.go().episode.end
    assert end.done.versions.tolist() == [2] * 4 + [5] * 6 + [5] * 2
    assert end.done.interruptions == 1
    late = Script(two_turns, "abok", "uv", version=4).go(2)
    late.version = 6
    assert late.go().episode.end.done.interruptions == 1


def test_before_the_first_version_has_come_the_environment_is_tagged_with_that_of_admission():
    async def greeting(prompt, engine):
        engine.append("hi")
        await engine.generate(max_new_tokens=1)
        return 1.0

    script = Script(greeting, "a", version=-1)
    script.episode.begin()
    assert script.episode.begun.versions.tolist() == [2, 2]
    assert script.episode.request().earliest_version == 2


@pytest.mark.parametrize(
    ("returned", "rewards", "reward", "outcome"),
    [
        (0.5, None, 0.5, "correct"),
        (-0.5, None, -0.5, "wrong"),
        ((0.5, "wrong"), None, 0.5, "wrong"),
        ([1, 2], [1.0, 2.0], 3.0, "correct"),
        (([1.0, -3.0], "unparsed"), [1.0, -3.0], -2.0, "unparsed"),
    ],
)
def test_what_a_workflow_returns(returned, rewards, reward, outcome):
    async def workflow(prompt, engine):
        await engine.generate(max_new_tokens=1)
        await engine.generate(max_new_tokens=1)
        return returned

    end = Script(workflow, "ab", "cd").go().episode.end
    assert (end.result.reward, end.result.outcome, end.journal.rewards) == (reward, outcome, rewards)
    assert end.journal.turn_rewards(end.result.reward) == (rewards or [0.0, reward])


def test_without_a_return_the_reward_function_scores_and_the_last_turn_has_it():
    end = Script(users.single, "abc").go().episode.end
    assert end.result is None and end.journal.turn_rewards(7.0) == [7.0]


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        ([1.0], "1 rewards for 2 turns"),
        ([1.0, float("nan")], "finite"),
        ("good", "expected a number"),
        ((1.0, "great"), "'correct' | 'wrong' | 'unparsed'"),
    ],
)
def test_rewards_that_make_no_sense_are_an_error_of_the_sample(returned, complaint):
    async def workflow(prompt, engine):
        await engine.generate(max_new_tokens=1)
        await engine.generate(max_new_tokens=1)
        return returned

    assert complaint in Script(workflow, "ab", "cd").go().failure


@pytest.mark.parametrize(
    ("stop", "text", "turn"),
    [
        (("b",), "aabb", "aab"),
        (("ab", "ca"), "bbcab", "bbca"),  # the first that is complete
        (("zz",), "abcdefghijklmnop", "abcdefghijkl"),
        ((EOS_TEXT,), f"ab{EOS_TEXT}c", "ab"),  # ends by itself: special tokens have no text
        (("b\u00e9",), "ab\u00e9c", "ab\u00e9"),
        (("x" * 11,), "x" * 12, "x" * 11),
    ],
)
def test_a_turn_ends_with_the_token_that_completes_a_stop_string(stop, text, turn):
    async def workflow(prompt, engine):
        seen.append(await engine.generate(stop=stop))

    seen: list = []
    Script(workflow, text).go()
    assert seen[0].text == turn and spelt(seen[0].tokens).replace(EOS_TEXT, "") == turn


def test_stop_strings_are_not_looked_for_in_earlier_turns():
    async def workflow(prompt, engine):
        await engine.generate(stop="b")
        engine.append("xb")
        await engine.generate(stop=["xb", "by"])
        return 1.0

    end = Script(workflow, "aab", "yb" + "xb").go().episode.end
    assert spelt(end.done.tokens) == "aabxbybxb" and end.done.finish == "stop"


def test_what_does_not_fit_is_cut_and_the_turn_after_it_is_empty():
    async def workflow(prompt, engine):
        await engine.generate(max_new_tokens=7)
        sizes.append((engine.room, engine.append("0123456789"), engine.room))
        turn = await engine.generate()
        sizes.append((turn.text, turn.finish, engine.num_turns, engine.text))
        return [1.0, 0.0]

    sizes: list = []
    end = Script(workflow, "abcdefghi").go().episode.end
    assert sizes == [(5, 5, 0), ("", "length", 2, "abcdefg01234")]
    assert end.done.finish == "length" and end.journal.turn_tokens == [7, 0] and len(end.done.tokens) == BUDGET


def test_a_workflow_that_never_ends_is_stopped():
    async def workflow(prompt, engine):
        while True:
            await engine.generate(max_new_tokens=5)

    assert "without any room" in Script(workflow, *["abcde"] * 9).go().failure


def test_an_exception_is_an_error_that_says_where():
    async def workflow(prompt, engine):
        turn = await engine.generate(max_new_tokens=2)
        return prompt.metadata[turn.text]

    script = Script(workflow, "ab").go()
    line = workflow.__code__.co_firstlineno + 2
    assert script.failure == f"{__file__}:{line}: KeyError: 'ab'"
    assert spelt(script.episode.end.done.tokens) == "ab" and script.episode.end.journal.turn_tokens == [2]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (lambda engine: engine.generate(stop=""), "WorkflowError: stop strings must be texts"),
        (lambda engine: engine.generate(max_new_tokens=0), "WorkflowError: max_new_tokens must be at least 1"),
        (lambda engine: engine.run(lambda: 1), "no plain function"),
        (lambda engine: engine.run(users.neighbours, object()), "cannot be run in another process"),
        (lambda engine: engine.run("no function", 1), "write package.module:name"),
        (lambda engine: asyncio.sleep(1), "RuntimeError: no running event loop"),
    ],
)
def test_what_a_workflow_must_not_ask_for(body, complaint):
    async def workflow(prompt, engine):
        await body(engine)

    failure = Script(workflow).go().failure
    assert complaint in failure
    assert failure.startswith(__file__) or "sleep" in complaint or "asyncio" in failure


def test_something_else_to_await_is_refused():
    class Foreign:
        def __await__(self) -> Iterator[str]:
            yield "a future of another library"

    async def workflow(prompt, engine):
        await Foreign()

    assert "'a future of another library', not its engine's generate or run" in Script(workflow).go().failure


def test_a_workflow_without_a_turn_has_nothing_to_learn_from():
    async def workflow(prompt, engine):
        engine.append("hello")
        return 1.0

    script = Script(workflow).go()
    assert "without any token from the policy" in script.failure


def test_a_workflow_that_holds_up_its_rank_is_ended(monkeypatch):
    monkeypatch.setattr(episode_module, "STEP_LIMIT_S", 0.2)

    async def workflow(prompt, engine):
        await engine.generate(max_new_tokens=1)
        with contextlib.suppress(Exception):
            time.sleep(30)

    began_s = time.monotonic()
    assert "held up its rank for 0.2 s" in Script(workflow, "a").go().failure
    assert time.monotonic() - began_s < 5


def test_a_tool_that_fails_can_be_caught_and_is_an_outcome_if_not():
    async def catching(prompt, engine):
        await engine.generate(max_new_tokens=1)
        try:
            await engine.run(users.misbehave, "hang")
        except ToolTimeout as error:
            return -1.0 if "too long" in str(error) else 1.0

    async def careless(prompt, engine):
        await engine.generate(max_new_tokens=1)
        await engine.run(users.misbehave, "hang")

    for workflow, outcome in ((catching, "wrong"), (careless, "timeout")):
        script = Script(workflow, "a").go(1)
        script.episode.ran(ToolResult((3, 1), "timeout", b"", "too long", 9.0))
        assert script.episode.end.result.outcome == outcome


# --------------------------------------------------------------------------------------------------- begun again
async def long_one(prompt, engine):
    """Four turns of lengths that depend on everything before."""
    chance = random.Random(prompt.seed)
    texts = []
    for number in range(4):
        turn = await engine.generate(stop="k", max_new_tokens=3 + chance.randrange(2))
        texts.append(turn.text)
        if number % 2 == 0:
            found = await engine.run(users.neighbours, turn.text, number)
            engine.append(found["text"][:3])
    return [float(len(text)) for text in texts]


TEXTS = ("abkxx", "cdefg", "hk", "lmnop")
LONG = replace(REQUEST, max_new_tokens=40)


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("part", [0, 1, 2])
def test_an_episode_goes_on_where_it_was(steps, part):
    """After any number of answers, and so many tokens into the next turn, through bytes and back."""
    whole = Script(long_one, *TEXTS, request=LONG).go()
    first = Script(long_one, *TEXTS, request=LONG).go(steps)
    so_far = first.episode.so_far()
    if isinstance(first.episode.asks, Generate):
        request = first.episode.request()
        text = first.texts[0]
        cut = first.write(replace(request, max_new_tokens=len(so_far.tokens) + part), text)
        done = first.write(request, text)
        so_far = cut.begun if len(cut.tokens) < len(done.tokens) else done.begun
    journal = msgspec.msgpack.decode(msgspec.msgpack.encode(Journal(first.episode.entries)), type=Journal)
    rest = list(first.texts)
    if len(so_far.tokens) > first.episode.so_far().tokens.size:
        rest[0] = rest[0][len(so_far.tokens) - first.episode.so_far().tokens.size :]
    second = Script(long_one, *rest, request=replace(LONG, begun=so_far), journal=journal)
    if len(so_far.tokens) > len(first.episode.so_far().tokens):
        second.episode.begin()
        assert second.episode.request().given == len(first.episode.so_far().tokens)
    end = second.go().episode.end
    assert end.result == whole.episode.end.result and end.journal == whole.episode.end.journal
    for name in ("tokens", "logprobs", "versions"):
        assert np.array_equal(getattr(end.done, name), getattr(whole.episode.end.done, name))


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_workflow_that_does_not_repeat_itself_is_told_so(steps):
    """The second time it asks for other things, puts in other things, or ends."""

    def changed(what):
        async def workflow(prompt, engine):
            for _ in range(3):
                turn = await engine.generate(stop="k" if what != "stop" else "j", max_new_tokens=4)
                if what == "end":
                    return 1.0
                try:
                    found = await engine.run(users.neighbours, turn.text, what == "args")
                    if what == "skip":
                        await engine.generate(max_new_tokens=1)
                    engine.append(found["text"][:3] if what != "append" else "??")
                except Exception:
                    engine.append("caught")
            return 1.0

        return workflow

    first = Script(changed("nothing"), "abk", "cdk", "efk", request=LONG).go(steps)
    journal = Journal(list(first.episode.entries))
    for what in ("nothing", "stop", "end", "args", "skip", "append"):
        texts = [*first.texts, *"opqrst"]
        second = Script(changed(what), *texts, request=replace(LONG, begun=first.episode.so_far()), journal=journal)
        second.go()
        if what == "stop" or (what != "nothing" and steps >= 2):  # the other changes come after the first turn
            assert "did not repeat itself" in second.failure, what
        else:
            assert second.episode.end.result.outcome == "correct", what


def test_an_unfinished_turn_must_be_asked_for_again():
    async def turns(prompt, engine):
        await engine.generate(max_new_tokens=2)
        await engine.generate(max_new_tokens=3)
        return 1.0

    async def other(prompt, engine):
        await engine.generate(max_new_tokens=2)
        engine.append("x")
        await engine.generate(max_new_tokens=3)
        return 1.0

    async def tool(prompt, engine):
        await engine.generate(max_new_tokens=2)
        await engine.run(users.neighbours, "a")

    async def leaves(prompt, engine):
        await engine.generate(max_new_tokens=2)
        return 1.0

    first = Script(turns, "ab", "cde").go(1)
    cut = first.write(replace(first.episode.request(), max_new_tokens=3), "c")
    for workflow in (other, tool, leaves):
        request = replace(REQUEST, begun=cut.begun)
        second = Script(workflow, request=request, journal=Journal(list(first.episode.entries))).go()
        assert "did not repeat itself" in second.failure
        assert spelt(second.episode.end.done.tokens) == "ab"


# ------------------------------------------------------------------------------------------------ a rank's episodes
def rank_of(workflow, *, timeout_s=60.0, num_slots=8) -> tuple:
    """Episodes on a real engine; its 29 tokens are the letters A.. and so on."""
    language = Language(
        more=lambda text: [ord(letter) - 64 for letter in text],
        read=lambda tokens: spelt(np.asarray(tokens) + 64),
    )
    engine = engine_of(num_slots=num_slots)
    compute = WorkflowCompute(workflow, language, ToolPool(1, 20.0), timeout_s)
    return Episodes(compute, engine, engine.cancel), compute, engine


def group_of(group: int, budget: int = 40) -> list[tuple[AdmitGroup, Request]]:
    prompt = tuple(np.random.default_rng(group).integers(2, 29, 7).tolist())
    header = AdmitGroup(group, f"p{group}", "text", {}, 3, 0)
    return [(header, Request((group, s), prompt, budget, seed=1000 * group + s)) for s in range(3)]


def finish(episodes: Episodes, engine, timeout_s: float = 60.0, at_step=lambda step: None) -> dict:
    ends, deadline_s, step = {}, time.monotonic() + timeout_s, 0
    while episodes._open or episodes._ends:
        assert time.monotonic() < deadline_s
        at_step(step)
        for done in engine.step() if engine.num_running or engine.num_waiting else []:
            episodes.turned(done)
        ends |= {end.done.key: end for end in episodes.poll()}
        step += 1
    return ends


def new_weights(engine, version: int) -> None:
    engine.load_weights(version, weights_of("qwen2", version))


def test_an_episode_of_one_turn_is_what_the_engine_makes_without_a_workflow():
    """Bit for bit, also where weights are swapped in the middle."""
    requests = group_of(0) + group_of(1)
    plain = engine_of(num_slots=8)
    plain.submit([request for _, request in requests])
    before = run(plain, 9)
    plain.load_weights(1, weights_of("qwen2", 1))
    expected = {done.key: done for done in before + run(plain)}
    episodes, compute, engine = rank_of(users.single)
    with compute.tools:
        for header, request in requests:
            episodes.begin(header, request)
        ends = finish(episodes, engine, at_step=lambda step: step == 9 and new_weights(engine, 1))
    assert ends.keys() == expected.keys()
    for key, end in ends.items():
        assert end.result is None and turns_of(end.journal.entries).tolist() == [0] * 40
        for name in ("tokens", "logprobs", "versions"):
            assert np.array_equal(getattr(end.done, name), getattr(expected[key], name))
        assert end.done.interruptions == expected[key].interruptions == 1


async def talk(prompt, engine):
    for _ in range(4):
        turn = await engine.generate(stop=["A", "B", "C", "D"], max_new_tokens=8)
        found = await engine.run(users.neighbours, turn.text[-1].lower() if turn.finish == "stop" else "e")
        engine.append(found["text"].upper())
    await engine.generate(max_new_tokens=4)
    return float(engine.num_turns)


def test_every_sampled_token_has_the_log_prob_of_its_version_however_often_weights_change():
    requests = [pair for group in range(3) for pair in group_of(group, budget=60)]
    episodes, compute, engine = rank_of(talk)
    with compute.tools:
        for header, request in requests:
            episodes.begin(header, request)
        ends = finish(episodes, engine, at_step=lambda step: step in range(7, 60, 7) and new_weights(engine, step // 7))
    assert len(ends) == 9 and all(end.result.reward == 5.0 for end in ends.values())
    policies = {version: tiny_model("qwen2", version) for version in range(9)}
    hidden = 0
    for end in ends.values():
        turns = turns_of(end.journal.entries)
        assert (end.done.logprobs[turns < 0] == 0).all() and (np.diff(end.done.versions) >= 0).all()
        hidden += int((turns < 0).sum())
        assert end.done.interruptions >= len(set(end.done.versions.tolist())) - 1
    assert hidden == 9 * 4 * 2
    completions = [end.done for end in ends.values()]
    assert sum(len(set(done.versions.tolist())) > 2 for done in completions) >= 2  # tools take real time
    prompts = {request.key: list(request.prompt) for _, request in requests}
    for end in ends.values():
        sampled, done = turns_of(end.journal.entries) >= 0, end.done
        for version in set(done.versions[sampled].tolist()):
            with torch.no_grad():
                fresh = plain_logprobs(policies[version], prompts[done.key] + done.tokens.tolist(), 7).numpy()
            here = sampled & (done.versions == version)
            assert np.abs(fresh - done.logprobs)[here].max() < 1e-5


def test_an_episode_that_takes_too_long_is_ended_wherever_it_is():
    async def stuck(prompt, engine):
        await engine.generate(max_new_tokens=2)
        if prompt.sample == 0:
            await engine.run(users.misbehave, "hang")
        await engine.generate(max_new_tokens=30)
        return 1.0

    episodes, compute, engine = rank_of(stuck, timeout_s=1.0)
    with compute.tools:
        for header, request in group_of(0):
            episodes.begin(header, request)

        def slowly(step: int) -> None:
            time.sleep(0.1)

        ends = finish(episodes, engine, at_step=slowly)
        assert {end.result.outcome for end in ends.values()} == {"timeout"}
        assert all(end.result.detail == "the episode was not done within 1 s" for end in ends.values())
        assert engine.num_running == engine.num_waiting == 0
        assert [len(ends[0, s].done.tokens) for s in range(3)] == [2, 2, 2]


def test_dropped_episodes_are_gone_from_engine_and_tools():
    episodes, compute, engine = rank_of(talk)
    with compute.tools:
        for header, request in group_of(0) + group_of(1):
            episodes.begin(header, request)
        for _ in range(10):
            for done in engine.step():
                episodes.turned(done)
        assert episodes.drop([(0, s) for s in range(4)]) == 3
        assert {key for key, *_ in episodes.snapshot(engine.partials())[0]} == {1}
        ends = finish(episodes, engine)
        assert set(ends) == {(1, 0), (1, 1), (1, 2)}


@pytest.mark.parametrize("steps", [3, 20])
def test_a_snapshot_goes_on_in_another_rank_with_the_same_tokens(steps):
    whole, compute, engine = rank_of(talk)
    with compute.tools:
        for header, request in group_of(0):
            whole.begin(header, request)
        expected = finish(whole, engine)
    first, compute, engine = rank_of(talk)
    with compute.tools:
        for header, request in group_of(0):
            first.begin(header, request)
        ended = {}
        for _ in range(steps):
            for done in engine.step() if engine.num_running or engine.num_waiting else []:
                first.turned(done)
            ended |= {end.done.key: end for end in first.poll()}
        begun, journals = first.snapshot(engine.partials())
    second, compute, engine = rank_of(talk)
    with compute.tools:
        for header, request in group_of(0):
            if request.key in begun:
                second.begin(header, replace(request, begun=begun[request.key]), journals[request.key])
        ended |= finish(second, engine)
    assert ended.keys() == expected.keys()
    for key, end in ended.items():
        assert np.array_equal(end.done.tokens, expected[key].done.tokens)
        assert end.journal.turn_tokens == expected[key].journal.turn_tokens
        assert np.abs(end.done.logprobs - expected[key].done.logprobs).max() < 1e-5


# --------------------------------------------------------------------------------------------- the rollout's loop
class Rank:
    """A rollout rank with a real engine and 4 slots, 3 answers per prompt; the reward function gives 0.5 at once."""

    config = Config.model_validate(
        {
            "model": {"path": "none"},
            "data": {"train": "none"},
            "reward": {"function": "none:none"},
            "workflow": {"function": "none:none"},
            "rollout": {"slots": 4, "max_prompt_tokens": 8, "max_new_tokens": 40},
            "trainer": {"batch_size": 2, "group_size": 3},
        }
    )

    def __init__(self, workflow, version: int = 0) -> None:
        self.inbox, self.posted, self.scored, self.texts = [], [], [], {}
        world = SimpleNamespace(
            rank=2,
            poll=lambda: self.inbox.pop(0) if self.inbox else None,
            post=lambda rank, message, arrays=None: self.posted.append((message, arrays)),
            check=SimpleNamespace(duplicates=0, stale=0),
        )
        _, self.episodes, self.engine = rank_of(workflow, num_slots=4)
        self.engine.version = version
        rewards = SimpleNamespace(num_restarts=0, num_pending=0, submit=self.submit, poll=self.rewards)
        receiver = SimpleNamespace(begin=lambda version: None, poll=lambda: None)
        language = self.episodes.language
        compute = RolloutCompute(language.more, language.read, self.engine, receiver, rewards, self.episodes)
        self.rollout = Rollout(self.config, world, RunClock(0.0), compute)

    def submit(self, key, prompt, completion, metadata, facts) -> None:
        self.scored.append(RewardResult(key, 0.5, "correct", 0.0, ""))
        self.texts[key] = completion

    def rewards(self) -> list[RewardResult]:
        results, self.scored = self.scored, []
        return results

    def tell(self, message, group_ids=()) -> Rank:
        self.inbox.append(Received(0, message, {"group_id": np.array(group_ids, np.int64)}))
        return self

    def loop(self, until=lambda: True, timeout_s: float = 60.0) -> Rank:
        deadline_s = time.monotonic() + timeout_s
        while True:
            assert time.monotonic() < deadline_s
            self.rollout.handle_messages()
            self.rollout.decode()
            self.rollout.take_episodes()
            self.rollout.take_rewards()
            self.rollout.report_saved()
            self.rollout.grant_credits()
            if until() and not self.inbox:
                return self

    def said(self, kind) -> list:
        return [(message, arrays) for message, arrays in self.posted if isinstance(message, kind)]

    @property
    def free(self) -> int:
        return sum(m.num_samples for m, _ in self.said(Credits)) + self.rollout.credits_to_grant

    def finished(self) -> dict[int, dict]:
        return {message.group_id: arrays for message, arrays in self.said(GroupFinished)}


def admit(group_id: int) -> AdmitGroup:
    return AdmitGroup(group_id, f"p{group_id}", "CAB" + "DEF"[: group_id % 3], {}, 3, 0)


def test_places_are_free_again_when_episodes_end_or_are_dropped_wherever_they_are():
    rank = Rank(talk)
    with rank.episodes.tools:
        assert rank.free == 4 + 3
        rank.tell(admit(0)).tell(admit(1)).tell(admit(2)).loop()
        rank.loop(lambda: len(rank.rollout.episodes._compute.tools._pending) > 0 and rank.engine.num_waiting > 0)
        assert rank.free == 7
        rank.tell(DropGroups(), [0, 2]).loop()
        assert rank.free == 7 + 6 and set(rank.rollout.groups) == {1}
        rank.loop(lambda: 1 in rank.finished())
        assert rank.free == 7 + 9 and rank.engine.num_running == rank.engine.num_waiting == 0
        assert rank.finished()[1]["num_turns"].tolist() == [5, 5, 5]
        assert rank.finished()[1]["turn_reward"].tolist() == [0, 0, 0, 0, 5.0] * 3


@pytest.mark.parametrize("wait_for", [0, 3])
def test_episodes_of_a_rank_survive_it(tmp_path, wait_for):
    """Saved with so many episodes ended, taken up by another rank: the same tokens, turns and rewards."""

    async def mostly_scored(prompt, engine):
        reward = await talk(prompt, engine)
        return None if prompt.sample == 1 else reward

    whole, first, second = Rank(mostly_scored), Rank(mostly_scored), Rank(mostly_scored)
    with whole.episodes.tools, first.episodes.tools, second.episodes.tools:
        whole.tell(admit(0)).tell(admit(1)).loop(lambda: len(whole.finished()) == 2)
        first.tell(admit(0)).tell(admit(1))
        first.loop(lambda: sum(len(g.completions) for g in first.rollout.groups.values()) >= wait_for)
        path = tmp_path / "groups"
        first.tell(SaveGroups(1, str(path))).loop(lambda: bool(first.said(GroupsSaved)))
        saved = {group.header.group_id: group for group in read_groups(path, [0, 1])}
        assert sum(len(group.journals) for group in saved.values()) == 6
        second.tell(RestoreGroups(str(path)), [0, 1]).loop(lambda: len(second.finished()) == 2)
        (restored,) = [message for message, _ in second.said(GroupsRestored)]
        assert restored.num_finished_samples == sum(len(group.completions) for group in saved.values()) >= wait_for
        for group_id, figures in whole.finished().items():
            for name in ("reward", "num_response", "num_turns", "turn_reward", "turn_tokens", "outcome", "finish"):
                assert second.finished()[group_id][name].tolist() == figures[name].tolist(), name
            for sample in range(3):
                one, other = (rank.rollout.groups[group_id].trajectory(sample) for rank in (whole, second))
                assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.turns, other.turns)
                assert np.abs(one.logprobs - other.logprobs).max() < 1e-5
        assert second.free == 7 + 6
        assert {key: second.texts[key] for key in second.texts} == {key: whole.texts[key] for key in second.texts}


def test_failures_are_told_with_place_and_reason_and_evaluations_go_the_same_way():
    rank = Rank(users.often_wrong)
    held_out = AdmitGroup(-1, "h", "CAB", {}, 1, 0, "evaluate")
    with rank.episodes.tools:
        for group_id in range(4):
            rank.tell(admit(group_id))
        rank.tell(held_out).loop(lambda: len(rank.finished()) == 5)
        told = [message.text for message, _ in rank.said(Event) if message.kind == "workflow_error"]
        outcomes = np.concatenate([arrays["outcome"] for arrays in rank.finished().values()])
        assert len(told) == (outcomes == Outcome.ERROR).sum() >= 3
        assert all(text.startswith("group ") and " sample " in text for text in told)
        assert -1 not in rank.rollout.groups and set(rank.rollout.groups) == {0, 1, 2, 3}


# -------------------------------------------------------------------------------------------------------- tools
def results(pool: ToolPool, count: int, timeout_s: float = 30.0) -> dict:
    found, deadline_s = {}, time.monotonic() + timeout_s
    while len(found) < count:
        assert time.monotonic() < deadline_s
        found |= {result.key: result for result in pool.poll()}
        time.sleep(0.01)
    return found


def submit(pool: ToolPool, sample: int, function, *args) -> None:
    pool.submit((0, sample), reference(function), msgspec.msgpack.encode(args))


def test_tools_run_elsewhere_and_whatever_they_do_is_a_result():
    with ToolPool(2, 1.0) as pool:
        began_s = time.monotonic()
        submit(pool, 0, users.neighbours, "a")
        assert time.monotonic() - began_s < 0.2  # submitted, not waited for
        for sample, how in enumerate(("raise", "die", "hang", "object", "much"), start=1):
            submit(pool, sample, users.misbehave, how)
        submit(pool, 6, "areal_hpc.no_such_module:f")
        submit(pool, 7, users.neighbours, "h")
        found = [results_[(0, sample)] for results_ in [results(pool, 8)] for sample in range(8)]
        assert [r.outcome for r in found] == ["done", "error", "error", "timeout", "error", "error", "error", "done"]
        assert msgspec.msgpack.decode(found[7].value)["text"] == "ab"
        for result, detail in zip(
            found[1:7],
            ["episodes.py:", "died (exit status 7)", "not done within 1 s", "object", "10,000,0", "No module named"],
            strict=True,
        ):
            assert detail in result.detail
        assert "KeyError: 'nothing there'" in found[1].detail and pool.num_restarts == 2


def test_closing_the_pool_leaves_no_process(tmp_path):
    pool = ToolPool(1, 60.0)
    submit(pool, 0, users.neighbours, "a")
    pid = msgspec.msgpack.decode(results(pool, 1)[0, 0].value)["pid"]
    submit(pool, 1, users.misbehave, "hang")
    time.sleep(0.2)
    began_s = time.monotonic()
    pool.close()
    assert time.monotonic() - began_s < 5
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_call_that_nobody_wants_any_more_is_not_made_or_not_told():
    with ToolPool(1, 20.0) as pool:
        submit(pool, 0, users.neighbours, "a", 0.3)
        submit(pool, 1, users.neighbours, "b")
        submit(pool, 2, users.neighbours, "c")
        pool.cancel((0, 0))
        pool.cancel((0, 1))
        assert set(results(pool, 1)) == {(0, 2)} and pool.poll() == []


def test_functions_are_found_again_by_another_process(tmp_path):
    (tmp_path / "mine.py").write_text("async def workflow(prompt, engine):\n    pass\ndef tool():\n    return 5\n")
    workflow = load_workflow(f"{tmp_path}/mine.py:workflow")
    tool = workflow.__globals__["tool"]
    assert reference(tool) == f"{tmp_path}/mine.py:tool"
    assert reference(users.neighbours) == "tests.episodes:neighbours"
    with ToolPool(1, 20.0) as pool:
        submit(pool, 0, tool)
        assert results(pool, 1)[0, 0].value == msgspec.msgpack.encode(5)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("def workflow(prompt, engine): ...", "must be an async function"),
        ("x = 1", "has no attribute 'workflow'"),
        ("1 / 0", "bad.py:1: ZeroDivisionError"),
    ],
)
def test_a_workflow_that_cannot_be_loaded_ends_the_run_at_its_start(tmp_path, text, complaint):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(RunError) as error:
        load_workflow(f"{tmp_path}/bad.py:workflow")
    assert error.value.code == Exit.CONFIG and complaint in error.value.reason
