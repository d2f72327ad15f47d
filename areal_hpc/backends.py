"""Builds what computes for a rank, as the configuration says.

Imports stand inside the functions: a simulated rank starts without torch, and a rank imports only what its role uses.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from areal_hpc.comm import World
from areal_hpc.compute import NoUpdates, Receiver, Rewards, RolloutCompute, TrainerCompute
from areal_hpc.config import Config
from areal_hpc.messages import StoreAddress, Welcome
from areal_hpc.preflight import expect, reward_ranks, rollout_ranks, trainer_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from areal_hpc.process_group import ProcessGroups
    from areal_hpc.workflows import Workflow
    from areal_hpc.workflows.episodes import WorkflowCompute


def trainer_compute(config: Config, world: World, welcome: Welcome) -> AbstractContextManager[TrainerCompute]:
    """What computes for this trainer rank; all trainer and rollout ranks enter at the same time."""
    if config.is_simulated:
        from areal_hpc.simulation.backend import simulated_trainer

        return simulated_trainer(config, world)
    return _trainer(config, world, welcome)


@contextmanager
def rollout_compute(config: Config, world: World, welcome: Welcome) -> Iterator[RolloutCompute]:
    """What computes for this rollout rank; all trainer and rollout ranks enter at the same time."""
    if config.is_simulated:
        from areal_hpc.simulation.backend import simulated_rollout

        with _rewards(config, world) as rewards, simulated_rollout(config, rewards) as compute:
            yield compute
    else:
        with _rollout(config, world, welcome) as compute:
            yield compute


@contextmanager
def reward_compute(config: Config) -> Iterator[Rewards]:
    """What scores answers in or for the calling rank."""
    if config.is_simulated:
        from areal_hpc.simulation.backend import simulated_rewards

        yield simulated_rewards(config)
        return
    from areal_hpc.rewards import Recipe, RewardService

    settings = config.reward
    with RewardService(Recipe.of(settings), num_workers=settings.workers, timeout_s=settings.timeout_s) as rewards:
        yield rewards


def _rewards(config: Config, world: World) -> AbstractContextManager[Rewards]:
    """What a rollout rank has its answers scored by: the reward ranks, if there are any, else itself."""
    if config.reward.ranks:
        from areal_hpc.rewards.remote import RemoteRewards

        return nullcontext(RemoteRewards(world, reward_ranks(config)))
    return reward_compute(config)


@contextmanager
def libraries_stay() -> Iterator[None]:
    """Import without Python's garbage collector, and have it leave alone for ever what has come in.

    It finds nothing there, but goes through all objects of torch and transformers again and again: a sixth of what a
    start costs, and 0.2 s between two tokens whenever it wants to see everything (CPython 3.11, torch 2.13).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _trainer(config: Config, world: World, welcome: Welcome) -> Iterator[TrainerCompute]:
    with libraries_stay():
        import torch

        from areal_hpc.buckets import BucketPlan
        from areal_hpc.checkpoint import read_tensors, write_tensors
        from areal_hpc.learner import Learner
        from areal_hpc.models import load_model, load_tokenizer, named_weights, save_model
        from areal_hpc.weights import WeightSender

    torch.set_num_threads(config.trainer.threads)
    groups = meet(config, world, welcome)
    tokenizer = load_tokenizer(config.model.path)
    model = load_model(config.model.path, dtype=config.model.dtype)
    sender = None
    if world.rank == trainer_ranks(config)[0]:
        sender = WeightSender(groups, BucketPlan.of(named_weights(model), config.weights.bucket_bytes))
    yield TrainerCompute(
        make_learner=lambda between, activity: Learner(
            model, config.trainer, config.rollout.temperature, reducer=groups, between=between, activity=activity
        ),
        weights=lambda: named_weights(model),
        sender=sender,
        save=lambda directory: save_model(model, tokenizer, directory),
        write_state=write_tensors,
        read_state=read_tensors,
    )
    if world.whole:  # a failed peer would hold it up
        groups.close()


@contextmanager
def _rollout(config: Config, world: World, welcome: Welcome) -> Iterator[RolloutCompute]:
    with libraries_stay():
        import torch

        from areal_hpc.data.chat import Chat
        from areal_hpc.engines.transformers_engine import TransformersEngine
        from areal_hpc.models import eos_ids, load_model, load_tokenizer, named_weights
        from areal_hpc.workflows.episodes import load_workflow

    torch.set_num_threads(config.rollout.threads)
    groups = None if config.is_evaluation else meet(config, world, welcome)
    settings = config.rollout
    with ExitStack() as stack:
        workflow = load_workflow(config.workflow.function) if config.workflow.function else None
        rewards = stack.enter_context(_rewards(config, world))
        tokenizer = load_tokenizer(config.model.path)
        encode = Chat(config.data).encoder(tokenizer)
        model = load_model(config.model.path, dtype=config.model.dtype)
        engine = TransformersEngine(
            model,
            num_slots=settings.slots,
            max_len=config.max_sequence_tokens,
            eos_ids=eos_ids(model),
            interrupt=settings.interrupt,
            prefill_tokens=settings.prefill_tokens,
        )
        receiver: Receiver = NoUpdates()  # of an evaluation: the weights in model.path are version 0
        if groups is not None:
            engine.version = -1  # no version yet: the first broadcast, of version 0, is a rise like any other
            receiver = _receiver(groups, named_weights(model), config)
        yield RolloutCompute(
            encode=encode,
            decode=lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)),
            engine=engine,
            receiver=receiver,
            rewards=rewards,
            workflow=_episodes(config, stack, workflow, tokenizer) if workflow else None,
        )
    if groups is not None and world.whole:
        groups.close()


def _receiver(groups: ProcessGroups, weights: Mapping[str, Tensor], config: Config) -> Receiver:
    """Where weight updates arrive. Imported apart: an evaluation has no process groups (rank.leave)."""
    from areal_hpc.buckets import BucketPlan
    from areal_hpc.weights import WeightReceiver

    return WeightReceiver(groups, BucketPlan.of(weights, config.weights.bucket_bytes))


def _episodes(config: Config, stack: ExitStack, workflow: Workflow, tokenizer: Any) -> WorkflowCompute:
    """What episodes need; tool processes end with `stack`."""
    from areal_hpc.workflows.episode import Language
    from areal_hpc.workflows.episodes import WorkflowCompute
    from areal_hpc.workflows.tools import ToolPool

    settings = config.workflow
    language = Language(
        more=lambda text: tokenizer(text, add_special_tokens=False).input_ids,
        read=lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)),
    )
    tools = stack.enter_context(ToolPool(settings.tool_workers, settings.tool_timeout_s))
    return WorkflowCompute(workflow, language, tools, settings.timeout_s)


def meet(config: Config, world: World, welcome: Welcome) -> ProcessGroups:
    """Build the torch process groups of trainers and rollouts; the first trainer's host is the meeting point."""
    from areal_hpc.process_group import ProcessGroups, open_store, store_port

    trainers = trainer_ranks(config)
    computing = [*trainers, *rollout_ranks(config)]
    others = len(computing)
    host = "127.0.0.1" if welcome.single_host else socket.gethostname()
    timeout_s = config.deadlines.startup_s
    if world.rank == trainers[0]:
        store = open_store(host, is_master=True, world_size=others, timeout_s=timeout_s)
        for rank in computing[1:]:
            world.post(rank, StoreAddress(host, store_port(store)))
        world.flush(timeout_s)
    else:
        address = expect(world, StoreAddress, timeout_s)
        store = open_store(address.host, is_master=False, world_size=others, port=address.port, timeout_s=timeout_s)
    return ProcessGroups(
        store,
        backend="gloo",
        rank=world.rank - 1,
        size=others,
        trainer_ranks=[rank - 1 for rank in trainers],
        generation=0,
        timeout_s=config.deadlines.weights_s,
        interface=config.weights.interface or ("lo" if welcome.single_host else None),
    )
