"""The controller rank: the thin shell around the pure ControllerState.

It reads prompts, turns messages into events and instructions into messages, and keeps the log. It touches no weights,
and trajectories pass it by (except when the configuration asks for their tokens in the log).

A healthy end: the last step is done, outstanding groups are dropped, the model is saved while the held-out prompts are
evaluated, every rank gets Stop and answers Farewell. Any other end is a RunError: it is written down, every rank gets
Stop, and who has not answered in time is ended by an MPI abort (rank.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from areal_hpc import instructions as state_machine
from areal_hpc.bookkeeping import BatchRecord, GroupRecord, group_rows, step_row
from areal_hpc.comm import Received, World
from areal_hpc.config import Config
from areal_hpc.controller_state import ControllerState, Rules
from areal_hpc.data import Source
from areal_hpc.endings import Endings
from areal_hpc.evaluation import Evaluation, HeldOut
from areal_hpc.examiner import Examiner
from areal_hpc.exits import Exit, RunError
from areal_hpc.faults import fault
from areal_hpc.logschema import Fate
from areal_hpc.messages import (
    AdmitGroup,
    Credits,
    DropGroups,
    GroupFinished,
    GroupRefused,
    LoadWeights,
    ModelSaved,
    RankFailed,
    Samples,
    SamplesArrived,
    SaveModel,
    ShipSamples,
    StepFinished,
    TrainBatch,
    Trained,
    Warned,
    WeightsLoaded,
    WeightsSent,
)
from areal_hpc.preflight import RunClock
from areal_hpc.progress import Progress
from areal_hpc.resuming import SavedRun
from areal_hpc.runlog_writer import RunLogWriter
from areal_hpc.saver import Saver
from areal_hpc.saving_messages import GroupsRestored, GroupsSaved, RestoreGroups, SaveFailed, TrainerSaved
from areal_hpc.shipment import split
from areal_hpc.survival_messages import WeightsTorn


class Controller(Endings):
    """World rank 0.

    Args:
        saver: of this attempt's checkpoints.
        saved: the state of an earlier attempt to go on from.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        clock: RunClock,
        log: RunLogWriter,
        source: Source,
        heldout: HeldOut,
        progress: Progress,
        saver: Saver,
        saved: SavedRun | None = None,
    ) -> None:
        super().__init__(config, world, clock, log)
        self.source, self.data = source, source.digests()
        self.progress = progress
        self.saver = saver
        self.saved = saved
        rules = Rules.of(config, source.num_total)
        self.state = saved.begin(rules, source) if saved else ControllerState(rules)
        self.first_id = self.state.next_id
        self.examiner = Examiner(self, heldout, self.state.credits, self.evaluated)
        self.groups: dict[int, GroupRecord] = {}
        self.restoring: dict[tuple[int, str], list[int]] = {}
        self.batches: dict[int, BatchRecord] = {}
        self.why_finished: str | None = None
        self.model_saved = False
        self.skipped_in_a_row = 0

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
        self.expect_heartbeats()
        self.announce(self.state.version)
        if self.saved is not None:
            self.event("resumed", self.saved.sentence)
            self.examiner.resume(self.saved.evaluation)
        elif self.config.evaluation.at_start:
            self.evaluate()
        self.progress.training_begins()
        self.handle_event(state_machine.Start())
        self.wait_for_progress(lambda: self.why_finished is not None, self.state.waiting_for)
        self.wait_for_progress(lambda: self.examiner.current is None, self.examiner.waiting_for)
        if self.config.checkpoint.resume:
            self.save_now()  # whoever raises `steps` goes on as if the run had never ended
        self.drop_the_rest()
        newest = self.state.version
        self.wait_for_progress(lambda: self.version_everywhere >= newest, lambda: f"version {newest} to be loaded")
        self.world.post(self.trainers[0], SaveModel())
        if self.config.evaluation.at_end:
            self.evaluate()
        self.wait_for_progress(lambda: self.model_saved, lambda: "the first trainer rank to save the model")
        assert self.why_finished is not None
        return self.why_finished

    def evaluate(self) -> None:
        """Held-out pass@1 of the newest version, sampled on the rollout ranks; training stands still."""
        if self.examiner.heldout:
            self.progress.now("evaluating")
            self.examiner.begin(self.state.version)
            self.wait_for_progress(lambda: self.examiner.current is None, self.examiner.waiting_for)

    def evaluated(self, evaluation: Evaluation) -> None:
        self.progress.evaluated(evaluation)
        self.examiner.catch_up(None if self.state.finished else self.state.version)

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
        for (rank, path), group_ids in self.restoring.items():
            self.world.post(rank, RestoreGroups(path), {"group_id": np.array(group_ids, np.int64)})
        self.restoring.clear()

    def carry_out(self, instruction: state_machine.Instruction) -> None:
        match instruction:
            case state_machine.Admit(group_id, rank, min_version):
                self.admit(group_id, rank, min_version)
            case state_machine.Restore(group_id, rank):
                self.restore(group_id, rank)
            case state_machine.Readmit(group_id, rank, min_version):
                self.readmit(group_id, rank, min_version)
            case state_machine.Recall(step):
                self.recall(step)
            case state_machine.Compose(step, group_ids):
                self.compose(step, group_ids)
            case state_machine.Leave(group_id, rank, why):
                self.leave(group_id, rank, why)
            case state_machine.EmptyBatch(num_groups):
                self.event("batch_empty", f"the filter left none of {num_groups} groups; the version stands still")
            case state_machine.Announce(version):
                self.announce(version)
                self.examiner.new_version(version)
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

    def restore(self, group_id: int, rank: int) -> None:
        """A group of an earlier attempt goes on at `rank`; told when all of this event's are known."""
        assert self.saved is not None
        prompt_id, name = self.saved.group(group_id)
        self.groups[group_id] = GroupRecord(group_id, prompt_id, rank, self.clock.now())
        self.restoring.setdefault((rank, str(self.saved.path / name)), []).append(group_id)

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
        self.incomplete[step, self.edition] = set(self.trainers)
        save_to = self.saver.order(step)
        for position, trainer in enumerate(self.trainers):
            header = TrainBatch(step, batch.micro_batches_of(position), batch.minibatch_tokens(), save_to, self.edition)
            self.world.post(trainer, header, table)
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
            case Credits(num_samples):
                self.state.credits.grant(source, num_samples)
                self.examiner.admit()  # held-out answers first, within their share
                self.handle_event(state_machine.CreditsGranted(source, 0))
            case GroupFinished() as header:
                self.group_finished(header, arrays)
            case GroupRefused() as header:
                self.group_refused(header, source)
            case SamplesArrived() as header:
                self.samples_arrived(source, header)
            case StepFinished() as report:
                self.step_finished(report)
            case Samples():
                self.log.tokens(split(arrays))
            case WeightsSent() as sent:
                self.weights_sent(sent)
            case WeightsTorn() as header:
                self.torn(source, header)
            case WeightsLoaded() as loaded:
                self.weights_loaded(loaded, source)
            case TrainerSaved() | GroupsSaved() as part:
                self.saver.part(source, part)
            case SaveFailed() as failed:
                self.saver.part_failed(source, failed)
            case GroupsRestored(num_groups, num_finished, num_tokens):
                text = f"{num_groups} groups, {num_finished} finished answers, {num_tokens:,} tokens of others"
                self.event("groups_restored", text, source)
            case Warned(name):
                self.asked_to_end(name, source)
            case ModelSaved(path, seconds):
                self.model_saved = True
                self.event("model_saved", f"{path} in {seconds:.1f} s", source)
            case RankFailed(_, reason) if self.ending and source in self.trainers[1:]:
                self.event("rank_failed", reason, source)  # the first trainer has left their collective to save
            case _:
                super().handle(received)

    def group_finished(self, header: GroupFinished, arrays: dict[str, np.ndarray]) -> None:
        if header.purpose == "evaluate":
            if not self.state.started or self.state.finished:
                self.progressed_s = time.monotonic()  # beside training only steps are progress
            self.examiner.finished(header, arrays)
            return
        if header.group_id not in self.state.running:
            return  # it finished while its DropGroups was on the way
        group = self.groups[header.group_id]
        group.num_prompt = header.num_prompt
        group.figures = arrays
        if header.group_id >= self.first_id:  # those of an earlier attempt began in the middle
            self.walltime.answered(self.clock.now() - group.admit_s)
        self.handle_event(state_machine.GroupDone(header.group_id, int(group.usable.sum()), group.num_correct))

    def group_refused(self, header: GroupRefused, source: int) -> None:
        self.event("prompt_refused", header.reason, source)
        self.progress.refused(header.purpose)
        if header.purpose == "evaluate":
            self.examiner.refused(header)
        elif header.group_id in self.state.running:
            self.handle_event(state_machine.GroupRefusedByRank(header.group_id))

    def step_finished(self, report: StepFinished) -> None:
        batch = self.batches.pop(report.step)
        version_before = self.state.version
        rows = batch.rows(version_before, Fate.DROPPED if report.skipped else Fate.CONSUMED)
        self.log.trajectories(rows)
        finished_s, self.progressed_s = self.clock.now(), time.monotonic()
        ids = np.array([group.group_id for group in batch.groups], np.int64)
        for rank in self.rollouts:
            self.world.post(rank, Trained(report.step), {"group_id": ids})
        self.handle_event(state_machine.BatchTrained(report.skipped))
        for group in batch.groups:
            self.groups.pop(group.group_id, None)
        self.saver.cut(report.step, *self.snapshot())
        row = step_row(report, batch, rows, version_before) | self.state.counters()
        row |= {"time_s": finished_s, "log_s": self.log_s}  # before what it admits
        self.log_step(row)
        self.progress.step(row)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if report.skipped else 0
        if self.skipped_in_a_row >= self.config.trainer.max_skipped:
            raise RunError(
                Exit.DIVERGED,
                f"step {report.step}: loss or gradient was not finite for {self.skipped_in_a_row} batches in a row; "
                "the batches are kept as skipped_step_*.npz in the attempt's directory",
            )
