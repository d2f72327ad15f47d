"""`areal-hpc submit CONFIG [a.b=value ...] [--dry-run]`, and the same from Python: one run, one job in the queue."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_hpc.batchscript import render, summary
from areal_hpc.check import check_data
from areal_hpc.config.check import check_config
from areal_hpc.config.schema import as_yaml
from areal_hpc.exits import Exit, RunError
from areal_hpc.jobspec import JobSpec, run_job

if TYPE_CHECKING:
    from areal_hpc.hetjob import RunJob

Overrides = Sequence[str] | Mapping[str, Any]


def submit(config: str | Path, overrides: Overrides = (), *, dependency: str | None = None) -> RunJob:
    """Put the run of a configuration into the queue.

    Args:
        config: YAML file, seen from the current directory, in which the job will run.
        overrides: "a.b=value" texts, or a mapping of dotted names to values.
        dependency: as `sbatch --dependency` takes it, for instance "afterok:123".

    Returns:
        A submitit job: `state`, `wait()`, `cancel()`, `stdout()`, and `result()`, which is the summary of the run.

    Raises:
        RunError: CONFIG, with everything that is wrong with it, or what sbatch said.
    """
    return send(job_spec(Path(config), as_texts(overrides)), dependency)


def job_spec(path: Path, overrides: Sequence[str], files_are_elsewhere: bool = False) -> JobSpec:
    """The job of a configuration; warnings go to stderr. Raises ConfigErrors; RunError (CONFIG), first rows do not fit.

    Where files are elsewhere, nothing is looked into.
    """
    checked = check_config(path, overrides, files_are_elsewhere)
    if not files_are_elsewhere:
        check_data(path, checked.config, libraries_are_elsewhere=checked.config.slurm.python is not None)
    for warning in checked.warnings:
        print(f"areal-hpc: warning: {warning}", file=sys.stderr)
    title = f"areal-hpc submit --dry-run {shlex.join([str(path), *overrides])}"
    return run_job(checked.config, str(path), overrides, sys.executable, [title])


def send(spec: JobSpec, dependency: str | None) -> RunJob:
    """Put a job into the queue. Raises RunError with what sbatch said."""
    from areal_hpc.hetjob import HetSlurmExecutor

    try:
        executor = HetSlurmExecutor(spec.folder)
    except RuntimeError:
        reason = "areal-hpc: not submitted: there is no srun here; submit from a login node of the cluster"
        raise RunError(Exit.CONFIG, reason) from None
    return executor.submit_run(spec, dependency)


def as_texts(overrides: Overrides) -> list[str]:
    """Overrides as `a.b=value` texts."""
    if isinstance(overrides, Mapping):
        return [f"{name}={as_yaml(value)}" for name, value in overrides.items()]
    return list(overrides)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(list(argv))
    try:
        spec = job_spec(Path(options.config), options.overrides, files_are_elsewhere=options.dry_run)
        if options.dry_run:
            print(render(spec), end="")
            return int(Exit.DONE)
        job = send(spec, options.dependency)
    except RunError as error:
        print(error.reason, file=sys.stderr)
        return int(error.code)
    print(f"submitted job {job.job_id}: {summary(spec)}")
    print(
        f"  output   {job.paths.stdout}\n  state    squeue --job {job.job_id}\n  status   {job.run_dir / 'status.json'}"
    )
    return int(Exit.DONE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal-hpc submit", description="Put the run of a configuration into the Slurm queue, as one job."
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that replace those of the file")
    parser.add_argument("--dry-run", action="store_true", help="print the batch script instead of submitting it")
    parser.add_argument("--dependency", metavar="WHEN", help="as sbatch takes it, for instance afterok:123")
    return parser
