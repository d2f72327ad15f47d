"""A trainer rank begins a step when it may, survives torn broadcasts, and leaves only between whole steps."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from areal_hpc.comm import Received
from areal_hpc.compute import StepResult, TrainerCompute
from areal_hpc.config import Config
from areal_hpc.exits import Exit, RunError
from areal_hpc.messages import BeginStep, Samples, SamplesArrived, StepFinished, Stop, TrainBatch, WeightsSent
from areal_hpc.preflight import RunClock
from areal_hpc.rundir import RunDir
from areal_hpc.saving_messages import SaveTrainer
from areal_hpc.shipment import join
from areal_hpc.survival_messages import PeerLost, RecallBatches, Regroup, WeightsTorn
from areal_hpc.trainer import LeaveStep, Trainer
from areal_hpc.trajectory import Trajectory


class World:
    rank, size, attempt, whole = 1, 4, 1, True
    expendable = frozenset({2, 3})
    check = SimpleNamespace(duplicates=0, stale=0)

    def __init__(self) -> None:
        self.inbox: deque[Received] = deque()
        self.sent: list[object] = []
        self.forgotten: list[int] = []

    def poll(self):
        return self.inbox.popleft() if self.inbox else None

    def post(self, rank, message, arrays=None) -> None:
        if type(message).__name__ not in ("ActivityReport",):
            self.sent.append(message)

    def forget(self, rank) -> None:
        self.forgotten.append(rank)

    def take(self) -> list[object]:
        sent, self.sent = self.sent, []
        return sent


class Sender:
    """The broadcast: tests tear it and mend it."""

    def __init__(self) -> None:
        self.last, self.torn, self.busy, self.calls = None, "", False, []

    def publish(self, version, tensors) -> None:
        self.poll()
        self.calls.append(("publish", version))
        self.last = SimpleNamespace(version=version, num_bytes=1, snapshot_s=0.0, broadcast_s=0.0)

    def hold(self, version, tensors) -> None:
        self.calls.append(("hold", version))

    def regroup(self, members, generation) -> None:
        self.torn = ""
        self.calls.append(("regroup", members, generation))

    def poll(self) -> bool:
        if self.torn:
            raise RunError(Exit.FAILED, self.torn)
        return not self.busy


class Learner:
    def __init__(self) -> None:
        self.seen: list[list[tuple[int, int]]] = []

    def train(self, batch) -> StepResult:
        self.seen.append([t.key for t in batch.trajectories if t is not None])
        return StepResult(False, {}, {"proximal_s": 0.0, "update_s": 0.0, "total_s": 0.0})

    def state(self):
        return {}


@pytest.fixture
def trainer(tmp_path) -> Trainer:
    data = {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"function": "tests.tiny:reward"}}
    own = {"rollout": {"ranks": 2}, "trainer": {"group_size": 2, "advantage": {"group_norm": "mean"}}}
    learner, sender = Learner(), Sender()
    compute = TrainerCompute(lambda between, activity: learner, dict, sender, print, None, None)
    return Trainer(Config.model_validate(data | own), World(), RunClock(0.0), compute, RunDir(tmp_path, 1))


def tell(trainer: Trainer, message, arrays=None, source: int = 0) -> None:
    trainer.world.inbox.append(Received(source, message, arrays or {}))


def announce(trainer: Trainer, step: int, groups: list[int], edition: int = 0) -> None:
    """Two samples of every group, all for this rank."""
    keys = [(group_id, sample) for group_id in groups for sample in (0, 1)]
    table = {
        "group_id": np.array([group_id for group_id, _ in keys], np.int64),
        "sample": np.array([sample for _, sample in keys], np.int32),
        "num_turns": np.ones(len(keys), np.int32),
        "turn_reward": np.array([float(sample) for _, sample in keys]),
        "turn_tokens": np.full(len(keys), 2, np.int32),
    }
    tell(trainer, TrainBatch(step, [[list(range(len(keys)))]], [2 * len(keys)], "", edition), table)


def ship(trainer: Trainer, step: int, group_id: int, token: int = 5) -> None:
    arrays = (np.array([1, token, token], np.int32), 1, np.zeros(2, np.float32), np.zeros(2, np.int32))
    tell(trainer, Samples(step), join([Trajectory(group_id, sample, *arrays) for sample in (0, 1)]), source=2)


def test_it_reports_once_when_its_samples_are_here_and_begins_when_told(trainer):
    ship(trainer, 1, 10)  # samples may be faster than the batch
    announce(trainer, 1, [10, 11])
    trainer.handle_messages()
    assert trainer.world.take() == []
    ship(trainer, 1, 11)
    trainer.handle_messages()
    trainer.handle_messages()
    assert trainer.world.take() == [SamplesArrived(1, 0)]
    assert not trainer.announced[0].may_begin
    tell(trainer, BeginStep(1))
    tell(trainer, Stop("enough"))
    trainer.handle_messages()
    (batch,) = trainer.announced
    assert batch.may_begin and [t.key for t in trainer.take(batch)] == [(10, 0), (10, 1), (11, 0), (11, 1)]
    assert trainer.samples == {}


def test_samples_of_a_recalled_batch_are_never_taken_for_the_next_one(trainer):
    announce(trainer, 1, [10])
    announce(trainer, 2, [11])
    ship(trainer, 1, 10, token=5)
    ship(trainer, 2, 11)
    trainer.handle_messages()
    trainer.world.take()
    tell(trainer, PeerLost(2))
    tell(trainer, RecallBatches(1))
    announce(trainer, 1, [10], edition=1)
    trainer.handle_messages()
    assert trainer.world.forgotten == [2]
    assert [batch.header.step for batch in trainer.announced] == [1] and trainer.samples == {}
    assert trainer.world.take() == []  # the old sample of group 10 does not count
    ship(trainer, 1, 10, token=7)
    trainer.handle_messages()
    assert trainer.world.take() == [SamplesArrived(1, 1)]
    assert trainer.take(trainer.announced[0])[0].tokens.tolist() == [1, 7, 7]


def test_a_torn_broadcast_is_reported_and_the_newest_version_kept_for_the_next_group(trainer):
    trainer.publish()
    trainer.report_sent()
    assert isinstance(trainer.world.take()[-1], WeightsSent)
    trainer.compute.sender.torn = "connection reset"
    trainer.version = 1
    trainer.publish()
    assert trainer.world.take() == [WeightsTorn(0, "connection reset")]  # once
    trainer.version = 2
    trainer.publish()
    assert trainer.world.take() == []
    tell(trainer, Regroup(1), {"rank": np.array([1, 3])})
    trainer.handle_messages()
    assert trainer.compute.sender.calls == [("publish", 0), ("hold", 1), ("hold", 2), ("regroup", [0, 2], 1)]
    trainer.version = 3
    trainer.publish()
    assert trainer.compute.sender.calls[-1] == ("publish", 3)


def test_where_nobody_may_be_lost_a_torn_broadcast_is_the_end(trainer):
    trainer.world.expendable = frozenset()
    trainer.publish()
    trainer.compute.sender.torn = "connection reset"
    with pytest.raises(RunError, match="connection reset"):
        trainer.publish()


def test_told_to_leave_while_weights_wait_it_reports_the_step_first(trainer):
    """The step is trained: a state saved now must be that after it, and the controller must know of it."""
    trainer.publish()
    trainer.compute.sender.busy = True
    announce(trainer, 1, [10])
    ship(trainer, 1, 10)
    tell(trainer, BeginStep(1))
    order = SaveTrainer(1, "somewhere")

    def poll_busy():
        if not trainer.learner.seen:
            return False
        tell(trainer, order)  # arrives while publish() waits
        trainer.compute.sender.poll = lambda: trainer.leaving is not None
        return False

    trainer.compute.sender.poll = poll_busy
    with pytest.raises(LeaveStep) as left:
        trainer.train()
    assert left.value.order is order and trainer.step == trainer.version == 1
    assert [type(message) for message in trainer.world.take() if isinstance(message, StepFinished)] == [StepFinished]
