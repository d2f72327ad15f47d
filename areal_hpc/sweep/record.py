"""What a sweep has done: DIRECTORY/sweep.json, and the lock under which it is changed."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc.exits import Exit, RunError
from areal_hpc.rundir import read_json, write_json

STOPS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Submitted:
    """One job of a point.

    Attributes:
        job_id: as sbatch said.
        lane: jobs of one lane run one after the other.
        output: file that the job prints to.
    """

    job_id: str
    lane: int = 0
    output: str = ""


@dataclass(slots=True)
class PointRecord:
    """One point.

    Attributes:
        varied: axis -> value, as the configuration understood it.
        gpus: GPUs of trainers and rollouts, simulated ones included; 0 without GPUs.
        world_size: MPI ranks.
        steps: that the run will have.
        compute: engine, for instance simulated.
        speedup: simulated seconds per second; 1 when nothing is simulated.
        fingerprint: hash of the configuration.
        jobs: every submission, oldest first.
    """

    varied: dict[str, Any]
    gpus: int
    world_size: int
    steps: int
    compute: str
    speedup: float
    fingerprint: str
    jobs: list[Submitted] = field(default_factory=list)


class SweepRecord:
    """The points of a sweep, in the order of the specification, with their jobs."""

    def __init__(self, directory: Path, points: dict[str, PointRecord]) -> None:
        self.directory = directory
        self.points = points

    @classmethod
    def read(cls, directory: Path) -> SweepRecord:
        """The record so far, without points when there is none.

        Raises RunError: CONFIG, it cannot be read.
        """
        path = directory / "sweep.json"
        try:
            found = read_json(path).get("points", {})
            points = {
                name: PointRecord(**{**point, "jobs": [Submitted(**job) for job in point["jobs"]]})
                for name, point in found.items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"areal-hpc: {path} cannot be read as the record of a sweep: {error}"
            raise RunError(Exit.CONFIG, f"{reason}; restore it, or move it away") from None
        return cls(directory, points)

    def write(self) -> None:
        """Replace the file as a whole. Raises OSError."""
        write_json(self.directory / "sweep.json", {"points": {n: asdict(p) for n, p in self.points.items()}})

    def run_dir(self, name: str) -> Path:
        return self.directory / name

    def jobs(self, name: str) -> list[Submitted]:
        """Jobs of a point, oldest first; a submission that was killed before it could be recorded left its script."""
        recorded = self.points[name].jobs
        known = {job.job_id for job in recorded}
        scripts = [path.stem for path in (self.run_dir(name) / "slurm").glob("*.sbatch") if path.stem.isdecimal()]
        others = [Submitted(job_id) for job_id in scripts if job_id not in known]
        return sorted([*recorded, *others], key=lambda job: int(job.job_id))


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Only one process at a time changes a sweep; its lock names the owner.

    The kernel's lock ends with its owner. Between hosts some file systems do not have it: there the name counts.

    Raises:
        RunError: CONFIG, another process has it, or the directory cannot be written.
    """
    path = directory / "sweep.lock"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise RunError(Exit.CONFIG, f"areal-hpc: {path} cannot be written: {error.strerror}") from None
    try:
        if (owner := _owner(file)) is not None:
            hint = f"wait for its end; if it is gone, delete {path}"
            raise RunError(Exit.CONFIG, f"areal-hpc: the sweep in {directory} is being changed by {owner}; {hint}")
        os.pwrite(file, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(file, 0)
    finally:
        os.close(file)


def _owner(file: int) -> str | None:
    """Who has the lock, in words; None: nobody, and from now on this process."""
    taken = False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        has_lock = True
    except BlockingIOError:
        has_lock, taken = False, True
    except OSError:  # a file system without locks
        has_lock = False
    pid, _, host = os.pread(file, 1000, 0).decode(errors="replace").strip().partition(" ")
    here = host == socket.gethostname()
    if not taken and host:
        taken = not here or (not has_lock and pid.isdecimal() and _is_alive(int(pid)))
    if not taken:
        os.ftruncate(file, 0)
        return None
    return f"process {pid} on {host}" if host else "another process"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect at the end of the block, in programs that it starts, too.

    Blocking them is enough for programs; here another thread may take the signal, so that it is also caught.
    """
    caught: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    handlers = {number: signal.signal(number, lambda n, _: caught.append(n)) for number in STOPS} if is_main else {}
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in caught:
            signal.raise_signal(late)
