"""The beginning of an attempt, on this machine under mpiexec or on the first node of a job: check, prepare, make room.

    python -m areal_hpc.attempt CONFIG [a.b=value ...]

prints the directory of the new attempt, which is all that its ranks need to know. The batch script is kept there.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from areal_hpc.check import facts
from areal_hpc.config import Config, PrepareConfig
from areal_hpc.configcheck import Checked, check_config
from areal_hpc.exits import Exit, RunError
from areal_hpc.jobspec import run_job
from areal_hpc.rundir import RunDir


def main(argv: Sequence[str]) -> int:
    result = os.dup(1)  # what `$(...)` of the batch script takes; whatever the preparation prints is for people
    os.dup2(2, 1)
    try:
        checked, run_dir = begin(Path(argv[0]), argv[1:])
        if "SLURM_JOB_ID" in os.environ:
            refuse_known_bad(checked.config, argv[0], argv[1:])
    except RunError as error:
        print(error.reason, file=sys.stderr)
        return int(error.code)
    print(f"{facts(checked)}\n  attempt  {run_dir.attempt}", flush=True)
    if script := os.environ.get("AREAL_HPC_BATCH_SCRIPT"):
        shutil.copy(script, run_dir.batch_script)
    os.write(result, f"{run_dir.attempt_dir}\n".encode())
    return int(Exit.DONE)


def begin(path: Path, overrides: Sequence[str]) -> tuple[Checked, RunDir]:
    """Check a configuration, make what it prepares, and open the next attempt of its run.

    Raises:
        ConfigErrors: it is not usable, before or after the preparation.
        RunError: CONFIG, what prepares cannot be loaded.
    """
    checked = check_config(path, overrides)
    if checked.config.prepare is not None:
        prepare(checked.config.prepare)
        checked = check_config(path, overrides)
    config = checked.config.resolved()
    run_dir = RunDir.next_attempt(Path(config.run_dir))
    run_dir.config.write_text(config.to_yaml(), encoding="utf-8")
    return checked, run_dir


def refuse_known_bad(config: Config, path: str, overrides: Sequence[str]) -> None:
    """Refuse what cannot start: no such MPI plugin, or one that does not fit the MPI library or this version of Slurm.

    Raises:
        RunError: PREFLIGHT, with everything that was found and what to do.
    """
    from areal_hpc.comm import MPI
    from areal_hpc.doctor import about_slurm, component_hosts

    hosts = component_hosts(run_job(config, path, overrides, sys.executable), os.environ)
    library = " ".join(MPI.Get_library_version().split("\n")[0].split())
    bad = [f"{found.text}; {found.advice}" for found in about_slurm(config, library, hosts) if found.level == "bad"]
    if bad:
        raise RunError(Exit.PREFLIGHT, "\n".join(f"areal-hpc: {text}" for text in bad))


def prepare(settings: PrepareConfig) -> None:
    """Call the configured function with its directory; it returns at once when all is there already."""
    load_function(settings.function)(Path(settings.directory))


def load_function(name: str) -> Callable[..., object]:
    """`package.module:function` or `/path/file.py:function`."""
    module_name, _, function = name.rpartition(":")
    if module_name.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
        if spec is None or spec.loader is None:
            raise RunError(Exit.CONFIG, f"areal-hpc: cannot load {module_name}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_name)
    return getattr(module, function)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
