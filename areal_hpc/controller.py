"""The controller rank: the thin shell around the pure ControllerState.

It reads prompts, turns messages into events and instructions into messages, and keeps the log. It touches no weights,
and trajectories pass it by (except when the configuration asks for their tokens in the log).

A healthy end: the last step is done, outstanding groups are dropped, the model is saved while the held-out prompts are
evaluated, every rank gets Stop and answers Farewell. Any other end is a RunError: it is written down, every rank gets
Stop, and who has not answered in time is ended by an MPI abort (rank.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from areal_hpc import controller_state as state_machine
from areal_hpc.activity import ActivityRecorder
from areal_hpc.bookkeeping import BatchRecord, GroupRecord, group_rows, step_row
from areal_hpc.comm import Received, World
from areal_hpc.config import Config
from areal_hpc.controller_state import ControllerState, Rules
from areal_hpc.datasets import Prompt, PromptSource
from areal_hpc.evaluation import Evaluation
from areal_hpc.exits import Exit, RunError
from areal_hpc.faults import fault
from areal_hpc.logschema import Fate
from areal_hpc.messages import (
    ActivityReport,
    AdmitGroup,
    ClockPing,
    ClockPong,
    Credits,
    DropGroups,
    Event,
    GroupFinished,
    GroupRefused,
    LoadWeights,
    ModelSaved,
    RankFailed,
    Ready,
    Samples,
    SaveModel,
    ShipSamples,
    StepFinished,
    TrainBatch,
    WeightsLoaded,
    WeightsSent,
)
from areal_hpc.preflight import RunClock, role_of, rollout_ranks, trainer_ranks, unusable
from areal_hpc.progress import Progress
from areal_hpc.reporting import interval_arrays, num_ignored
from areal_hpc.runlog_writer import RunLogWriter
from areal_hpc.shipment import split
from areal_hpc.waiting import Backoff


def rules_of(config: Config, num_prompts: int | None) -> Rules:
    """The controller's rules for a (resolved) configuration."""
    trainer, staleness = config.trainer, config.staleness
    return Rules(
        batch_size=trainer.batch_size,
        group_size=trainer.group_size,
        steps=config.steps,
        max_staleness=staleness.eta,
        order=staleness.order,
        max_running_groups=staleness.max_running_groups,
        min_success=config.filter.min_success,
        max_success=config.filter.max_success,
        min_usable=1 if trainer.advantage.group_norm == "none" else 2,
        num_prompts=num_prompts,
    )


class Controller:
    """World rank 0.

    Args:
        interrupted: tells whether a signal asked the run to end, and which.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        clock: RunClock,
        log: RunLogWriter,
        source: PromptSource,
        heldout: Sequence[Prompt],
        progress: Progress,
        interrupted: Callable[[], str | None],
    ) -> None:
        self.config = config
        self.world = world
        self.clock = clock
        self.log = log
        self.source = source
        self.heldout = heldout
        self.progress = progress
        self.interrupted = interrupted
        self.trainers = trainer_ranks(config)
        self.rollouts = rollout_ranks(config)
        self.state = ControllerState(rules_of(config, source.num_total))
        self.groups: dict[int, GroupRecord] = {}
        self.batches: dict[int, BatchRecord] = {}
        self.activity = ActivityRecorder(clock.now)
        self.evaluation: Evaluation | None = None
        self.not_ready = set(range(1, world.size))
        self.why_finished: str | None = None
        self.sent_version = -1
        self.loaded_version = dict.fromkeys(self.rollouts, -1)
        self.model_saved = False
        self.skipped_in_a_row = 0
        self.log_s = 0.0
        self.num_ignored_told = 0
        self.progressed_s = time.monotonic()

    # ----------------------------------------------------------------------------------------------- the story
    def run(self) -> str:
        """The whole run; returns why it ended.

        Raises:
            RunError: any end but the healthy one.
        """
        self.wait(
            lambda: not self.not_ready,
            self.config.deadlines.startup_s,
            lambda: f"ranks {sorted(self.not_ready)} to be ready",
        )
        self.announce(0)
        if self.config.evaluation.at_start:
            self.evaluate()
        self.progress.training_begins()
        self.handle_event(state_machine.Start())
        self.wait_for_progress(lambda: self.why_finished is not None, self.state.waiting_for)
        self.drop_the_rest()
        self.wait_for_progress(self.everybody_is_up_to_date, lambda: f"version {self.state.version} to be loaded")
        self.world.post(self.trainers[0], SaveModel())
        if self.config.evaluation.at_end:
            self.evaluate()
        self.wait_for_progress(lambda: self.model_saved, lambda: "the first trainer rank to save the model")
        assert self.why_finished is not None
        return self.why_finished

    def evaluate(self) -> None:
        """Held-out pass@1 of the newest version, sampled on the rollout ranks."""
        if not self.heldout:
            return
        evaluation = Evaluation(self.heldout, self.config.evaluation.samples, self.state.version)
        self.evaluation = evaluation
        self.progress.now("evaluating")
        while not evaluation.is_complete:
            self.admit_evaluation(evaluation)
            self.wait_for_progress(lambda: evaluation.can_go_on(self.state.credits), evaluation.waiting_for)
        self.evaluation = None
        self.log.evaluations(evaluation.rows())
        self.flush()
        self.progress.evaluated(evaluation)

    def admit_evaluation(self, evaluation: Evaluation) -> None:
        while evaluation.pending and (rank := self.state.credits.take(1)) is not None:
            group_id, prompt = evaluation.pending.popleft()
            self.world.post(
                rank,
                AdmitGroup(group_id, prompt.prompt_id, prompt.text, prompt.metadata, 1, evaluation.version, "evaluate"),
            )

    def everybody_is_up_to_date(self) -> bool:
        """The newest version has left the trainer and is loaded on every rollout rank."""
        versions = [self.sent_version, *self.loaded_version.values()]
        return min(versions) >= self.state.version

    def drop_the_rest(self) -> None:
        """The end came in the middle of everything: forget what is running, write down what is finished."""
        outstanding = self.state.outstanding()
        for rank in self.rollouts:
            self.send_drop(rank, [group_id for group_id, owner in outstanding.items() if owner == rank])
        finished = [self.groups[group_id] for group_id in outstanding if self.groups[group_id].figures]
        for group in finished:
            self.log.trajectories(group_rows(group, Fate.LEFTOVER))
        if outstanding:
            unfinished = len(outstanding) - len(finished)
            self.event("leftover", f"{len(finished)} finished and {unfinished} running groups were not trained on")
        self.flush()

    # ------------------------------------------------------------------------------------- events, instructions
    def handle_event(self, event: state_machine.Event) -> None:
        for instruction in self.state.handle(event):
            self.carry_out(instruction)

    def carry_out(self, instruction: state_machine.Instruction) -> None:
        match instruction:
            case state_machine.Admit(group_id, rank, min_version):
                self.admit(group_id, rank, min_version)
            case state_machine.Compose(step, group_ids):
                self.compose(step, group_ids)
            case state_machine.Leave(group_id, rank, why):
                self.leave(group_id, rank, why)
            case state_machine.Announce(version):
                self.announce(version)
            case state_machine.Finish(why):
                self.why_finished = why

    def admit(self, group_id: int, rank: int, min_version: int) -> None:
        prompt = self.source.next()
        assert prompt is not None, "the state machine admitted more prompts than the data set has"
        self.groups[group_id] = GroupRecord(group_id, prompt.prompt_id, rank, self.clock.now())
        message = AdmitGroup(
            group_id, prompt.prompt_id, prompt.text, prompt.metadata, self.config.trainer.group_size, min_version
        )
        self.world.post(rank, message)

    def compose(self, step: int, group_ids: Sequence[int]) -> None:
        """Plan the batch, tell the trainers what it holds and the rollout ranks where to send it."""
        fault("controller.compose", self.world.rank)
        settings = self.config.trainer
        with self.activity("schedule"):
            batch = BatchRecord.compose(
                step,
                [self.groups[group_id] for group_id in group_ids],
                self.clock.now(),
                capacity=settings.micro_batch_tokens,
                trainers=self.trainers,
                minibatches=settings.minibatches,
                seed=self.config.seed,
            )
        self.batches[step] = batch
        table = {name: getattr(batch, name) for name in TrainBatch.ARRAYS}
        for position, trainer in enumerate(self.trainers):
            self.world.post(
                trainer, TrainBatch(step, batch.micro_batches_of(position), batch.minibatch_tokens()), table
            )
        owner = np.array([self.groups[group_id].rank for group_id in batch.group_id.tolist()])
        for rank in self.rollouts:
            mine = owner == rank
            if mine.any():
                arrays = {name: getattr(batch, name)[mine] for name in ShipSamples.ARRAYS}
                self.world.post(rank, ShipSamples(step, self.config.log.tokens), arrays)

    def leave(self, group_id: int, rank: int, why: str) -> None:
        """A group left the count; a skipped one is already gone from its rollout rank."""
        group = self.groups.pop(group_id)
        if why in ("filtered", "unscored"):
            self.log.trajectories(group_rows(group, Fate.FILTERED if why == "filtered" else Fate.DROPPED))
            self.send_drop(rank, [group_id])
            self.event(
                f"group_{why}",
                f"group {group_id} ({group.prompt_id}): {group.num_correct} of {group.usable.sum()} right",
            )

    def send_drop(self, rank: int, group_ids: list[int]) -> None:
        if group_ids:
            self.world.post(rank, DropGroups(), {"group_id": np.array(group_ids, np.int64)})

    def announce(self, version: int) -> None:
        for rank in self.rollouts:
            self.world.post(rank, LoadWeights(version))

    # ------------------------------------------------------------------------------------------------ messages
    def handle(self, received: Received) -> None:
        source, arrays = received.source, received.arrays
        match received.message:
            case ClockPing(local_s):
                self.world.post(source, ClockPong(local_s, self.clock.now()))
            case Ready():
                self.not_ready.discard(source)
            case Credits(num_samples):
                self.handle_event(state_machine.CreditsGranted(source, num_samples))
            case GroupFinished() as header:
                self.group_finished(header, arrays)
            case GroupRefused() as header:
                self.group_refused(header, source)
            case StepFinished() as report:
                self.step_finished(report)
            case Samples():
                self.log.tokens(split(arrays))
            case WeightsSent(version, num_bytes, snapshot_s, broadcast_s):
                self.sent_version = version
                self.log.weight_update(
                    {
                        "version": version,
                        "time_s": self.clock.now(),
                        "num_bytes": num_bytes,
                        "snapshot_s": snapshot_s,
                        "broadcast_s": broadcast_s,
                    }
                )
            case WeightsLoaded() as loaded:
                self.weights_loaded(loaded, source)
            case ActivityReport():
                self.log_activity(arrays, source)
            case Event(kind, text):
                self.event(kind, text, source)
            case ModelSaved(path, seconds):
                self.model_saved = True
                self.event("model_saved", f"{path} in {seconds:.1f} s", source)
            case RankFailed(code, reason):
                raise RunError(Exit(code), f"rank {source} ({role_of(source, self.config)}) {reason}")
            case _:
                raise unusable(self.world, self.config, received)

    def group_finished(self, header: GroupFinished, arrays: dict[str, np.ndarray]) -> None:
        if header.purpose == "evaluate":
            if self.evaluation is not None:
                self.evaluation.finished(header.group_id, arrays)
            return
        if header.group_id not in self.state.running:
            return  # it finished while its DropGroups was on the way
        group = self.groups[header.group_id]
        group.num_prompt = header.num_prompt
        group.figures = arrays
        self.handle_event(state_machine.GroupDone(header.group_id, int(group.usable.sum()), group.num_correct))

    def group_refused(self, header: GroupRefused, source: int) -> None:
        self.event("prompt_refused", header.reason, source)
        if header.purpose == "evaluate":
            if self.evaluation is not None:
                self.evaluation.refused(header.group_id)
        elif header.group_id in self.state.running:
            self.handle_event(state_machine.GroupRefusedByRank(header.group_id))

    def step_finished(self, report: StepFinished) -> None:
        batch = self.batches.pop(report.step)
        version_before = self.state.version
        rows = batch.rows(version_before, Fate.DROPPED if report.skipped else Fate.CONSUMED)
        self.log.trajectories(rows)
        self.progressed_s = time.monotonic()
        self.handle_event(state_machine.BatchTrained(report.skipped))
        for group in batch.groups:
            self.groups.pop(group.group_id, None)
        row = step_row(report, batch, rows, version_before) | {
            "time_s": self.clock.now(),
            "num_admitted": self.state.next_id,
            "num_consumed": self.state.consumed_batches * self.config.trainer.batch_size,
            "num_filtered": self.state.left["filtered"],
            "log_s": self.log_s,
        }
        self.log_s = 0.0
        self.log.step(row)
        self.flush()
        self.progress.step(row)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if report.skipped else 0
        if self.skipped_in_a_row >= self.config.trainer.max_skipped:
            raise RunError(
                Exit.DIVERGED,
                f"step {report.step}: loss or gradient was not finite for {self.skipped_in_a_row} batches in a row; "
                "the batches are kept as skipped_step_*.npz in the attempt's directory",
            )

    def weights_loaded(self, loaded: WeightsLoaded, source: int) -> None:
        self.loaded_version[source] = loaded.version
        row = {
            name: [getattr(loaded, name)]
            for name in ("version", "receive_s", "pause_s", "interrupted", "reprefilled_tokens")
        }
        self.log.weight_loads(row | {"rank": [source], "time_s": [self.clock.now()]})

    # ------------------------------------------------------------------------------------------ waiting, logging
    def event(self, kind: str, text: str, rank: int = 0) -> None:
        self.log.event(self.clock.now(), kind, text, rank)

    def flush(self) -> None:
        if (count := num_ignored(self.world)) > self.num_ignored_told:
            self.num_ignored_told = count
            self.event("messages_ignored", f"{count} doubled or stale messages ignored so far on the controller")
        self.log_activity(interval_arrays(self.activity.drain()), self.world.rank)
        with self.activity("log"):
            self.log_s += self.log.flush()

    def log_activity(self, intervals: dict[str, np.ndarray], rank: int) -> None:
        self.log.activity(intervals | {"rank": np.full(len(intervals["kind"]), rank, np.int32)})

    def wait_for_progress(self, done: Callable[[], bool], waiting_for: Callable[[], str]) -> None:
        """Wait as long as steps keep finishing; `deadlines.step_s` without one ends the run."""
        self.progressed_s = time.monotonic()
        self.wait(done, self.config.deadlines.step_s, waiting_for)

    def wait(self, done: Callable[[], bool], timeout_s: float, waiting_for: Callable[[], str]) -> None:
        """Handle messages until `done()`.

        Raises:
            RunError: DEADLINE after `timeout_s` without a finished step; INTERRUPTED on a signal; what a rank reported.
        """
        pause = Backoff()
        while not done():
            received = self.world.poll()
            if received is not None:
                self.handle(received)
                pause.reset()
                continue
            if (signal_name := self.interrupted()) is not None:
                raise RunError(Exit.INTERRUPTED, f"stopped by {signal_name} at version {self.state.version}")
            if time.monotonic() - self.progressed_s > timeout_s:
                raise RunError(
                    Exit.DEADLINE, f"nothing finished for {timeout_s:.0f} s while waiting for {waiting_for()}"
                )
            pause.sleep()
