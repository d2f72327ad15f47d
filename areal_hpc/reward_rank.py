"""A reward rank: scores the answers of rollout ranks in processes of its own. It needs neither model nor torch."""

from __future__ import annotations

import math
import time
from collections import deque

from areal_hpc.comm import Received, World
from areal_hpc.compute import Rewards
from areal_hpc.config import Config
from areal_hpc.exits import Exit, RunError
from areal_hpc.faults import fault
from areal_hpc.messages import Ready, Score, Scored, Stop
from areal_hpc.preflight import CONTROLLER, RunClock, check_pulse, unusable
from areal_hpc.reporting import Reporter
from areal_hpc.rewards.remote import to_text
from areal_hpc.survival_messages import PeerLost, Pulse
from areal_hpc.trajectory import Key
from areal_hpc.waiting import Backoff


class RewardRank:
    """One reward rank and what scores for it."""

    def __init__(self, config: Config, world: World, clock: RunClock, rewards: Rewards) -> None:
        self.config = config
        self.world = world
        self.reporter = Reporter(world, clock)
        self.rewards = rewards
        self.senders: dict[Key, int] = {}
        self.later: deque[Received] = deque()
        self.num_restarts_told = 0
        self.heard_s = time.monotonic()
        self.pulse_s = math.inf
        self.stopped = self.healthy_end = False

    def run(self) -> bool:
        """Score until told to stop; True after a healthy end.

        Raises:
            RunError: DEADLINE, nobody has sent anything for too long, or the controller has not.
            RewardError: the reward processes do not start any more.
        """
        self.world.post(CONTROLLER, Ready())
        pause = Backoff()
        silence_s = self.config.deadlines.silence_s
        while not self.stopped:
            busy = self.handle_messages()
            busy |= self.send_results()
            self.reporter.activity.switch("score" if self.rewards.num_pending else "idle")
            if busy:
                pause.reset()
                continue
            check_pulse(self.world, self.config, self.pulse_s)
            if time.monotonic() - self.heard_s > silence_s:
                reason = f"reward rank {self.world.rank} heard nothing for {silence_s:.0f} s"
                raise RunError(Exit.DEADLINE, reason)
            pause.sleep()
        self.reporter.send()
        return self.healthy_end

    def handle_messages(self) -> bool:
        self.reporter.tick()
        self.world.look_at_lifelines()  # takes new ones as well, one at a time
        busy = False
        while (received := self.world.poll()) is not None:
            self.heard_s = time.monotonic()
            match received.message:
                case Score():
                    self.score(received)
                case PeerLost(rank):
                    self.forget(rank)
                case Pulse():
                    self.pulse_s = time.monotonic()
                case Stop(_, healthy, whole):
                    self.world.whole &= whole
                    self.stopped, self.healthy_end = True, healthy
                case _:
                    raise unusable(self.world, self.config, received)
            busy = True
        return busy

    def score(self, received: Received) -> None:
        """Give an answer to the reward processes. One with the name of another that is still at work waits for it: a
        group may be generated anew by another rank."""
        message: Score = received.message
        key = (message.group_id, message.sample)
        if key in self.senders:
            self.later.append(received)
            return
        fault("reward.score", self.world.rank)
        self.senders[key] = received.source
        prompt, completion = to_text(received.arrays["prompt"]), to_text(received.arrays["completion"])
        self.rewards.submit(key, prompt, completion, message.metadata, message.facts)

    def forget(self, rank: int) -> None:
        """Drop the answers of a rollout rank that is lost: their groups are generated anew elsewhere. What is scored
        already is scored to its end, and `World.post`, which may have seen the death before, sends it to nobody."""
        self.world.forget(rank)
        num_begun = sum(sender == rank for sender in self.senders.values())
        kept = [received for received in self.later if received.source != rank]
        text = f"{num_begun} answers are scored for nobody, {len(self.later) - len(kept)} that waited are dropped"
        self.later = deque(kept)
        self.reporter.event("answers_unclaimed", f"rank {rank} is lost: {text}")

    def send_results(self) -> bool:
        results = self.rewards.poll()
        if self.rewards.num_restarts > self.num_restarts_told:
            self.num_restarts_told = self.rewards.num_restarts
            self.reporter.event("reward_process_replaced", f"{self.num_restarts_told} replaced so far on this rank")
        for result in results:
            group_id, sample = result.key
            scored = Scored(
                group_id, sample, result.reward, result.outcome, result.seconds, result.detail, result.answer
            )
            self.world.post(self.senders.pop(result.key), scored)
        waiting, self.later = (self.later, deque()) if results else (deque(), self.later)
        for received in waiting:
            self.score(received)
        return bool(results)
