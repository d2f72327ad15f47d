"""How a run can end: the exit code of the job and what each one means to a person."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of `areal-hpc run` and of every rank."""

    DONE = 0
    FAILED = 1
    CONFIG = 2
    PREFLIGHT = 3
    DIVERGED = 4
    DEADLINE = 5
    DISK = 6
    REQUEUE = 75
    INTERRUPTED = 130


MEANING = {
    Exit.DONE: "the run reached its last step, or its data set is exhausted",
    Exit.FAILED: "an exception on one of the ranks",
    Exit.CONFIG: "the configuration or the data set is not usable; nothing was started",
    Exit.PREFLIGHT: "ranks disagree about the run, or the MPI world has not the expected size",
    Exit.DIVERGED: "too many batches in a row gave a loss or a gradient that is not finite",
    Exit.DEADLINE: "a rank waited longer than a deadline of the configuration",
    Exit.DISK: "the run directory cannot be written or read",
    Exit.REQUEUE: "saved before the job's time was over; the next attempt goes on",
    Exit.INTERRUPTED: "stopped by a signal (Ctrl-C, SIGTERM)",
}


class RunError(Exception):
    """A failure that ends the run with an exit code and one line a user can act on."""

    def __init__(self, code: Exit, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
