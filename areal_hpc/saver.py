"""The controller's checkpoints: when one is due, who has to write what, and when it is complete.

The cut. Right after step N the controller writes down its own state and posts SaveGroups to every rollout rank. MPI
keeps the order, so a rollout rank that handles it holds exactly the groups that are admitted and not trained on in the
controller's state. The first trainer writes the version after step N, which it was told with the batch of step N
(it may be far into N + 1 when the others begin to write). Nobody waits for anybody; generation goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc.checkpoint import Checkpoints, FileRecord, Found, write_arrays, write_json
from areal_hpc.comm import World
from areal_hpc.config import Config
from areal_hpc.exits import Exit, RunError
from areal_hpc.faults import fault
from areal_hpc.messages import AdmitGroup
from areal_hpc.preflight import rollout_ranks, trainer_ranks
from areal_hpc.rollout_state import SavedGroup, pack_groups
from areal_hpc.saving_messages import GroupsSaved, SaveFailed, SaveGroups, SaveTrainer, TrainerSaved

STATE = "controller.json"
TRAINER_STATE = "trainer.safetensors"
MAX_FAILED = 2


def groups_file(rank: int) -> str:
    return f"groups_{rank:04d}.safetensors"


@dataclass(slots=True)
class Pending:
    """A checkpoint in the making.

    Attributes:
        waiting: ranks whose part has not come.
        is_cut: the controller has written its part, the groups are being written.
    """

    step: int
    path: Path
    began_s: float
    waiting: set[int]
    is_cut: bool = False
    records: list[FileRecord] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)


class Saver:
    """At most one checkpoint at a time.

    Args:
        event: writes a line of the run log.
        found: the checkpoint that this attempt began with.
        is_ours: nobody else has become the owner of the run directory.
        now: seconds of any clock that does not jump.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        checkpoints: Checkpoints,
        event: Callable[[str, str], None],
        found: Found | None = None,
        is_ours: Callable[[], bool] = lambda: True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.world = world
        self.checkpoints = checkpoints
        self.event = event
        self.found = found
        self.is_ours = is_ours
        self.now = now
        self.trainer = trainer_ranks(config)[0]
        self.rollouts = rollout_ranks(config)
        self.pending: Pending | None = None
        self.saved_step = -1
        self.saved_s = now()
        self.num_failed = 0
        self.part_s: float | None = None
        """The longest time a rank took for its part of the last checkpoint."""

    # -------------------------------------------------------------------------------------------------- ordering
    def order(self, step: int) -> str:
        """Where the trainer writes its part after this step; "" if no checkpoint is due then."""
        every_s = self.config.checkpoint.every_s
        if (
            (pending := self.pending)
            and pending.step == step
            and not pending.is_cut
            and self.trainer in pending.waiting
        ):
            return str(pending.path)  # the batch of this step was recalled and composed again
        if every_s is None or self.pending is not None or self.now() - self.saved_s < every_s:
            return ""
        pending = self._begin(step)
        return str(pending.path) if pending is not None else ""

    def order_now(self, step: int) -> None:
        """Have the trainer leave its step and write what it has; `cut` must follow when its part is there."""
        if self.pending is not None:
            if self.pending.is_cut and self.pending.step == step:
                return  # it is this moment's already
            self.checkpoints.abandon(self.pending.path)  # of a step that will not be finished
            self.pending = None
        pending = self._begin(step)
        if pending is not None:
            self.world.post(self.trainer, SaveTrainer(step, str(pending.path)))

    def lose(self, rank: int) -> None:
        """A rollout rank is lost: nobody waits for its part. If others rely on it, this checkpoint is none."""
        self.rollouts.remove(rank)
        pending = self.pending
        if pending is None or rank not in pending.waiting:
            return
        pending.waiting.discard(rank)
        if pending.is_cut:
            self.pending = None
            self.checkpoints.abandon(pending.path)
            self.saved_s = float("-inf")  # the next step is as good
            self.event("checkpoint_given_up", f"step {pending.step}: rank {rank} is lost, and its groups with it")

    @property
    def awaits_cut(self) -> int | None:
        """The step after which the trainer has written its part, when the controller has not yet."""
        pending = self.pending
        return pending.step if pending and not pending.is_cut and self.trainer not in pending.waiting else None

    def _begin(self, step: int) -> Pending | None:
        try:
            before = self.checkpoints.num_leftovers
            path = self.checkpoints.begin(step, self.world.attempt)
            if removed := self.checkpoints.num_leftovers - before:
                self.event("checkpoint_leftovers", f"{removed} unfinished checkpoints of earlier attempts removed")
        except RunError as error:
            self._failed(step, error.reason)
            return None
        self.pending = Pending(step, path, self.now(), {self.trainer, *self.rollouts})
        return self.pending

    def cut(self, step: int, state: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Step `step` is trained: write the controller's part and have the rollout ranks write theirs."""
        pending = self.pending
        if pending is None or pending.is_cut or pending.step != step:
            return
        pending.is_cut = True
        pending.facts = dict(facts)
        try:
            adopted = self._adopt(pending, state["waiting"])
            if headers := state.get("anew"):
                adopted += self._write_anew(pending, headers)
            content = {name: value for name, value in state.items() if name not in ("waiting", "anew")}
            content["groups"] = [*state["groups"], *adopted]
            pending.records.append(write_json(pending.path / STATE, content))
        except RunError as error:
            self._give_up(pending, error.reason)
            return
        for rank in self.rollouts:
            self.world.post(rank, SaveGroups(step, str(pending.path / groups_file(rank))))

    def _adopt(self, pending: Pending, waiting: Sequence[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
        """Groups of the checkpoint this attempt began with that no rank has taken yet: their files come along."""
        names: dict[str, str] = {}
        for name in {name for _, _, name in waiting}:
            assert self.found is not None
            record = self.checkpoints.adopt(pending.path, self.found.path / name, self.found.files[name])
            pending.records.append(record)
            names[name] = record.name
        return [(group_id, prompt_id, names[name]) for group_id, prompt_id, name in waiting]

    def _write_anew(self, pending: Pending, headers: Sequence[AdmitGroup]) -> list[tuple[int, str, str]]:
        """Groups whose tokens are lost: what they are generated from is kept in the place of a rank's file."""
        path = pending.path / groups_file(0)
        pending.records.append(write_arrays(path, pack_groups([SavedGroup(header, {}, {}, {}) for header in headers])))
        return [(header.group_id, header.prompt_id, path.name) for header in headers]

    # ------------------------------------------------------------------------------------------------ collecting
    def part(self, source: int, message: TrainerSaved | GroupsSaved) -> None:
        """A rank has written its part."""
        pending = self.pending
        if pending is None or source not in pending.waiting:
            return  # of a checkpoint that was given up
        if isinstance(message, TrainerSaved):
            pending.step = message.step
        elif message.step != pending.step:
            return
        pending.waiting.discard(source)
        pending.records.append(FileRecord(message.name, message.num_bytes, message.sha256))
        for name in ("copy_s", "write_s"):
            pending.figures[name] = max(pending.figures.get(name, 0.0), getattr(message, name))
        if not pending.waiting and pending.is_cut:
            self._commit(pending)

    def part_failed(self, source: int, message: SaveFailed) -> None:
        """A rank could not write: the checkpoint before stands.

        Raises:
            RunError: DISK, for the second time in a row.
        """
        if self.pending is not None and message.step == self.pending.step:
            self._give_up(self.pending, f"rank {source}: {message.reason}")

    def _commit(self, pending: Pending) -> None:
        self.pending = None
        if not self.is_ours():
            raise RunError(
                Exit.FAILED, "another attempt has taken over the run directory; this one must not write there"
            )
        fault("controller.commit", self.world.rank)
        try:
            path = self.checkpoints.commit(pending.step, pending.path, pending.records, pending.facts)
            self.checkpoints.prune()
        except RunError as error:
            self._failed(pending.step, error.reason)
            return
        self.saved_step, self.saved_s, self.num_failed = pending.step, self.now(), 0
        self.part_s = pending.figures["copy_s"] + pending.figures["write_s"]
        size = sum(record.num_bytes for record in pending.records)
        seconds = self.now() - pending.began_s
        still = f"ranks stood still for at most {pending.figures['copy_s']:.3f} s"
        self.event("checkpoint", f"{path.name}: {size:,} bytes in {seconds:.2f} s, {still}")

    def poll(self) -> None:
        """Give up what takes too long."""
        if self.pending and self.now() - self.pending.began_s > self.config.deadlines.checkpoint_s:
            self._give_up(self.pending, f"ranks {sorted(self.pending.waiting)} wrote nothing in time")

    def _give_up(self, pending: Pending, why: str) -> None:
        self.pending = None
        self.checkpoints.abandon(pending.path)
        self._failed(pending.step, why)

    def _failed(self, step: int, why: str) -> None:
        self.saved_s = self.now()  # the next try comes as late as the next checkpoint
        self.num_failed += 1
        self.event("checkpoint_failed", f"step {step}: {why}; the one before stands")
        if self.num_failed >= MAX_FAILED:
            raise RunError(Exit.DISK, f"{self.num_failed} checkpoints in a row could not be written; the last: {why}")
