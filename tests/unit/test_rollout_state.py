"""The groups of a rollout rank as arrays, in files, and in a rollout rank that goes on with them."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from areal_hpc import group_files, rollout_state
from areal_hpc.checkpoint import CheckpointError, FileRecord, read_arrays
from areal_hpc.comm import Received
from areal_hpc.compute import RolloutCompute
from areal_hpc.config import Config, SimulationConfig
from areal_hpc.engines.base import Begun, Completion
from areal_hpc.exits import Exit, RunError
from areal_hpc.group_files import GroupSaver, read_groups
from areal_hpc.logschema import Outcome
from areal_hpc.messages import (
    AdmitGroup,
    Credits,
    DropGroups,
    GroupFinished,
    GroupRefused,
    LoadWeights,
    Samples,
    ShipSamples,
    Stop,
    Trained,
)
from areal_hpc.preflight import RunClock
from areal_hpc.rewards import RewardResult
from areal_hpc.rollout import Rollout
from areal_hpc.rollout_state import BadGroups, Group, SavedGroup, pack_groups, snapshot, unpack_groups
from areal_hpc.saving_messages import GroupsRestored, GroupsSaved, RestoreGroups, SaveFailed, SaveGroups
from areal_hpc.seeds import sample_seed
from areal_hpc.simulation.clock import Clock
from areal_hpc.simulation.engine import SimulatedEngine, response_length
from areal_hpc.simulation.rewards import SimulatedRewards
from areal_hpc.simulation.weights import SimulatedReceiver
from areal_hpc.workflows.journal import Entry, Journal

# ------------------------------------------------------------------------------------------------ arrays and back
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
outcomes = st.sampled_from(Outcome.labels())


@st.composite
def begun_samples(draw, at_least: int = 0) -> Begun:
    size = draw(st.integers(at_least, 5))
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size))
    logprobs = draw(st.lists(st.floats(-50, 0, width=32) | st.just(math.nan), min_size=size, max_size=size))
    versions = sorted(draw(st.lists(st.integers(0, 1000), min_size=size, max_size=size)))
    arrays = (np.array(tokens, np.int32), np.array(logprobs, np.float32), np.array(versions, np.int32))
    return Begun(*arrays, draw(st.integers(0, 9)), draw(st.floats(0, 1e6)))


@st.composite
def journals(draw) -> Journal:
    kinds = st.sampled_from(["turn", "append", "run"])
    entry = st.builds(Entry, kinds, st.binary(max_size=8), st.integers(0, 9), texts, st.binary(max_size=9))
    return Journal(draw(st.lists(entry, max_size=4)), draw(st.none() | st.lists(st.floats(-9, 9), max_size=3)))


@st.composite
def saved_groups(draw, group_id: int) -> SavedGroup:
    num_samples = draw(st.integers(1, 4))
    metadata = draw(st.dictionaries(texts, values, max_size=3))
    header = AdmitGroup(group_id, draw(texts), draw(texts), metadata, num_samples, draw(st.integers(0, 99)))
    group = SavedGroup(header, {}, {}, {}, {})
    for sample in range(num_samples):
        if draw(st.booleans()):
            group.journals[sample] = draw(journals())
        state = draw(st.sampled_from(["waiting", "partial", "finished", "scored"]))
        if state == "partial":
            group.begun[sample] = draw(begun_samples())
        elif state != "waiting":
            begun, finish = draw(begun_samples(at_least=1)), draw(st.sampled_from(["eos", "length"]))
            arrays = (begun.tokens, begun.logprobs, begun.versions)
            group.completions[sample] = Completion(
                (group_id, sample), *arrays, finish, begun.interruptions, 100.0, 100.0 + begun.spent_s
            )
        if state == "scored":
            outcome = draw(outcomes)
            reward = math.nan if outcome in ("timeout", "error") else draw(st.floats(-9, 9))
            detail = draw(st.text(max_size=9))
            group.rewards[sample] = RewardResult((group_id, sample), reward, outcome, draw(st.floats(0, 9)), detail)
    return group


@st.composite
def lists_of_groups(draw) -> list[SavedGroup]:
    ids = draw(st.lists(st.integers(0, 2**62), max_size=4, unique=True))
    return [draw(saved_groups(group_id)) for group_id in ids]


def same_begun(one: Begun, other: Begun) -> bool:
    arrays = [(one.tokens, other.tokens), (one.logprobs, other.logprobs), (one.versions, other.versions)]
    return all(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype == np.float32) for a, b in arrays) and (
        one.interruptions == other.interruptions and abs(one.spent_s - other.spent_s) < 1e-6
    )


def assert_same(one: SavedGroup, other: SavedGroup) -> None:
    assert one.header == other.header
    assert (one.begun.keys(), one.completions.keys()) == (other.begun.keys(), other.completions.keys())
    assert all(same_begun(one.begun[sample], other.begun[sample]) for sample in one.begun)
    for sample, done in one.completions.items():
        assert same_begun(done.begun, other.completions[sample].begun)
        assert (done.key, done.finish) == (other.completions[sample].key, other.completions[sample].finish)
    assert repr(one.rewards) == repr(other.rewards)  # NaN is not itself
    assert one.journals == other.journals


@hypothesis_settings(max_examples=150, deadline=None)
@given(lists_of_groups(), st.randoms(use_true_random=False))
def test_groups_come_back_as_they_were(groups, random):
    arrays = pack_groups(groups)
    expected = rollout_state.ARRAYS | (rollout_state.EPISODES if any(group.journals for group in groups) else {})
    assert {name: str(array.dtype) for name, array in arrays.items()} == expected
    before_s = time.monotonic()
    again = unpack_groups(arrays)
    assert len(again) == len(groups)
    for one, other in zip(again, groups, strict=True):
        assert_same(one, other)
        assert all(before_s <= done.finished_s <= time.monotonic() for done in one.completions.values())
    wanted = {group.header.group_id for group in groups if random.random() < 0.5}
    some = unpack_groups(arrays, wanted)
    assert [group.header.group_id for group in some] == [
        g.header.group_id for g in groups if g.header.group_id in wanted
    ]


def finished(group_id: int, sample: int, size: int = 3) -> Completion:
    tokens, logprobs = np.arange(size, dtype=np.int32), np.full(size, -0.5, np.float32)
    return Completion((group_id, sample), tokens, logprobs, np.zeros(size, np.int32), "eos", 0, 5.0, 7.5)


def beginning(size: int) -> Begun:
    return Begun(np.full(size, 9, np.int32), np.full(size, -1, np.float32), np.zeros(size, np.int32), 1, 0.5)


def example() -> list[SavedGroup]:
    """Two groups: one sample each that is scored, finished, partial, waiting; and one of one partial sample."""
    header = AdmitGroup(7, "seven", "αβ \U0001f600", {"a": {"b": [1, None]}}, 4, 3)
    reward = RewardResult((7, 0), math.nan, "timeout", 2.0, "took more than 2 s")
    first = SavedGroup(header, {0: finished(7, 0), 1: finished(7, 1, 2)}, {0: reward}, {2: beginning(4)})
    return [first, SavedGroup(AdmitGroup(9, "nine", "", {}, 1, 0), {}, {}, {0: beginning(1)})]


def test_the_arrays_by_hand():
    arrays = pack_groups(example())
    assert arrays["group_id"].tolist() == [7, 9]
    assert arrays["state"].tolist() == [2, 2, 1, 0, 1] and arrays["scored"].tolist() == [1, 0, 0, 0, 0]
    assert arrays["num_tokens"].tolist() == [3, 2, 4, 0, 1]
    assert arrays["tokens"].tolist() == [0, 1, 2, 0, 1, 9, 9, 9, 9, 9]
    assert arrays["spent_s"].tolist() == [2.5, 2.5, 0.5, 0.0, 0.5]
    assert arrays["detail"].tobytes() == b"took more than 2 s" and np.isnan(arrays["reward"]).all()
    assert [group.num_partial_tokens for group in example()] == [4, 1]


def test_figures_of_episodes_by_hand():
    """A scored episode of two turns, one whose terminal reward falls to its last turn, one that failed at once."""
    tokens, ones = np.arange(5, dtype=np.int32), np.zeros(5, np.float32)
    versions = np.array([1, 1, 2, 3, 3], np.int32)
    whole = Completion((1, 0), tokens, ones, versions, "stop", 2, 5.0, 7.5)
    nothing = Completion((1, 2), tokens[:0], ones[:0], versions[:0], "length", 0, 5.0, 5.0)
    turns = [Entry("turn", b"", 2), Entry("append", b"", 2), Entry("run", b""), Entry("turn", b"", 1)]
    late = [Entry("append", b"", 2), Entry("turn", b"", 2), Entry("turn", b"", 0), Entry("append", b"", 1)]
    results = [RewardResult((1, s), r, o, 0.0, "") for s, r, o in [(0, 3.0, "correct"), (1, -1.0, "wrong")]]
    results.append(RewardResult((1, 2), math.nan, "error", 0.0, "why"))
    group = Group(
        AdmitGroup(1, "p", "text", {}, 3, 7),
        (8, 9),
        {0: whole, 1: whole, 2: nothing},
        dict(enumerate(results)),
        {0: Journal(turns, [1.0, 2.0]), 1: Journal(late), 2: Journal([])},
    )
    figures = group.figures(RunClock(0.0))
    assert figures["num_turns"].tolist() == [2, 2, 0]
    assert figures["turn_reward"].tolist() == [1.0, 2.0, 0.0, -1.0] and figures["turn_tokens"].tolist() == [2, 1, 2, 0]
    assert figures["num_response"].tolist() == [5, 5, 0] and figures["finish"].tolist() == [2, 2, 1]
    assert figures["first_version"].tolist() == [1, 2, 7] and figures["last_version"].tolist() == [3, 3, 7]
    assert figures["mean_version"] == pytest.approx([5 / 3, 2.5, 7.0])
    assert group.trajectory(0).turns.tolist() == [0, 0, -1, -1, 1]
    assert group.trajectory(1).turns.tolist() == [-1, -1, 0, 0, -1]
    group.trajectory(0).validate()
    assert {name: str(array.dtype) for name, array in figures.items()} == dict(GroupFinished.ARRAYS)


def test_figures_without_a_workflow_are_single_turns():
    group = Group(AdmitGroup(1, "p", "text", {}, 2, 0), (8,), {0: finished(1, 0), 1: finished(1, 1, 2)})
    group.rewards |= {s: RewardResult((1, s), 5.0 - s, "correct", 0.0, "") for s in range(2)}
    figures = group.figures(RunClock(0.0))
    assert figures["num_turns"].tolist() == [1, 1] and figures["turn_tokens"].tolist() == [3, 2]
    assert figures["turn_reward"].tolist() == figures["reward"].tolist() == [5.0, 4.0]
    assert group.trajectory(0).turns is None


def test_what_is_read_does_not_hold_the_file_in_memory():
    for group in unpack_groups(pack_groups(example())):
        for begun in [*group.begun.values(), *(done.begun for done in group.completions.values())]:
            assert begun.tokens.base is None and begun.logprobs.base is None and begun.versions.base is None


def with_journals() -> list[SavedGroup]:
    journal = Journal([Entry("turn", b"x", 2, "stop"), Entry("append", b"y", 1)], [1.0])
    return [replace(group, journals={0: journal}) for group in example()]


def changed_journals(**arrays) -> dict[str, np.ndarray]:
    packed = pack_groups(with_journals())
    return packed | {name: change(packed[name]) for name, change in arrays.items()}


def changed(**arrays) -> dict[str, np.ndarray]:
    packed = pack_groups(example())
    return packed | {name: change(packed[name]) for name, change in arrays.items()}


@pytest.mark.parametrize(
    "arrays, said",
    [
        ({}, "not the arrays of saved groups"),
        (changed(tokens=lambda a: a.astype(np.int64)), "not the arrays of saved groups"),
        (changed(tokens=lambda a: a[:-1]), "tokens has 9 entries, expected 10"),
        (changed(versions=lambda a: a[:-1]), "versions has 9 entries, expected 10"),
        (changed(state=lambda a: a[:-1]), "state has 4 entries, expected 5"),
        (changed(state=lambda a: a + 2), "state has codes of 3 or more"),
        (changed(scored=lambda a: a + 1), "group 7 has rewards of unfinished samples"),
        (changed(group_id=lambda a: a + 1), "group ids differ"),
        (changed(header=lambda a: a[:-1]), "header has"),
        (changed(header=lambda a: a[::-1].copy()), "a group's header cannot be read"),
        (changed(detail=lambda a: a[:-1]), "detail has 17 entries, expected 18"),
        (changed_journals(journal=lambda a: a[:-1]), "journal has"),
        (changed_journals(journal=lambda a: a[::-1].copy()), "a journal of group 7 cannot be read"),
        (changed_journals(journal_bytes=lambda a: a[:-1]), "journal_bytes has 4 entries, expected 5"),
        ({k: v for k, v in changed_journals().items() if k != "journal"}, "not the arrays of saved groups"),
    ],
)
def test_arrays_that_contradict_each_other_are_refused(arrays, said):
    with pytest.raises(BadGroups, match=said):
        unpack_groups(arrays)


def test_a_snapshot_is_of_one_moment_and_of_training_only():
    group = Group(AdmitGroup(1, "p", "text", {}, 3, 0), (1, 2), {0: finished(1, 0)})
    held_out = Group(AdmitGroup(2, "q", "text", {}, 1, 0, "evaluate"), (1,), {0: finished(2, 0)})
    (saved,) = snapshot([group, held_out], {(1, 1): beginning(2), (2, 0): beginning(1), (5, 0): beginning(1)})
    group.completions[1] = finished(1, 1)
    group.rewards[0] = RewardResult((1, 0), 1.0, "correct", 0.0, "")
    assert (list(saved.completions), list(saved.rewards), list(saved.begun)) == ([0], [], [1])
    assert saved.header is group.header


# --------------------------------------------------------------------------------------------------------- files
def wait_for(saver: GroupSaver, timeout_s: float = 10.0) -> GroupsSaved | SaveFailed:
    deadline_s = time.monotonic() + timeout_s
    while (saved := saver.poll()) is None:
        assert time.monotonic() < deadline_s, "nothing was saved"
        time.sleep(0.001)
    return saved


def test_a_file_goes_out_and_comes_back(tmp_path):
    saver, path = GroupSaver(), tmp_path / "rollout_3.safetensors"
    assert saver.poll() is None
    saver.save(4, path, example(), 0.25)
    saved = wait_for(saver)
    assert (saved.step, saved.name, saved.num_bytes) == (4, path.name, path.stat().st_size)
    assert (saved.num_groups, saved.num_partial_tokens, saved.copy_s) == (2, 5, 0.25) and saved.write_s > 0
    assert saver.poll() is None
    for one, other in zip(read_groups(path, [9, 7]), example(), strict=True):
        assert_same(one, other)
    assert [group.header.group_id for group in read_groups(path, [9])] == [9]
    with pytest.raises(RunError, match=r"rollout_3.* does not hold groups \[2, 8\]"):
        read_groups(path, [8, 9, 2])


def test_no_groups_are_a_file_too(tmp_path):
    saver = GroupSaver()
    saver.save(4, tmp_path / "none", [], 0.0)
    assert wait_for(saver).num_groups == 0 and read_groups(tmp_path / "none", []) == []


def test_files_that_are_none_of_ours(tmp_path):
    with pytest.raises(CheckpointError, match="absent"):
        read_groups(tmp_path / "absent", [1])
    group_files.write_arrays(tmp_path / "weights", {"lm_head": np.zeros(3)})
    with pytest.raises(RunError, match="weights does not hold the groups of an earlier attempt"):
        read_groups(tmp_path / "weights", [1])


def test_writing_takes_place_beside_and_in_order(monkeypatch):
    """Nobody waits for a slow disk; the second file is begun when the first is there."""
    go_on, begun = threading.Semaphore(0), []

    def write(path: Path, arrays) -> FileRecord:
        begun.append(path.name)
        assert go_on.acquire(timeout=10.0)
        return FileRecord(path.name, 1, "00")

    monkeypatch.setattr(group_files, "write_arrays", write)
    saver = GroupSaver()
    started_s = time.monotonic()
    for step in (1, 2, 3):
        saver.save(step, Path(f"step_{step}"), example(), 0.0)
    assert saver.poll() is None and time.monotonic() - started_s < 5.0
    for step in (1, 2, 3):
        go_on.release()
        assert wait_for(saver).step == step
        assert len(begun) <= step + 1
    assert begun == ["step_1", "step_2", "step_3"] and saver.poll() is None


def test_a_full_disk_is_told_and_the_next_file_is_tried(monkeypatch, tmp_path):
    def write(path: Path, arrays) -> FileRecord:
        raise CheckpointError("the file system is full")

    saver = GroupSaver()
    with monkeypatch.context() as patch:
        patch.setattr(group_files, "write_arrays", write)
        saver.save(3, tmp_path / "step_3", example(), 0.0)
        assert wait_for(saver) == SaveFailed(3, "the file system is full")
    saver.save(4, tmp_path / "step_4", example(), 0.0)
    assert wait_for(saver).step == 4


def test_a_mistake_of_ours_ends_the_run(monkeypatch):
    def write(path: Path, arrays) -> FileRecord:
        raise TypeError("no such type")

    monkeypatch.setattr(group_files, "write_arrays", write)
    saver = GroupSaver()
    saver.save(3, Path("step_3"), example(), 0.0)
    with pytest.raises(RunError, match="groups of step 3 are not saved: TypeError: no such type") as caught:
        wait_for(saver)
    assert caught.value.code == Exit.FAILED


# --------------------------------------------------------------------------------------------- the rollout's loop
GROUP_SIZE, BUDGET = 2, 40
VALUES = SimulationConfig(
    gpus_per_rank=1, response_median=20.0, response_sigma=0.5, decode_s=0.01, decode_sequence_s=0.0,
    decode_context_s=0.0, prefill_tokens_per_s=1e15, load_s=0.0, broadcast_bytes_per_s=1e15, reward_s=0.03,
)  # fmt: skip
CONFIG = Config.model_validate(
    {
        "model": {"path": "none"},
        "data": {"train": "none"},
        "reward": {"function": "areal_hpc.simulation:reward"},
        "rollout": {"engine": "simulated", "slots": 6, "max_prompt_tokens": 5, "max_new_tokens": BUDGET},
        "trainer": {"engine": "simulated", "batch_size": 2, "group_size": GROUP_SIZE},
    }
)


class Rank:
    """A rollout rank with simulated compute on a clock of its own, and what it says to whom."""

    def __init__(self, start_s: float = 50.0) -> None:
        self.now_s = start_s
        self.inbox: list[Received] = []
        self.posted: list[tuple[int, object, dict]] = []
        self.scored: list[tuple[int, int]] = []
        clock = Clock(1.0, lambda: self.now_s, self.sleep)
        rewards = SimulatedRewards(VALUES, clock, seed=0)
        submit = rewards.submit
        rewards.submit = lambda key, *rest: self.scored.append(key) or submit(key, *rest)
        world = SimpleNamespace(
            rank=2,
            poll=lambda: self.inbox.pop(0) if self.inbox else None,
            post=lambda rank, message, arrays=None: self.posted.append((rank, message, arrays)),
            check=SimpleNamespace(duplicates=0, stale=0),
            whole=True,
        )
        self.engine = SimulatedEngine(VALUES, clock, num_slots=6, max_len=100)
        compute = RolloutCompute(
            encode=lambda text: [1] * len(text),
            decode=lambda tokens: "",
            engine=self.engine,
            receiver=SimulatedReceiver(VALUES, clock),
            rewards=rewards,
        )
        self.rollout = Rollout(CONFIG, world, RunClock(0.0), compute)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def tell(self, message, group_ids=(), **arrays) -> Rank:
        arrays = arrays or {"group_id": np.array(group_ids, np.int64)}
        self.inbox.append(Received(0, message, arrays))
        return self

    def loop(self, seconds: float) -> Rank:
        """The body of the rank's loop, for this long."""
        rollout, until_s = self.rollout, self.now_s + seconds
        while self.now_s < until_s or self.inbox:
            busy = rollout.handle_messages()
            busy |= rollout.take_weights()
            busy |= rollout.decode()
            busy |= rollout.take_rewards()
            busy |= rollout.report_saved()
            rollout.grant_credits()
            self.now_s += 0.001
        return self

    def until_something_is_not_scored(self) -> Rank:
        while len(self.scored) == sum(len(group.rewards) for group in self.rollout.groups.values()):
            assert self.engine.num_running
            self.loop(0.001)
        return self

    def said(self, kind: type) -> list:
        return [message for _, message, _ in self.posted if isinstance(message, kind)]

    @property
    def free(self) -> int:
        """Places as the controller counts them, if it admits no more than it is told to here."""
        return sum(message.num_samples for message in self.said(Credits)) + self.rollout.credits_to_grant

    def save(self, path: Path, step: int = 1) -> GroupsSaved:
        self.tell(SaveGroups(step, str(path))).loop(0.0)
        deadline_s = time.monotonic() + 10.0
        while not (done := [saved for saved in self.said(GroupsSaved) if saved.step == step]):
            assert time.monotonic() < deadline_s
            time.sleep(0.001)  # of real time: the simulated clock moves a millisecond
            self.loop(0.001)
        return done[0]


def admit(group_id: int, prompt: str = "abc") -> AdmitGroup:
    return AdmitGroup(group_id, f"p{group_id}", prompt, {"answer": group_id}, GROUP_SIZE, 0)


def lengths(group_id: int) -> list[int]:
    seeds = [sample_seed(CONFIG.seed, "train", group_id, sample) for sample in range(GROUP_SIZE)]
    return [response_length(VALUES, seed, BUDGET)[0] for seed in seeds]


def test_the_places_a_rank_has():
    rank = Rank().tell(LoadWeights(0)).loop(0.01)
    assert rank.free == 6 + GROUP_SIZE


def begun_rank(num_groups: int = 8, age_s: float = 0.3) -> Rank:
    """Version 0 and this many groups of 2 on 6 slots; after 0.3 s some of 8 are complete, some run, some wait."""
    rank = Rank().tell(LoadWeights(0)).loop(0.01)
    for group_id in range(num_groups):
        rank.tell(admit(group_id))
    return rank.loop(age_s)


def test_no_token_is_lost_or_sampled_twice(tmp_path):
    """A rank dies after a checkpoint, two others go on with version 1: lengths, rewards and durations are as ever.

    All tokens in the file are of version 0, so the mean version of a sample tells how many are from there.
    """
    first = begun_rank().until_something_is_not_scored()
    assert first.said(GroupFinished) and first.engine.num_running and first.engine.num_waiting
    saved = first.save(tmp_path / "groups")
    arrays = read_arrays(tmp_path / "groups")
    assert saved.num_groups == 8 and saved.num_partial_tokens > 20
    finished_samples, scored = int((arrays["state"] == 2).sum()), int(arrays["scored"].sum())
    assert {0, 1, 2} == set(arrays["state"].tolist()) and scored < finished_samples

    complete = {g.header.group_id for g in read_groups(tmp_path / "groups", range(8)) if len(g.rewards) == GROUP_SIZE}
    assert 0 < len(complete) < 8
    seen: dict[int, dict] = {}
    totals = np.zeros(3, int)
    for mine in (range(0, 8, 2), range(1, 8, 2)):
        rank = Rank(start_s=1000.0)
        rank.tell(RestoreGroups(str(tmp_path / "groups")), mine)
        rank.loop(0.005)
        (restored,) = rank.said(GroupsRestored)
        assert rank.free == 6 + GROUP_SIZE + restored.num_finished_samples
        assert rank.engine.num_waiting == len(mine) * GROUP_SIZE - restored.num_finished_samples  # no weights yet
        totals += (restored.num_groups, restored.num_finished_samples, restored.num_partial_tokens)
        at_once = {message.group_id for message in rank.said(GroupFinished)}
        rank.tell(LoadWeights(1)).loop(3.0)
        assert rank.free == 6 + GROUP_SIZE + len(mine) * GROUP_SIZE
        finished_here = {m.group_id: arrays for _, m, arrays in rank.posted if isinstance(m, GroupFinished)}
        assert sorted(finished_here) == list(mine) and len(rank.said(GroupFinished)) == len(mine)
        assert at_once == complete & set(mine)
        seen |= finished_here
    assert totals.tolist() == [8, finished_samples, saved.num_partial_tokens]
    kept = [figures["num_response"] * (1 - figures["mean_version"]) for _, figures in sorted(seen.items())]
    assert np.concatenate(kept) == pytest.approx(arrays["num_tokens"], abs=1e-3)
    interrupted = np.concatenate([figures["interruptions"] for _, figures in sorted(seen.items())])
    assert interrupted.tolist() == ((arrays["state"] == 1) & (arrays["num_tokens"] > 0)).tolist()
    for group_id, figures in seen.items():
        assert figures["num_response"].tolist() == lengths(group_id)
        took_s = figures["finish_s"] - figures["start_s"]
        assert took_s == pytest.approx(np.array(lengths(group_id)) * 0.01, abs=0.002)
        right = [sample_seed(0, "reward", group_id, s) < VALUES.success * 2**63 for s in range(GROUP_SIZE)]
        assert figures["reward"].tolist() == [5.0 if r else -5.0 for r in right]


def test_groups_stay_until_they_are_trained_on(tmp_path):
    rank = begun_rank(num_groups=2).loop(1.0)
    assert {m.group_id for m in rank.said(GroupFinished)} == {0, 1}
    to = {"group_id": np.array([0, 1]), "sample": np.array([0, 1], np.int32), "trainer": np.array([1, 1], np.int32)}
    rank.tell(ShipSamples(1), **to).loop(0.0)
    (arrays,) = [arrays for where, m, arrays in rank.posted if isinstance(m, Samples) and where == 1]
    assert arrays["num_response"].tolist() == [lengths(0)[0], lengths(1)[1]]
    assert rank.save(tmp_path / "shipped").num_groups == 2
    assert [g.is_complete for g in rank.rollout.groups.values()] == [True, True]
    rank.tell(Trained(1), [1, 5]).loop(0.0)
    assert list(rank.rollout.groups) == [0]
    rank.tell(DropGroups(), [0]).tell(Stop("over")).loop(0.0)
    assert not rank.rollout.groups and rank.rollout.stopped


def test_finished_samples_without_a_reward_are_scored_again(tmp_path):
    first = begun_rank(num_groups=2, age_s=0.05)
    first.until_something_is_not_scored()
    first.save(tmp_path / "groups")
    state = {g.header.group_id: g for g in read_groups(tmp_path / "groups", [0, 1])}
    unscored = {(i, s) for i, g in state.items() for s in g.completions if s not in g.rewards}
    assert unscored
    second = Rank().tell(RestoreGroups(str(tmp_path / "groups")), [0, 1]).loop(0.0)
    assert set(second.scored) == unscored
    second.tell(LoadWeights(0)).loop(2.0)
    assert {m.group_id for m in second.said(GroupFinished)} == {0, 1} and second.free == 6 + GROUP_SIZE + 4


def test_saving_does_not_disturb_and_evaluation_is_not_saved(tmp_path):
    rank, undisturbed = begun_rank(), begun_rank()
    held_out = AdmitGroup(100, "held out", "abc", {}, 1, 0, "evaluate")
    for each in (rank, undisturbed):
        each.tell(held_out)
    saved = [rank.save(tmp_path / f"step_{step}", step) for step in (1, 2)]
    assert [s.num_groups for s in saved] == [8, 8] and [s.step for s in rank.said(GroupsSaved)] == [1, 2]
    rank.loop(3.0)
    undisturbed.loop(3.0)
    figures = [
        {m.group_id: a["num_response"].tolist() for _, m, a in each.posted if isinstance(m, GroupFinished)}
        for each in (rank, undisturbed)
    ]
    assert figures[0] == figures[1] and len(figures[0]) == 9 and rank.free == undisturbed.free
    assert 100 not in rank.rollout.groups


def test_a_prompt_that_has_become_too_long_is_refused_and_told(tmp_path):
    header = admit(3, prompt="abcdef")
    group_files.write_arrays(tmp_path / "groups", pack_groups([SavedGroup(header, {0: finished(3, 0)}, {}, {})]))
    rank = Rank().tell(RestoreGroups(str(tmp_path / "groups")), [3]).loop(0.0)
    (refused,) = rank.said(GroupRefused)
    assert refused.group_id == 3 and "p3 has 6 tokens" in refused.reason
    assert not rank.rollout.groups and rank.free == 6 + GROUP_SIZE + GROUP_SIZE and not rank.scored


def test_a_rank_whose_disk_is_full_tells_and_goes_on(tmp_path):
    (tmp_path / "groups").write_text("somebody else's")
    rank = begun_rank().tell(SaveGroups(5, str(tmp_path / "groups")))
    while not rank.said(SaveFailed):
        time.sleep(0.001)
        rank.loop(0.001)
    (failed,) = rank.said(SaveFailed)
    assert failed.step == 5 and "groups: file exists" in failed.reason and not rank.said(GroupsSaved)
    rank.loop(3.0)
    assert len(rank.said(GroupFinished)) == 8


def test_a_group_that_is_not_there_ends_the_run(tmp_path):
    begun_rank().save(tmp_path / "groups")
    rank = Rank().tell(RestoreGroups(str(tmp_path / "groups")), [7, 8])
    with pytest.raises(RunError, match=r"does not hold groups \[8\]"):
        rank.loop(0.0)
    assert not rank.rollout.groups and not rank.said(GroupsRestored)
