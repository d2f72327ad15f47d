"""A trainer rank: receives the batches the controller composes, learns from them, sends new weights.

It never waits for a particular rollout rank's generation: a batch is announced only when all of its samples exist,
and the samples of the next batch arrive while this one is being trained.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_hpc.advantages import advantages, discounted_returns
from areal_hpc.checkpoint import FileRecord
from areal_hpc.comm import Received, World
from areal_hpc.compute import Batch, StepResult, TrainerCompute
from areal_hpc.config import Config
from areal_hpc.exits import Exit, RunError
from areal_hpc.faults import fault
from areal_hpc.messages import (
    BeginStep,
    ModelSaved,
    Ready,
    Samples,
    SamplesArrived,
    SaveModel,
    StepFinished,
    Stop,
    TrainBatch,
    WeightsSent,
    Welcome,
)
from areal_hpc.preflight import CONTROLLER, RunClock, check_pulse, unusable
from areal_hpc.reporting import Reporter
from areal_hpc.rundir import RunDir
from areal_hpc.saver import TRAINER_STATE
from areal_hpc.saving_messages import SaveFailed, SaveTrainer, TrainerSaved
from areal_hpc.shipment import join, split
from areal_hpc.survival_messages import PeerLost, Pulse, RecallBatches, Regroup, WeightsTorn
from areal_hpc.trajectory import Key, Trajectory
from areal_hpc.waiting import Backoff, Stopwatch


@dataclass(slots=True)
class Announced:
    """A TrainBatch message with its table, which describes the whole batch.

    Attributes:
        missing: samples of this rank's share that are not here yet.
        may_begin: the other trainers have theirs, too.
    """

    header: TrainBatch
    table: dict[str, NDArray]
    missing: set[Key] = field(default_factory=set)
    may_begin: bool = False

    @property
    def keys(self) -> list[Key]:
        return list(zip(self.table["group_id"].tolist(), self.table["sample"].tolist(), strict=True))

    @property
    def mine(self) -> set[int]:
        """Indices of the samples planned for this rank."""
        return {i for minibatch in self.header.micro_batches for micro in minibatch for i in micro}


@dataclass(frozen=True, slots=True)
class Saving:
    """A state on its way to disk; `written` gives its record and the seconds it took."""

    step: int
    copy_s: float
    written: Future[tuple[FileRecord, float]]


def timed(write: Callable[[], FileRecord]) -> tuple[FileRecord, float]:
    began_s = time.monotonic()
    return write(), time.monotonic() - began_s


class LeaveStep(Exception):
    """The run is about to end: this step must not go on, and what was before it is to be saved."""

    def __init__(self, order: SaveTrainer) -> None:
        super().__init__("the run is about to end")
        self.order = order


class Trainer:
    """One trainer rank. The first one also publishes weights, reports for all, and saves states and the model."""

    def __init__(
        self,
        config: Config,
        world: World,
        clock: RunClock,
        compute: TrainerCompute,
        run_dir: RunDir,
        welcome: Welcome | None = None,
    ) -> None:
        self.config = config
        self.world = world
        self.run_dir = run_dir
        self.reporter = Reporter(world, clock)
        self.compute = compute
        self.learner = compute.make_learner(self.handle_messages, self.reporter.activity)
        self.sender = compute.sender
        self.version, self.step = 0, 0
        self.saving: Saving | None = None
        if welcome is not None and welcome.resume:
            self.learner.load_state(compute.read_state(Path(welcome.resume) / TRAINER_STATE))
            self.version = welcome.version
        self.announced: list[Announced] = []
        self.samples: dict[Key, Trajectory] = {}
        self.reported_version = -1
        self.torn = False
        self.generation = 0
        self.leaving: SaveTrainer | None = None
        self.may_leave = True
        self.pulse_s = math.inf
        self.stopped = self.healthy_end = False

    # ------------------------------------------------------------------------------------------------ the loop
    def run(self) -> bool:
        """Train until told to stop, or to save and wait for the end; True after a healthy end.

        Raises:
            RunError: DEADLINE when a batch or its samples do not come in time.
        """
        self.publish()
        self.world.post(CONTROLLER, Ready())
        self.reporter.activity.switch("idle")
        try:
            self.train()
        except LeaveStep as leave:
            self.begin_saving(max(leave.order.step, self.step), leave.order.path)
            self.wait_for(lambda: False, "idle", self.config.deadlines.silence_s, "the end of the run")
        self.reporter.send()
        return self.healthy_end

    def train(self) -> None:
        """Step after step."""
        watch = Stopwatch()
        while (batch := self.next_batch(watch)) is not None:
            trajectories = self.take(batch)
            result = self.learn(batch, trajectories)
            watch.lap("update_s")
            self.may_leave = False  # what is trained has to be reported first
            if result.skipped:
                self.dump(batch.header.step, trajectories)
            else:
                self.version += 1
                self.publish()
                self.export()
            self.step = batch.header.step
            if self.sender is not None and batch.header.save_to:
                self.begin_saving(self.step, batch.header.save_to)
            watch.lap("publish_s")
            self.report(self.step, result, watch.finish())
            self.may_leave = True
            if self.leaving is not None:
                raise LeaveStep(self.leaving)

    def next_batch(self, watch: Stopwatch) -> Announced | None:
        """The next batch once all trainer ranks have their samples of it; None when the controller says Stop."""
        deadlines = self.config.deadlines
        patience_s = deadlines.message_s + (deadlines.heartbeat_s if self.world.expendable else 0.0)
        while True:
            self.wait_for(lambda: bool(self.announced), "wait_batch", deadlines.silence_s, "the next batch")
            watch.lap("wait_s")
            if self.stopped:
                return None
            what = f"samples of step {self.announced[0].header.step}"
            self.wait_for(lambda: not self.announced or self.announced[0].may_begin, "receive", patience_s, what)
            watch.lap("receive_s")
            if self.announced and not self.stopped:
                return self.announced.pop(0)

    def take(self, batch: Announced) -> list[Trajectory | None]:
        """This rank's trajectories, by index in the batch; None for those of other ranks."""
        mine = batch.mine
        taken = [self.samples.get(key) if i in mine else None for i, key in enumerate(batch.keys)]
        for key in batch.keys:  # those of others, too: a recalled batch may have brought them here
            self.samples.pop(key, None)
        return taken

    def learn(self, batch: Announced, trajectories: list[Trajectory | None]) -> StepResult:
        if fault("trainer.batch", self.world.rank) == "nan":
            next(t for t in trajectories if t is not None).logprobs[0] = np.nan
        settings = self.config.trainer.advantage
        table, header, num_turns = batch.table, batch.header, batch.table["num_turns"]
        values = advantages(
            discounted_returns(table["turn_reward"], num_turns, self.config.workflow.discount),
            np.repeat(table["group_id"], num_turns),
            table["turn_tokens"],
            np.repeat(1.0 / num_turns, num_turns),
            group_norm=settings.group_norm,
            batch_norm=settings.batch_norm,
        )
        first_turn = np.cumsum(num_turns) - num_turns
        shares = Batch(trajectories, values, header.micro_batches, header.minibatch_tokens, first_turn)
        result = self.learner.train(shares)
        fault("trainer.updated", self.world.rank)
        return result

    # ------------------------------------------------------------------------------------------ weights, files
    def publish(self) -> None:
        """Start the broadcast of the current version; training goes on while it travels."""
        if self.sender is None:
            return
        patience_s = 2 * self.config.deadlines.weights_s
        self.wait_for(self.weights_have_left, "publish", patience_s, "the weights before to leave")
        if self.stopped:
            return
        with self.reporter.activity("publish"):
            if not self.torn:
                with self.mending():
                    self.sender.publish(self.version, self.compute.weights())
            if self.torn:
                self.sender.hold(self.version, self.compute.weights())
            fault("trainer.publish", self.world.rank)

    def weights_have_left(self) -> bool:
        """No broadcast is under way, or none can be."""
        self.report_sent()
        return self.torn or self.sender is None or self.sender.poll()

    def report_sent(self) -> None:
        """Tell the controller, once, about a broadcast that has left completely."""
        if self.sender is None or self.torn:
            return
        with self.mending():
            if not self.sender.poll():
                return
        sent = self.sender.last
        if sent is not None and sent.version > self.reported_version:
            self.reported_version = sent.version
            self.world.post(CONTROLLER, WeightsSent(sent.version, sent.num_bytes, sent.snapshot_s, sent.broadcast_s))

    @contextmanager
    def mending(self) -> Iterator[None]:
        """Where a lost rank can be survived, a torn broadcast is not the end: the controller has the group rebuilt."""
        try:
            yield
        except RunError as error:
            if not self.world.expendable:
                raise
            self.torn = True
            self.world.post(CONTROLLER, WeightsTorn(self.generation, error.reason))

    def regroup(self, generation: int, ranks: list[int]) -> None:
        if self.sender is not None:
            self.generation, self.torn = generation, False
            with self.mending():
                self.sender.regroup([rank - 1 for rank in ranks], generation)

    def begin_saving(self, step: int, directory: str) -> None:
        """Copy the state, and write it in a thread of its own while training goes on."""
        watch = Stopwatch()
        state = self.learner.state()
        watch.lap("copy_s")
        path = Path(directory) / TRAINER_STATE
        writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        written = writer.submit(timed, lambda: self.write_state(path, state))
        writer.shutdown(wait=False)
        self.saving = Saving(step, watch.finish()["copy_s"], written)

    def write_state(self, path: Path, state: Mapping[str, Any]) -> FileRecord:
        record = self.compute.write_state(path, state)
        fault("trainer.saved", self.world.rank)
        return record

    def report_saved(self) -> None:
        """Tell the controller, once, that the state is written, or why it is not."""
        if self.saving is None or not self.saving.written.done():
            return
        saving, self.saving = self.saving, None
        try:
            record, write_s = saving.written.result()
        except RunError as error:
            self.world.post(CONTROLLER, SaveFailed(saving.step, error.reason))
            return
        file = (record.name, record.num_bytes, record.sha256)
        self.world.post(CONTROLLER, TrainerSaved(saving.step, *file, saving.copy_s, write_s))

    def export(self) -> None:
        """Save this version, if the configuration asks for it."""
        every = self.config.trainer.export_every
        if self.sender is not None and every and self.version % every == 0:
            self.compute.save(self.run_dir.weights(self.version))

    def save(self) -> None:
        """Save the model after the last step."""
        began_s = time.monotonic()
        self.compute.save(self.run_dir.model)
        self.world.post(CONTROLLER, ModelSaved(str(self.run_dir.model), time.monotonic() - began_s))

    def dump(self, step: int, trajectories: list[Trajectory | None]) -> None:
        """Keep a batch that gave no finite loss or gradient, for a person to look at."""
        path = self.run_dir.skipped_batch(step, self.world.rank)
        np.savez(path, **join([t for t in trajectories if t is not None]))  # type: ignore[arg-type]
        self.reporter.event("batch_skipped", f"step {step}: loss or gradient not finite; batch kept in {path}")

    # ------------------------------------------------------------------------------------------------ messages
    def report(self, step: int, result: StepResult, phases: dict[str, float]) -> None:
        if self.sender is not None:
            phases["proximal_s"] = result.phases["proximal_s"]
            phases["update_s"] -= phases["proximal_s"]
            self.world.post(CONTROLLER, StepFinished(step, self.version, result.skipped, result.stats, phases))

    def wait_for(self, arrived: Callable[[], bool], activity: str, timeout_s: float, what: str) -> None:
        """Handle messages until `arrived()`, or until told to stop."""
        pause = Backoff()
        deadline_s = time.monotonic() + timeout_s
        with self.reporter.activity(activity):
            while not arrived() and not self.stopped:
                if time.monotonic() > deadline_s:
                    raise RunError(Exit.DEADLINE, f"trainer rank {self.world.rank} waited {timeout_s:.0f} s for {what}")
                check_pulse(self.world, self.config, self.pulse_s)
                self.handle_messages()
                pause.sleep()

    def handle_messages(self) -> None:
        """Take what has arrived; called between micro-batches and while waiting. Never blocks."""
        self.reporter.tick()
        self.report_sent()
        self.report_saved()
        while (received := self.world.poll()) is not None:
            self.handle(received)

    def handle(self, received: Received) -> None:
        match received.message:
            case TrainBatch() as header:
                self.announce(Announced(header, received.arrays))
            case Samples():
                self.arrive({trajectory.key: trajectory for trajectory in split(received.arrays)})
            case BeginStep(step):
                next(batch for batch in self.announced if batch.header.step == step).may_begin = True
            case RecallBatches(step):
                self.recall(step)
            case PeerLost(rank):
                self.world.forget(rank)
            case Regroup(generation):
                self.regroup(generation, received.arrays["rank"].tolist())
            case Pulse():
                self.pulse_s = time.monotonic()
            case SaveModel():
                self.save()
            case SaveTrainer() as order:
                self.leaving = order
                if self.may_leave:
                    raise LeaveStep(order)
            case Stop(_, healthy, whole):
                self.world.whole &= whole
                self.stopped, self.healthy_end = True, healthy
            case _:
                raise unusable(self.world, self.config, received)

    # ------------------------------------------------------------------------------------------------- samples
    def announce(self, batch: Announced) -> None:
        keys = batch.keys
        batch.missing = {keys[i] for i in batch.mine} - self.samples.keys()
        self.announced.append(batch)
        self.report_complete(batch)

    def arrive(self, samples: dict[Key, Trajectory]) -> None:
        self.samples |= samples
        for batch in self.announced:
            if batch.missing:
                batch.missing -= samples.keys()
                self.report_complete(batch)

    def report_complete(self, batch: Announced) -> None:
        """Tell the controller, once, that this rank's samples of a batch are here."""
        if not batch.missing:
            self.world.post(CONTROLLER, SamplesArrived(batch.header.step, batch.header.edition))

    def recall(self, step: int) -> None:
        """Batches from this step on will be composed again; of their samples none must be taken for a new one."""
        for batch in [batch for batch in self.announced if batch.header.step >= step]:
            self.announced.remove(batch)
            for key in batch.keys:
                self.samples.pop(key, None)
