"""A rollout rank: generates without ever waiting, and takes new weights between two tokens.

Its loop does a little of everything between two decoding steps: messages, weights, one token for every running
sample, rewards. A finished group is announced by its figures; its tokens stay here until the controller says which
trainer rank they go to, and after that until they are trained on, so that a checkpoint in between can save them. A
prompt is never dropped: what cannot be generated is reported as refused.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from numpy.typing import NDArray

from areal_hpc.comm import Received, World
from areal_hpc.compute import Arrived, RolloutCompute
from areal_hpc.config import Config
from areal_hpc.engines.base import NOT_BEGUN, Begun, Completion, Request, Swap
from areal_hpc.exits import Exit, RunError
from areal_hpc.faults import fault
from areal_hpc.group_files import GroupSaver, read_groups
from areal_hpc.messages import (
    AdmitGroup,
    Credits,
    DropGroups,
    GroupFinished,
    GroupRefused,
    LoadWeights,
    Ready,
    Samples,
    Scored,
    ShipSamples,
    Stop,
    Trained,
    WeightsLoaded,
)
from areal_hpc.mpi_start import say_ready
from areal_hpc.preflight import CONTROLLER, RunClock, check_pulse, unusable
from areal_hpc.reporting import Reporter
from areal_hpc.rewards import RewardResult
from areal_hpc.rewards.backlog import Backlog
from areal_hpc.rewards.remote import RemoteRewards
from areal_hpc.rollout_state import Group, SavedGroup, snapshot
from areal_hpc.saving_messages import GroupsRestored, RestoreGroups, SaveGroups
from areal_hpc.seeds import sample_seed
from areal_hpc.shipment import join
from areal_hpc.survival_messages import Pulse, Regroup, WeightsTorn
from areal_hpc.trajectory import Key
from areal_hpc.waiting import Backoff
from areal_hpc.workflows.episodes import Episodes


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
        self.episodes = Episodes(compute.workflow, self.engine, self.cancel) if compute.workflow else None
        self.saver = GroupSaver()
        self.versions_to_load: list[int] = []
        self.receiving = False
        self.received_version = -1
        self.generation, self.torn = 0, False
        self.receive_s: dict[int, float] = {}
        self.credits_to_grant = config.rollout.slots + config.trainer.group_size
        self.heard_s = time.monotonic()
        self.pulse_s = math.inf
        self.num_restarts_told = self.num_tool_restarts_told = 0
        self.backlog = Backlog(config.max_pending, lambda text: self.reporter.event("reward_backlog", text))
        self.stopped = self.healthy_end = False

    def run(self) -> bool:
        """Generate until told to stop; True after a healthy end.

        Raises:
            RunError: DEADLINE when a weight update does not arrive completely in time, or the controller is silent;
                FAILED or DISK when groups cannot be packed or restored.
            WeightError: an update that arrived is not the one that was announced.
        """
        self.world.post(CONTROLLER, Ready())
        say_ready()
        pause = Backoff()
        silence_s = self.config.deadlines.silence_s
        while not self.stopped:
            busy = self.handle_messages()
            busy |= self.take_weights()
            busy |= self.decode()
            busy |= self.take_episodes()
            busy |= self.take_rewards()
            busy |= self.report_saved()
            self.grant_credits()
            if busy:
                pause.reset()
                continue
            check_pulse(self.world, self.config, self.pulse_s)
            if time.monotonic() - self.heard_s > silence_s:
                reason = f"rollout rank {self.world.rank} heard nothing from the controller for {silence_s:.0f} s"
                raise RunError(Exit.DEADLINE, reason)
            pause.sleep()
        self.reporter.send()
        return self.healthy_end

    # ------------------------------------------------------------------------------------------------ decoding
    def decode(self) -> bool:
        """One token for every running sample."""
        if not self.engine.num_running and not self.engine.num_waiting:
            self.reporter.activity.switch("idle")
            fault("rollout.idle", self.world.rank)
            return False
        self.reporter.activity.switch("generate")
        fault("rollout.decode", self.world.rank)
        for done in self.engine.step():
            if self.episodes is None:
                self.score(done)
            else:
                self.episodes.turned(done)
        self.report_swap(self.engine.take_swap())
        return bool(self.engine.num_running)

    def score(self, done: Completion, result: RewardResult | None = None) -> None:
        """Give a finished sample to the reward workers at once, unless it is scored already; decoding does not wait
        for them."""
        self.credits_to_grant += 1
        group = self.groups.get(done.key[0])
        if group is None:
            return
        group.completions[done.key[1]] = done
        if result is None:
            self.submit_reward(group, done)

    def take_episodes(self) -> bool:
        """Episodes that have ended, scored by their workflow or to be scored."""
        ends = self.episodes.poll() if self.episodes is not None else []
        for end in ends:
            group_id, sample = end.done.key
            if (group := self.groups.get(group_id)) is not None:
                group.journals[sample] = end.journal
            self.score(end.done, end.result)
            if group is not None and end.result is not None:
                self.settle(group, end.result, "workflow")
        if self.episodes is not None and self.episodes.num_restarts > self.num_tool_restarts_told:
            self.num_tool_restarts_told = self.episodes.num_restarts
            self.reporter.event("tool_process_replaced", f"{self.num_tool_restarts_told} replaced so far on this rank")
        return bool(ends)

    def submit_reward(self, group: Group, done: Completion) -> None:
        header = group.header
        facts = {
            "num_tokens": len(done.tokens),
            "max_new_tokens": self.config.rollout.max_new_tokens,
            "prompt_tokens": len(group.prompt),
            "truncated": done.finish == "length",
            "purpose": header.purpose,
        }
        self.rewards.submit(done.key, header.prompt, self.compute.decode(done.tokens), header.metadata, facts)

    def take_rewards(self) -> bool:
        results = self.rewards.poll()
        if self.rewards.num_restarts > self.num_restarts_told:
            self.num_restarts_told = self.rewards.num_restarts
            self.reporter.event("reward_process_replaced", f"{self.num_restarts_told} replaced so far on this rank")
        for result in results:
            group = self.groups.get(result.key[0])
            if group is not None:
                self.settle(group, result, "reward")
        return bool(results)

    def settle(self, group: Group, result: RewardResult, by: str) -> None:
        """Note what became of a sample, from the reward function or its workflow; the last one completes its group."""
        group.rewards[result.key[1]] = result
        if result.outcome in ("timeout", "error"):
            self.reporter.event(
                f"{by}_{result.outcome}", f"group {result.key[0]} sample {result.key[1]}: {result.detail}"
            )
        if group.is_complete:
            self.announce(group)

    def announce(self, group: Group) -> None:
        header = group.header
        texts, answers = self.words_of(group) if self.config.is_evaluation else ([], [])
        message = GroupFinished(header.group_id, len(group.prompt), header.purpose, texts, answers)
        self.world.post(CONTROLLER, message, group.figures(self.clock))
        if header.purpose == "evaluate":
            del self.groups[header.group_id]

    def words_of(self, group: Group) -> tuple[list[str], list[str | None]]:
        """Texts of a finished group and what the reward function read out of them, by sample index."""
        order = range(group.header.num_samples)
        texts = [self.compute.decode(group.completions[s].tokens) for s in order]
        words = [text.encode("utf-8", "backslashreplace").decode() for text in texts]  # half a surrogate cannot travel
        return words, [group.rewards[s].answer for s in order]

    def grant_credits(self) -> None:
        """Tell the controller about free places as soon as they suffice for a group, or nothing else runs; not while
        too many answers wait for their reward."""
        if self.backlog.holds(self.rewards.num_pending):
            return
        enough = 1 if self.config.is_evaluation else self.config.trainer.group_size
        if self.credits_to_grant >= enough or (self.credits_to_grant and not self.engine.num_running):
            self.world.post(CONTROLLER, Credits(self.credits_to_grant))
            self.credits_to_grant = 0

    # ------------------------------------------------------------------------------------------------- weights
    def take_weights(self) -> bool:
        """Move a weight update on: post its receives; when it is complete, swap it in between two tokens."""
        try:
            ready = self.receive()
        except RunError as error:
            self.weights_torn(error)
            return False
        if ready is None:
            return False
        self.receiving = False
        if ready.version <= self.received_version:
            return True  # sent again, because others had lost it
        fault("rollout.swap", self.world.rank)
        self.received_version = ready.version
        self.receive_s[ready.version] = ready.receive_s
        with self.reporter.activity("swap"):
            self.report_swap(self.engine.load_weights(ready.version, ready.tensors.items()))
        return True

    def receive(self) -> Arrived | None:
        """The next version once it is complete."""
        if not self.receiving:
            while self.versions_to_load and self.versions_to_load[0] <= self.received_version:
                self.versions_to_load.pop(0)  # what a new group is given first may be newer than what was announced
            if not self.versions_to_load or self.torn:
                return None
            self.receiver.begin(self.versions_to_load.pop(0))
            self.receiving = True
            fault("rollout.receive", self.world.rank)
        return self.receiver.poll()

    def weights_torn(self, error: RunError) -> None:
        """Where a lost rank can be survived, a torn update is not the end: the controller has the group rebuilt."""
        if not self.world.expendable:
            raise error
        self.torn, self.receiving = True, False
        self.world.post(CONTROLLER, WeightsTorn(self.generation, error.reason))

    def regroup(self, generation: int, ranks: list[int]) -> None:
        """Leave the weights group for the next one, in which the newest version comes first of all."""
        self.generation, self.torn, self.receiving = generation, False, True
        self.receiver.regroup([rank - 1 for rank in ranks], generation)

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
            case Trained():
                self.forget(arrays["group_id"].tolist())
            case DropGroups():
                self.drop(arrays["group_id"].tolist())
            case SaveGroups(step, path):
                self.save(step, Path(path))
            case RestoreGroups(path):
                self.restore(Path(path), arrays["group_id"].tolist())
            case Scored() as scored if isinstance(self.rewards, RemoteRewards):
                self.rewards.arrived(scored)
            case LoadWeights(version):
                self.versions_to_load.append(version)
            case Regroup(generation):
                self.regroup(generation, arrays["rank"].tolist())
            case Pulse():
                self.pulse_s = time.monotonic()
            case Stop(_, healthy, whole):
                self.world.whole &= whole
                self.stopped, self.healthy_end = True, healthy
            case _:
                raise unusable(self.world, self.config, received)

    def admit(self, header: AdmitGroup) -> None:
        self.take_up(SavedGroup(header, {}, {}, {}, {}))

    def take_up(self, saved: SavedGroup) -> None:
        """Begin with a group, or go on with it where an earlier attempt was; what is finished takes no place."""
        header = saved.header
        prompt = tuple(self.compute.encode(header.prompt))
        longest = self.config.rollout.max_prompt_tokens
        if not 1 <= len(prompt) <= longest:
            reason = f"prompt {header.prompt_id} has {len(prompt)} tokens; 1 to {longest} are allowed"
            self.world.post(CONTROLLER, GroupRefused(header.group_id, reason, header.purpose))
            self.credits_to_grant += header.num_samples
            return
        journals = {sample: saved.journals[sample] for sample in saved.completions if sample in saved.journals}
        group = Group(header, prompt, dict(saved.completions), dict(saved.rewards), journals)
        self.groups[header.group_id] = group
        self.credits_to_grant += len(group.completions)
        unfinished = [sample for sample in range(header.num_samples) if sample not in group.completions]
        requests = [self.request(group, sample, saved.begun.get(sample, NOT_BEGUN)) for sample in unfinished]
        if self.episodes is None:
            self.engine.submit(requests)
        else:
            for sample, request in zip(unfinished, requests, strict=True):
                self.episodes.begin(header, request, saved.journals.get(sample))
        for sample, done in group.completions.items():
            if sample not in group.rewards:
                self.submit_reward(group, done)
        if group.is_complete:
            self.announce(group)

    def request(self, group: Group, sample: int, begun: Begun) -> Request:
        header = group.header
        return Request(
            key=(header.group_id, sample),
            prompt=group.prompt,
            max_new_tokens=self.config.rollout.max_new_tokens,
            seed=self.seed(header, sample),
            min_version=header.min_version,
            temperature=self.config.temperature_of(header.purpose),
            begun=begun,
        )

    def seed(self, header: AdmitGroup, sample: int) -> int:
        """Held-out answers follow from prompt and sample number: every version and every run meets the same numbers."""
        group = header.prompt_id if header.purpose == "evaluate" else header.group_id
        return sample_seed(self.config.seed, header.purpose, group, header.first_sample + sample)

    def ship(self, header: ShipSamples, group_ids: NDArray, samples: NDArray, trainers: NDArray) -> None:
        """Send finished samples to the trainers that will learn from them."""
        by_rank: dict[int, list[Key]] = defaultdict(list)
        for group_id, sample, trainer in zip(group_ids.tolist(), samples.tolist(), trainers.tolist(), strict=True):
            by_rank[trainer].append((group_id, sample))
        for trainer, keys in by_rank.items():
            arrays = join([self.groups[group_id].trajectory(sample) for group_id, sample in keys])
            self.world.post(trainer, Samples(header.step), arrays)
            fault("rollout.ship", self.world.rank)
            if header.also_log:
                self.world.post(CONTROLLER, Samples(header.step), arrays)

    def drop(self, group_ids: list[int]) -> None:
        keys = [(group_id, sample) for group_id in group_ids for sample in range(self.config.trainer.group_size)]
        self.credits_to_grant += self.cancel(keys) if self.episodes is None else self.episodes.drop(keys)
        self.forget(group_ids)

    def cancel(self, keys: Iterable[Key]) -> int:
        """Forget samples in the engine, which may then be free to swap; returns how many there were."""
        num_cancelled = self.engine.cancel(keys)
        self.report_swap(self.engine.take_swap())
        return num_cancelled

    def forget(self, group_ids: list[int]) -> None:
        for group_id in group_ids:
            self.groups.pop(group_id, None)

    # --------------------------------------------------------------------------------------------- checkpoints
    def save(self, step: int, path: Path) -> None:
        """Note the state of all groups between two tokens; a thread writes it."""
        begin_s = time.monotonic()
        partials = self.engine.partials()
        of_samples = self.episodes.snapshot(partials) if self.episodes is not None else (partials,)
        groups = snapshot(self.groups.values(), *of_samples)
        self.saver.save(step, path, groups, time.monotonic() - begin_s)

    def report_saved(self) -> bool:
        saved = self.saver.poll()
        if saved is not None:
            self.world.post(CONTROLLER, saved)
        return saved is not None

    def restore(self, path: Path, group_ids: list[int]) -> None:
        """Go on with these groups of an earlier attempt; the controller has reserved places for all their samples."""
        groups = read_groups(path, group_ids)
        for group in groups:
            self.take_up(group)
        num_finished = sum(len(group.completions) for group in groups)
        num_tokens = sum(group.num_partial_tokens for group in groups)
        self.world.post(CONTROLLER, GroupsRestored(len(groups), num_finished, num_tokens))
