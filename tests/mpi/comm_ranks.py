"""What the ranks of test_comm.py do: `python comm_ranks.py PROGRAM [argument ...]` under mpiexec."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np

from areal_hpc.codec import Codec, CodecError, Frame, Message, pack_trailer
from areal_hpc.comm import TAG_FRAME, TAG_PAYLOAD, DeadlineExceeded, World
from areal_hpc.exits import Exit, RunError

DTYPES = ("bool", "int8", "uint8", "int32", "int64", "uint16", "float16", "float32", "float64")
WAIT_S = 60.0


class Note(Message):
    number: int


class Mixed(Message):
    ARRAYS: ClassVar[Mapping[str, str]] = {name: name for name in DTYPES}
    number: int


class Block(Message):
    ARRAYS: ClassVar[Mapping[str, str]] = {"data": "uint8"}
    number: int


TYPES = (Note, Mixed, Block)
CHUNKED = Codec(TYPES, inline_bytes=1024, chunk_bytes=4096)  # the path of large payloads, quickly
LARGE_CHUNKS = Codec(TYPES, chunk_bytes=500_000)  # too large for MPI to take without a matching receive


def ring() -> None:
    """A list of ranks goes round and grows; rank 0 sees all of them."""
    with World(CHUNKED, attempt=1) as world:
        following = (world.rank + 1) % world.size
        if world.rank == 0:
            world.post(following, Block(0), {"data": np.array([0], np.uint8)})
        data = world.recv(WAIT_S).arrays["data"]
        if world.rank:
            world.post(following, Block(0), {"data": np.append(data, np.uint8(world.rank))})
        else:
            assert data.tolist() == list(range(world.size)), data


def mixed_arrays(source: int, dest: int, number: int) -> dict[str, np.ndarray]:
    """The same random arrays on both sides: of no, one to three dimensions, empty ones among them, up to 30 kB."""
    rng = np.random.default_rng([source, dest, number])
    arrays = {}
    for name in DTYPES:
        shape = tuple(rng.choice([0, 1, 3, 11, 15], rng.integers(0, 4)))
        arrays[name] = (rng.normal(size=shape) * 40).astype(name)
    return arrays


def all_to_all(num_messages: str) -> None:
    """Everybody sends to everybody, itself included; every message arrives once, in order, with its own arrays."""
    with World(CHUNKED, attempt=1) as world:
        for number in range(int(num_messages)):
            for dest in range(world.size):
                world.post(dest, Mixed(number), mixed_arrays(world.rank, dest, number))
        expected = [0] * world.size
        for _ in range(int(num_messages) * world.size):
            received = world.recv(WAIT_S)
            assert received.message == Mixed(expected[received.source]), (received.source, received.message)
            for name, array in mixed_arrays(received.source, world.rank, expected[received.source]).items():
                arrived = received.arrays[name]
                assert (arrived.dtype, arrived.shape) == (array.dtype, array.shape)
                assert arrived.tobytes() == array.tobytes()
            expected[received.source] += 1
        world.flush(WAIT_S)
        assert world.poll() is None and world.unsent() == []


def deadline() -> None:
    """A wait that is too long says who was last heard."""
    with World(CHUNKED, attempt=1) as world:
        if world.rank == 0:
            world.post(1, Note(1))
            world.recv(WAIT_S)
        else:
            assert world.recv(WAIT_S).message == Note(1)
            try:
                world.recv(0.3)
            except DeadlineExceeded as error:
                print(error)
            world.post(0, Note(2))


def nobody_takes() -> None:
    """A large message to a busy rank: `send` returns, `flush` gives up at its deadline, later everything arrives."""
    with World(LARGE_CHUNKS, attempt=1) as world:
        if world.rank == 0:
            world.post(1, Block(5), {"data": np.full(4_000_000, 7, np.uint8)})
            try:
                world.flush(0.3)
            except DeadlineExceeded as error:
                print(error)
            world.comm.Send(np.zeros(1, np.uint8), 1, 99)
            world.flush(WAIT_S)
        else:
            world.comm.Recv(np.zeros(1, np.uint8), 0, 99)
            assert (world.recv(WAIT_S).arrays["data"] == 7).all()


def held() -> None:
    """A receiver that only makes progress takes payloads up to its limit; the rest waits at the sender."""
    with World(LARGE_CHUNKS, attempt=1, held_bytes=3_000_000) as world:
        if world.rank == 0:
            for number in range(5):
                world.post(1, Block(number), {"data": np.full(1_000_000, number, np.uint8)})
            progress_until(world, lambda: len(world.unsent()) <= 2, WAIT_S)
            progress_until(world, lambda: len(world.unsent()) < 2, 0.5)
            assert len(world.unsent()) == 2, world.unsent()
            world.comm.Send(np.zeros(1, np.uint8), 1, 99)
            world.flush(WAIT_S)
        else:
            progress_until(world, lambda: world.comm.Iprobe(0, 99), 2 * WAIT_S)
            world.comm.Recv(np.zeros(1, np.uint8), 0, 99)
            for number in range(5):
                received = world.recv(WAIT_S)
                assert received.message == Block(number) and (received.arrays["data"] == number).all()


def progress_until(world: World, done: Callable[[], bool], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while not done() and time.monotonic() < until:
        world.progress()
        time.sleep(0.005)


def ignored() -> None:
    """Doubled messages, and those of another attempt, are passed over with their payloads and counted."""
    with World(CHUNKED, attempt=2) as world:
        if world.rank == 0:
            large = {"data": np.arange(10_000).astype(np.uint8)}
            for sequence, attempt in ((0, 2), (0, 2), (7, 1), (1, 2)):
                ship(world, Block(sequence), large, sequence=sequence, attempt=attempt)
                ship(world, Note(sequence), {}, sequence=sequence, attempt=attempt + 10)
            ship(world, Note(2), {}, sequence=2, attempt=2)
            world.recv(WAIT_S)
        else:
            numbers = [world.recv(WAIT_S).message.number for _ in range(3)]
            print(numbers, world.check.duplicates, world.check.stale)
            world.post(0, Note(0))


def ship(world: World, message: Message, arrays: dict[str, np.ndarray], sequence: int, attempt: int) -> None:
    """Send by hand, with any sequence number and attempt."""
    frame = world.codec.encode(message, arrays, source=0, sequence=sequence, attempt=attempt)
    if frame.inline:
        world.comm.Send(frame.joined(), 1, TAG_FRAME)
        return
    world.comm.Send(frame.header, 1, TAG_FRAME)
    for part in [*frame.chunks(), trailer(frame)]:
        world.comm.Send(part, 1, TAG_PAYLOAD)


def trailer(frame: Frame) -> bytes:
    return pack_trailer([frame.crc(index, chunk) for index, chunk in enumerate(frame.chunks())])


def damage(how: str) -> None:
    """Rank 0 sends one bad message; rank 1 says what it makes of it and ends the world with exit code 7."""
    world = World(CHUNKED, attempt=1, stall_s=0.3)
    if world.rank == 0:
        send_damaged(world, how)
        time.sleep(WAIT_S)
    try:
        world.recv(WAIT_S)
    except (CodecError, DeadlineExceeded) as error:
        print(f"{type(error).__name__}: {error}")
        world.abort(7)


def send_damaged(world: World, how: str) -> None:
    source = 5 if how == "wrong source" else 0
    sequence = 3 if how == "gap" else 0
    data = {"data": np.zeros(10_000, np.uint8)}
    frame = world.codec.encode(Block(0), data, source=source, sequence=sequence, attempt=1)
    if how == "noise":
        world.comm.Send(np.full(100, 0xAB, np.uint8), 1, TAG_FRAME)
        return
    world.comm.Send(frame.header, 1, TAG_FRAME)
    parts = [np.array(chunk) for chunk in frame.chunks()]
    if how == "flipped bit":
        parts[1][17] ^= 4
    elif how == "short part":
        parts[1] = parts[1][:-1]
    elif how == "long part":
        parts[1] = np.append(parts[1], np.uint8(0))
    elif how == "missing part":
        del parts[1:]
    for part in parts:
        world.comm.Send(part, 1, TAG_PAYLOAD)
    if how != "missing part":
        world.comm.Send(trailer(frame), 1, TAG_PAYLOAD)


def fail(how: str) -> None:
    """The last rank fails while the others wait for a message."""
    with World(CHUNKED, attempt=1) as world:
        if world.rank < world.size - 1:
            world.recv(WAIT_S)
        # A thread that is not a daemon must not hold up the end (Pyomo/mpi-sppy #853).
        threading.Thread(target=time.sleep, args=(WAIT_S,)).start()
        if how == "exception":
            raise RuntimeError("reason to be read")
        if how == "run error":
            raise RunError(Exit.DISK, "reason to be read")
        if how == "exit":
            sys.exit(5)
        world.abort(42)


def leave() -> None:
    """sys.exit(0) on one rank is a healthy end: it waits for the others to finish."""
    with World(CHUNKED, attempt=1) as world:
        if world.rank == 0:
            sys.exit(0)
        time.sleep(1)
        sys.stdout.write("finished\n")


def hang_at_end() -> None:
    """Rank 0 closes, rank 1 never does: rank 0 does not wait for ever."""
    world = World(CHUNKED, attempt=1)
    if world.rank == 1:
        time.sleep(WAIT_S)
    world.close(timeout_s=0.5, exit_code=9)


def idle(seconds: str) -> None:
    """All ranks but 0 wait for a message; prints the CPU seconds each of them used for it."""
    with World(CHUNKED, attempt=1) as world:
        if world.rank == 0:
            time.sleep(float(seconds))
            for dest in range(1, world.size):
                world.post(dest, Note(0))
            for _ in range(1, world.size):
                print("cpu", world.recv(WAIT_S).message.number / 1e6)
        else:
            before = time.process_time()
            world.recv(WAIT_S)
            world.post(0, Note(int((time.process_time() - before) * 1e6)))


def large(gib: str) -> None:
    """One payload above 2 GiB, with the default codec."""
    size = int(float(gib) * 1024**3)
    with World(Codec(TYPES), attempt=1) as world:
        if world.rank == 0:
            data = np.zeros(size, np.uint8)
            data[:: 1024**2 + 1] = 0xA5
            world.post(1, Block(1), {"data": data})
            world.flush(300)
        else:
            data = world.recv(300).arrays["data"]
            marks = np.count_nonzero(data[:: 1024**2 + 1] == 0xA5)
            assert data.size == size and marks == -(-size // (1024**2 + 1)) == np.count_nonzero(data)


def detached_child(pid_file: str) -> None:
    """Leaves a child in a session of its own and never ends."""
    child = os.fork()
    if child == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    with open(f"{pid_file}.{os.getpid()}", "w") as file:
        file.write(str(child))
    time.sleep(600)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
