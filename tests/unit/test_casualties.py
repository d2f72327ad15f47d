"""What the controller does about a lost rank, message by message, on a clock of the test's own."""

from __future__ import annotations

import pytest

from areal_hpc import casualties as module
from areal_hpc.batchscript import SURVIVE
from areal_hpc.bookkeeping import GroupRecord
from areal_hpc.casualties import SUSPECT_S, Casualties
from areal_hpc.config import Config
from areal_hpc.controller_state import ControllerState, Rules
from areal_hpc.data import Prompt, PromptSource
from areal_hpc.exits import Exit, RunError
from areal_hpc.instructions import CreditsGranted, GroupDone, Start
from areal_hpc.messages import AdmitGroup, BeginStep, SamplesArrived, Stop
from areal_hpc.preflight import RunClock
from areal_hpc.survival_messages import PeerLost, Pulse, RecallBatches, Regroup, WeightsTorn

HEARTBEAT_S = 60.0


class World:
    """One controller, two trainers (1, 2), four rollouts (3 .. 6)."""

    rank, attempt, size = 0, 1, 9

    def __init__(self) -> None:
        self.sent: list[tuple[int, object]] = []
        self.lost: dict[int, int] = {}
        self.trouble: dict[int, str] = {}

    def post(self, rank, message, arrays=None) -> None:
        if rank not in self.lost:
            self.sent.append((rank, message if arrays is None else (message, arrays["rank"].tolist())))

    def forget(self, rank) -> None:
        self.lost.setdefault(rank, 0)

    def dismiss(self, rank, message) -> None:
        self.sent.append((rank, message))

    def look_at_lifelines(self) -> None: ...

    def take(self) -> list[tuple[int, object]]:
        sent, self.sent = self.sent, []
        return sent


class Ignore:
    """A log, a progress line, a saver that remember what they were told."""

    def __init__(self) -> None:
        self.told: list[tuple] = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.told.append((name, *args)) or 0.0


class Bench(Casualties):
    def __init__(self, now, **changes) -> None:
        data = {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"function": "tests.tiny:reward"}}
        own = {"trainer": {"ranks": 2, "batch_size": 2}, "rollout": {"ranks": 4}}
        own |= {"deadlines": {"heartbeat_s": HEARTBEAT_S}}
        self.now = now
        self.ignore = Ignore()
        super().__init__(Config.model_validate(data | own | changes), World(), RunClock(0.0), self.ignore)
        self.progress = self.saver = self.examiner = self.ignore
        self.state = ControllerState(Rules(2, 4, 10, 1), validate=True)
        self.source = PromptSource([Prompt(f"p{i}", f"{i}", {}) for i in range(9)], seed=0, shuffle=False, epochs=None)
        self.groups: dict[int, GroupRecord] = {}
        self.batches: dict[int, object] = {}
        self.events: list[str] = []
        self.expect_heartbeats()

    def event(self, kind, text, rank=0) -> None:
        self.events.append(f"{kind}: {text}")

    def flush(self) -> None: ...

    def handle_event(self, event) -> None:
        self.instructions = self.state.handle(event)

    def after(self, seconds: float, silent: set[int] = frozenset()) -> list[tuple[int, object]]:
        """Let time pass, in which all but these ranks are heard; what the controller sends then."""
        self.now[0] += seconds
        for rank in self.heard_s:
            if rank not in silent:
                self.heard_s[rank] = self.now[0]
        self.check_heartbeats()
        return [(rank, message) for rank, message in self.world.take() if not isinstance(message, Pulse)]


@pytest.fixture
def bench(monkeypatch) -> Bench:
    monkeypatch.setenv(SURVIVE, "1")
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return Bench(now)


def test_a_silent_rollout_rank_is_lost_and_all_who_need_to_know_are_told(bench):
    assert bench.after(HEARTBEAT_S - 1, silent={4}) == []
    sent = bench.after(2, silent={4})
    members = [1, 3, 5, 6]
    assert sent == [(1, PeerLost(4)), (2, PeerLost(4)), *((rank, (Regroup(1), members)) for rank in members)]
    assert bench.rollouts == [3, 5, 6] and 4 not in bench.loaded_version
    (text,) = bench.events
    assert text.startswith("rank_lost: rank 4 (rollout) on ? is lost: it has not been heard for 61 s; 0 groups")
    assert text.endswith("3 rollout ranks go on, 1 more may be lost")
    told = [entry[:2] for entry in bench.ignore.told if entry[0] in ("lose", "lost")]
    assert told == [("lose", 4), ("lost", 4), ("lost", 4)]  # the saver, the progress line, the examiner


def test_reward_ranks_are_told_and_hear_the_controller(bench):
    reward = {"function": "tests.tiny:reward", "ranks": 2}
    bench = Bench(bench.now, reward=reward)
    bench.world.trouble[4] = "died without a word"
    sent = bench.after(1)
    assert [rank for rank, message in sent if message == PeerLost(4)] == [1, 2, 7, 8]
    bench.now[0] += HEARTBEAT_S
    bench.pulse(bench.now[0])
    assert [rank for rank, message in bench.world.take() if message == Pulse()] == [1, 2, 3, 5, 6, 7, 8]
    bench.world.trouble[7] = "died without a word"
    with pytest.raises(RunError, match=r"rank 7 \(reward\) died without a word"):
        bench.after(1)


def test_one_that_died_is_lost_at_once(bench):
    bench.world.trouble[5] = "died without a word"
    assert (1, PeerLost(5)) in bench.after(1)


def test_a_host_is_one_loss_for_the_weights(bench):
    sent = bench.after(HEARTBEAT_S + 1, silent={3, 4})
    assert [message for rank, message in sent if rank == 5] == [(Regroup(1), [1, 5, 6])]


@pytest.mark.parametrize(("silent", "said"), [({2}, r"rank 2 \(trainer\)"), ({3, 4, 5}, "2 rollout ranks are lost")])
def test_a_trainer_or_one_too_many_is_the_end(bench, silent, said):
    with pytest.raises(RunError, match=said) as caught:
        bench.after(HEARTBEAT_S + 1, silent=silent)
    assert caught.value.code == Exit.DEADLINE


def test_where_mpi_ends_them_all_nobody_is_expendable(bench, monkeypatch):
    monkeypatch.delenv(SURVIVE)
    alone = Bench(bench.now)
    with pytest.raises(RunError, match=r"rank 4 \(rollout\) has not been heard for 61 s$"):
        alone.after(HEARTBEAT_S + 1, silent={4})


def test_a_rank_that_dies_before_the_run_has_begun_is_the_end(bench):
    bench.heard_s = {}
    bench.world.trouble[5] = "died without a word"
    with pytest.raises(RunError, match=r"rank 5 \(rollout\) died"):
        bench.after(1)


def test_the_controller_is_heard_by_all(bench):
    pulses = 0
    for _ in range(120):
        bench.now[0] += 1
        bench.heard_s = dict.fromkeys(bench.heard_s, bench.now[0])
        bench.check_heartbeats()
        pulses += sum(isinstance(message, Pulse) for rank, message in bench.world.take() if rank == 6)
    assert 7 <= pulses <= 9  # every heartbeat_s / 4


def test_a_lost_rank_that_sends_something_is_dismissed_once(bench):
    bench.after(HEARTBEAT_S + 1, silent={4})
    assert bench.after(1) == []
    bench.world.lost[4] = 3
    assert bench.after(1) == [(4, Stop("taken for lost", whole=False))]
    bench.world.lost[4] = 9
    assert bench.after(1) == []


# --------------------------------------------------------------------------------------------------- torn weights
def test_a_torn_group_is_a_hint_and_silence_confirms_it(bench):
    bench.torn(1, WeightsTorn(0, "connection reset"))
    assert bench.after(SUSPECT_S - 1, silent={6}) == []
    assert (1, PeerLost(6)) in bench.after(1.6, silent={6})
    assert bench.torn_s is None and bench.generation == 1


def test_if_nobody_is_lost_the_same_ranks_build_it_again_but_not_for_ever(bench):
    for generation in (1, 2, 3):
        bench.torn(1, WeightsTorn(generation - 1, "connection reset"))
        sent = bench.after(SUSPECT_S + 2)
        assert sent == [(rank, (Regroup(generation), [1, 3, 4, 5, 6])) for rank in (1, 3, 4, 5, 6)]
    bench.torn(1, WeightsTorn(3, "connection reset"))
    with pytest.raises(RunError, match="broke 4 times in a row, and nobody is lost"):
        bench.after(SUSPECT_S + 2)


def test_a_version_that_arrived_everywhere_forgives(bench):
    for generation in range(8):
        bench.torn(1, WeightsTorn(generation, "connection reset"))
        bench.sent_version = generation
        bench.loaded_version = dict.fromkeys(bench.rollouts, generation)
        bench.after(SUSPECT_S + 2)
    assert bench.generation == 8


def test_word_of_a_group_that_is_gone_is_no_news(bench):
    bench.after(HEARTBEAT_S + 1, silent={4})
    bench.torn(3, WeightsTorn(0, "connection reset"))
    assert bench.torn_s is None and bench.after(SUSPECT_S + 2) == []


# ------------------------------------------------------------------------------------------------ batches, groups
def test_a_step_begins_when_all_trainers_have_their_samples(bench):
    bench.state.handle(CreditsGranted(3, 8))
    bench.state.handle(Start())
    for group_id in (0, 1):
        bench.state.handle(GroupDone(group_id, 4, 2))
    bench.incomplete[1, 0] = {1, 2}
    bench.samples_arrived(1, SamplesArrived(1, 0))
    assert bench.world.take() == [] and bench.state.complete == set()
    bench.samples_arrived(2, SamplesArrived(1, 0))
    assert bench.world.take() == [(1, BeginStep(1)), (2, BeginStep(1))] and bench.state.complete == {1}


def test_word_about_a_recalled_batch_does_not_count_for_the_next_one(bench):
    bench.batches = {1: object(), 2: object()}
    bench.incomplete = {(1, 0): {2}, (2, 0): {1, 2}}
    bench.recall(1)
    assert bench.world.take() == [(1, RecallBatches(1)), (2, RecallBatches(1))]
    assert bench.batches == {} and bench.incomplete == {} and bench.edition == 1
    bench.incomplete[1, 1] = {1, 2}
    bench.samples_arrived(2, SamplesArrived(1, 0))  # it was under way
    assert bench.incomplete == {(1, 1): {1, 2}}


def test_a_group_that_is_generated_anew_has_the_same_prompt_and_id(bench):
    bench.groups[7] = GroupRecord(7, "p5", 4, 1.0, 3, {"reward": None})
    bench.readmit(7, 6, 2)
    assert bench.world.take() == [(6, AdmitGroup(7, "p5", "5", {}, bench.config.trainer.group_size, 2))]
    assert (bench.groups[7].rank, bench.groups[7].figures) == (6, {})


def test_groups_of_the_lost_rank_come_before_new_ones(bench):
    bench.state.handle(CreditsGranted(4, 4))
    bench.state.handle(CreditsGranted(5, 4))
    bench.state.handle(Start())
    bench.after(HEARTBEAT_S + 1, silent={4})
    assert "1 groups are generated anew elsewhere" in bench.events[0]
    assert list(bench.state.backlog) == sorted(bench.state.anew) != []
