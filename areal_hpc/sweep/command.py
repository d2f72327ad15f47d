"""`areal-hpc sweep SPEC.yaml`: many runs from one file, each a job of its own, since het jobs cannot be arrays.

A second call submits only what is missing, so that it may be interrupted and repeated at any time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.batchscript import render
from areal_hpc.config import Config
from areal_hpc.config.check import Checked, ConfigErrors, check_config
from areal_hpc.exits import Exit, RunError
from areal_hpc.jobspec import JobSpec, components_of, merged, run_job
from areal_hpc.submission import as_texts, send
from areal_hpc.sweep.record import PointRecord, Submitted, SweepRecord, locked, undisturbed
from areal_hpc.sweep.spec import GPUS, Point, SweepSpec, load_spec, points, split_gpus
from areal_hpc.sweep.table import PointState, aligned, look, results_of, status_table

FIRST_POLL_S, LONGEST_POLL_S = 2.0, 30.0
CANCEL_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Planned:
    """A point that can be submitted."""

    point: Point
    overrides: list[str]
    config: Config

    def job(self, spec: SweepSpec, source: Path) -> JobSpec:
        title = f"areal-hpc sweep {source}: {self.point.name}"
        return run_job(self.config, spec.base, self.overrides, sys.executable, [title])

    def record(self, jobs: list[Submitted]) -> PointRecord:
        config = self.config
        varied = {axis: self.point.gpus if axis == GPUS else _setting(config, axis) for axis in self.point.varied}
        speedup = config.simulation.speedup if config.is_simulated else 1.0
        size = (_gpus(config), config.world_size, config.steps, config.rollout.engine, speedup)
        return PointRecord(varied, *size, config.fingerprint(), jobs)


@dataclass(frozen=True, slots=True)
class Lane:
    """Jobs that run one after the other: how many, and those that the next one has to wait for."""

    length: int = 0
    last: tuple[str, ...] = ()

    @property
    def dependency(self) -> str | None:
        return ":".join(("afterany", *self.last)) if self.last else None


def submit_sweep(
    source: str | Path, *, retry_failed: bool = False, say: Callable[[str], None] = print
) -> dict[str, str]:
    """Put the missing points of a sweep into the queue.

    Args:
        source: YAML file (spec.SweepSpec).
        retry_failed: submit failed points again.
        say: prints one line per point.

    Returns:
        Point -> job id of what was submitted.

    Raises:
        RunError: CONFIG, with all that is wrong with the sweep and its points, or what sbatch said. What was submitted
            before is in the record.
    """
    source = Path(source)
    spec = load_spec(source)
    planned = plan(spec, source)
    with locked(Path(spec.directory)):
        record = _recorded(spec, planned)
        record.write()
        states = look(record)
        wanted = [name for name in planned if _is_due(states[name], retry_failed)]
        lanes = _lanes(record, states, spec.max_jobs)
        submitted: dict[str, str] = {}
        for name in planned:
            if name not in wanted:
                say(f"{name}: {_left_alone(states[name])}")
                continue
            lane = min(lanes, key=lambda number: lanes[number].length) if lanes else 0
            dependency = lanes[lane].dependency if lanes else None
            try:
                job_id = _submit(planned[name], spec, source, record, lane, dependency)
            except RunError as error:
                before = f"  {len(submitted)} of {len(wanted)} points were submitted before {name}"
                raise RunError(error.code, f"{error.reason}\n{before}; the same command goes on there") from None
            if lanes:
                lanes[lane] = Lane(lanes[lane].length + 1, (job_id,))
            submitted[name] = job_id
            say(f"{name}: submitted job {job_id}" + (f", {dependency}" if dependency else ""))
    return submitted


def _submit(
    planned: Planned, spec: SweepSpec, source: Path, record: SweepRecord, lane: int, dependency: str | None
) -> str:
    name = planned.point.name
    with undisturbed():
        job = send(planned.job(spec, source), dependency)
        new = Submitted(job.job_id, lane, str(job.paths.stdout))
        record.points[name] = planned.record([*record.points[name].jobs, new])
        record.write()
    return job.job_id


def plan(spec: SweepSpec, source: Path, files_are_elsewhere: bool = False) -> dict[str, Planned]:
    """Check every point; warnings go to stderr. Raises RunError: CONFIG, with all problems, naming the points."""
    planned: dict[str, Planned] = {}
    wrong: dict[str, list[str]] = {}
    odd: dict[str, list[str]] = {}
    for point in (all_points := points(spec)):
        try:
            overrides, checked = _check(spec, point, files_are_elsewhere)
        except ConfigErrors as errors:
            for problem in errors.problems:
                wrong.setdefault(str(problem), []).append(point.name)
        except ValueError as error:
            wrong.setdefault(f"vary.gpus: {error}", []).append(point.name)
        else:
            planned[point.name] = Planned(point, overrides, checked.config)
            for warning in checked.warnings:
                odd.setdefault(str(warning), []).append(point.name)

    def told(found: dict[str, list[str]]) -> list[str]:
        return [f"{_named(names, len(all_points))}: {text}" for text, names in found.items()]

    if wrong:
        head = f"{source}: {len(wrong)} problem{'s' * (len(wrong) != 1)} with its points, nothing was submitted"
        raise RunError(Exit.CONFIG, "\n  ".join([head, *told(wrong)]))
    for line in told(odd):
        print(f"areal-hpc: warning: {line}", file=sys.stderr)
    return planned


def _check(spec: SweepSpec, point: Point, files_are_elsewhere: bool) -> tuple[list[str], Checked]:
    """Raises ConfigErrors, or ValueError when the GPUs cannot be shared out."""
    overrides, gpus, per_rank = as_texts(point.settings), point.gpus, spec.gpus_per_rank
    if gpus is not None:
        trainers = max(1, round(gpus * spec.trainer_share / per_rank))
        overrides += [f"trainer.ranks={trainers}", f"rollout.ranks={max(1, gpus // per_rank - trainers)}"]
    checked = check_config(Path(spec.base), overrides, files_are_elsewhere)
    if gpus is None:
        return overrides, checked
    config = checked.config
    if per_rank > 1 and not config.is_simulated:
        raise ValueError(f"gpus_per_rank = {per_rank} needs simulated compute, otherwise a rank computes on one GPU")
    common = config.slurm.common
    nodes = [merged(common, part).gpus_per_node or per_rank for part in (config.slurm.trainer, config.slurm.rollout)]
    split_gpus(gpus, spec.trainer_share, per_rank, nodes[0], nodes[1])
    if config.is_simulated:
        overrides.append(f"simulation.gpus_per_rank={per_rank}")
        checked = check_config(Path(spec.base), overrides, files_are_elsewhere)
    return overrides, checked


def _named(names: list[str], total: int) -> str:
    return f"all {total} points" if len(names) == total > 1 else ", ".join(names)


def _setting(config: Config, name: str) -> object:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _gpus(config: Config) -> int:
    """GPUs of trainers and rollouts; 0 where none were asked for."""
    ranks = config.trainer.ranks + config.rollout.ranks
    if config.is_simulated:
        return ranks * config.simulation.gpus_per_rank
    return ranks if merged(config.slurm.common, config.slurm.trainer).gpus_per_node else 0


def _recorded(spec: SweepSpec, planned: dict[str, Planned]) -> SweepRecord:
    """The record so far with all points of the specification in it; what has jobs keeps what it was submitted with."""
    record = SweepRecord.read(Path(spec.directory))
    for name, new in planned.items():
        old = record.points.get(name)
        if old is None or not old.jobs:
            record.points[name] = new.record([])
        elif old.fingerprint != new.config.fingerprint():
            print(f"areal-hpc: warning: {name}: settings have changed since it was submitted", file=sys.stderr)
    others = {name: old for name, old in record.points.items() if name not in planned and record.jobs(name)}
    record.points = {name: record.points[name] for name in planned} | others
    return record


def _is_due(at: PointState, retry_failed: bool) -> bool:
    return at.kind == "missing" or (at.kind == "failed" and retry_failed)


def _left_alone(at: PointState) -> str:
    if at.kind == "failed":
        return f"{at.state}, left alone; --retry-failed submits it again ({at.why})"
    return f"{at.state}, job {at.job_id}" if at.job_id else at.state


def _lanes(record: SweepRecord, states: dict[str, PointState], max_jobs: int | None) -> dict[int, Lane]:
    """Live jobs by lane; a job waits for the end of all before it in its lane, so that at most `max_jobs` run."""
    lanes = {number: Lane() for number in range(max_jobs or 0)}
    for name, at in states.items():
        if lanes and at.kind == "live":
            job = record.jobs(name)[-1]
            old = lanes[job.lane % len(lanes)]
            lanes[job.lane % len(lanes)] = Lane(old.length + 1, (*old.last, job.job_id))
    return lanes


# ------------------------------------------------------------------------------------------------ looking after it
def wait(record: SweepRecord, deadline_s: float | None, say: Callable[[str], None]) -> dict[str, PointState]:
    """Follow a sweep until no point is in the queue or running; one line per change.

    Raises RunError: DEADLINE, after `deadline_s` seconds; the jobs go on.
    """
    end_s = None if deadline_s is None else time.monotonic() + deadline_s
    pause_s, seen = FIRST_POLL_S, {name: at.state for name, at in look(record).items()}
    while True:
        states = look(record)
        for name, at in states.items():
            if seen[name] != at.state:
                say(f"{time.strftime('%H:%M:%S')}  {name}: {seen[name]} -> {at.state}")
                seen[name], pause_s = at.state, FIRST_POLL_S
        live = [name for name, at in states.items() if at.kind == "live"]
        if not live:
            return states
        if end_s is not None and time.monotonic() + pause_s > end_s:
            reason = f"areal-hpc: after {deadline_s:g} s {len(live)} points have not ended: {', '.join(live)}"
            raise RunError(Exit.DEADLINE, f"{reason}; their jobs go on")
        time.sleep(pause_s)
        pause_s = min(LONGEST_POLL_S, pause_s * 1.5)


def cancel(record: SweepRecord, say: Callable[[str], None]) -> None:
    """Cancel what is in the queue or running. Raises RunError: FAILED, with what scancel said."""
    live = {name: at.job_id for name, at in look(record).items() if at.kind == "live" and at.job_id}
    if not live:
        say("nothing is in the queue or running")
        return
    command = ["scancel", *live.values()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CANCEL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(Exit.FAILED, f"areal-hpc: not cancelled: {error}") from None
    if done.returncode:
        raise RunError(Exit.FAILED, f"areal-hpc: not cancelled: {done.stderr.strip()}")
    for name, job_id in live.items():
        say(f"{name}: cancelled job {job_id}")


def _dry_run(spec: SweepSpec, source: Path, options: argparse.Namespace) -> None:
    planned = plan(spec, source, files_are_elsewhere=True)
    states = look(_recorded(spec, planned))
    rows = [("point", "trainers", "rollouts", "nodes", "GPUs", "now")]
    for name, new in planned.items():
        config, due = new.config, _is_due(states[name], options.retry_failed)
        nodes = "+".join(str(component.nodes) for component in components_of(config))
        numbers = (str(config.trainer.ranks), str(config.rollout.ranks), nodes, str(_gpus(config) or "-"))
        rows.append((name, *numbers, "would be submitted" if due else _left_alone(states[name])))
        if options.scripts:
            options.scripts.mkdir(parents=True, exist_ok=True)
            (options.scripts / f"{name}.sbatch").write_text(render(new.job(spec, source)), encoding="utf-8")
    print(aligned(rows, right=(1, 2, 3, 4)))


def _look_after(spec: SweepSpec, source: Path, options: argparse.Namespace) -> int:
    """--status, --wait, --cancel and --results."""
    directory = Path(spec.directory)
    record = SweepRecord.read(directory)
    if any(point.name not in record.points for point in points(spec)):
        record = _recorded(spec, plan(spec, source, files_are_elsewhere=True))
    if options.cancel:
        with locked(directory):
            cancel(record, print)
        return int(Exit.DONE)
    code = Exit.DONE
    if options.status or options.wait:
        states = wait(record, options.deadline, print) if options.wait else look(record)
        print(status_table(record, states))
        code = Exit.DONE if all(at.kind == "done" for at in states.values()) else Exit.FAILED
    if options.results:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        results_of(record).to_csv(options.results, index=False)
        print(f"{len(record.points)} points in {options.results}")
    return int(code)


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(list(argv))
    if options.deadline is not None and not options.wait:
        parser.error("--deadline goes with --wait")
    if options.scripts is not None and not options.dry_run:
        parser.error("--scripts goes with --dry-run")
    source = Path(options.spec)
    try:
        spec = load_spec(source)
        if options.dry_run:
            _dry_run(spec, source, options)
        elif options.status or options.wait or options.cancel or options.results:
            return _look_after(spec, source, options)
        else:
            submitted = submit_sweep(source, retry_failed=options.retry_failed)
            print(f"{len(submitted)} of {len(points(spec))} points submitted; areal-hpc sweep {source} --status")
    except RunError as error:
        print(error.reason, file=sys.stderr)
        return int(error.code)
    except OSError as error:
        print(f"areal-hpc: {error.filename or source}: {error.strerror}", file=sys.stderr)
        return int(Exit.DISK)
    except KeyboardInterrupt:
        print("areal-hpc: stopped; jobs that were submitted go on", file=sys.stderr)
        return int(Exit.INTERRUPTED)
    return int(Exit.DONE)


def _csv(text: str) -> Path:
    if not text.endswith(".csv"):
        raise argparse.ArgumentTypeError(f"{text}: a table is written as .csv")
    return Path(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal-hpc sweep",
        description="Put the missing points of a sweep into the Slurm queue, one job each; or look after them.",
    )
    parser.add_argument("spec", metavar="SPEC", help="YAML file: base, directory, vary, max_jobs, overrides")
    parser.add_argument("--retry-failed", action="store_true", help="submit failed points again, too")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="list the points and what would be submitted")
    what.add_argument("--status", action="store_true", help="table of all points; exit code 1 if not all are done")
    what.add_argument("--wait", action="store_true", help="follow until all have ended; exit code as --status")
    what.add_argument("--cancel", action="store_true", help="cancel what is in the queue or running")
    parser.add_argument("--scripts", metavar="DIR", type=Path, help="with --dry-run: write the batch scripts there")
    parser.add_argument("--deadline", metavar="S", type=float, help="with --wait: give up after so many seconds")
    parser.add_argument("--results", metavar="FILE", type=_csv, help="write one table with a row per point")
    return parser
