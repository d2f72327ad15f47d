"""A learner without a model: a step takes as long as the trainer rank with most tokens needs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from areal_hpc.comm import World
from areal_hpc.compute import ActivityHook, Batch, Between, StepResult
from areal_hpc.config import SimulationConfig
from areal_hpc.exits import Exit, RunError
from areal_hpc.simulation.clock import NAP_S, Clock
from areal_hpc.waiting import Stopwatch


class Agreement(Protocol):
    """Waits for all trainer ranks; True if all of them said so."""

    def __call__(self, mine: bool, between: Between) -> bool: ...


class TrainerAgreement:
    """An `Agreement` over MPI, on a communicator of the trainer ranks; they all make it at the same time."""

    def __init__(self, world: World, ranks: Sequence[int], timeout_s: float) -> None:
        self._rank, self._num, self._timeout_s = world.rank, len(ranks), timeout_s
        self._comm = world.comm.Create_group(world.comm.Get_group().Incl(list(ranks)))

    def __call__(self, mine: bool, between: Between) -> bool:
        """Raises RunError (DEADLINE) when another trainer rank does not come in time."""
        votes = np.zeros(self._num, np.uint8)
        request = self._comm.Iallgather(np.array([mine], np.uint8), votes)
        deadline_s = time.monotonic() + self._timeout_s
        while not request.Test():
            if time.monotonic() > deadline_s:
                reason = f"trainer rank {self._rank} waited {self._timeout_s:.0f} s for the other trainers in a step"
                raise RunError(Exit.DEADLINE, reason)
            between()
            time.sleep(NAP_S / 4)
        return bool(votes.all())


class SimulatedLearner:
    """A learner that lets time pass: tokens of this rank, then the slowest rank, then train_step_s.

    A behaviour log-prob that is not finite skips the step on all ranks, as with a real loss. There are no statistics.
    """

    def __init__(
        self, settings: SimulationConfig, clock: Clock, agree: Agreement, between: Between, activity: ActivityHook
    ) -> None:
        self._settings, self._clock, self._agree = settings, clock, agree
        self._between, self._activity = between, activity
        self._num_steps = 0

    def train(self, batch: Batch) -> StepResult:
        """Raises KeyError when a sample planned for this rank is not in the batch."""
        watch = Stopwatch()
        watch.lap("proximal_s")
        with self._activity("train_update"):
            num_tokens, finite = _work(batch)
            self._pass(num_tokens / (self._settings.train_tokens_per_s * self._settings.gpus_per_rank))
            finite = self._agree(finite, self._between)
            self._pass(self._settings.train_step_s)
        self._num_steps += finite
        watch.lap("update_s")
        return StepResult(not finite, {}, watch.finish())

    def state(self) -> dict[str, np.ndarray]:
        """There is nothing to keep but the number of steps."""
        return {"num_steps": np.array(self._num_steps)}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._num_steps = int(state["num_steps"])

    def _pass(self, seconds: float) -> None:
        self._clock.sleep_until(self._clock.now() + seconds, self._between)


def _work(batch: Batch) -> tuple[int, bool]:
    """Tokens of this rank, prompts included, and whether all of its log-probs are finite."""
    num_tokens, finite = 0, True
    for index in (i for minibatch in batch.micro_batches for micro in minibatch for i in micro):
        trajectory = batch.trajectories[index]
        if trajectory is None:
            raise KeyError(f"sample {index} of the batch is planned for this rank but was not received")
        num_tokens += len(trajectory.tokens)
        finite &= math.isfinite(trajectory.logprobs.sum())
    return num_tokens, finite
