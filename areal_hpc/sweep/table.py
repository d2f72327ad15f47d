"""Where the points of a sweep are, and one tidy table of what they gave.

from areal_hpc.sweep.table import results
table = results("runs/scaling")            # needs neither torch nor MPI nor Slurm
table.plot("gpus", "tokens_per_s")
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from areal_hpc.exits import Exit, RunError
from areal_hpc.logschema import Activity, Fate
from areal_hpc.rundir import read_json
from areal_hpc.runlog import RunLog, RunLogError
from areal_hpc.slurmstate import States, has_ended, worst
from areal_hpc.sweep.record import SweepRecord

if TYPE_CHECKING:
    from pandas import DataFrame

WIDTH = 120
COUNTS = (
    "gpus",
    "world_size",
    "job_id",
    "attempt",
    "steps",
    "steps_done",
    "consumed_tokens",
    "staleness_max",
    "interruptions",
    "filtered_groups",
)
"""Whole numbers of the table; absent ones are pandas.NA, absent others NaN."""

FIGURES = {
    "steps_done": "finished steps in the log",
    "consumed_tokens": "prompt and response tokens that were trained on",
    "tokens_per_s": "consumed tokens from the end of the first step to that of the last one, per second",
    "step_s": "mean time of a step, the first one left out",
    "staleness_mean": "head lag of consumed samples, mean",
    "staleness_max": "head lag of consumed samples, largest",
    "trainer_idle": "share of that time in which trainer ranks neither trained nor published weights",
    "rollout_idle": "share of that time in which rollout ranks neither generated nor swapped weights nor shipped",
    "controller_busy": "share of that time in which the controller scheduled or wrote the log",
    "interruptions": "samples that were interrupted by new weights, each time counted",
    "filtered_groups": "groups that the success filter rejected",
}
"""What the log of a point gives. Seconds are those of the machine that is simulated, where compute is simulated."""

Kind = Literal["done", "live", "failed", "missing"]


@dataclass(frozen=True, slots=True)
class PointState:
    """Where a point is.

    Attributes:
        kind: what `areal-hpc sweep` makes of it.
        state: in Slurm's words, for a person.
        job_id: newest job; None if there is none.
        status: status.json as this job wrote it.
        why: why it ended, or why its attempt before did; else empty.
    """

    kind: Kind
    state: str
    job_id: str | None
    status: dict[str, Any]
    why: str


def look(record: SweepRecord, ask: Callable[[Sequence[str]], States] | None = None) -> dict[str, PointState]:
    """The state of all points; Slurm is asked once, for what it no longer knows status.json counts."""
    from areal_hpc.hetjob import job_states  # here, so that the analysis of one log does not load submitit

    newest = {name: jobs[-1].job_id for name in record.points if (jobs := record.jobs(name))}
    states = (ask or job_states)(list(newest.values())) if newest else {}
    return {name: _state(record, name, newest.get(name), states) for name in record.points}


def _state(record: SweepRecord, name: str, job_id: str | None, states: States) -> PointState:
    components = states.get(job_id or "", {}).values()
    slurm, live = worst(components), bool(components) and not has_ended(components)
    status = _status(record.run_dir(name))
    if live:
        mine = status if status.get("job_id") == job_id else {}
        return PointState("live", slurm, job_id, mine, mine.get("why_ended", ""))
    if status.get("exit_code") == 0:
        return PointState("done", "COMPLETED", job_id, status, status.get("why_ended", ""))
    if job_id is not None and status.get("job_id") != job_id:
        status = {}
    if job_id is None and not status:
        return PointState("missing", "NOT SUBMITTED", None, {}, "")
    why = status.get("why_ended") or _silence(record, name, status)
    state = slurm if components else "FAILED" if "exit_code" in status else "UNKNOWN"
    return PointState("failed", state, job_id, status, why)


def _status(run_dir: Path) -> dict[str, Any]:
    try:
        return read_json(run_dir / "status.json")
    except (OSError, ValueError):
        return {}


def _silence(record: SweepRecord, name: str, status: dict[str, Any]) -> str:
    if not (jobs := record.jobs(name)):
        return f"last seen {status.get('state', 'somewhere')}; its job is not known here"
    output = Path(jobs[-1].output or record.run_dir(name) / "slurm" / f"{jobs[-1].job_id}.out")
    if not output.exists():
        return "its job wrote nothing: it never began"
    return f"no rank had time to say why; see {os.path.relpath(output, record.directory)}"


def status_table(record: SweepRecord, states: dict[str, PointState]) -> str:
    """All points as aligned plain text of at most WIDTH columns."""
    rows = [("point", "job", "state", "steps", "tokens/s", "why it ended")]
    for name, at in states.items():
        point, status = record.points[name], at.status
        speed = status.get("tokens_per_s")
        rows.append(
            (
                name,
                at.job_id or "-",
                at.state,
                f"{status.get('version', 0)}/{status.get('steps', point.steps)}",
                "-" if speed is None else f"{speed / point.speedup:,.0f}",
                " ".join(at.why.split()),
            )
        )
    text = aligned(rows, right=(1, 3, 4))
    if any(point.speedup != 1 or point.compute == "simulated" for point in record.points.values()):
        text += "\n(simulated compute: tokens per simulated second)"
    return text


def aligned(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Rows of text as columns, two spaces apart; what does not fit into WIDTH is cut and ends in "..."."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        line = "  ".join(cells).rstrip()
        lines.append(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}...")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------- results
def results(directory: Path | str, ask: Callable[[Sequence[str]], States] | None = None) -> DataFrame:
    """One row per point of the sweep in `directory`, failed ones and those that were never submitted included.

    Columns: point; every axis; gpus, world_size, compute, speedup; state, job_id, attempt, steps (asked for); the
    `FIGURES`; pass1_before, pass1_after; run_dir, why_ended. `.attrs`: docs of the figures, names of the axes.

    Args:
        ask: gives the states of jobs; None: Slurm, if it is there.

    Raises:
        RunError: no sweep in this directory, or its record cannot be read.
    """
    record = SweepRecord.read(Path(directory))
    if not record.points:
        raise RunError(Exit.CONFIG, f"areal-hpc: no sweep in {directory}: it has no sweep.json")
    return results_of(record, ask)


def results_of(record: SweepRecord, ask: Callable[[Sequence[str]], States] | None = None) -> DataFrame:
    """The table of `results` for a record."""
    from pandas import DataFrame

    states = look(record, ask)
    frame = DataFrame([_row(record, name, states[name]) for name in record.points])
    frame = frame.astype({name: "Int64" for name in COUNTS if name in frame})
    axes = dict.fromkeys(axis for point in record.points.values() for axis in point.varied)
    frame.attrs = {"docs": dict(FIGURES), "axes": list(axes)}
    return frame


def _row(record: SweepRecord, name: str, at: PointState) -> dict[str, Any]:
    point, run_dir = record.points[name], record.run_dir(name)
    attempt = at.status.get("attempt")
    summary = _summary(run_dir) if at.kind == "done" else {}
    return {
        "point": name,
        **point.varied,
        "gpus": point.gpus or None,
        "world_size": point.world_size,
        "compute": point.compute,
        "speedup": point.speedup,
        "state": at.state,
        "job_id": None if at.job_id is None else int(at.job_id),
        "attempt": attempt,
        "steps": point.steps,
        **dict.fromkeys(FIGURES, math.nan),
        **_figures(run_dir, attempt),
        "pass1_before": _number(summary.get("pass1_before")),
        "pass1_after": _number(summary.get("pass1_after")),
        "run_dir": str(run_dir),
        "why_ended": at.why,
    }


def _summary(run_dir: Path) -> dict[str, Any]:
    try:
        return read_json(run_dir / "summary.json")
    except (OSError, ValueError):
        return {}


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _figures(run_dir: Path, attempt: int | None) -> dict[str, Any]:
    """The FIGURES of one attempt, as far as its log has them."""
    if attempt is None:
        return {}
    try:
        with RunLog(run_dir, attempt) as log:
            return figures(log)
    except (RunLogError, KeyError):  # KeyError: a damaged column, of which RunLog has warned
        return {}


def figures(log: RunLog) -> dict[str, Any]:
    """FIGURES of a run log; what needs two steps is absent before there are two."""
    steps, samples = log.steps, log.trajectories
    config = yaml.safe_load(log.attributes["config"])
    consumed = samples[samples["fate"] == Fate.CONSUMED.label]
    found: dict[str, Any] = {
        "steps_done": len(steps),
        "consumed_tokens": int(steps["consumed_tokens"].sum()),
        "interruptions": int(log.weight_loads["interrupted"].sum()),
        "filtered_groups": int(steps["num_filtered"].iloc[-1]) if len(steps) else 0,
    }
    if len(consumed):
        lag = consumed["head_lag"]
        found |= {"staleness_mean": float(lag.mean()), "staleness_max": int(lag.max())}
    if len(steps) > 1:
        begin, end = float(steps["time_s"].iloc[0]), float(steps["time_s"].iloc[-1])
        simulated = config["rollout"]["engine"] == "simulated"
        seconds = (end - begin) * (config["simulation"]["speedup"] if simulated else 1)
        found |= {
            "tokens_per_s": int(steps["consumed_tokens"].iloc[1:].sum()) / seconds,
            "step_s": seconds / (len(steps) - 1),
            **_shares(log.activity, config["trainer"]["ranks"], config["rollout"]["ranks"], begin, end),
        }
    return found


def _shares(activity: DataFrame, trainers: int, rollouts: int, begin: float, end: float) -> dict[str, float]:
    """Shares of the time from `begin` to `end` that the ranks of each role were busy or idle.

    Ranks report now and then, the last piece may be missing: only time of which they have reported counts.
    """
    inside = activity["stop_s"].clip(begin, end) - activity["start_s"].clip(begin, end)

    def share(ranks: range, *kinds: Activity) -> float:
        role = activity["rank"].isin(ranks)
        busy = role & activity["kind"].isin([kind.label for kind in kinds])
        known_s = float(inside[role].sum())
        return float(inside[busy].sum()) / known_s if known_s else math.nan

    learns = (Activity.TRAIN_PROXIMAL, Activity.TRAIN_UPDATE, Activity.PUBLISH)
    return {
        "trainer_idle": 1 - share(range(1, 1 + trainers), *learns),
        "rollout_idle": 1
        - share(range(1 + trainers, 1 + trainers + rollouts), Activity.GENERATE, Activity.SWAP, Activity.SHIP),
        "controller_busy": share(range(1), Activity.SCHEDULE, Activity.LOG),
    }
