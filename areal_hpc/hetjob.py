"""Heterogeneous Slurm jobs for submitit: several components, each with nodes of its own, in one MPI world.

    executor = HetSlurmExecutor(folder="jobs")
    executor.update_parameters(
        mpi="pmix", minutes=30, setup=["module load openmpi"],
        components={"trainer": {"partition": "gpu", "nodes": 2, "tasks": 17}, "rollout": {"nodes": 6, "tasks": 48}},
    )
    job = executor.submit(function, argument)      # every task of every component calls it; job.results() has them all

`executor.submit_run` submits a run of this package instead: its payload is a module and a configuration file, nothing
is pickled, and `job.result()` is the run's summary. The only file that imports submitit.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from submitit.core import core, utils
from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob

from areal_hpc.batchscript import render
from areal_hpc.config import ComponentConfig
from areal_hpc.exits import Exit, RunError
from areal_hpc.jobspec import Component, JobSpec
from areal_hpc.rundir import read_json
from areal_hpc.slurmcall import NoAnswer, call
from areal_hpc.slurmstate import States, has_ended, parse_scontrol, parse_table, worst

POLL_S = 30
COMMAND_TIMEOUT_S = 60
SUMMARY_WAIT_S = 15

_VARIABLES = {"%j": "SLURM_JOB_ID", "%t": "SLURM_PROCID"}

PARAMETERS: dict[str, Any] = {
    "name": "submitit",
    "components": {},
    "shape": "het",
    "mpi": "pmix",
    "minutes": 5,
    "setup": [],
    "srun": [],
    "dependency": None,
    "signal_delay_s": 90,
}
"""What `HetSlurmExecutor.update_parameters` takes, with defaults."""

COMPONENT_PARAMETERS = {name: field.default for name, field in ComponentConfig.model_fields.items()} | {
    "nodes": 1,
    "tasks": 1,
}
"""What each of `components` takes."""


class HetInfoWatcher(SlurmInfoWatcher):
    """Asks for the states of all watched jobs at once: sacct, or squeue and scontrol where accounting is absent."""

    def __init__(self, delay_s: int = POLL_S) -> None:
        super().__init__(delay_s)
        self.components: States = {}

    def update(self) -> None:
        """Ask Slurm; what cannot be asked leaves the states as they were."""
        asked = sorted(self._registered - self._finished)
        if not asked:
            return
        self._num_calls += 1
        self._last_status_check = time.time()
        self.components.update(job_states(asked))
        for job_id in asked:
            self._info_dict[job_id] = {"JobID": job_id, "State": worst(self.components.get(job_id, {}).values())}
            if self.is_done(job_id, mode="cache"):
                self._finished.add(job_id)

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """All components have ended."""
        self.get_info(job_id, mode)
        return has_ended(self.components.get(job_id, {}).values())

    def clear(self) -> None:
        super().clear()
        self.components = {}


def job_states(job_ids: Sequence[str]) -> States:
    """Component states of jobs; what Slurm no longer knows is left out.

    sacct is asked first. What it does not know, or calls ended, is asked of the controller too: accounting lags by
    seconds, forgets components at first, and calls a job preempted that is in the queue again.
    """
    if not job_ids:
        return {}
    wanted = ",".join(job_ids)
    states = parse_table(_output("sacct", "--noheader", "--parsable2", "--format=JobID,State", f"--jobs={wanted}"))
    doubtful = [i for i in job_ids if i not in states or has_ended(states[i].values())]
    if doubtful:
        queue = _output("squeue", "--noheader", "--states=all", "--format=%i|%T", f"--jobs={','.join(doubtful)}")
        states |= parse_table(queue)
    for job_id in set(job_ids) - set(states):
        states |= parse_scontrol(_output("scontrol", "show", "job", job_id))
    return {job_id: states[job_id] for job_id in job_ids if job_id in states}


def _output(*command: str) -> str:
    """What a Slurm command prints; nothing when it fails or is not there: another one is asked then."""
    try:
        return call(command, COMMAND_TIMEOUT_S)
    except NoAnswer:
        return ""


class HetJob(SlurmJob[core.R]):
    """A submitted heterogeneous job; its state is that of its worst component."""

    watcher = HetInfoWatcher()

    @property
    def component_states(self) -> dict[str, str]:
        """State of each component by its index ("" for a job that has only one); asks Slurm now."""
        self.watcher.get_info(self.job_id, mode="force")
        return dict(self.watcher.components.get(self.job_id, {}))

    def cancel(self, check: bool = True, component: int | None = None) -> None:
        """Cancel the job, or one component of a running one; a run saves itself then, and ends."""
        target = self.job_id if component is None else f"{self.job_id}+{component}"
        (subprocess.check_call if check else subprocess.call)(["scancel", target], timeout=COMMAND_TIMEOUT_S)


class RunPaths(utils.JobPaths):
    """Where a run's job writes: one file for all output; %j in its name is the job id."""

    def __init__(self, folder: Path | str, job_id: str, output: str) -> None:
        super().__init__(folder, job_id=job_id)
        self.output = output

    @property
    def submission_file(self) -> Path:
        return self._format_id(self.folder / "%j.sbatch")

    @property
    def stdout(self) -> Path:
        return self._format_id(Path(self.output).absolute())

    stderr = stdout


class RunJob(HetJob[dict[str, Any]]):
    """A job that is a run of this package; `result()` is its summary."""

    def __init__(self, run_dir: Path | str, job_id: str, output: str = "%j.out") -> None:
        self.run_dir = Path(run_dir)
        super().__init__(self.run_dir / "slurm", job_id)
        self._paths = RunPaths(self.run_dir / "slurm", job_id, output)

    def done(self, force_check: bool = False) -> bool:
        """Slurm has ended all components."""
        return self.watcher.is_done(self.job_id, mode="force" if force_check else "standard")

    @property
    def status(self) -> dict[str, Any]:
        """RUN/status.json as this job wrote it; empty before it has, or when a later job took over."""
        status = read_json(self.run_dir / "status.json")
        return status if status.get("job_id") == self.job_id else {}

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        # A shared file system may be late; a job that failed early may have nothing to say.
        deadline_s = time.monotonic() + SUMMARY_WAIT_S / (1 if self.state == "COMPLETED" else 5)
        while "exit_code" not in self.status and time.monotonic() < deadline_s:
            time.sleep(0.5)
        status = self.status
        if status.get("exit_code") == 0:
            return "success", read_json(self.run_dir / "summary.json")
        why = status.get("why_ended") or "no rank had time to say why"
        output = (self.stdout() or "").splitlines()[-20:]
        lines = [f"job {self.job_id} ended as {self.state}: {why}", f"run directory: {self.run_dir}"]
        raise utils.FailedJobError("\n".join([*lines, f"last lines of {self.paths.stdout}:", *output]))


class HetSlurmExecutor(SlurmExecutor):
    """Submits heterogeneous jobs.

    Args:
        folder: for scripts, pickles and output; shared by all nodes. %j in it is the job id.
        python: shell text that starts Python on the nodes; None: the one that submits.

    Raises:
        RuntimeError: no srun on PATH.
    """

    job_class = HetJob

    @classmethod
    def _equivalence_dict(cls) -> core.EquivalenceDict:
        return {"name": "name", "timeout_min": "minutes"}  # type: ignore[typeddict-item]

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return set(PARAMETERS)

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Check and keep parameters. Raises ValueError naming those that are unknown, with the legal list."""
        _refuse_unknown("parameter", set(kwargs), PARAMETERS)
        for name, values in kwargs.get("components", {}).items():
            _component(name, values, "true")
        self.parameters.update(kwargs)

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        """One job each: Slurm has no arrays of heterogeneous jobs."""
        self.parameters.setdefault("minutes", PARAMETERS["minutes"])
        return core.PicklingExecutor._internal_process_submissions(self, list(delayed_submissions))

    def _num_tasks(self) -> int:
        return self._spec("true").num_tasks

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return render(self._spec(command))

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return sbatch_command(submission_file_path, self.parameters.get("dependency"))

    def _spec(self, command: str) -> JobSpec:
        given = PARAMETERS | self.parameters
        if not given["components"]:
            raise ValueError("no components: call update_parameters(components={NAME: {...}, ...}) first")
        paths = utils.JobPaths(self.folder)
        # srun's own %j and %t are wrong in later components: the component's number, and the task's counted twice.
        out, err = _as_task_sees(paths.stdout), _as_task_sees(paths.stderr)
        # A warning before submitit listens is ignored: it would end the task. Slurm may send it a minute early.
        body = f"trap '' USR2; SUBMITIT_EXECUTOR=slurm exec {command} >{out} 2>{err}"
        task = f"bash -c {shlex.quote(body)}"
        return JobSpec(
            name=given["name"],
            folder=str(self.folder),
            components=tuple(_component(name, values, task) for name, values in given["components"].items()),
            shape=given["shape"],
            mpi=given["mpi"],
            python=sys.executable,
            minutes=given["minutes"],
            output=str(paths.stdout).replace("%t", "0"),
            setup=tuple(given["setup"]),
            srun=tuple(given["srun"]),
            title=(f"submitted by {type(self).__name__}",),
            signal=f"USR2@{given['signal_delay_s']}",
        )

    def submit_run(self, spec: JobSpec, dependency: str | None = None) -> RunJob:
        """Submit the job of a run (`jobspec.run_job`).

        Raises:
            RunError: CONFIG, sbatch refused; its words are in the message.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        script = self.folder / f".{time.time_ns()}.sbatch"
        script.write_text(render(spec), encoding="utf-8")
        try:
            output = utils.CommandFunction(sbatch_command(script, dependency), verbose=False)()
            job_id = self._get_job_id_from_submission_command(output)
        except (utils.FailedJobError, utils.FailedSubmissionError) as error:
            script.unlink(missing_ok=True)
            raise RunError(Exit.CONFIG, f"areal-hpc: not submitted: {error}") from None
        job = RunJob(self.folder.parent, job_id, spec.output.replace("%x", spec.name))
        script.rename(job.paths.submission_file)
        return job


def _as_task_sees(path: Path) -> str:
    """Shell text of a file name with %j and %t, for a task of any component."""
    parts = re.split("(%[jt])", str(path))
    return "".join(f'"${_VARIABLES[part]}"' if part in _VARIABLES else shlex.quote(part) for part in parts if part)


def sbatch_command(script: Path, dependency: str | None) -> list[str]:
    return ["sbatch", *([f"--dependency={dependency}"] if dependency else []), str(script)]


def _component(name: str, values: Mapping[str, Any], command: str) -> Component:
    """A component from keyword arguments. Raises ValueError naming what is unknown or wrong, with the legal list."""
    _refuse_unknown(f"parameter of component {name}", set(values), COMPONENT_PARAMETERS)
    settings = {key: value for key, value in values.items() if key != "tasks"}
    try:
        config = ComponentConfig.model_validate(settings)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r}" for e in error.errors())
        raise ValueError(f"component {name}: {wrong}") from None
    return Component(name, config.nodes or 1, values.get("tasks", 1), config, "", command)


def _refuse_unknown(what: str, given: set[str], legal: Mapping[str, Any]) -> None:
    unknown = sorted(given - set(legal))
    if unknown:
        listed = "\n  - ".join(f"{name} (default: {value!r})" for name, value in sorted(legal.items()))
        raise ValueError(f"unknown {what}: {', '.join(unknown)}; there are:\n  - {listed}")
