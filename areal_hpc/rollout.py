"""A rollout rank: generates without ever waiting, and takes new weights between two tokens.

Its loop does a little of everything between two decoding steps: messages, weights, one token for every running
sample, rewards. A finished group is announced by its figures; its tokens stay here until the controller says which
trainer rank they go to. A prompt is never dropped: what cannot be generated is reported as refused.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from areal_hpc.comm import Received, World
from areal_hpc.compute import RolloutCompute
from areal_hpc.config import Config
from areal_hpc.engines.base import Completion, Request, Swap
from areal_hpc.exits import Exit, RunError
from areal_hpc.faults import fault
from areal_hpc.logschema import Finish, Outcome
from areal_hpc.messages import (
    AdmitGroup,
    Credits,
    DropGroups,
    GroupFinished,
    GroupRefused,
    LoadWeights,
    Ready,
    Samples,
    ShipSamples,
    Stop,
    WeightsLoaded,
)
from areal_hpc.preflight import CONTROLLER, RunClock, unusable
from areal_hpc.reporting import Reporter
from areal_hpc.rewards import RewardResult
from areal_hpc.seeds import sample_seed
from areal_hpc.shipment import join
from areal_hpc.trajectory import Key, Trajectory
from areal_hpc.waiting import Backoff


@dataclass(slots=True)
class Group:
    """One admitted prompt with what is known of its samples so far."""

    header: AdmitGroup
    prompt: tuple[int, ...]
    completions: dict[int, Completion] = field(default_factory=dict)
    rewards: dict[int, RewardResult] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.rewards) == self.header.num_samples

    def trajectory(self, sample: int) -> Trajectory:
        done = self.completions[sample]
        tokens = np.concatenate([np.asarray(self.prompt, np.int32), done.tokens])
        return Trajectory(self.header.group_id, sample, tokens, len(self.prompt), done.logprobs, done.versions)

    def figures(self, clock: RunClock) -> dict[str, NDArray]:
        """The arrays of GroupFinished, by sample index."""
        order = range(self.header.num_samples)
        done = [self.completions[s] for s in order]
        scored = [self.rewards[s] for s in order]
        return {
            "reward": np.array([r.reward for r in scored], np.float64),
            "outcome": np.array([Outcome.of(r.outcome) for r in scored], np.uint8),
            "finish": np.array([Finish.of(c.finish) for c in done], np.uint8),
            "num_response": np.array([len(c.tokens) for c in done], np.int32),
            "first_version": np.array([c.versions[0] for c in done], np.int32),
            "last_version": np.array([c.versions[-1] for c in done], np.int32),
            "mean_version": np.array([c.versions.mean() for c in done], np.float32),
            "interruptions": np.array([c.interruptions for c in done], np.int32),
            "start_s": np.array([clock.at(c.started_s) for c in done], np.float64),
            "finish_s": np.array([clock.at(c.finished_s) for c in done], np.float64),
        }


class Rollout:
    """One rollout rank: an engine, its end of the weight broadcast, and what scores its answers."""

    def __init__(self, config: Config, world: World, clock: RunClock, compute: RolloutCompute) -> None:
        self.config = config
        self.world = world
        self.clock = clock
        self.reporter = Reporter(world, clock)
        self.compute = compute
        self.engine, self.receiver, self.rewards = compute.engine, compute.receiver, compute.rewards
        self.groups: dict[int, Group] = {}
        self.versions_to_load: list[int] = []
        self.receiving = False
        self.receive_s: dict[int, float] = {}
        self.credits_to_grant = config.rollout.slots + config.trainer.group_size
        self.heard_s = time.monotonic()
        self.num_restarts_told = 0
        self.stopped = False

    def run(self) -> None:
        """Generate until told to stop.

        Raises:
            RunError: DEADLINE when a weight update does not arrive completely in time, or the controller is silent.
            WeightError: an update that arrived is not the one that was announced.
        """
        self.world.post(CONTROLLER, Ready())
        pause = Backoff()
        silence_s = self.config.deadlines.silence_s
        while not self.stopped:
            busy = self.handle_messages()
            busy |= self.take_weights()
            busy |= self.decode()
            busy |= self.take_rewards()
            self.grant_credits()
            if busy:
                pause.reset()
                continue
            if time.monotonic() - self.heard_s > silence_s:
                reason = f"rollout rank {self.world.rank} heard nothing from the controller for {silence_s:.0f} s"
                raise RunError(Exit.DEADLINE, reason)
            pause.sleep()

    # ------------------------------------------------------------------------------------------------ decoding
    def decode(self) -> bool:
        """One token for every running sample."""
        if not self.engine.num_running and not self.engine.num_waiting:
            self.reporter.activity.switch("idle")
            return False
        self.reporter.activity.switch("generate")
        fault("rollout.decode", self.world.rank)
        for done in self.engine.step():
            self.score(done)
        self.report_swap(self.engine.take_swap())
        return bool(self.engine.num_running)

    def score(self, done: Completion) -> None:
        """Give a finished sample to the reward workers at once; decoding does not wait for them."""
        self.credits_to_grant += 1
        group = self.groups.get(done.key[0])
        if group is None:
            return
        group.completions[done.key[1]] = done
        text = self.compute.decode(done.tokens)
        self.rewards.submit(done.key, group.header.prompt, text, group.header.metadata)

    def take_rewards(self) -> bool:
        results = self.rewards.poll()
        if self.rewards.num_restarts > self.num_restarts_told:
            self.num_restarts_told = self.rewards.num_restarts
            self.reporter.event("reward_worker_replaced", f"{self.num_restarts_told} replaced so far on this rank")
        for result in results:
            group = self.groups.get(result.key[0])
            if group is None:
                continue
            group.rewards[result.key[1]] = result
            if result.outcome in ("timeout", "error"):
                self.reporter.event(
                    f"reward_{result.outcome}", f"group {result.key[0]} sample {result.key[1]}: {result.detail}"
                )
            if group.is_complete:
                header = group.header
                message = GroupFinished(header.group_id, len(group.prompt), header.purpose)
                self.world.post(CONTROLLER, message, group.figures(self.clock))
                if header.purpose == "evaluate":
                    del self.groups[header.group_id]
        return bool(results)

    def grant_credits(self) -> None:
        """Tell the controller about free places as soon as they suffice for a group, or nothing else runs."""
        if self.credits_to_grant >= self.config.trainer.group_size or (
            self.credits_to_grant and not self.engine.num_running
        ):
            self.world.post(CONTROLLER, Credits(self.credits_to_grant))
            self.credits_to_grant = 0

    # ------------------------------------------------------------------------------------------------- weights
    def take_weights(self) -> bool:
        """Move a weight update on: post its receives; when it is complete, swap it in between two tokens."""
        if not self.receiving:
            if not self.versions_to_load:
                return False
            self.receiver.begin(self.versions_to_load.pop(0))
            self.receiving = True
        ready = self.receiver.poll()
        if ready is None:
            return False
        self.receiving = False
        self.receive_s[ready.version] = ready.receive_s
        with self.reporter.activity("swap"):
            self.report_swap(self.engine.load_weights(ready.version, ready.tensors.items()))
        return True

    def report_swap(self, swap: Swap | None) -> None:
        if swap is not None:
            receive_s = self.receive_s.pop(swap.version)
            cost = (swap.pause_s, swap.interrupted, swap.reprefilled_tokens)
            self.world.post(CONTROLLER, WeightsLoaded(swap.version, receive_s, *cost))

    # ------------------------------------------------------------------------------------------------ messages
    def handle_messages(self) -> bool:
        self.reporter.tick()
        busy = False
        while (received := self.world.poll()) is not None:
            self.handle(received)
            self.heard_s = time.monotonic()
            busy = True
        return busy

    def handle(self, received: Received) -> None:
        arrays = received.arrays
        match received.message:
            case AdmitGroup() as header:
                self.admit(header)
            case ShipSamples() as header:
                with self.reporter.activity("ship"):
                    self.ship(header, arrays["group_id"], arrays["sample"], arrays["trainer"])
            case DropGroups():
                self.drop(arrays["group_id"].tolist())
            case LoadWeights(version):
                self.versions_to_load.append(version)
            case Stop():
                self.stopped = True
            case _:
                raise unusable(self.world, self.config, received)

    def admit(self, header: AdmitGroup) -> None:
        prompt = tuple(self.compute.encode(header.prompt))
        longest = self.config.rollout.max_prompt_tokens
        if not 1 <= len(prompt) <= longest:
            reason = f"prompt {header.prompt_id} has {len(prompt)} tokens; 1 to {longest} are allowed"
            self.world.post(CONTROLLER, GroupRefused(header.group_id, reason, header.purpose))
            self.credits_to_grant += header.num_samples
            return
        self.groups[header.group_id] = Group(header, prompt)
        self.engine.submit(
            [
                Request(
                    key=(header.group_id, sample),
                    prompt=prompt,
                    max_new_tokens=self.config.rollout.max_new_tokens,
                    seed=sample_seed(self.config.seed, header.purpose, header.group_id, sample),
                    min_version=header.min_version,
                )
                for sample in range(header.num_samples)
            ]
        )

    def ship(self, header: ShipSamples, group_ids: NDArray, samples: NDArray, trainers: NDArray) -> None:
        """Send finished samples to the trainers that will learn from them, then forget their groups."""
        by_rank: dict[int, list[Key]] = defaultdict(list)
        for group_id, sample, trainer in zip(group_ids.tolist(), samples.tolist(), trainers.tolist(), strict=True):
            by_rank[trainer].append((group_id, sample))
        for trainer, keys in by_rank.items():
            arrays = join([self.groups[group_id].trajectory(sample) for group_id, sample in keys])
            self.world.post(trainer, Samples(header.step), arrays)
            if header.also_log:
                self.world.post(CONTROLLER, Samples(header.step), arrays)
        for group_id in set(group_ids.tolist()):
            del self.groups[group_id]

    def drop(self, group_ids: list[int]) -> None:
        keys = [(group_id, sample) for group_id in group_ids for sample in range(self.config.trainer.group_size)]
        self.credits_to_grant += self.engine.cancel(keys)
        self.report_swap(self.engine.take_swap())
        for group_id in group_ids:
            self.groups.pop(group_id, None)
