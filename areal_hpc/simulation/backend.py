"""What stands in for computing on the ranks of a simulated run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_hpc.checkpoint import read_arrays, write_arrays
from areal_hpc.comm import World
from areal_hpc.compute import ActivityHook, Between, Rewards, RolloutCompute, TrainerCompute
from areal_hpc.config import Config
from areal_hpc.data.chat import Chat
from areal_hpc.preflight import trainer_ranks
from areal_hpc.simulation import CHARS_PER_TOKEN
from areal_hpc.simulation.clock import Clock
from areal_hpc.simulation.engine import TOKEN, SimulatedEngine
from areal_hpc.simulation.rewards import SimulatedRewards
from areal_hpc.simulation.training import SimulatedLearner, TrainerAgreement
from areal_hpc.simulation.weights import SimulatedReceiver, SimulatedSender


@contextmanager
def simulated_trainer(config: Config, world: World) -> Iterator[TrainerCompute]:
    settings, trainers = config.simulation, trainer_ranks(config)
    clock = Clock(settings.speedup)
    agree = TrainerAgreement(world, trainers, config.deadlines.step_s)

    def make_learner(between: Between, activity: ActivityHook) -> SimulatedLearner:
        return SimulatedLearner(settings, clock, agree, between, activity)

    yield TrainerCompute(
        make_learner=make_learner,
        weights=dict,
        sender=SimulatedSender(settings, clock) if world.rank == trainers[0] else None,
        save=lambda directory: save(directory, config),
        write_state=write_arrays,
        read_state=read_arrays,
    )


@contextmanager
def simulated_rollout(config: Config, rewards: Rewards) -> Iterator[RolloutCompute]:
    settings, chat = config.simulation, Chat(config.data)
    clock = Clock(settings.speedup)
    engine = SimulatedEngine(
        settings,
        clock,
        num_slots=config.rollout.slots,
        max_len=config.max_sequence_tokens,
        interrupt=config.rollout.interrupt,
    )
    if config.is_evaluation:
        engine.version = 0
    yield RolloutCompute(
        encode=lambda text: encode(chat.plain(text)),
        decode=lambda tokens: "",
        engine=engine,
        receiver=SimulatedReceiver(settings, clock),
        rewards=rewards,
    )


def simulated_rewards(config: Config) -> SimulatedRewards:
    return SimulatedRewards(config.simulation, Clock(config.simulation.speedup), config.seed)


def encode(text: str) -> list[int]:
    """A token for every CHARS_PER_TOKEN characters that have begun."""
    return [TOKEN] * -(-len(text) // CHARS_PER_TOKEN)


def save(directory: Path, config: Config) -> None:
    """Say in the place of the model that there is none."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "SIMULATED").write_text(f"Run {config.name} was {config.compute}: no model.\n", encoding="utf-8")
