"""Reward ranks: where they stand in the world and in the job, and what passes between them and the rollout ranks."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from areal_hpc.codec import Codec
from areal_hpc.comm import Received
from areal_hpc.config import Config
from areal_hpc.doctor.command import plan_of
from areal_hpc.doctor.diagnosis import Plan
from areal_hpc.doctor.probes import role_of as doctor_role_of
from areal_hpc.exits import RunError
from areal_hpc.jobspec import components_of
from areal_hpc.launch import command_line
from areal_hpc.messages import MESSAGE_TYPES, Ready, Score, Scored, ShipSamples, Stop
from areal_hpc.placement import narrow
from areal_hpc.preflight import RunClock, check_world, reward_ranks, role_of, rollout_ranks
from areal_hpc.reward_rank import RewardRank
from areal_hpc.rewards import RewardError, RewardResult
from areal_hpc.rewards.remote import RemoteRewards, to_text
from areal_hpc.rundir import RunDir
from areal_hpc.survival_messages import PeerLost, Pulse

CODEC = Codec(MESSAGE_TYPES)


def config(rewards: int = 2, **sections: Any) -> Config:
    required = {"model": {"path": "m"}, "data": {"train": "d"}, "trainer": {"ranks": 2}, "rollout": {"ranks": 3}}
    return Config.model_validate(required | {"reward": {"function": "a:b", "ranks": rewards}} | sections)


class FakeWorld:
    """Keeps what is posted, after a trip through the codec; `inbox` holds what `poll` gives."""

    expendable = frozenset({3, 4, 5})

    def __init__(self, rank: int, size: int = 8) -> None:
        self.rank, self.size = rank, size
        self.posted: list[tuple[int, Any, dict]] = []
        self.inbox: list[Received] = []
        self.lost: dict[int, int] = {}
        self.whole = True
        self.check = type("Check", (), {"duplicates": 0, "stale": 0})()

    def look_at_lifelines(self) -> None: ...

    def forget(self, rank: int) -> None:
        self.lost.setdefault(rank, 0)

    def post(self, dest: int, message: Any, arrays: dict | None = None) -> None:
        if dest in self.lost:
            return
        frame = CODEC.encode(message, arrays, source=self.rank, sequence=0, attempt=1)
        incoming, copies = CODEC.decode(frame.joined())
        self.posted.append((dest, incoming.message, copies))

    def poll(self) -> Received | None:
        return self.inbox.pop(0) if self.inbox else None


# -------------------------------------------------------------------------------------------------- place in a world
def test_rank_order():
    c = config()
    assert [role_of(rank, c) for rank in range(c.world_size)] == (
        ["controller", "trainer", "trainer", "rollout", "rollout", "rollout", "reward", "reward"]
    )
    assert (rollout_ranks(c), reward_ranks(c)) == ([3, 4, 5], [6, 7])
    none = config(rewards=0)
    assert (none.world_size, rollout_ranks(none), reward_ranks(none)) == (6, [3, 4, 5], [])
    assert c.ranks_in_words == "1 controller + 2 trainer + 3 rollout + 2 reward"
    assert none.ranks_in_words == "1 controller + 2 trainer + 3 rollout"


@pytest.mark.parametrize(
    ("rank", "component", "well"), [(6, "reward", True), (6, "rollout", False), (5, "reward", False)]
)
def test_a_rank_in_the_wrong_component_is_told(rank, component, well):
    if well:
        check_world(FakeWorld(rank), config(), component)
        return
    with pytest.raises(RunError, match=f"rank {rank} was started in component {component} but is a"):
        check_world(FakeWorld(rank), config(), component)


def test_a_world_without_its_reward_ranks_is_told():
    with pytest.raises(RunError, match=r"has 6 ranks but the configuration needs 8: 1 controller .* \+ 2 reward"):
        check_world(FakeWorld(0, size=6), config(), None)


def test_mpiexec_starts_them_last(tmp_path):
    line = command_line("mpiexec", config(), RunDir(tmp_path, 1))
    parts = " ".join(line).split(" : ")
    assert len(parts) == 3 and parts[2].startswith("-n 2 ") and parts[2].endswith("--component reward")
    assert len(" ".join(command_line("mpiexec", config(rewards=0), RunDir(tmp_path, 1))).split(" : ")) == 2


def test_they_have_nodes_without_gpus():
    slurm = {"common": {"gpus_per_node": 4, "cpus_per_task": 6}, "reward": {"partition": "cpu", "ranks_per_node": 1}}
    *_, reward = components_of(config(slurm=slurm))
    assert (reward.name, reward.nodes, reward.tasks, reward.holds) == ("reward", 2, 2, "2 reward")
    assert reward.settings.gpus_per_node is None
    assert (reward.settings.partition, reward.settings.cpus_per_task) == ("cpu", 6)
    assert [c.name for c in components_of(config(rewards=0, slurm=slurm))] == ["trainer", "rollout"]


def test_they_see_no_gpu():
    environ = {"SLURM_LOCALID": "0", "SLURM_NODEID": "5", "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "2"}
    assert narrow(environ, "reward") is None and environ["CUDA_VISIBLE_DEVICES"] == ""


def test_the_doctor_knows_them(tmp_path):
    plan = plan_of(config(run_dir=str(tmp_path)), 10.0)
    assert Plan.from_text(plan.to_text()) == plan and plan.num_ranks == 8
    assert plan.components == (("trainer", 3), ("rollout", 3), ("reward", 2))
    assert [doctor_role_of(rank, plan) for rank in range(8)] == [role_of(rank, config()) for rank in range(8)]


# ------------------------------------------------------------------------------------------------------ rollout side
def test_the_rank_with_fewest_answers_gets_the_next_one():
    world = FakeWorld(4)
    rewards = RemoteRewards(world, [6, 7, 8])
    for sample in range(6):
        rewards.submit((1, sample), "p", "c", {})
    sent = [dest for dest, _, _ in world.posted]
    assert Counter(sent) == {6: 2, 7: 2, 8: 2} and rewards.num_pending == 6
    of_7 = [message.sample for dest, message, _ in world.posted if dest == 7]
    for sample in of_7:
        rewards.arrived(Scored(1, sample, 1.0, "correct", 0.1, ""))
    rewards.submit((2, 0), "p", "c", {})
    rewards.submit((2, 1), "p", "c", {})
    assert [dest for dest, _, _ in world.posted[-2:]] == [7, 7] and rewards.num_pending == 6


def test_rollout_ranks_do_not_all_begin_with_the_same():
    first = []
    for rank in (3, 4):
        world = FakeWorld(rank)
        RemoteRewards(world, [6, 7]).submit((1, 0), "p", "c", {})
        first.append(world.posted[0][0])
    assert sorted(first) == [6, 7]


def test_everything_about_an_answer_travels_and_each_result_comes_once():
    world = FakeWorld(4)
    rewards = RemoteRewards(world, [6])
    rewards.submit((3, 1), "caf\u00e9 \ud83d", "", {"answer": "4"}, {"truncated": True, "purpose": "train"})
    ((_, message, arrays),) = world.posted
    assert (to_text(arrays["prompt"]), to_text(arrays["completion"])) == ("caf\u00e9 \ud83d", "")
    assert message == Score(3, 1, {"answer": "4"}, {"truncated": True, "purpose": "train"})
    with pytest.raises(RewardError, match="unique"):
        rewards.submit((3, 1), "p", "c", {})
    assert rewards.poll() == []
    rewards.arrived(Scored(3, 1, 0.5, "wrong", 0.25, "", "42"))
    assert rewards.poll() == [RewardResult((3, 1), 0.5, "wrong", 0.25, "", "42")] and rewards.poll() == []
    assert rewards.num_pending == 0


# ------------------------------------------------------------------------------------------------------- reward side
class FakeRewards:
    num_restarts = 0

    def __init__(self) -> None:
        self.submitted: list[tuple] = []
        self.done: list[RewardResult] = []

    @property
    def num_pending(self) -> int:
        return len(self.submitted)

    def submit(self, *given: Any) -> None:
        self.submitted.append(given)

    def poll(self) -> list[RewardResult]:
        done, self.done = self.done, []
        return done


def reward_rank() -> tuple[RewardRank, FakeWorld, FakeRewards]:
    world, rewards = FakeWorld(6), FakeRewards()
    return RewardRank(config(), world, RunClock(0.0), rewards), world, rewards


def score(source: int, group_id: int, sample: int, completion: str = "c") -> Received:
    arrays = {"prompt": np.frombuffer(b"p", np.uint8), "completion": np.frombuffer(completion.encode(), np.uint8)}
    return Received(source, Score(group_id, sample, {"a": 1}, {"num_tokens": 2}), arrays)


def test_each_result_goes_back_to_whom_it_belongs():
    rank, world, rewards = reward_rank()
    world.inbox = [score(3, 1, 0, "x"), score(5, 2, 0, "y")]
    assert rank.handle_messages() and not rank.handle_messages()
    assert rewards.submitted == [
        ((1, 0), "p", "x", {"a": 1}, {"num_tokens": 2}),
        ((2, 0), "p", "y", {"a": 1}, {"num_tokens": 2}),
    ]
    rewards.done = [
        RewardResult((2, 0), 5.0, "correct", 0.1, "", "42"),
        RewardResult((1, 0), math.nan, "timeout", 2.0, "not scored within 2 s"),
    ]
    assert rank.send_results()
    (to, first, _), (to_other, second, _) = world.posted
    assert (to, first) == (5, Scored(2, 0, 5.0, "correct", 0.1, "", "42"))
    assert (to_other, second.outcome, second.detail) == (3, "timeout", "not scored within 2 s")
    assert math.isnan(second.reward)


def test_a_group_generated_anew_elsewhere_waits_for_its_namesake():
    rank, world, rewards = reward_rank()
    world.inbox = [score(3, 1, 0, "lost"), score(4, 1, 0, "anew")]
    rank.handle_messages()
    assert [given[2] for given in rewards.submitted] == ["lost"]
    rewards.done = [RewardResult((1, 0), 1.0, "correct", 0.1, "")]
    rank.send_results()
    assert [given[2] for given in rewards.submitted] == ["lost", "anew"]
    rewards.done = [RewardResult((1, 0), 2.0, "correct", 0.1, "")]
    rank.send_results()
    assert [(to, message.reward) for to, message, _ in world.posted] == [(3, 1.0), (4, 2.0)]


def test_a_lost_rank_gets_no_answer_and_its_namesakes_do_not_wait_for_it():
    """Rank 3 has an answer at work and one that waits for a namesake of rank 4; rank 4 goes on with the lost group."""
    rank, world, rewards = reward_rank()
    world.inbox = [score(3, 1, 0, "lost"), score(4, 2, 0, "own"), score(3, 2, 0, "waits"), score(4, 1, 0, "anew")]
    rank.handle_messages()
    world.inbox = [Received(0, PeerLost(3), {})]
    rank.handle_messages()
    events = [message.text for _, message, _ in world.posted if type(message).__name__ == "Event"]
    assert events == ["rank 3 is lost: 1 answers are scored for nobody, 1 that waited are dropped"]
    rewards.done = [RewardResult((1, 0), 1.0, "correct", 0.1, ""), RewardResult((2, 0), 2.0, "correct", 0.1, "")]
    rank.send_results()
    assert [given[2] for given in rewards.submitted] == ["lost", "own", "anew"]
    rewards.done = [RewardResult((1, 0), 3.0, "correct", 0.1, "")]
    rank.send_results()
    sent = [(to, message.group_id, message.reward) for to, message, _ in world.posted if isinstance(message, Scored)]
    assert sent == [(4, 2, 2.0), (4, 1, 3.0)]


def test_a_world_that_is_not_whole_and_a_silent_controller():
    rank, world, _ = reward_rank()
    world.inbox = [Received(0, Stop("done", False, whole=False), {})]
    assert rank.run() is False and not world.whole
    rank, world, _ = reward_rank()
    rank.config = config(deadlines={"heartbeat_s": 0.01, "step_s": 0.5, "startup_s": 3})
    world.inbox = [Received(0, Pulse(), {})]
    with pytest.raises(RunError, match="rank 6 heard nothing from the controller for"):
        rank.run()


def test_it_reports_a_replaced_process_and_ends_when_told():
    rank, world, rewards = reward_rank()
    rewards.num_restarts = 2
    world.inbox = [Received(0, Stop("done", True), {})]
    assert rank.run() is True
    kinds = [type(message).__name__ for _, message, _ in world.posted]
    assert world.posted[0][1] == Ready() and "Event" in kinds
    event = world.posted[kinds.index("Event")][1]
    assert (event.kind, event.text) == ("reward_process_replaced", "2 replaced so far on this rank")


def test_a_message_for_another_role_is_refused():
    rank, world, _ = reward_rank()
    world.inbox = [Received(0, ShipSamples(1), {})]
    with pytest.raises(RunError, match="reward rank 6 cannot use ShipSamples from rank 0"):
        rank.run()


def test_a_silent_world_ends_it():
    rank, _, _ = reward_rank()
    rank.config = config(deadlines={"step_s": 0.001, "startup_s": 0.05})
    with pytest.raises(RunError, match="reward rank 6 heard nothing for"):
        rank.run()


def test_it_needs_no_torch():
    code = "import sys, areal_hpc.reward_rank; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
