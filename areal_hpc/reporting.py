"""What every trainer and rollout rank tells the controller besides its work: what it is busy with, and events."""

from __future__ import annotations

import time

import numpy as np

from areal_hpc import signals
from areal_hpc.activity import ActivityRecorder, Interval
from areal_hpc.comm import World
from areal_hpc.messages import ActivityReport, Event, Warned
from areal_hpc.preflight import CONTROLLER, RunClock

REPORT_EVERY_S = 1.0


def interval_arrays(intervals: list[Interval]) -> dict[str, np.ndarray]:
    """The arrays of an ActivityReport."""
    return {
        "kind": np.array([i.kind for i in intervals], np.uint8),
        "start_s": np.array([i.start_s for i in intervals], np.float64),
        "stop_s": np.array([i.stop_s for i in intervals], np.float64),
    }


def num_ignored(world: World) -> int:
    """Messages this rank has ignored because they came twice or from another attempt."""
    return world.check.duplicates + world.check.stale


class Reporter:
    """Sends the intervals of `activity` about once a second; a sign of life at the same time."""

    def __init__(self, world: World, clock: RunClock) -> None:
        self.world = world
        self.activity = ActivityRecorder(clock.now, "startup")
        self._next_s = time.monotonic() + REPORT_EVERY_S
        self._num_ignored_told = 0

    def tick(self) -> None:
        """Cheap; call it in every loop."""
        if (name := signals.take()) is not None:
            self.world.post(CONTROLLER, Warned(name))
        if time.monotonic() >= self._next_s:
            self.send()

    def send(self) -> None:
        self._next_s = time.monotonic() + REPORT_EVERY_S
        self.world.post(CONTROLLER, ActivityReport(), interval_arrays(self.activity.drain()))
        if (count := num_ignored(self.world)) > self._num_ignored_told:
            self._num_ignored_told = count
            self.event("messages_ignored", f"{count} doubled or stale messages ignored so far on this rank")

    def event(self, kind: str, text: str) -> None:
        self.world.post(CONTROLLER, Event(kind, text))
