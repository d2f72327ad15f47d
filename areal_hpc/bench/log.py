"""`areal-hpc bench log`: controller time for the run log per step, against the length of a step.

ours = seconds in RunLogWriter per step (checking, encoding, appending, making visible to readers), reference = the
stated length of a step (--step-s); lower is better, the goal is a ratio of at most 0.005. The JSON line is about the
demo's size without tokens. The table adds logged tokens and the paper's batch of 512 x 16 answers, whose step of
213 s is Table 1's 14.8 h over 250 steps. Between two steps the benchmark does other work, so that the log finds
caches as cold as in a run. `cpu ms` tells the writer's own cost from waiting for a busy machine or file system.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from areal_hpc.bench.report import report
from areal_hpc.logschema import ACTIVITY, STEPS, TRAJECTORIES, WEIGHT_LOADS, WEIGHT_UPDATES, Table
from areal_hpc.runlog_writer import RunLogWriter
from areal_hpc.trajectory import Trajectory

GOAL = 0.005
PROMPT_TOKENS = 64
OTHER_WORK_S = 0.02


@dataclass(frozen=True)
class Load:
    """What one step puts into the log, and how long the step is."""

    name: str
    step_s: float
    trajectories: int
    ranks: int
    intervals: int
    """Activity intervals per rank."""
    tokens: int
    """Response tokens logged per trajectory; 0: none."""


@dataclass
class Cost:
    """What the writer took: one figure per repeat, means over its steps."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    num_bytes: list[float] = field(default_factory=list)


class StepRows:
    """The rows of one step; their values do not matter, nothing is compressed."""

    def __init__(self, load: Load) -> None:
        self.trajectories = _rows(TRAJECTORIES, load.trajectories)
        self.step = {name: values[0] for name, values in _rows(STEPS, 1).items()}
        self.update = {name: values[0] for name, values in _rows(WEIGHT_UPDATES, 1).items()}
        self.loads = _rows(WEIGHT_LOADS, load.ranks)
        self.activity = _rows(ACTIVITY, load.ranks * load.intervals)
        tokens = np.ones(PROMPT_TOKENS + load.tokens, np.int32)
        logprobs, versions = np.zeros(load.tokens, np.float32), np.zeros(load.tokens, np.int32)
        self.tokens = [
            Trajectory(i, 0, tokens, PROMPT_TOKENS, logprobs, versions)
            for i in range(load.trajectories if load.tokens else 0)
        ]

    def write(self, writer: RunLogWriter) -> None:
        writer.trajectories(self.trajectories)
        writer.step(self.step)
        writer.weight_update(self.update)
        writer.weight_loads(self.loads)
        writer.activity(self.activity)
        writer.event(0.0, "note", "a sentence of ordinary length for a person to read")
        if self.tokens:
            writer.tokens(self.tokens)
        writer.flush()


def _rows(table: Table, count: int) -> dict[str, Any]:
    texts = [f"prompt {i}" for i in range(count)]
    return {c.name: texts if c.dtype.startswith("S") else np.ones(count, c.dtype) for c in table.columns}


def _other_work() -> None:
    memory = np.zeros(2**25, np.int8)  # more than the caches hold
    end = time.perf_counter() + OTHER_WORK_S
    while time.perf_counter() < end:
        memory += 1


def measure(load: Load, rows: StepRows, path: Path, num_steps: int, cost: Cost) -> None:
    """Log `num_steps` steps into a new file and add their mean cost to `cost`."""
    wall, cpu = [], []
    with RunLogWriter(path, attributes={}, tokens=load.tokens > 0) as writer:
        for _ in range(num_steps):
            _other_work()
            wall_start, cpu_start = time.perf_counter(), time.thread_time()
            rows.write(writer)
            wall.append(time.perf_counter() - wall_start)
            cpu.append(time.thread_time() - cpu_start)
    cost.wall_s.append(fmean(wall))
    cost.cpu_s.append(fmean(cpu))
    cost.num_bytes.append(path.stat().st_size / num_steps)


@contextmanager
def _scratch(directory: str | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="areal_hpc_bench_log_", dir=directory) as name:
        yield Path(name) / "attempt_1.h5"


def _row(load: Load, cost: Cost) -> dict[str, str]:
    share = median(cost.wall_s) / load.step_s
    return {
        "step": load.name,
        "trajectories": str(load.trajectories),
        "tokens each": str(load.tokens),
        "log ms": f"{median(cost.wall_s) * 1e3:.2f}",
        "cpu ms": f"{median(cost.cpu_s) * 1e3:.2f}",
        "kB": f"{median(cost.num_bytes) / 1e3:.0f}",
        "step s": f"{load.step_s:g}",
        "share": f"{share:.3%}",
        "goal": "met" if share <= GOAL else "MISSED",
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="areal-hpc bench log", description="time for the run log per step")
    parser.add_argument("--step-s", type=float, default=1.5, help="length of a demo step (default: %(default)s)")
    parser.add_argument("--paper-step-s", type=float, default=213.0, help="of a paper step (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1000, help="logged response tokens (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps per repeat (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="new log files per size (default: %(default)s)")
    parser.add_argument("--dir", help="directory on the file system to measure (default: the one for temporary files)")
    options = parser.parse_args(argv)
    demo = (options.step_s, 256, 4, 6)  # step length, trajectories, ranks, intervals per rank
    paper = (options.paper_step_s, 512 * 16, 128, 64)
    loads = [
        Load("demo", *demo, 0),
        Load("demo, tokens", *demo, options.tokens),
        Load("paper", *paper, 0),
        Load("paper, tokens", *paper, options.tokens),
    ]
    rows = [StepRows(load) for load in loads]
    costs = [Cost() for _ in loads]
    for _ in range(options.repeats):
        for load, step_rows, cost in zip(loads, rows, costs, strict=True):
            num_steps = options.steps if load.trajectories <= 256 else max(1, options.steps // 10)
            with _scratch(options.dir) as path:
                measure(load, step_rows, path, num_steps, cost)
    stated = f"the length of a step as stated: {options.step_s:g} s (demo), {options.paper_step_s:g} s (paper)"
    waiting = ("log ms - cpu ms", "waiting for a processor or the file system")
    return report(
        "log",
        "s per step (demo)",
        costs[0].wall_s,
        [options.step_s] * options.repeats,
        goal=GOAL,
        higher_is_better=False,
        rows=[*(_row(load, cost) for load, cost in zip(loads, costs, strict=True)), ("reference", stated), waiting],
    )
