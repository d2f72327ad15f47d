"""Receive buffers that stay warm: faulting in fresh pages halves the throughput of a large message."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

LIMIT_BYTES = 512 * 1024**2
SMALLEST_BYTES = 1024**2


class WarmBlocks:
    """Hands out byte blocks and uses them again once no array looks at them. Keeps at most `limit_bytes`."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._blocks: list[NDArray[np.uint8]] = []
        self._alone = _references([np.empty(1, np.uint8)])[0]

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """A block of `num_bytes`, warm if one is free; small and very large ones are always fresh."""
        if not SMALLEST_BYTES <= num_bytes <= self._limit_bytes // 2:
            return np.empty(num_bytes, np.uint8)
        # An array cut from a block refers to that block itself: numpy collapses views of views.
        counts = _references(self._blocks)
        for block, count in zip(self._blocks, counts, strict=True):
            if count == self._alone and num_bytes <= block.size <= 2 * num_bytes:
                break
        else:
            block = np.empty(num_bytes, np.uint8)
        kept = [block]  # most recently used first; the oldest leave when the limit is reached
        for other in self._blocks:
            if other is not block and sum(map(len, kept)) + other.size <= self._limit_bytes:
                kept.append(other)
        self._blocks = kept
        return block[:num_bytes]


def _references(blocks: list[NDArray[np.uint8]]) -> list[int]:
    return [sys.getrefcount(block) for block in blocks]
