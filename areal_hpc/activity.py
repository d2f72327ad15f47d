"""What a rank is doing, as an unbroken series of intervals; the source of busy and idle time in the run log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from areal_hpc.logschema import Activity


class Interval(NamedTuple):
    """From `start_s` to `stop_s`, in seconds on the recorder's clock, the rank did `kind`."""

    kind: Activity
    start_s: float
    stop_s: float


class ActivityRecorder:
    """Keeps the intervals of one rank: each begins where the one before ends, neighbours differ in kind.

        recorder = ActivityRecorder(clock)
        recorder.switch("generate")
        with recorder("swap"):      # back to "generate" afterwards
            load()

    A clock that steps back (it is corrected against the controller's) shortens an interval, never makes two overlap.
    """

    def __init__(self, clock: Callable[[], float], kind: Activity | str = Activity.IDLE) -> None:
        """Args: clock: seconds on the run clock; kind: what the rank does now, a member or its label."""
        self._clock = clock
        self._kind = _activity(kind)
        self._since_s = clock()
        self._intervals: list[Interval] = []

    @property
    def kind(self) -> Activity:
        """What the rank does now."""
        return self._kind

    def switch(self, kind: Activity | str) -> None:
        """From now on the rank does `kind`; ValueError for a kind that is not in logschema.Activity."""
        new = _activity(kind)
        if new is not self._kind:
            self._cut()
            self._kind = new

    @contextmanager
    def __call__(self, kind: Activity | str) -> Iterator[None]:
        """The rank does `kind` inside the block, and afterwards, exception or not, what it did before."""
        before = self._kind
        self.switch(kind)
        try:
            yield
        finally:
            self.switch(before)

    def drain(self) -> list[Interval]:
        """Everything up to now that was not drained before; the next drain begins at this instant."""
        self._cut()
        intervals, self._intervals = self._intervals, []
        return intervals

    def _cut(self) -> None:
        now = self._clock()
        if now <= self._since_s:
            return
        last = self._intervals[-1] if self._intervals else None
        if last is not None and last.kind is self._kind:
            self._intervals[-1] = last._replace(stop_s=now)
        else:
            self._intervals.append(Interval(self._kind, self._since_s, now))
        self._since_s = now


def _activity(kind: Activity | str) -> Activity:
    try:
        return Activity[kind.upper()] if isinstance(kind, str) else Activity(kind)
    except (KeyError, ValueError):
        raise ValueError(f"unknown activity {kind!r}; known: {', '.join(Activity.labels())}") from None
