"""The process that calls the user's reward functions: `python -m areal_hpc.rewards.process RECIPE PARENT_PID`.

Started by `areal_hpc.rewards.service`, never by hand: one request after another comes in on fd 0, one answer for each
of its samples goes out on what was fd 1. The process may be killed at any moment, so it holds nothing worth keeping. It
imports neither torch, MPI nor numpy unless a function does.

It protects the rank from accidents (loops, crashes, prints, memory), not from malice: code written by a model must not
run in here without a sandbox.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
import time
from typing import BinaryIO

import msgspec

from areal_hpc.rewards.functions import Scorer, describe
from areal_hpc.rewards.recipe import Recipe
from areal_hpc.rewards.wire import Answer, Sample, answer_frame, one_line, read_frame

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies, and leave at once if it is dead already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed: the process could outlive its rank")
    if os.getppid() != parent:
        os._exit(1)


def settle(memory_bytes: int | None) -> tuple[BinaryIO, int]:
    """Move the protocol away from fd 0 and 1, which user code may read and print to; returns (requests, answers)."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is not None:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:  # when memory ends, the kernel shall take this process and not the rank
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        # Slurm's walltime warning is for ranks. A handler, since SIG_IGN would pass on to children of the function.
        signal.signal(number, lambda *_: None)
    return requests, answers


def main(arguments: list[str]) -> None:
    """Load the functions, say "ready", answer until the rank closes the pipe; does not return."""
    die_with(int(arguments[1]))
    recipe = Recipe.from_text(arguments[0])
    requests, answers = settle(recipe.memory_bytes)
    try:
        scorer = Scorer(recipe)
    except BaseException as error:  # user code may raise anything
        os.write(answers, answer_frame(Answer(0, math.nan, "error", 0.0, one_line(describe(error)))))
        os._exit(1)
    os.write(answers, answer_frame(Answer(0, math.nan, "ready", 0.0, "")))
    decoder = msgspec.msgpack.Decoder(list[Sample])
    while (body := read_frame(requests)) is not None:
        samples = decoder.decode(body)
        started = time.monotonic()
        judged = scorer(samples)
        seconds = time.monotonic() - started
        for sample, (reward, outcome, detail, text) in zip(samples, judged, strict=True):
            last = scorer.exhausted and sample is samples[-1]
            answer = Answer(sample.id, reward, outcome, seconds, detail, last, text)  # type: ignore[arg-type]
            os.write(answers, answer_frame(answer))
    os._exit(0)  # threads left by a function must not hold the process


if __name__ == "__main__":
    main(sys.argv[1:])
