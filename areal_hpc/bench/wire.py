"""Payload MB/s of messages, checksums on, against raw MPI Send/Recv of the same bytes between two ranks of one machine.

Both sides send the same warm array `count` times and wait for one answer; they take turns in the same two processes.
Raw MPI receives into one warm array and checks nothing. Messages are received into buffers of the receiver's choosing,
and each byte is hashed on both sides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from areal_hpc.bench.report import report
from areal_hpc.codec import Codec, Message
from areal_hpc.comm import World
from areal_hpc.launch import find_mpiexec

GOAL = 0.8
KIB = 1024
SIZES = {"64 KiB": 64 * KIB, "1 MiB": KIB**2, "16 MiB": 16 * KIB**2, "64 MiB": 64 * KIB**2, "256 MiB": 256 * KIB**2}
HEADLINE = "64 MiB"
BYTES_PER_TURN = 256 * KIB**2
MAX_COUNT = 1000
DEADLINE_S = 300.0
RAW_TAG, RAW_ANSWER_TAG = 11, 12

Array = NDArray[np.uint8]


class Block(Message):
    """Rank 0 -> rank 1: bytes."""

    ARRAYS: ClassVar[Mapping[str, str]] = {"data": "uint8"}


class Ping(Message):
    """Either way: everything before me has arrived."""

    number: int


def main(argv: list[str]) -> int:
    """Start two ranks of this program, and report what they measured."""
    parser = argparse.ArgumentParser(prog="areal-hpc bench wire", description=__doc__)
    parser.add_argument("--repeats", type=int, default=9, help="turns of each side (default: %(default)s)")
    parser.add_argument("--round-trips", type=int, default=2000, help="small messages (default: %(default)s)")
    parser.add_argument("--rank-mode", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank_mode:
        return rank_main(options.repeats, options.round_trips)
    measured = start_ranks(argv)
    ours, raw = measured["ours"], measured["raw"]
    return report(
        "wire",
        "MB/s",
        ours[HEADLINE],
        raw[HEADLINE],
        goal=GOAL,
        rows=[
            *(row(name, ours[name], raw[name]) for name in SIZES),
            ("round trips of a small message", f"{measured['round_trips_per_s']:.0f} /s"),
            ("MPI library", measured["library"]),
        ],
    )


def row(size: str, ours: list[float], raw: list[float]) -> dict[str, str]:
    pairs = [a / b for a, b in zip(ours, raw, strict=True)]
    return {
        "payload": size,
        "messages MB/s": f"{statistics.median(ours):.0f}",
        "raw MPI MB/s": f"{statistics.median(raw):.0f}",
        "ratio": f"{statistics.median(ours) / statistics.median(raw):.2f}",
        "spread": f"{min(pairs):.2f} .. {max(pairs):.2f}",
    }


def start_ranks(argv: list[str]) -> dict:
    """Run two ranks of this program under mpiexec; returns what rank 0 printed."""
    code = "import sys; from areal_hpc.bench.wire import main; sys.exit(main(sys.argv[1:]))"
    command = [find_mpiexec(), "-n", "2", sys.executable, "-c", code, "--rank-mode", *argv]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=2 * DEADLINE_S)
    if ended.returncode != 0:
        raise SystemExit(f"areal-hpc bench wire: the ranks ended with exit code {ended.returncode}")
    return json.loads(ended.stdout)


def rank_main(repeats: int, round_trips: int) -> int:
    """One of the two ranks; rank 0 prints JSON."""
    with World(Codec((Block, Ping)), attempt=0) as world:
        if world.size != 2:
            raise SystemExit(f"areal-hpc bench wire needs 2 ranks, the MPI world has {world.size}")
        ours: dict[str, list[float]] = {}
        raw: dict[str, list[float]] = {}
        for name, size in SIZES.items():
            data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
            count = max(1, min(MAX_COUNT, BYTES_PER_TURN // size))
            for turn in (raw_turn, message_turn):
                turn(world, data, 1)  # warm pages and connections on both sides
            for _ in range(repeats):
                raw.setdefault(name, []).append(rate(raw_turn, world, data, count))
                ours.setdefault(name, []).append(rate(message_turn, world, data, count))
        result = {"ours": ours, "raw": raw, "round_trips_per_s": ping(world, round_trips), "library": world.library}
        if world.rank == 0:
            print(json.dumps(result), flush=True)
    return 0


def rate(turn: Callable[[World, Array, int], None], world: World, data: Array, count: int) -> float:
    start = time.perf_counter()
    turn(world, data, count)
    return count * data.nbytes / (time.perf_counter() - start) / 1e6


def raw_turn(world: World, data: Array, count: int) -> None:
    if world.rank == 0:
        for _ in range(count):
            world.comm.Send(data, 1, RAW_TAG)
        world.comm.Recv(data[:1].copy(), 1, RAW_ANSWER_TAG)
    else:
        for _ in range(count):
            world.comm.Recv(data, 0, RAW_TAG)
        world.comm.Send(data[:1], 0, RAW_ANSWER_TAG)


def message_turn(world: World, data: Array, count: int) -> None:
    if world.rank == 0:
        for _ in range(count):
            world.post(1, Block(), {"data": data})
        answer = world.recv(DEADLINE_S).message
        assert answer == Ping(count), f"expected Ping({count}), got {answer}"
    else:
        for _ in range(count):
            assert world.recv(DEADLINE_S).arrays["data"].shape == data.shape
        world.post(0, Ping(count))


def ping(world: World, count: int) -> float:
    """Round trips per second of a message without arrays."""
    start = time.perf_counter()
    for number in range(count):
        if world.rank == 0:
            world.post(1, Ping(number))
            answer = world.recv(DEADLINE_S).message
            assert answer == Ping(number), f"expected Ping({number}), got {answer}"
        else:
            world.post(0, world.recv(DEADLINE_S).message)
    return count / (time.perf_counter() - start)
