"""Reward functions for the reward tests: good, wrong, hanging, crashing and flooding ones. Imported by workers only."""

from __future__ import annotations

import contextlib
import ctypes
import fractions  # noqa: F401 - for literal()
import os
import resource
import signal
import subprocess
import sys
import time
from typing import Any


def reward(prompt: str, completion: str, metadata: dict[str, Any]) -> Any:
    return globals()[metadata["do"]](prompt, completion, metadata)


def note(metadata: dict[str, Any], text: str) -> None:
    with open(metadata["file"], "a") as file:
        file.write(text + "\n")


def first_time(metadata: dict[str, Any]) -> bool:
    first = not os.path.exists(metadata["file"])
    note(metadata, "been here")
    return first


# Values


def literal(_p: str, _c: str, metadata: dict[str, Any]) -> Any:
    return eval(metadata["value"])


def pair(_p: str, _c: str, metadata: dict[str, Any]) -> Any:
    return float(metadata["reward"]), metadata["outcome"]


def same_text(prompt: str, completion: str, metadata: dict[str, Any]) -> bool:
    return ascii(prompt + "|" + completion) == metadata["ascii"]


# Exceptions


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def fails(*_: Any) -> None:
    raise ValueError("first line\nsecond " + "x" * 100_000)


def unprintable(*_: Any) -> None:
    raise Unprintable


def surrogate(*_: Any) -> None:
    raise ValueError("bad \udc80")


def leaves(*_: Any) -> None:
    sys.exit(0)


def recursion(*_: Any) -> Any:
    return recursion()


def memory(*_: Any) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
    try:
        return len(bytearray(1 << 31))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


# Time


def spin(_p: str, _c: str, metadata: dict[str, Any]) -> None:
    note(metadata, str(os.getpid()))
    while True:
        pass


def nap(_p: str, _c: str, metadata: dict[str, Any]) -> int:
    time.sleep(metadata["s"])
    if "file" in metadata:
        note(metadata, "awake")
    return 1


def stubborn(_p: str, _c: str, metadata: dict[str, Any]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleeper = subprocess.Popen(["sleep", "1000"])
    forked = os.fork()
    if forked:
        note(metadata, f"{sleeper.pid} {forked} {os.getpid()}")
    while True:
        pass


# Death


def dies(_p: str, _c: str, metadata: dict[str, Any]) -> int:
    note(metadata, "try")
    if metadata["how"] == "exit":
        os._exit(3)
    elif metadata["how"] == "segfault":
        ctypes.string_at(0)
    elif metadata["how"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif metadata["how"] == "exit with a child":  # that keeps the pipe to the rank open
        if os.fork():
            os._exit(4)
        time.sleep(1000)
    elif metadata["how"] == "closed pipe":
        os.closerange(0, 100)
    return 1


def dies_once(_p: str, _c: str, metadata: dict[str, Any]) -> Any:
    if first_time(metadata):
        os._exit(1)
    return 1, "correct"


def garbage_once(_p: str, _c: str, metadata: dict[str, Any]) -> int:
    if first_time(metadata):
        for fd in range(3, 10):
            with contextlib.suppress(OSError):
                os.write(fd, b"a function that found the pipe")
        time.sleep(1000)
    return 1


def forks(*_: Any) -> int:
    return 7 if os.fork() else 666


# Surroundings


def floods(*_: Any) -> int:
    print("x" * 1_000_000)
    for fd in (1, 2):
        for _i in range(20):
            os.write(fd, b"y" * 1_000_000)
    subprocess.run(["echo", "from a child"], check=True)
    assert sys.stdin.read() == ""
    return 1


def warned(*_: Any) -> int:
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        os.kill(os.getpid(), number)
    return 1


def surroundings(*_: Any) -> int:
    ranks = [name for name in os.environ if name.startswith(("PMI", "OMPI", "MPI", "HYDRA", "SLURM", "RANK"))]
    assert not ranks, ranks
    assert os.environ["KEPT"] == "yes" and os.environ["OMP_NUM_THREADS"] == "1"
    heavy = {"torch", "numpy", "mpi4py", "h5py", "asyncio"} & set(sys.modules)
    assert not heavy, heavy
    assert os.getsid(0) == os.getpgid(0) == os.getpid()
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    kinds = sorted(os.readlink(link).split(":")[0] for link in links if os.path.lexists(link))
    assert kinds == ["/dev/null"] * 3 + ["pipe"] * 2, kinds
    assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
    with open("/proc/self/oom_score_adj") as file:
        assert file.read().strip() == "1000"
    return 1


# Parameters of many kinds


def all_facts(_p: str, _c: str, _m: dict, *, num_tokens, max_new_tokens, prompt_tokens, truncated, purpose):
    wanted = (7, 10, 3, True, "train")
    return (num_tokens, max_new_tokens, prompt_tokens, truncated, purpose) == wanted


def some(_p: str, _c: str, _m: dict, num_tokens: int = -1, tolerance: float = 0.0, **rest: Any) -> float:
    return num_tokens + tolerance + sum(rest.values())


def needs_more(_p: str, _c: str, _m: dict, *, threshold: float) -> float:
    return threshold


def number(_p: str, completion: str, _m: dict) -> float:
    return float(completion)


def length(_p: str, completion: str, _m: dict) -> int:
    return len(completion)


# Batches


def lengths(prompts: list, completions: list, metadata: list, *, num_tokens: list, calls: str) -> list:
    """Length of each completion as its reward; notes the size of every call."""
    note({"file": calls}, str(len(completions)))
    assert len(prompts) == len(metadata) == len(num_tokens) == len(completions)
    if "raise" in completions:
        raise ValueError("cannot judge this")
    if "die" in completions:
        os._exit(9)
    if "hang" in completions:
        time.sleep(1000)
    if "short" in completions:
        return []
    return [(len(completion), "wrong") if n else "none" for completion, n in zip(completions, num_tokens, strict=True)]


def hungry(_p: str, _c: str, metadata: dict[str, Any]) -> int:
    return len(bytearray(metadata["num_bytes"]))
