"""`areal-hpc bench packing`: micro-batches of Algorithm 1 against the lower bound ceil(tokens / capacity).

ours = micro-batches of `allocate`, reference = the lower bound, on the same lengths; lower is better, the goal is a ratio
of at most 1.02. The JSON line is about the workload named by --workload; the table shows all of them, also those that miss the goal.
Beside it stand the time of `allocate`, the whole plan for several trainer ranks, and what the paper compares with: a fixed
number of 32 micro-batches per rank, sequences in order of arrival, each micro-batch padded to its longest sequence.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

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
    micro_batches: int
    bound: int
    allocate_s: float
    plan_waste: float  # worst minibatch
    plan_imbalance: float  # worst minibatch
    fixed_padding: float  # padding tokens / all tokens computed
    fixed_peak: float  # largest padded micro-batch / capacity

    @property
    def ratio(self) -> float:
        return self.micro_batches / self.bound


def measure(workload: Workload, seed: int, num_ranks: int, num_minibatches: int) -> Measured:
    lengths = workload.lengths(seed)
    started = time.perf_counter()
    groups = allocate(lengths, workload.capacity)
    allocate_s = time.perf_counter() - started
    made = plan(
        lengths, capacity=workload.capacity, num_ranks=num_ranks, num_minibatches=num_minibatches, rng_seed=seed
    )
    padded = fixed_count(lengths, FIXED_COUNT * num_ranks)
    return Measured(
        micro_batches=len(groups),
        bound=lower_bound(lengths, workload.capacity),
        allocate_s=allocate_s,
        plan_waste=max(made.waste),
        plan_imbalance=max(made.imbalance),
        fixed_padding=1 - sum(lengths) / sum(padded),
        fixed_peak=max(padded) / workload.capacity,
    )


def fixed_count(lengths: list[int], count: int) -> list[int]:
    """Tokens computed by each of `count` micro-batches (or one per sequence) of near-equal numbers of padded sequences."""
    parts = np.array_split(np.asarray(lengths), min(count, len(lengths)))
    return [int(part.max()) * len(part) for part in parts]
