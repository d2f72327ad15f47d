"""Run a Python program on N MPI ranks from a test, with a deadline, and leave nothing behind.

    result = run_ranks(4, ["-c", code], timeout_s=60)
    result = run_ranks(2, ["-m", "areal_hpc.rank", "config.yaml"], timeout_s=60, env={"KEY": "value"})

The launcher is the `mpiexec` beside this Python. It gets its own session, and every process it starts inherits a unique
environment variable, by which leftovers are found and killed: also those that changed their process group.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "AREAL_HPC_TEST_RUN"
REPOSITORY = Path(__file__).resolve().parents[2]
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "PYTHONFAULTHANDLER": "1",
    # Open MPI refuses root and more ranks than cores unless told; MPICH ignores these.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


@dataclass(frozen=True)
class Result:
    """How a world ended. `returncode` is None when the deadline ended it."""

    returncode: int | None
    stdout: str
    stderr: str
    wall_s: float

    @property
    def timed_out(self) -> bool:
        return self.returncode is None

    def check(self) -> Result:
        """This result, or AssertionError with everything the ranks said when they did not all end well."""
        how = "deadline passed" if self.timed_out else f"exit code {self.returncode}"
        assert self.returncode == 0, f"{how} after {self.wall_s:.1f} s\n{self.stdout}\n{self.stderr}"
        return self


def mpiexec() -> str:
    """Path of the launcher that belongs to this Python, else the first on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert found, f"no mpiexec beside {sys.executable} and none on PATH"
    return found


def run_ranks(n: int, argv: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> Result:
    """Run `python *argv` on `n` ranks from the repository root; kill whatever is left of it before returning."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, **SETTINGS, **(env or {}), MARK: mark}
    command = [mpiexec(), "-n", str(n), sys.executable, *argv]
    started = time.monotonic()
    # Files, not pipes: a leftover that holds a pipe open would hold up the reader.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        launcher = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=out, stderr=err, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        returncode: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                returncode = launcher.wait(timeout_s)
        finally:
            wall_s = time.monotonic() - started
            _kill_marked(mark)
            launcher.wait()
        return Result(returncode, _text(out), _text(err), wall_s)


def marked_pids(mark: str) -> list[int]:
    """Processes whose environment carries this run's mark."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # A process may end, or belong to someone else, while we look.
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _kill_marked(mark: str, deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while (pids := marked_pids(mark)) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _text(stream: tempfile._TemporaryFileWrapper) -> str:  # type: ignore[type-arg]
    stream.seek(0)
    return stream.read().decode(errors="replace")
