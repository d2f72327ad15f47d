"""The part of the controller that saves the run and ends it early."""

from __future__ import annotations

from typing import Any

from areal_hpc import signals
from areal_hpc.casualties import Casualties
from areal_hpc.exits import Exit, RunError
from areal_hpc.instructions import CreditsGranted
from areal_hpc.resuming import SavedRun
from areal_hpc.saver import groups_file


class Endings(Casualties):
    """Base of the controller.

    Attributes:
        saved: the state of an earlier attempt that this one goes on from.
        ending: what asked for the end, once something has.
    """

    saved: SavedRun | None
    data: dict[str, list[Any]]
    ending: str | None = None

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The controller's part of a checkpoint, and what its manifest says."""
        state = self.state.snapshot()
        rank_of = self.state.outstanding()
        held = {group_id: rank for group_id, rank in rank_of.items() if rank not in self.lost}
        groups = [(g, self.groups[g].prompt_id, groups_file(rank)) for g, rank in held.items()]
        lost = self.state.anew | (rank_of.keys() - held.keys())
        anew = [self.admission(group_id, self.state.version) for group_id in sorted(lost)]
        waiting = [(g, *self.saved.group(g)) for g in self.state.backlog if g not in lost] if self.saved else []
        cursor = list(self.source.cursor)
        facts = {name: state[name] for name in ("step", "version")} | {"config": self.config.model_dump(mode="json")}
        own = {"cursor": cursor, "data": self.data, "evaluation": self.examiner.snapshot()}
        return state | own | {"groups": groups, "waiting": waiting, "anew": anew}, facts

    def idle(self) -> None:
        self.saver.poll()
        if (name := signals.take()) is not None:
            self.asked_to_end(name, self.world.rank)
        if self.ending is None and self.time_is_over(self.saver.part_s):
            self.end_early(f"walltime ({self.walltime.left_s:.0f} s left, no warning came)", requeue=True)
        if self.state.closed != self.walltime.closed:
            self.state.closed = self.walltime.closed
            self.examiner.admit()
            self.handle_event(CreditsGranted(self.rollouts[0], 0))  # looks at prompts again

    def asked_to_end(self, name: str, rank: int) -> None:
        """A signal: save what there is, and end. Raises RunError as `end_early` does, once."""
        if self.ending is None:
            self.event("signal", f"{name} on rank {rank}", rank)
            self.end_early(f"{name} on rank {rank}", requeue=name == signals.SAVE_AND_REQUEUE.name)

    def end_early(self, why: str, requeue: bool) -> None:
        """Save what there is, and end.

        Raises:
            RunError: REQUEUE or INTERRUPTED, when all is saved or has failed.
        """
        self.ending = why
        if self.state.started:
            self.progress.now("saving")
            self.save_now()
        saved = f"step {self.saver.saved_step} is saved" if self.saver.saved_step >= 0 else "nothing was saved"
        reason = f"stopped by {self.ending} at version {self.state.version}; {saved}"
        raise RunError(Exit.REQUEUE if requeue else Exit.INTERRUPTED, reason)

    def save_now(self) -> None:
        """A checkpoint of this moment: the trainer leaves the step it is in, no group is admitted or composed."""
        self.state.started = False
        self.saver.order_now(self.state.snapshot()["step"])

        def done() -> bool:
            if (step := self.saver.awaits_cut) is not None:
                self.saver.cut(step, *self.snapshot())
            return self.saver.pending is None

        self.wait_for_progress(done, lambda: "the checkpoint")
