"""A warning of the time limit that finds a rank in its imports, before anything of the run exists."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("number", "code"), [("SIGUSR2", 42), ("SIGTERM", -signal.SIGTERM)])
def test_a_rank_outlives_a_warning_while_it_starts(tmp_path, number, code):
    """The MPI library is one that sends the process a signal; whoever cancels a job still ends it."""
    (tmp_path / "mpi4py.py").write_text(
        f"import os, signal\nos.kill(os.getpid(), signal.{number})\nprint('still here', flush=True)\nos._exit(42)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "areal_hpc.rank", str(tmp_path / "attempt_1")],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    assert done.stdout == ("still here\n" if code == 42 else "")
