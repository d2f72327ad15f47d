"""Flow control towards rollout ranks."""

from __future__ import annotations

from collections.abc import Collection


class Credits:
    """Free places for samples, per rollout rank. The rank with most is the one with least outstanding work."""

    def __init__(self) -> None:
        self.free: dict[int, int] = {}

    def grant(self, rank: int, num_samples: int) -> None:
        self.free[rank] = self.free.get(rank, 0) + num_samples

    def take(self, num_samples: int, among: Collection[int] | None = None) -> int | None:
        """Reserve places on one rank (of `among`), or return None when no rank has that many."""
        ranks = self.free if among is None else among
        if not ranks:
            return None
        rank = max(ranks, key=lambda r: (self.free[r], -r))
        if self.free[rank] < num_samples:
            return None
        self.free[rank] -= num_samples
        return rank
