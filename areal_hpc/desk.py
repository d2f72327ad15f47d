"""What the controller sits at: messages, clock, run log, and waiting with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from areal_hpc.activity import ActivityRecorder
from areal_hpc.comm import Received, World
from areal_hpc.config import Config
from areal_hpc.exits import Exit, RunError
from areal_hpc.messages import (
    ActivityReport,
    ClockPing,
    ClockPong,
    Event,
    RankFailed,
    Ready,
    WeightsLoaded,
    WeightsSent,
)
from areal_hpc.preflight import RunClock, role_of, rollout_ranks, trainer_ranks, unusable
from areal_hpc.progress import Progress
from areal_hpc.reporting import interval_arrays, num_ignored
from areal_hpc.runlog_writer import RunLogWriter
from areal_hpc.waiting import Backoff
from areal_hpc.walltime import Stage, Walltime


class Desk:
    """Base of the controllers of a run and of an evaluation, which add their own messages to `handle`, and `idle`."""

    progress: Progress

    def __init__(self, config: Config, world: World, clock: RunClock, log: RunLogWriter) -> None:
        self.config = config
        self.world = world
        self.clock = clock
        self.log = log
        self.log_s = 0.0
        self.walltime = Walltime(config)
        self.activity = ActivityRecorder(clock.now)
        self.num_ignored_told = 0
        self.sent_version = -1
        self.trainers = trainer_ranks(config)
        self.rollouts = rollout_ranks(config)
        self.hosts: dict[int, str] = {}
        self.loaded_version = dict.fromkeys(self.rollouts, -1)
        self.progressed_s = time.monotonic()
        self.heard_s: dict[int, float] = {}
        self.not_ready = set(range(1, world.size))
        if config.reward.sandbox == "rlimits":
            self.event("sandbox", "limits only: a program can read files and processes of this user (reward.sandbox)")

    def handle(self, received: Received) -> None:
        """Take one message of those that every rank sends in every run.

        Raises:
            RunError: a rank has failed, or nobody may send this message here.
        """
        source = received.source
        match received.message:
            case ClockPing(local_s):
                self.world.post(source, ClockPong(local_s, self.clock.now()))
            case Ready():
                self.not_ready.discard(source)
            case ActivityReport():
                self.log_activity(received.arrays, source)
            case Event(kind, text):
                self.event(kind, text, source)
            case RankFailed(code, reason):
                raise RunError(Exit(code), f"rank {source} ({role_of(source, self.config)}) {reason}")
            case _:
                raise unusable(self.world, self.config, received)

    def idle(self) -> None:
        """Called between messages while waiting; may raise."""

    def time_is_over(self, part_s: float | None = None) -> bool:
        """One look at the clock: whether the job has to end without having been told to.

        Args:
            part_s: the longest time a rank took for its part of the last checkpoint.
        """
        for text in self.walltime.look(part_s):
            self.event("walltime", text)
            self.progress.walltime(text)
        if self.walltime.stage is Stage.CLOSE:
            self.progressed_s = time.monotonic()  # without new prompts nobody waits for a step, but for the end
        return self.walltime.stage is Stage.END

    def event(self, kind: str, text: str, rank: int = 0) -> None:
        self.log.event(self.clock.now(), kind, text, rank)

    def flush(self) -> None:
        if (count := num_ignored(self.world)) > self.num_ignored_told:
            self.num_ignored_told = count
            self.event("messages_ignored", f"{count} doubled or stale messages ignored so far on the controller")
        self.log_activity(interval_arrays(self.activity.drain()), self.world.rank)
        with self.activity("log"):
            self.log_s += self.log.flush()

    def log_step(self, row: Mapping[str, Any]) -> None:
        """The step's row, with all that came before it."""
        self.log_s = 0.0
        self.log.step(row)
        self.flush()

    def log_activity(self, intervals: dict[str, np.ndarray], rank: int) -> None:
        self.log.activity(intervals | {"rank": np.full(len(intervals["kind"]), rank, np.int32)})

    @property
    def version_everywhere(self) -> int:
        """The newest version that has left the trainer and is loaded on every rollout rank."""
        return min(self.sent_version, *self.loaded_version.values())

    def weights_sent(self, sent: WeightsSent) -> None:
        self.sent_version = sent.version
        names = ("version", "num_bytes", "snapshot_s", "broadcast_s")
        self.log.weight_update({name: getattr(sent, name) for name in names} | {"time_s": self.clock.now()})

    def weights_loaded(self, loaded: WeightsLoaded, rank: int) -> None:
        self.loaded_version[rank] = loaded.version
        names = ("version", "receive_s", "pause_s", "interrupted", "reprefilled_tokens")
        row = {name: [getattr(loaded, name)] for name in names}
        self.log.weight_loads(row | {"rank": [rank], "time_s": [self.clock.now()]})

    def expect_heartbeats(self) -> None:
        """From now on every rank must be heard. While it loads its model it is silent; `startup_s` is for that."""
        self.heard_s = dict.fromkeys(range(1, self.world.size), time.monotonic())

    def check_heartbeats(self) -> None:
        """Raises RunError (DEADLINE) naming the rank that has been silent for longest, if too long."""
        if not self.heard_s:
            return
        rank, heard_s = min(self.heard_s.items(), key=lambda item: item[1])
        silent_s = time.monotonic() - heard_s
        if silent_s > self.config.deadlines.heartbeat_s:
            role = role_of(rank, self.config)
            raise RunError(Exit.DEADLINE, f"rank {rank} ({role}) has not been heard for {silent_s:.0f} s")

    def wait_for_progress(self, done: Callable[[], bool], waiting_for: Callable[[], str]) -> None:
        """Wait as long as steps keep finishing; `deadlines.step_s` without one ends the run."""
        self.progressed_s = time.monotonic()
        self.wait(done, self.config.deadlines.step_s, waiting_for)

    def wait(self, done: Callable[[], bool], timeout_s: float, waiting_for: Callable[[], str]) -> None:
        """Handle messages until `done()`.

        Raises:
            RunError: DEADLINE after `timeout_s` without a finished step; what `handle` and `idle` raise.
        """
        pause = Backoff()
        while not done():
            received = self.world.poll()
            if received is not None:
                if received.source in self.heard_s:
                    self.heard_s[received.source] = time.monotonic()
                self.handle(received)
                pause.reset()
                continue
            self.idle()
            self.check_heartbeats()
            if time.monotonic() - self.progressed_s > timeout_s:
                raise RunError(
                    Exit.DEADLINE, f"nothing finished for {timeout_s:.0f} s while waiting for {waiting_for()}"
                )
            pause.sleep()
