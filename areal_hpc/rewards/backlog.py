"""When too many answers wait for their reward, a rollout rank takes in no new prompts; it never stops decoding."""

from __future__ import annotations

import time
from collections.abc import Callable


class Backlog:
    """Decides whether a rollout rank may tell the controller about free places.

    It holds from the moment at which more than `limit` answers wait until at most half as many do.

    Args:
        limit: answers submitted and not yet returned.
        tell: called with one sentence when it begins to hold and when it ends.

    Attributes:
        held_s: seconds held in all, the present time not counted.
    """

    def __init__(
        self, limit: int, tell: Callable[[str], None], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.held_s = 0.0
        self._tell, self._monotonic = tell, monotonic
        self._since_s: float | None = None

    def holds(self, num_pending: int) -> bool:
        """True while no new work may be asked for."""
        if self._since_s is None:
            if num_pending > self.limit:
                self._since_s = self._monotonic()
                self._tell(f"{num_pending} answers wait, reward.max_pending is {self.limit}: no new prompts for now")
        elif num_pending <= self.limit // 2:
            seconds = self._monotonic() - self._since_s
            self.held_s += seconds
            self._since_s = None
            self._tell(f"new prompts again after {seconds:.1f} s; {self.held_s:.1f} s without since the start")
        return self._since_s is not None
