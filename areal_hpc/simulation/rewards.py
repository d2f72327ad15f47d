"""Rewards by chance, each a fixed time after its answer; nothing is started and nothing is called."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from areal_hpc.config import SimulationConfig
from areal_hpc.rewards import NO_FACTS, RewardResult
from areal_hpc.seeds import sample_seed
from areal_hpc.simulation.clock import Clock
from areal_hpc.trajectory import Key

CORRECT, WRONG = 5.0, -5.0


class SimulatedRewards:
    """A `Rewards`: right with probability `success`, decided by the run's seed and the key alone."""

    num_restarts = 0

    def __init__(self, settings: SimulationConfig, clock: Clock, seed: int) -> None:
        self._settings, self._clock, self._seed = settings, clock, seed
        self._pending: deque[tuple[float, Key]] = deque()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def submit(
        self, key: Key, prompt: str, completion: str, metadata: dict[Any, Any], facts: Mapping[str, Any] = NO_FACTS
    ) -> None:
        self._pending.append((self._clock.now() + self._settings.reward_s, key))

    def poll(self) -> list[RewardResult]:
        now_s, results = self._clock.now(), []
        while self._pending and self._pending[0][0] <= now_s:
            results.append(self._score(self._pending.popleft()[1]))
        return results

    def _score(self, key: Key) -> RewardResult:
        seconds = self._clock.real(self._settings.reward_s)
        if sample_seed(self._seed, "reward", *key) < self._settings.success * 2**63:
            return RewardResult(key, CORRECT, "correct", seconds, "")
        return RewardResult(key, WRONG, "wrong", seconds, "")
