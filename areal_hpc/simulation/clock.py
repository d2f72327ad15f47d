"""Simulated time: real time, `speedup` times faster."""

from __future__ import annotations

import time
from collections.abc import Callable

NAP_S = 0.02
"""Longest real sleep of a rank that has messages to handle; a quarter of it is the shortest."""


class Clock:
    """Moments and durations in simulated seconds.

    Args:
        speedup: simulated seconds per real second.
        monotonic, sleep: real time.
    """

    def __init__(
        self,
        speedup: float,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.speedup = speedup
        self._monotonic = monotonic
        self._sleep = sleep

    def now(self) -> float:
        return self._monotonic() * self.speedup

    def real(self, simulated_s: float) -> float:
        """A simulated moment as a reading of time.monotonic(), or a duration in real seconds."""
        return simulated_s / self.speedup

    def sleep_until(self, moment_s: float, between: Callable[[], None] | None = None) -> None:
        """Sleep until a simulated moment, calling `between` about every NAP_S real seconds."""
        while (left_s := self.real(moment_s - self.now())) > 0:
            self._sleep(left_s if between is None else min(NAP_S, left_s))
            if between is not None:
                between()

    def nap(self, moment_s: float) -> None:
        """Sleep until a simulated moment, for 5 to 20 real milliseconds."""
        self._sleep(min(NAP_S, max(NAP_S / 4, self.real(moment_s - self.now()))))
