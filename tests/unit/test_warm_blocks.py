"""Receive buffers are used again, and never while somebody still looks at them."""

from __future__ import annotations

import numpy as np

from areal_hpc.warm_blocks import WarmBlocks

MIB = 1024**2


def address(block: np.ndarray) -> int:
    return block.__array_interface__["data"][0]


def test_a_block_is_used_again_once_its_last_array_is_gone():
    blocks = WarmBlocks()
    block = blocks.take(4 * MIB)
    array = block[64 : 64 + MIB].view(np.int32).reshape(512, -1)
    first = address(block)
    del block
    part = array[3:5].T  # a view of a view of a view still holds the block
    del array
    other = blocks.take(4 * MIB)
    assert address(other) != first
    del part
    assert address(blocks.take(3 * MIB)) == first


def test_a_block_is_not_wasted_on_a_much_smaller_request():
    blocks = WarmBlocks()
    first = address(blocks.take(8 * MIB))
    small = blocks.take(3 * MIB)
    assert address(small) != first
    assert address(blocks.take(5 * MIB)) == first


def test_no_two_live_arrays_share_memory():
    blocks = WarmBlocks()
    rng = np.random.default_rng(0)
    alive: list[np.ndarray] = []
    for number in range(200):
        block = blocks.take(int(rng.integers(MIB, 4 * MIB)))
        block[:] = number % 251
        alive.append(block[5:])
        if len(alive) > 4:
            assert len({int(a[0]) for a in alive}) == len(alive) and all((a == a[0]).all() for a in alive)
            del alive[rng.integers(len(alive))]


def test_it_keeps_no_more_than_its_limit():
    blocks = WarmBlocks(limit_bytes=8 * MIB)
    for size in (4, 2, 1, 3, 4, 2):
        blocks.take(size * MIB)
        assert sum(block.size for block in blocks._blocks) <= 8 * MIB
    huge = blocks.take(5 * MIB)  # above half of the limit: fresh, not kept
    assert huge.size == 5 * MIB and all(block.size < 5 * MIB for block in blocks._blocks)
    assert blocks.take(100).size == 100
