"""The beginning of an attempt, on this machine under mpiexec or on the first node of a job: check, prepare, make room.

    python -m areal_hpc.attempt CONFIG [a.b=value ...]

prints the directory of the new attempt, which is all that its ranks need to know. The batch script is kept there.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.answers import check_settings, num_on_record
from areal_hpc.attempts import Begin, may_go_on, write_begin
from areal_hpc.check import check_data, facts
from areal_hpc.checkpoint import Checkpoints, Found, preflight_space
from areal_hpc.config import Config, PrepareConfig
from areal_hpc.config.check import Checked, check_config
from areal_hpc.exits import Exit, RunError
from areal_hpc.figuresview import show_figures
from areal_hpc.heldout import read_sets, settings_of
from areal_hpc.jobspec import run_job
from areal_hpc.ownership import Owner, alive, claim, release
from areal_hpc.resuming import differences
from areal_hpc.rundir import RunDir, read_json, write_json
from areal_hpc.slurmstate import States


@dataclass(frozen=True, slots=True)
class Begun:
    """An attempt whose ranks may start; `finished`: there is nothing to do, and no attempt was opened."""

    checked: Checked
    run_dir: RunDir
    finished: str = ""


def main(argv: Sequence[str]) -> int:
    result = os.dup(1)  # what `$(...)` of the batch script takes; whatever the preparation prints is for people
    os.dup2(2, 1)
    path, overrides = Path(argv[0]), argv[1:]
    try:
        begun = begin(path, overrides)
    except RunError as error:
        print(error.reason, file=sys.stderr)
        return int(error.code)
    if begun.finished:
        write_json(begun.run_dir.status, read_json(begun.run_dir.status) | {"job_id": os.environ.get("SLURM_JOB_ID")})
        print(begun.finished, flush=True)
        if begun.checked.config.is_evaluation:
            show_figures(read_json(begun.run_dir.summary))
        return int(Exit.DONE)
    print(f"{facts(begun.checked)}\n  attempt  {begun.run_dir.attempt}", flush=True)
    if script := os.environ.get("AREAL_HPC_BATCH_SCRIPT"):
        shutil.copy(script, begun.run_dir.batch_script)
    os.write(result, f"{begun.run_dir.attempt_dir}\n".encode())
    return int(Exit.DONE)


def begin(path: Path, overrides: Sequence[str]) -> Begun:
    """Check a configuration, make what it prepares, become the owner of its run directory, open the next attempt.

    Raises:
        ConfigErrors: it is not usable, before or after the preparation.
        RunError: CONFIG, what prepares cannot be loaded, first rows of the data do not fit, somebody else owns the
            directory, or its checkpoint is of another run; FAILED, this job has tried often enough; PREFLIGHT, MPI
            cannot start as configured.
    """
    checked = check_config(path, overrides)
    if checked.config.prepare is not None:
        prepare(checked.config.prepare)
        checked = check_config(path, overrides)
    check_data(path, checked.config)
    config = checked.config.resolved()
    root = Path(config.run_dir)
    number = RunDir.next_number(root)
    if config.checkpoint.resume and (finished := what_is_finished(RunDir(root, number), config)):
        return Begun(checked, RunDir(root, number), finished)
    owner = claim(root, Owner.here(number), lambda other: alive(other, states_of))
    notes = [owner.note] if owner.note else []
    try:
        found = find_checkpoint(RunDir(root, number), config)
        if "SLURM_JOB_ID" in os.environ:
            refuse_known_bad(checked.config, str(path), overrides)
        run_dir = RunDir.next_attempt(root)
        run_dir.config.write_text(config.to_yaml(), encoding="utf-8")
        leave_word(run_dir, found, notes + about_space(run_dir, config))
    except BaseException as error:
        if isinstance(error, RunError):
            refused(RunDir(root, number), config, error)
        release(owner)
        raise
    return Begun(checked, run_dir)


def what_is_finished(run_dir: RunDir, config: Config) -> str:
    """A sentence for people when the run has reached its end already, else nothing.

    Raises:
        RunError: CONFIG, the directory holds an evaluation with other settings, or its prompts cannot be read.
    """
    if config.is_evaluation:
        check_settings(run_dir.root, settings_of(config, read_sets(config)[0]))
    status = read_json(run_dir.status)
    if status.get("state") != "done" or status.get("steps", 0) < config.steps:
        return ""
    if config.is_evaluation:
        return f"areal-hpc: the evaluation in {run_dir.root} is complete: {status['answers']} answers"
    return (
        f"areal-hpc: the run in {run_dir.root} is finished: version {status['version']}, {status['why_ended']}; "
        "raise steps to go on, set checkpoint.resume=false to begin anew, or name another run_dir"
    )


def find_checkpoint(run_dir: RunDir, config: Config) -> Found | None:
    """The newest valid checkpoint to go on from.

    Raises:
        RunError: CONFIG, it belongs to another configuration; FAILED, this job has tried often enough.
    """
    if not config.checkpoint.resume:
        return None
    found = Checkpoints(run_dir.checkpoints, config.checkpoint.keep).newest()
    if found is not None and (changed := differences(found.facts["config"], config)):
        hint = "name another run_dir, or set checkpoint.resume=false to begin anew"
        raise RunError(Exit.CONFIG, f"areal-hpc: {found.path} is of another run: {'; '.join(changed)}; {hint}")
    reached, job_id = found.step if found else 0, os.environ.get("SLURM_JOB_ID")
    if config.is_evaluation:
        reached = num_on_record(run_dir.root)
    if job_id is not None and (reason := may_go_on(run_dir.root, reached, config.checkpoint.max_fruitless, job_id)):
        raise RunError(Exit.FAILED, f"areal-hpc: {reason}")
    return found


def about_space(run_dir: RunDir, config: Config) -> list[str]:
    """A sentence when the checkpoints of the model will hardly fit; groups and other users come on top of it.

    Counted are the weights and AdamW's two moments in 32 bits.
    """
    if config.is_simulated or config.is_evaluation:
        return []
    model = Path(config.model.path)
    stored = read_json(model / "config.json")
    widen = 2 if (stored.get("dtype") or stored.get("torch_dtype")) in ("bfloat16", "float16") else 1
    num_bytes = 3 * widen * sum(path.stat().st_size for path in model.glob("*.safetensors"))
    sentence = preflight_space(run_dir.checkpoints, num_bytes, config.checkpoint.keep)
    return [sentence] if sentence else []


def refused(run_dir: RunDir, config: Config, error: RunError) -> None:
    """Whoever looks at status.json learns that this attempt did not begin, and why; a finished run stays finished."""
    before = read_json(run_dir.status)
    if before.get("state") == "done":
        return
    ended = {"name": config.name, "state": "failed", "why_ended": error.reason, "exit_code": int(error.code)}
    where = {"host": socket.gethostname(), "job_id": os.environ.get("SLURM_JOB_ID"), "pid": os.getpid()}
    write_json(run_dir.status, before | ended | where)


def leave_word(run_dir: RunDir, found: Found | None, notes: list[str]) -> None:
    """Write down, for the controller and for later attempts, what this one goes on from."""
    notes = [*notes, *(found.refused if found else ())]
    for note in notes:
        print(f"areal-hpc: {note}", file=sys.stderr, flush=True)
    begin = Begin(socket.gethostname(), os.environ.get("SLURM_JOB_ID"), found.step if found else 0)
    write_begin(run_dir.attempt_dir, begin)
    write_json(run_dir.resume, {"checkpoint": str(found.path) if found else None, "notes": notes})


def states_of(job_ids: Sequence[str]) -> States:
    """What Slurm says of jobs; submitit is loaded only when somebody asks."""
    from areal_hpc.hetjob import job_states

    return job_states(job_ids)


def refuse_known_bad(config: Config, path: str, overrides: Sequence[str]) -> None:
    """Refuse what cannot start: no such MPI plugin, or one that does not fit the MPI library or this version of Slurm.

    Raises:
        RunError: PREFLIGHT, with everything that was found and what to do.
    """
    from areal_hpc.comm import MPI
    from areal_hpc.doctor.command import about_slurm, component_hosts

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
