"""The part of the controller that goes on without a lost rollout rank.

A rank is lost when its lifeline ends, when MPI cannot reach it, or when it has been silent for
`deadlines.heartbeat_s`. Its groups are generated anew elsewhere, under the same ids;
a batch whose samples are not all with the trainers is composed again without them; the weights group is built again of
the living. A torn weights group alone proves nothing: if nobody turns out to be lost, the same ranks build it again.

What a lost rank sends later is ignored and counted. If it lives all the same (it was stopped, or its link was cut) it
is told to leave, once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np

from areal_hpc.bookkeeping import BatchRecord, GroupRecord
from areal_hpc.comm import World
from areal_hpc.config import Config
from areal_hpc.controller_state import ControllerState
from areal_hpc.data import Source
from areal_hpc.desk import Desk
from areal_hpc.examiner import Examiner
from areal_hpc.exits import Exit, RunError
from areal_hpc.instructions import Event, RankLost, SamplesHere
from areal_hpc.messages import AdmitGroup, BeginStep, SamplesArrived, Stop
from areal_hpc.preflight import RunClock, num_expendable, reward_ranks, role_of
from areal_hpc.runlog_writer import RunLogWriter
from areal_hpc.saver import Saver
from areal_hpc.survival_messages import PeerLost, Pulse, RecallBatches, Regroup, WeightsTorn

LOOK_S = 0.5
SUSPECT_S = 15.0
"""Longest silence of a rank while the weights group is torn: somebody must be the reason."""
MAX_FUTILE = 3


class Casualties(Desk):
    """Base of the controller."""

    state: ControllerState
    groups: dict[int, GroupRecord]
    batches: dict[int, BatchRecord]
    source: Source
    saver: Saver
    examiner: Examiner

    def __init__(self, config: Config, world: World, clock: RunClock, log: RunLogWriter) -> None:
        super().__init__(config, world, clock, log)
        self.may_lose = num_expendable(config)
        self.scorers = reward_ranks(config)
        self.lost: dict[int, str] = {}
        self.dismissed: set[int] = set()
        self.edition = 0
        self.incomplete: dict[tuple[int, int], set[int]] = {}
        """(Step, edition) -> trainers that wait for samples of it."""
        self.generation = 0
        self.torn_s: float | None = None
        self.num_futile = 0
        self.mended_version = -1
        self.looked_s = self.pulsed_s = -math.inf

    def handle_event(self, event: Event) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------- noticing
    def check_heartbeats(self) -> None:
        """Raises RunError (DEADLINE) naming a silent or dead rank that the run cannot go on without."""
        now_s = time.monotonic()
        if now_s - self.looked_s < LOOK_S:
            return
        self.looked_s = now_s
        missing = dict(self.silent_ranks(now_s))
        for rank, why in missing.items():
            self.lose(rank, why)
        if missing:
            self.regroup()
        if self.may_lose:
            self.dismiss_late_ones()
            self.mend_weights(now_s)
            self.pulse(now_s)

    def silent_ranks(self, now_s: float) -> Iterator[tuple[int, str]]:
        """Ranks that are lost, as it seems, and why."""
        self.world.look_at_lifelines()
        for rank in sorted({*self.heard_s, *self.rollouts}):
            silent_s = now_s - self.heard_s[rank] if rank in self.heard_s else 0.0
            limit_s = self.config.deadlines.heartbeat_s
            if self.torn_s is not None and rank in self.rollouts and now_s - self.torn_s > SUSPECT_S:
                limit_s = min(limit_s, SUSPECT_S)
            if rank in self.world.trouble:
                yield rank, self.world.trouble[rank]
            elif silent_s > limit_s:
                yield rank, f"has not been heard for {silent_s:.0f} s"

    def pulse(self, now_s: float) -> None:
        """Where nobody else sees the controller die, it has to be heard."""
        if self.heard_s and now_s - self.pulsed_s > self.config.deadlines.heartbeat_s / 4:
            self.pulsed_s = now_s
            for rank in (*self.trainers, *self.rollouts, *self.scorers):
                self.world.post(rank, Pulse())

    # --------------------------------------------------------------------------------------------- going smaller
    def lose(self, rank: int, why: str) -> None:
        """Go on without this rank.

        Raises:
            RunError: DEADLINE, the run cannot.
        """
        who = f"rank {rank} ({role_of(rank, self.config)})"
        if rank not in self.rollouts or len(self.lost) >= self.may_lose or not self.heard_s:
            so_far = f"; {len(self.lost)} rollout ranks are lost already, no more may be" if self.lost else ""
            raise RunError(Exit.DEADLINE, f"{who} {why}{so_far}")
        host = self.hosts.get(rank, "?")
        self.lost[rank] = why
        self.heard_s.pop(rank)
        self.rollouts.remove(rank)
        self.loaded_version.pop(rank)
        self.world.forget(rank)
        for peer in (*self.trainers, *self.scorers):
            self.world.post(peer, PeerLost(rank))
        self.saver.lose(rank)
        num_before = self.state.num_lost
        self.handle_event(RankLost(rank))
        again = f"{self.state.num_lost - num_before} groups"
        left = f"{len(self.rollouts)} rollout ranks go on, {self.may_lose - len(self.lost)} more may be lost"
        text = f"{who} on {host} is lost: it {why}; {again} are generated anew elsewhere; {left}"
        self.event("rank_lost", text, rank)
        self.flush()
        self.progress.lost(rank, host, text)
        self.examiner.lost(rank)

    def dismiss_late_ones(self) -> None:
        """A rank that was taken for lost and has sent something since lives: tell it to leave."""
        for rank, num_ignored in list(self.world.lost.items()):
            if num_ignored and rank not in self.dismissed:
                self.dismissed.add(rank)
                self.event("rank_dismissed", "it was taken for lost, and lives; what it sends is ignored", rank)
                self.world.dismiss(rank, Stop("taken for lost", whole=False))

    # ------------------------------------------------------------------------------------------ groups, batches
    def readmit(self, group_id: int, rank: int, min_version: int) -> None:
        """The same prompt under the same id, from the beginning, on another rank."""
        prompt_id = self.groups[group_id].prompt_id
        self.groups[group_id] = GroupRecord(group_id, prompt_id, rank, self.clock.now())
        self.world.post(rank, self.admission(group_id, min_version))

    def admission(self, group_id: int, min_version: int) -> AdmitGroup:
        """What tells a rollout rank to generate a group from its prompt."""
        prompt = self.source.named(self.groups[group_id].prompt_id)
        size = self.config.trainer.group_size
        return AdmitGroup(group_id, prompt.prompt_id, prompt.text, prompt.metadata, size, min_version)

    def recall(self, step: int) -> None:
        """Batches from this step on are none any more."""
        self.edition += 1
        steps = [other for other in self.batches if other >= step]
        for other in steps:
            del self.batches[other]
        self.incomplete = {key: trainers for key, trainers in self.incomplete.items() if key[0] < step}
        for trainer in self.trainers:
            self.world.post(trainer, RecallBatches(step))
        self.event("batches_recalled", f"steps {steps}: samples are lost; they are composed again")

    def samples_arrived(self, trainer: int, header: SamplesArrived) -> None:
        """When the last trainer has its samples of a step, all may begin it."""
        missing = self.incomplete.get((header.step, header.edition))
        if missing is None:
            return  # of a batch that was recalled
        missing.discard(trainer)
        if not missing:
            del self.incomplete[header.step, header.edition]
            for rank in self.trainers:
                self.world.post(rank, BeginStep(header.step))
            self.handle_event(SamplesHere(header.step))

    # -------------------------------------------------------------------------------------------------- weights
    def torn(self, source: int, header: WeightsTorn) -> None:
        if header.generation == self.generation:
            self.event("weights_torn", header.reason, source)
            self.torn_s = self.torn_s or time.monotonic()

    def mend_weights(self, now_s: float) -> None:
        """Nobody is lost, and yet the group is torn: the same ranks try again, a few times."""
        if self.torn_s is None or now_s - self.torn_s < SUSPECT_S + 2 * LOOK_S:
            return
        self.num_futile = 1 if self.version_everywhere > self.mended_version else self.num_futile + 1
        self.mended_version = self.version_everywhere
        if self.num_futile > MAX_FUTILE:
            raise RunError(
                Exit.DEADLINE, f"the weights group broke {self.num_futile} times in a row, and nobody is lost"
            )
        self.regroup()

    def regroup(self) -> None:
        """Have the living build the next weights group; the sender then sends the newest version to all of them."""
        self.torn_s = None
        if self.config.is_simulated:
            return
        self.generation += 1
        members = np.array([self.trainers[0], *self.rollouts], np.int64)
        for rank in members.tolist():
            self.world.post(rank, Regroup(self.generation), {"rank": members})
