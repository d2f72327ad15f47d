"""`areal-hpc doctor CONFIG [a.b=value ...]`: can this allocation carry the run? One screen, and an exit code.

Inside an allocation the ranks of the run are started by the very script that would start the run, only that each is a
`rank.py`. With --submit a small job with the same components does that. Elsewhere only what a login node can tell
is looked at.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from areal_hpc.batchscript import head
from areal_hpc.batchscript import render as render_script
from areal_hpc.config import Config
from areal_hpc.config.check import check_config
from areal_hpc.doctor.diagnosis import Plan
from areal_hpc.doctor.marks import Mark, code_in, exit_code, findings_in, parse, render, unfinished
from areal_hpc.exits import Exit, RunError
from areal_hpc.jobspec import JobSpec, run_job
from areal_hpc.launch import kill_session
from areal_hpc.slurmfacts import Finding, combination, expand, library_name, plugins, settings, slurm_version

COMMAND_S = 30.0
KILL_AFTER_S = 10.0
POLL_S = 1.0


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(list(argv))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is left behind
    try:
        checked = check_config(Path(options.config), options.overrides, files_are_elsewhere=True)
        config = checked.config.resolved()
        spec = doctor_job(config, options.config, options.overrides, options.deadline)
        if options.submit:
            return submit(spec, doctor_script(spec, options), options.wait * 60.0)
        if "SLURM_JOB_ID" not in os.environ:
            return outside(config, spec)
        return inside(config, spec, options.deadline, os.environ)
    except RunError as error:
        print(error.reason, file=sys.stderr)
        return int(error.code)
    except KeyboardInterrupt:
        print("areal-hpc doctor: stopped", file=sys.stderr)
        return int(Exit.INTERRUPTED)


# --------------------------------------------------------------------------------------------------- the script
def data_paths(config: Config) -> list[str]:
    """Files and directories of prompts."""
    sources = [*config.data.train_sources, *config.data.heldout_sources]
    return [source.path for source in sources if source.generator is None]


def plan_of(config: Config, patience_s: float) -> Plan:
    """What every rank is told."""
    model = None if config.is_simulated else str(Path(config.model.path).absolute())
    made = Path(config.prepare.directory).absolute() if config.prepare else None
    data = data_paths(config)

    def there(path: str) -> bool:
        """`prepare` makes the others before a run."""
        return made is None or made.exists() or made not in Path(path).absolute().parents

    return Plan(
        trainers=config.trainer.ranks,
        rollouts=config.rollout.ranks,
        components=tuple((c.name, c.tasks) for c in run_job(config, "", (), "").components),
        run_dir=str(Path(config.run_dir).absolute()),
        cwd=os.getcwd(),
        model=model if model and there(model) else None,
        data=tuple(str(Path(path).absolute()) for path in data if there(path)),
        threads={
            "controller": 1,
            "trainer": config.trainer.threads,
            "rollout": config.rollout.threads,
            "reward": config.reward.workers,
        },
        rewards=config.reward.ranks,
        interface=config.weights.interface,
        token=uuid.uuid4().hex[:12],
        patience_s=patience_s,
    )


def doctor_job(config: Config, path: str, overrides: Sequence[str], deadline_s: float) -> JobSpec:
    """The job of the run with the doctor's ranks in it, short, and nothing prepared before."""
    spec = run_job(config, path, overrides, sys.executable, [f"areal-hpc doctor {shlex.join([path, *overrides])}"])
    plan = shlex.quote(plan_of(config, deadline_s * 0.7).to_text())
    rank = f'"$PYTHON" -m areal_hpc.doctor.rank {plan} --component'
    return replace(
        spec,
        name=f"{spec.name}-doctor",
        minutes=2 + int(deadline_s // 60),
        output=f"{spec.folder}/doctor-%j.out",
        prologue=(),
        components=tuple(replace(c, command=f"{rank} {c.name}") for c in spec.components),
        signal=None,
        epilogue=(),
        requeue=False,
    )


def doctor_script(spec: JobSpec, options: argparse.Namespace) -> str:
    """A batch script that runs the doctor inside the job."""
    again = shlex.join([options.config, *options.overrides, "--deadline", str(options.deadline)])
    return head(spec) + f'exec "$PYTHON" -m areal_hpc.cli doctor {again}\n'


# --------------------------------------------------------------------------------------------------- three places
def inside(config: Config, spec: JobSpec, deadline_s: float, environ: Mapping[str, str]) -> int:
    """In an allocation: start all ranks, wait, judge, print."""
    script, hosts = render_script(spec), component_hosts(spec, environ)
    mismatch = wrong_allocation(spec, environ)
    heard = None if mismatch else Heard(["bash", "-c", script], deadline_s)
    marks = heard.marks if heard else []
    library = next((str(m["library"]) for m in marks if "library" in m), "") or library_of(spec)
    findings = [*mismatch, *about_slurm(config, library, hosts), *findings_in(marks)]
    if heard and not any("end" in mark for mark in marks):
        everywhere = sorted({host for group in hosts for host in group})
        findings += unfinished(spec.num_tasks, everywhere, marks, heard.ended, heard.gave_up, heard.noise)
    elif heard and heard.returncode and not exit_code(findings):
        text = f"all is well, but the ranks did not end as they should: {heard.ended}"
        findings.append(Finding("warn", "end", text, "a run's exit code may mislead; its status.json does not"))
    title = f"areal-hpc doctor: {spec.num_tasks} ranks in job {environ['SLURM_JOB_ID']}, shape {spec.shape}"
    print(render(title, findings), flush=True)
    return int(exit_code(findings))


def outside(config: Config, spec: JobSpec) -> int:
    """On a login node: what needs no allocation. Always CONFIG: the question itself stays open."""
    findings = about_slurm(config, library_of(spec), ())
    for what, path in (("model", config.model.path), *(("data", path) for path in data_paths(config))):
        if not Path(path).exists() and not (config.is_simulated and what == "model"):
            findings.append(Finding("warn", "offline", f"{what} {path} is not here", "fetch it before the run starts"))
    screen = render("areal-hpc doctor: no allocation here; of this, a login node can tell", findings)
    print(screen.rpartition("\n")[0])
    advice = "add --submit to examine nodes by a small job, or call it inside salloc"
    print(f"areal-hpc doctor: not inside a Slurm job: {advice}", file=sys.stderr)
    return int(Exit.CONFIG)


def submit(spec: JobSpec, script: str, wait_s: float) -> int:
    """Put the doctor's job into the queue, wait for its screen, pass it on. Ctrl-C cancels the job."""
    from areal_hpc.hetjob import job_states, sbatch_command
    from areal_hpc.slurmstate import has_ended

    folder = Path(spec.folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"doctor-{uuid.uuid4().hex[:8]}.sbatch"
    path.write_text(script, encoding="utf-8")
    code, said = ask(*sbatch_command(path, None))
    if code != 0:
        raise RunError(Exit.CONFIG, f"areal-hpc doctor: not submitted: {said.strip()}")
    job_id = said.split()[-1]
    output = Path(spec.output.replace("%j", job_id))
    deadline_s = time.monotonic() + wait_s
    try:
        print(f"areal-hpc doctor: job {job_id} waits in the queue; Ctrl-C cancels it", file=sys.stderr, flush=True)
        while not has_ended((states := job_states([job_id]).get(job_id, {})).values()):
            if time.monotonic() > deadline_s:
                reason = f"job {job_id} has not ended after {wait_s / 60:.0f} minutes ({states}); cancelled"
                raise RunError(Exit.DEADLINE, f"areal-hpc doctor: {reason}; give it longer by --wait MINUTES")
            time.sleep(POLL_S)
    except BaseException:
        failed, said = ask("scancel", job_id)
        if failed:
            print(f"areal-hpc doctor: job {job_id} is not cancelled: {said.strip()}", file=sys.stderr, flush=True)
        raise
    screen = _finished_text(output)
    print(screen, flush=True)
    found = code_in(screen)
    if found is None:
        raise RunError(Exit.FAILED, f"areal-hpc doctor: job {job_id} ended ({states}) without a verdict; see {output}")
    return found


def _finished_text(output: Path, timeout_s: float = 10.0) -> str:
    """The job's output once its verdict is there; a shared file system may be late."""
    deadline_s, text = time.monotonic() + timeout_s, ""
    while code_in(text) is None and time.monotonic() < deadline_s:
        with contextlib.suppress(FileNotFoundError):
            text = output.read_text(encoding="utf-8", errors="replace").rstrip()
        time.sleep(0.2)
    return text


# --------------------------------------------------------------------------------------------------- looking around
def about_slurm(config: Config, library: str, hosts: Sequence[Sequence[str]]) -> list[Finding]:
    """Versions and plugins, and what is known about their combination."""
    plugin, shape = config.slurm.mpi, config.slurm.shape
    _, version_text = ask("srun", "--version")
    version, offered = slurm_version(version_text), plugins(ask("srun", "--mpi=list")[1])
    found = []
    if version and library:
        text = f"{version_text.split()[-1]} with plugin {plugin}, shape {shape}, {library_name(library)}"
        found.append(Finding("ok", "slurm", text))
    if not version:
        found.append(Finding("bad", "slurm", f"no srun: {version_text.strip()}", "load its module, or look at PATH"))
    if version and plugin not in offered:
        text = f"srun has no MPI plugin {plugin}; there are {', '.join(sorted(offered - {'none'}))}"
        found.append(Finding("bad", "mpi", text, "set slurm.mpi"))
    if not library:
        found.append(Finding("bad", "mpi", "mpi4py loads no MPI library", "load its module in slurm.setup"))
    found += combination(version, plugin, library, shape, hosts)
    return found + settings(ask("scontrol", "show", "config")[1], shape)


def component_hosts(spec: JobSpec, environ: Mapping[str, str]) -> list[list[str]]:
    """Host names by component, as Slurm tells a batch script; the components of one allocation share them in order."""
    if spec.shape == "het":
        lists = [environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{n}", "") for n in range(len(spec.components))]
        return [expand(text) for text in lists]
    hosts = expand(environ.get("SLURM_JOB_NODELIST", ""))
    ends = [sum(c.nodes for c in spec.components[: n + 1]) for n in range(len(spec.components))]
    return [hosts[end - c.nodes : end] for c, end in zip(spec.components, ends, strict=True)]


def wrong_allocation(spec: JobSpec, environ: Mapping[str, str]) -> list[Finding]:
    """Differences between the allocation and the configuration that srun would only stumble over."""
    wanted = len(spec.components) if spec.shape == "het" else 1
    size = int(environ.get("SLURM_HET_SIZE", "1"))
    if wanted != size:
        text = f"slurm.shape={spec.shape} needs {wanted} component{'s' * (wanted > 1)}, this job has {size}"
        return [
            Finding(
                "bad", "alloc", text, "ask for the nodes as `areal-hpc submit CONFIG --dry-run` does, or use --submit"
            )
        ]
    hosts = component_hosts(spec, environ)
    needed, there = sum(c.nodes for c in spec.components), len({host for group in hosts for host in group})
    if any(len(group) < c.nodes for c, group in zip(spec.components, hosts, strict=True)):
        text = f"the configuration needs {needed} nodes, this job has {there}"
        return [Finding("bad", "alloc", text, "see slurm.*.nodes and ranks_per_node, or use --submit")]
    return []


def library_of(spec: JobSpec) -> str:
    """What the MPI library says that the ranks' Python loads, after the user's setup lines."""
    heard = Heard(["bash", "-c", head(spec) + '"$PYTHON" -m areal_hpc.doctor.rank --library'], COMMAND_S)
    return next((str(mark["library"]) for mark in heard.marks if "library" in mark), "")


def ask(*command: str) -> tuple[int, str]:
    """Exit code and all output of a Slurm command."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)
    return done.returncode, done.stdout


class Heard:
    """Runs a command to its end or the deadline, and keeps what it printed.

    Attributes:
        marks: content of marked lines.
        noise: the last of all other lines.
        ended: how it ended, for a person.
        gave_up: the deadline ended it.
        returncode: its exit code, or minus the signal.
    """

    def __init__(self, command: Sequence[str], deadline_s: float) -> None:
        self.marks: list[Mark] = []
        self.noise: list[str] = []
        before: list[str] = []
        self.gave_up = False
        self.returncode = 0
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout and process.stderr
        readers = [
            threading.Thread(target=self._read, args=[stream], daemon=True)
            for stream in (process.stdout, process.stderr)
        ]
        for reader in readers:
            reader.start()
        try:
            process.wait(deadline_s)
            self.ended = f"srun ended with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            self.gave_up = True
            before = self.noise
            self.ended = f"no result after {deadline_s:.0f} s, given up"
        finally:
            kill_session(process)
            for reader in readers:
                reader.join(KILL_AFTER_S)
            self.noise = before if self.gave_up else self.noise  # what srun says while it is ended explains nothing
        self.returncode = process.returncode

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            mark = parse(line)
            if mark is None:
                self.noise = [*self.noise[-49:], line.rstrip()]
            else:
                self.marks.append(mark)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal-hpc doctor", description="Tell whether a Slurm allocation can carry the run of a configuration."
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that replace those of the file")
    parser.add_argument("--submit", action="store_true", help="examine the nodes by a small job of its own")
    parser.add_argument("--deadline", type=float, default=120.0, metavar="S", help="for everything (default: 120 s)")
    parser.add_argument(
        "--wait", type=float, default=30.0, metavar="MIN", help="with --submit: minutes until the job has ended"
    )
    return parser
