"""The controller's decisions as a pure state machine: events in, instructions out.

No clock, no messages, no files: `ControllerState.handle(event)` returns what is to be done, and the shell in
controller.py does it. The unit of counting is the prompt group. A group is

    running -> ready -> taken -> consumed
         \\-> left (filtered, refused, unscored)    taken -> left (its batch was skipped)

A group of an earlier attempt waits in the backlog until a rollout rank has room for it, and is running then. So does
one whose rollout rank was lost before its samples had reached the trainers: under the same id, so that it stays in the
count and its samples have the same random streams, it is generated anew elsewhere.
Groups that left are out of the staleness count, so a replacement is admitted at once under a new id. With `refill` off
a filtered group is not replaced. It keeps its place in the count and in a batch of B, which is smaller for it, and the
version rises by one per batch as ever. A batch of which nothing is left is no step: its B places leave the count, as
those of a skipped batch do, or eta = 0 would wait for ever.
With `validate=True` every event is followed by a check of all invariants.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from areal_hpc.config import Config
from areal_hpc.credits import Credits
from areal_hpc.instructions import (
    Admit,
    Announce,
    BatchTrained,
    Compose,
    CreditsGranted,
    EmptyBatch,
    Event,
    Finish,
    GroupDone,
    GroupRefusedByRank,
    Instruction,
    Leave,
    RankLost,
    Readmit,
    Recall,
    Restore,
    SamplesHere,
    Start,
)
from areal_hpc.staleness import counted_at_resume, may_admit

NOBODY = -1
"""Rollout rank of a group that is forgotten and only holds a place."""


# ------------------------------------------------------------------------------------------------------- state
@dataclass(frozen=True, slots=True)
class Rules:
    """What the decisions depend on; see config for the meaning of each."""

    batch_size: int
    group_size: int
    steps: int
    max_staleness: float
    order: Literal["admission", "strict"] = "admission"
    max_running_groups: int | None = None
    min_success: float = 0.0
    max_success: float = 1.0
    refill: bool = True
    min_usable: int = 1
    num_prompts: int | None = None
    max_batches_taken: int = 2  # one in training and one whose samples already travel

    @classmethod
    def of(cls, config: Config, num_prompts: int | None) -> Rules:
        """The rules of a (resolved) configuration over a data set of `num_prompts`, None without end."""
        trainer, staleness = config.trainer, config.staleness
        return cls(
            batch_size=trainer.batch_size,
            group_size=trainer.group_size,
            steps=config.steps,
            max_staleness=staleness.eta,
            order=staleness.order,
            max_running_groups=staleness.max_running_groups,
            min_success=config.filter.min_success,
            max_success=config.filter.max_success,
            refill=config.filter.refill,
            min_usable=1 if trainer.advantage.group_norm == "none" else 2,
            num_prompts=num_prompts,
        )


@dataclass(slots=True)
class ControllerState:
    """All that the controller knows about groups and versions.

    Attributes:
        version: newest policy version that rollout ranks have been told to load (i of the rule).
        next_id: the id of the next group; ids count on over all attempts.
        counted: groups in the staleness count (admitted and not left, earlier attempts included).
        backlog: groups of an earlier attempt, or of a lost rank, that wait for room, oldest first.
        anew: those of the backlog whose samples are lost.
        running, ready: group id -> rollout rank.
        taken: batches handed to the trainers, oldest first.
        complete: steps of taken batches whose samples are with the trainers.
        lost: ranks that are gone.
        num_lost: groups that had to be generated anew for it.
        rejected: groups in `ready` or in a batch that only hold a place there: filtered and not replaced.
        empty_batches: batches of which the filter left nothing.
        closed: the job's time is nearly over, no prompt is admitted.
    """

    rules: Rules
    validate: bool = False
    version: int = 0
    next_id: int = 0
    counted: int = 0
    consumed_batches: int = 0
    composed: int = 0
    started: bool = False
    finished: bool = False
    closed: bool = False
    prompts_used: int = 0
    credits: Credits = field(default_factory=Credits)
    backlog: deque[int] = field(default_factory=deque)
    anew: set[int] = field(default_factory=set)
    running: dict[int, int] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    taken: list[dict[int, int]] = field(default_factory=list)
    complete: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    num_lost: int = 0
    rejected: set[int] = field(default_factory=set)
    empty_batches: int = 0
    left: Counter[str] = field(default_factory=Counter)

    def snapshot(self) -> dict[str, Any]:
        """What an attempt needs to go on after the last trained step; batches in training are groups like others."""
        return {
            "step": self.trained_step,
            "version": self.version,
            "next_id": self.next_id,
            "prompts_used": self.prompts_used,
            "left": dict(self.left),
            "empty_batches": self.empty_batches,
            "rejected": sorted(self.rejected),
            "group_ids": sorted([*self.outstanding(), *self.backlog]),
        }

    @classmethod
    def resume(cls, rules: Rules, saved: Mapping[str, Any], validate: bool = False) -> ControllerState:
        """The state that `snapshot` described: v * B groups are consumed, its groups count once (AReaL issue 1388)."""
        version, groups, rejected = saved["version"], saved["group_ids"], saved.get("rejected", [])
        return cls(
            rules,
            validate=validate,
            version=version,
            next_id=saved["next_id"],
            counted=counted_at_resume(version, rules.batch_size, len(groups) + len(rejected)),
            consumed_batches=version,
            composed=saved["step"],
            prompts_used=saved["prompts_used"],
            backlog=deque(sorted(groups)),
            left=Counter(saved["left"]),
            ready=dict.fromkeys(rejected, NOBODY),
            rejected=set(rejected),
            empty_batches=saved.get("empty_batches", 0),
        )

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event, return what is to be done, in this order."""
        out: list[Instruction] = []
        match event:
            case Start():
                self.started = True
            case CreditsGranted(rank, num_samples):
                self.credits.grant(rank, num_samples)
            case GroupDone(group_id, usable, correct):
                self._group_done(group_id, usable, correct, out)
            case GroupRefusedByRank(group_id):
                self._leave(group_id, self.running.pop(group_id), "refused", out)
            case BatchTrained(skipped):
                self._batch_trained(skipped, out)
            case SamplesHere(step):
                self.complete.add(step)
            case RankLost(rank):
                self._rank_lost(rank, out)
        if self.started and not self.finished:
            self._compose(out)
            self._restore(out)
            self._admit(out)
            self._finish(out)
        if self.validate:
            self.check()
        return out

    # ------------------------------------------------------------------------------------------ what happened
    def _group_done(self, group_id: int, usable: int, correct: int, out: list[Instruction]) -> None:
        rank = self.running.pop(group_id)
        if usable < self.rules.min_usable:
            self._leave(group_id, rank, "unscored", out)
        elif not self.rules.min_success <= correct / usable <= self.rules.max_success:
            self._leave(group_id, rank, "filtered", out)
            if not self.rules.refill:
                self.counted += 1
                self.ready[group_id] = NOBODY
                self.rejected.add(group_id)
        else:
            self.ready[group_id] = rank

    def _leave(
        self,
        group_id: int,
        rank: int,
        why: Literal["filtered", "unscored", "refused", "skipped"],
        out: list[Instruction],
    ) -> None:
        self.counted -= 1
        self.left[why] += 1
        out.append(Leave(group_id, rank, why))

    def _batch_trained(self, skipped: bool, out: list[Instruction]) -> None:
        batch = self.taken.pop(0)
        self.complete.discard(self.trained_step)
        if skipped:
            # The version stands still, so these groups must leave the count or eta = 0 would wait for ever.
            for group_id, rank in batch.items():
                if group_id not in self.rejected:
                    self._leave(group_id, rank, "skipped", out)
            self._forget_rejected(batch)
            return
        self.rejected.difference_update(batch)
        self.consumed_batches += 1
        self.version += 1
        out.append(Announce(self.version))

    def _forget_rejected(self, batch: Collection[int]) -> None:
        """Give up the places that rejected groups hold in a batch that will never be trained."""
        self.counted -= len(self.rejected.intersection(batch))
        self.rejected.difference_update(batch)

    def _rank_lost(self, rank: int, out: list[Instruction]) -> None:
        self.lost.add(rank)
        self.credits.free.pop(rank, None)
        first = self.trained_step + 1
        for step, batch in enumerate(self.taken, first):
            if rank in batch.values() and step not in self.complete:
                self._recall(step, out)
                break
        anew = [g for groups in (self.running, self.ready) for g, owner in groups.items() if owner == rank]
        self.running = {g: owner for g, owner in self.running.items() if owner != rank}
        self.ready = {g: owner for g, owner in self.ready.items() if owner != rank}
        self.anew.update(anew)
        self.num_lost += len(anew)
        self.backlog = deque(sorted([*self.backlog, *anew]))

    def _recall(self, step: int, out: list[Instruction]) -> None:
        """Later batches come back, too: steps are trained in order."""
        num_kept = step - 1 - self.trained_step
        for batch in self.taken[num_kept:]:
            self.ready |= batch
        del self.taken[num_kept:]
        self.composed = step - 1
        self.complete = {other for other in self.complete if other < step}
        out.append(Recall(step))

    # ------------------------------------------------------------------------------------------- what follows
    def _next_batch(self) -> list[int] | None:
        """The B oldest ready groups; in strict order only if no older group is still running."""
        if len(self.ready) < self.rules.batch_size:
            return None
        oldest = sorted(self.ready)[: self.rules.batch_size]
        if self.rules.order == "strict" and any(older < oldest[-1] for older in (*self.running, *self.backlog)):
            return None
        return oldest

    def _compose(self, out: list[Instruction]) -> None:
        while len(self.taken) < self.rules.max_batches_taken:
            batch = self._next_batch()
            if batch is None:
                return
            owners = {group_id: self.ready.pop(group_id) for group_id in batch}
            kept = tuple(group_id for group_id in batch if group_id not in self.rejected)
            if not kept:
                self._forget_rejected(batch)
                self.empty_batches += 1
                out.append(EmptyBatch(len(batch)))
                continue
            self.taken.append(owners)
            self.composed += 1
            out.append(Compose(self.composed, kept))

    def _prompts_left(self) -> bool:
        return self.rules.num_prompts is None or self.prompts_used < self.rules.num_prompts

    def _has_room(self) -> bool:
        cap = self.rules.max_running_groups
        return cap is None or len(self.running) < cap

    def _restore(self, out: list[Instruction]) -> None:
        while self.backlog and self._has_room():
            rank = self.credits.take(self.rules.group_size)
            if rank is None:
                return
            group_id = self.backlog.popleft()
            self.running[group_id] = rank
            if group_id in self.anew:
                self.anew.discard(group_id)
                out.append(Readmit(group_id, rank, self.version))
            else:
                out.append(Restore(group_id, rank))

    def _may_admit(self) -> bool:
        rules = self.rules
        return (
            not self.closed
            and self._has_room()
            and not self.backlog
            and self.counted < rules.steps * rules.batch_size
            and self._prompts_left()
            and may_admit(self.counted + 1, rules.batch_size, self.version, rules.max_staleness)
        )

    def _admit(self, out: list[Instruction]) -> None:
        while self._may_admit():
            rank = self.credits.take(self.rules.group_size)
            if rank is None:
                return
            group_id = self.next_id
            self.next_id += 1
            self.counted += 1
            self.prompts_used += 1
            self.running[group_id] = rank
            out.append(Admit(group_id, rank, self.version))

    def _finish(self, out: list[Instruction]) -> None:
        if self.version >= self.rules.steps:
            self.finished = True
            out.append(Finish("last step reached"))
        elif not self._prompts_left() and not self.backlog and not self.running and not self.taken:
            self.finished = True
            out.append(Finish("data set exhausted"))

    # -------------------------------------------------------------------------------------------- for people
    @property
    def trained_step(self) -> int:
        """The newest step that is through, skipped or not."""
        return self.composed - len(self.taken)

    def outstanding(self) -> dict[int, int]:
        """Group id -> rollout rank of everything that a rollout rank holds: not consumed and not left."""
        groups = self.running | self.ready
        for batch in self.taken:
            groups |= batch
        return {group_id: rank for group_id, rank in groups.items() if group_id not in self.rejected}

    def counters(self) -> dict[str, int]:
        """The counting columns of the step table."""
        return {
            "num_admitted": self.next_id,
            "num_consumed": self.consumed_batches * self.rules.batch_size,
            "num_filtered": self.left["filtered"],
            "num_empty_batches": self.empty_batches,
        }

    def waiting_for(self) -> str:
        """One line that explains why no step is being trained, for deadlines and status."""
        rules = self.rules
        left = ", ".join(f"{n} {why}" for why, n in sorted(self.left.items())) or "none left the count"
        empty = f" ({len(self.rejected.intersection(self.ready))} of them filtered)" if self.rejected else ""
        waiting = f"{len(self.backlog)} of an earlier attempt or a lost rank waiting, " if self.backlog else ""
        return (
            f"version {self.version}: {len(self.ready)} of {rules.batch_size} groups ready{empty}, "
            f"{len(self.running)} running, {waiting}{len(self.taken)} batches with the trainers, {left}"
        )

    def check(self) -> None:
        """Raise AssertionError when an invariant does not hold; for tests and replays."""
        rules = self.rules
        taken = [group_id for batch in self.taken for group_id in batch]
        everything = [*self.backlog, *self.running, *self.ready, *taken]
        assert len(everything) == len(set(everything)), "a group is in two places"
        assert self.counted == len(everything) + self.consumed_batches * rules.batch_size, "the staleness count is off"
        assert all(len(batch) == rules.batch_size for batch in self.taken), "a taken batch has not B groups"
        assert self.rejected <= {*self.ready, *taken}, "a rejected group holds no place"
        assert NOBODY not in self.outstanding().values(), "nobody holds a group that is to be trained on"
        assert all(free >= 0 for free in self.credits.free.values()), "more samples on a rank than it has places"
        assert len(everything) <= (rules.max_staleness + 1) * rules.batch_size, (
            "more groups outstanding than (eta + 1) B"
        )
        assert self.version == self.consumed_batches, "version and consumed batches differ"
        assert len(self.taken) <= rules.max_batches_taken
        if rules.max_running_groups is not None:
            assert len(self.running) <= rules.max_running_groups, "more groups running than allowed"
        incomplete = [b for step, b in enumerate(self.taken, self.trained_step + 1) if step not in self.complete]
        held = [rank for groups in (self.running, self.ready, *incomplete) for rank in groups.values()]
        assert not self.lost & {*held, *self.credits.free}, "something is waited for from a lost rank"
        assert self.anew <= set(self.backlog), "a group is generated anew twice"
        if rules.order == "strict" and taken and (older := [*self.running, *self.backlog]):
            assert max(taken) < min(older), "strict order: a group was overtaken"
