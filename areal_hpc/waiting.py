"""How a rank waits: it sleeps between looks, longer the longer nothing happens, and never spins.

A blocking MPI receive burns a core; on a node with more ranks than cores that stops everybody else.
"""

from __future__ import annotations

import time


class Backoff:
    """Sleeps that grow by half from `first_s` to `longest_s`; `reset()` when something happened."""

    def __init__(self, first_s: float = 0.0005, longest_s: float = 0.01) -> None:
        self.first_s = first_s
        self.longest_s = longest_s
        self._next_s = first_s

    def sleep(self) -> None:
        time.sleep(self._next_s)
        self._next_s = min(self.longest_s, self._next_s * 1.5)

    def reset(self) -> None:
        self._next_s = self.first_s


class Stopwatch:
    """Seconds per named phase; phases with the same name add up."""

    def __init__(self) -> None:
        self._began_s = self._lap_s = time.monotonic()
        self._phases: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._lap_s
        self._lap_s = now

    def finish(self) -> dict[str, float]:
        """All phases and `total_s`; the watch starts again."""
        phases = self._phases | {"total_s": time.monotonic() - self._began_s}
        self._began_s = self._lap_s = time.monotonic()
        self._phases = {}
        return phases
