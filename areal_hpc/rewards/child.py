"""One reward process, seen from the rank: two non-blocking pipes, a few answers to score, one deadline."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

import msgspec

from areal_hpc.rewards.recipe import Recipe
from areal_hpc.rewards.wire import Answer, pop_frame, request_frame

if TYPE_CHECKING:
    from areal_hpc.trajectory import Key

_RANK_PREFIXES = ("PMI", "OMPI_", "MPI", "I_MPI_", "MV2_", "HYD", "PRTE_", "PALS_", "SLURM")
_RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_PIPE_BYTES = 65536  # what a pipe holds: one read takes all that a dead process has left


def command(recipe: Recipe) -> list[str]:
    """Command line of a process of the calling rank. Raises RewardError for a recipe that cannot be passed on."""
    return [sys.executable, "-m", "areal_hpc.rewards.process", recipe.absolute().to_text(), str(os.getpid())]


def environment() -> dict[str, str]:
    """Its environment: the rank's, without whatever would make a child think that it is a rank, too."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_RANK_PREFIXES) and name not in _RANK_NAMES
    }
    kept["OMP_NUM_THREADS"] = "1"
    kept["PYTHONPATH"] = os.pathsep.join(os.path.abspath(place) for place in sys.path if place)
    return kept


@dataclass(slots=True)
class Job:
    """One answer to score. `alone`: it was in a batch that came to nothing, so it gets a process for itself."""

    id: int
    key: Key
    sample: msgspec.Raw
    deaths: int = 0
    alone: bool = False


class Child:
    """A process from its start to its end.

    Attributes:
        ready: its functions are loaded.
        jobs: what it works on, by id; nothing new before all of it is answered.
        in_batch: those were more than one at the beginning.
        deadline: when it must be ready, or have answered (time.monotonic()).
        fault: why it is of no use any more, where it shows in what it sent.
    """

    def __init__(self, command: Sequence[str], selector: selectors.BaseSelector, start_timeout_s: float) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
            env=environment(),
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._requests: IO[bytes] = self.process.stdin
        self._answers: IO[bytes] = self.process.stdout
        for pipe in (self._requests, self._answers):
            os.set_blocking(pipe.fileno(), False)
        self._selector = selector
        selector.register(self._answers, selectors.EVENT_READ, self)
        self._outgoing = memoryview(b"")
        self._incoming = bytearray()
        self.ready = False
        self.jobs: dict[int, Job] = {}
        self.in_batch = False
        self.started = time.monotonic()
        self.deadline = self.started + start_timeout_s
        self.fault: str | None = None

    @property
    def is_free(self) -> bool:
        return self.ready and not self.jobs and self.fault is None

    def take(self, jobs: Sequence[Job], timeout_s: float) -> None:
        """Start on some jobs."""
        self.jobs = {job.id: job for job in jobs}
        self.in_batch = len(jobs) > 1
        self._outgoing = memoryview(request_frame([job.sample for job in jobs]))
        self._selector.register(self._requests, selectors.EVENT_WRITE, self)
        self.deadline = time.monotonic() + timeout_s
        self.send(timeout_s)

    def send(self, timeout_s: float) -> None:
        """Hand over what the pipe takes now. The time limit runs anew from the last byte on."""
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self._requests.fileno(), self._outgoing) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            pass  # the process is dead or about to be: `failure` will see it
        self._forget(self._requests)
        self.started = time.monotonic()
        self.deadline = self.started + timeout_s

    def receive(self) -> list[Answer]:
        """Answers that have arrived; bytes that are no answer are a fault of the process."""
        try:
            chunk = os.read(self._answers.fileno(), _PIPE_BYTES)
        except BlockingIOError:
            return []
        if not chunk:  # dead or about to be; `failure` reads the exit status as soon as there is one
            self._forget(self._answers)
            self.kill()
        self._incoming += chunk
        answers: list[Answer] = []
        try:
            while (body := pop_frame(self._incoming)) is not None:
                answers.append(msgspec.msgpack.decode(body, type=Answer))
        except (ValueError, msgspec.MsgspecError) as error:
            self.fault = f"sent a broken answer ({error})"
        return answers

    def finish(self, id: int) -> Job:
        """Take a job off it; without any it has no deadline."""
        job = self.jobs.pop(id)
        if not self.jobs:
            self.deadline = math.inf
        return job

    def failure(self) -> str | None:
        """Why this process is of no use any more; None while it is. Leaves a dead process unreaped, see `kill`."""
        if self.fault is not None:
            return self.fault
        try:
            status = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # this rank was started with SIGCHLD ignored
            return "vanished"
        if status is None:
            return None
        if status.si_code == os.CLD_EXITED:
            return f"exited with status {status.si_status}"
        return f"was killed by signal {status.si_status} ({signal.strsignal(status.si_status)})"

    def kill(self) -> None:
        """SIGKILL the process group. The leader must not be reaped before, else its group id may be a stranger's."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def bury(self) -> None:
        """Kill and let go of the pipes; only `process` is left, to be reaped."""
        self.kill()
        for pipe in (self._requests, self._answers):
            self._forget(pipe)
            pipe.close()

    def _forget(self, pipe: IO[bytes]) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(pipe)
