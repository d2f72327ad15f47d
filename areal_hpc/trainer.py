"""A trainer rank: receives the batches the controller composes, learns from them, sends new weights.

It never waits for a particular rollout rank's generation: a batch is announced only when all of its samples exist,
and the samples of the next batch arrive while this one is being trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_hpc.advantages import advantages
from areal_hpc.checkpoint import FileRecord
from areal_hpc.comm import Received, World
from areal_hpc.compute import Batch, StepResult, TrainerCompute
from areal_hpc.config import Config
from areal_hpc.exits import Exit, RunError
from areal_hpc.faults import fault
from areal_hpc.messages import (
    ModelSaved,
    Ready,
    Samples,
    SaveFailed,
    SaveModel,
    SaveTrainer,
    StepFinished,
    Stop,
    TrainBatch,
    TrainerSaved,
    WeightsSent,
    Welcome,
)
from areal_hpc.preflight import CONTROLLER, RunClock, unusable
from areal_hpc.reporting import Reporter
from areal_hpc.rundir import RunDir
from areal_hpc.saver import TRAINER_STATE
from areal_hpc.shipment import join, split
from areal_hpc.trajectory import Key, Trajectory
from areal_hpc.waiting import Backoff, Stopwatch


@dataclass(frozen=True, slots=True)
class Announced:
    """A TrainBatch message with its table, which describes the whole batch."""

    header: TrainBatch
    table: dict[str, NDArray]

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
        return self.healthy_end

    def train(self) -> None:
        """Step after step."""
        watch = Stopwatch()
        for batch in self.batches():
            watch.lap("wait_s")
            trajectories = self.collect(batch)
            watch.lap("receive_s")
            result = self.learn(batch, trajectories)
            watch.lap("update_s")
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

    def batches(self) -> Iterator[Announced]:
        """The batches of the run, as the controller announces them, until it says Stop."""
        while True:
            self.wait_for(lambda: bool(self.announced), "wait_batch", self.config.deadlines.silence_s, "the next batch")
            if self.stopped:
                return
            yield self.announced.pop(0)

    def collect(self, batch: Announced) -> list[Trajectory | None]:
        """This rank's trajectories, by index in the batch; None for those of other ranks."""
        keys, mine = batch.keys, batch.mine
        missing = {keys[i] for i in mine}

        def all_here() -> bool:
            missing.difference_update(self.samples)
            return not missing

        what = f"samples of step {batch.header.step}"
        self.wait_for(all_here, "receive", self.config.deadlines.message_s, what)
        return [self.samples.pop(key) if i in mine and key in self.samples else None for i, key in enumerate(keys)]

    def learn(self, batch: Announced, trajectories: list[Trajectory | None]) -> StepResult:
        if fault("trainer.batch", self.world.rank) == "nan":
            next(t for t in trajectories if t is not None).logprobs[0] = np.nan
        settings = self.config.trainer.advantage
        values = advantages(
            batch.table["reward"],
            batch.table["group_id"],
            batch.table["num_response"],
            group_norm=settings.group_norm,
            batch_norm=settings.batch_norm,
        )
        shares = Batch(trajectories, values, batch.header.micro_batches, batch.header.minibatch_tokens)
        result = self.learner.train(shares)
        fault("trainer.updated", self.world.rank)
        return result

    # ------------------------------------------------------------------------------------------ weights, files
    def publish(self) -> None:
        """Start the broadcast of the current version; training goes on while it travels."""
        if self.sender is None:
            return
        with self.reporter.activity("publish"):
            self.sender.wait()
            self.report_sent()
            self.sender.publish(self.version, self.compute.weights())
            fault("trainer.publish", self.world.rank)

    def report_sent(self) -> None:
        """Tell the controller, once, about a broadcast that has left completely."""
        if self.sender is None or not self.sender.poll():
            return
        sent = self.sender.last
        if sent is not None and sent.version > self.reported_version:
            self.reported_version = sent.version
            self.world.post(CONTROLLER, WeightsSent(sent.version, sent.num_bytes, sent.snapshot_s, sent.broadcast_s))

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
                self.announced.append(Announced(header, received.arrays))
            case Samples():
                self.samples |= {trajectory.key: trajectory for trajectory in split(received.arrays)}
            case SaveModel():
                self.save()
            case SaveTrainer() as order:
                raise LeaveStep(order)
            case Stop(_, healthy):
                self.stopped, self.healthy_end = True, healthy
            case _:
                raise unusable(self.world, self.config, received)
