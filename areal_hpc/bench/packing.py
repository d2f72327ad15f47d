"""`areal-hpc bench packing`: micro-batches of Algorithm 1 against the lower bound ceil(tokens / capacity).

ours = micro-batches of `allocate`, reference = the lower bound, on the same lengths; lower is better, the goal is 1.02.
The JSON line is about the workload named by --workload; the table shows all of them, also those that miss the goal.
The bound may be out of reach: best-fit decreasing, the yardstick of bin packing, tells the lengths from the algorithm.
The padded side is what the paper compares with: a fixed number of micro-batches on each rank, sequences in order of
arrival, each micro-batch padded to its longest sequence.
"""

from __future__ import annotations

import argparse
import statistics
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from areal_hpc.bench.report import report
from areal_hpc.packing import allocate, lower_bound, plan

GOAL = 1.02
FIXED_COUNT = 32

Draw = Callable[[np.random.Generator, int], np.ndarray]


@dataclass(frozen=True)
class Workload:
    """One training batch: how many sequences, how long (prompt and response tokens), and what a micro-batch holds."""

    num_sequences: int
    capacity: int
    max_prompt: int
    max_response: int
    draw_responses: Draw

    def lengths(self, seed: int) -> list[int]:
        rng = np.random.default_rng(seed)
        responses = np.clip(self.draw_responses(rng, self.num_sequences), 1, self.max_response).astype(np.int64)
        return (responses + rng.integers(1, self.max_prompt, self.num_sequences, endpoint=True)).tolist()


def log_normal(median: float, sigma: float) -> Draw:
    return lambda rng, size: rng.lognormal(np.log(median), sigma, size)


def uniform(low: int, high: int) -> Draw:
    return lambda rng, size: rng.integers(low, high, size, endpoint=True)


# 27648 response tokens, prompts up to 1024, 32768 per micro-batch and 512 x 16 sequences are the paper's Table 3.
WORKLOADS = {
    "reasoning": Workload(512 * 16, 32768, 1024, 27648, log_normal(8000, 0.8)),
    "heavy tail": Workload(512 * 16, 32768, 1024, 27648, log_normal(5000, 1.2)),
    "late, long": Workload(512 * 16, 32768, 1024, 27648, log_normal(12000, 0.6)),
    "uniform": Workload(512 * 16, 32768, 1024, 27648, uniform(1, 27648)),
    "minibatch": Workload(128 * 16, 32768, 1024, 27648, log_normal(8000, 0.8)),
    "small": Workload(16 * 4, 32768, 1024, 27648, log_normal(8000, 0.8)),
    "demo": Workload(32 * 8, 2048, 16, 320, log_normal(41, 0.44)),
}


@dataclass(frozen=True)
class Measured:
    """One workload, one seed."""

    micro_batches: int
    bound: int
    best_fit: int
    allocate_s: float
    plan_excess: float  # worst minibatch, against the bound rounded up to a multiple of ranks
    plan_imbalance: float  # worst minibatch
    fixed_padding: float  # padding / all tokens computed
    fixed_peak: float  # largest padded micro-batch / capacity

    @property
    def ratio(self) -> float:
        return self.micro_batches / self.bound


def measure(workload: Workload, seed: int, num_ranks: int, num_minibatches: int) -> Measured:
    lengths, capacity = workload.lengths(seed), workload.capacity
    started = time.perf_counter()
    groups = allocate(lengths, capacity)
    allocate_s = time.perf_counter() - started
    made = plan(lengths, capacity=capacity, num_ranks=num_ranks, num_minibatches=num_minibatches, rng_seed=seed)
    even_bounds = [-(-bound // num_ranks) * num_ranks for bound in made.lower_bounds]
    padded = fixed_count(lengths, FIXED_COUNT * num_ranks)
    return Measured(
        micro_batches=len(groups),
        bound=lower_bound(lengths, capacity),
        best_fit=best_fit_decreasing(lengths, capacity),
        allocate_s=allocate_s,
        plan_excess=max(count / bound - 1 for count, bound in zip(made.num_micro_batches, even_bounds, strict=True)),
        plan_imbalance=max(made.imbalance),
        fixed_padding=1 - sum(lengths) / sum(padded),
        fixed_peak=max(padded) / capacity,
    )


def best_fit_decreasing(lengths: list[int], capacity: int) -> int:
    """Number of groups when each sequence, longest first, joins the fullest group that has room."""
    rooms: list[int] = []  # room left in each group, ascending
    for length in sorted(lengths, reverse=True):
        tightest = bisect_left(rooms, length)
        room = rooms.pop(tightest) if tightest < len(rooms) else capacity
        insort(rooms, room - length)
    return len(rooms)


def fixed_count(lengths: list[int], count: int) -> list[int]:
    """Tokens computed by each of `count` micro-batches (fewer if there are fewer sequences), padding included."""
    parts = np.array_split(np.asarray(lengths), min(count, len(lengths)))
    return [int(part.max()) * len(part) for part in parts]


def row(name: str, measured: list[Measured]) -> dict[str, str]:
    """A line of the table: medians over the repeats, but the worst repeat where the heading says so."""

    def median(field: str) -> float:
        return statistics.median(getattr(run, field) for run in measured)

    worst = max(run.ratio for run in measured)
    return {
        "workload": name,
        "sequences": str(WORKLOADS[name].num_sequences),
        "bound": f"{median('bound'):.0f}",
        "ours": f"{median('micro_batches'):.0f}",
        "best fit": f"{median('best_fit'):.0f}",
        "worst over bound": f"{worst - 1:.2%}",
        "goal": "met" if worst <= GOAL else "MISSED",
        "allocate ms": f"{median('allocate_s') * 1e3:.1f}",
        "worst plan": f"{max(run.plan_excess for run in measured):.1%}",
        "worst rank": f"{max(run.plan_imbalance for run in measured):.1%}",
        "padding": f"{median('fixed_padding'):.0%}",
        "padded peak": f"{median('fixed_peak'):.1f}",
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="areal-hpc bench packing", description="micro-batches against their bound")
    parser.add_argument("--workload", choices=WORKLOADS, default="reasoning", help="the one the JSON line is about")
    parser.add_argument("--repeats", type=int, default=5, help="fresh lengths each time (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=8, help="trainer ranks of the plan (default: %(default)s)")
    parser.add_argument("--minibatches", type=int, default=4, help="PPO minibatches of the plan (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    runs = {
        name: [measure(workload, options.seed + i, options.ranks, options.minibatches) for i in range(options.repeats)]
        for name, workload in WORKLOADS.items()
    }
    legend = [
        ("worst plan", f"micro-batches of a minibatch over its bound made a multiple of {options.ranks} ranks"),
        ("worst rank", f"tokens of the busiest rank over the mean, {options.minibatches} minibatches"),
        ("padding", f"share of computed tokens at a fixed {FIXED_COUNT} micro-batches per rank"),
        ("padded peak", "its largest micro-batch / capacity; above 1 it would not fit"),
    ]
    chosen = runs[options.workload]
    return report(
        "packing",
        f"micro-batches ({options.workload})",
        [float(run.micro_batches) for run in chosen],
        [float(run.bound) for run in chosen],
        goal=GOAL,
        higher_is_better=False,
        rows=[*(row(name, measured) for name, measured in runs.items()), *legend],
    )
