"""Too many answers without a reward stop admission, not decoding: a rollout rank with everything around it faked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from areal_hpc.config import Config
from areal_hpc.messages import Credits, Event
from areal_hpc.preflight import RunClock
from areal_hpc.rollout import Rollout


class Engine:
    """Always four sequences running; counts its steps."""

    num_running, num_waiting, steps = 4, 0, 0

    def step(self) -> list:
        self.steps += 1
        return []

    def take_swap(self) -> None:
        return None


def test_a_backlog_holds_back_credits_and_nothing_else():
    posted: list[Any] = []
    world = SimpleNamespace(
        rank=2,
        size=3,
        check=SimpleNamespace(duplicates=0, stale=0),
        post=lambda dest, message, arrays=None: posted.append(message),
        poll=lambda: None,
    )
    settings = {"function": "a:b", "max_pending": 20}
    required = {"model": {"path": "m"}, "data": {"train": "d"}, "trainer": {"group_size": 2}}
    config = Config.model_validate(required | {"reward": settings, "rollout": {"slots": 4}})
    engine, rewards = Engine(), SimpleNamespace(num_pending=0, num_restarts=0, poll=list)
    compute: Any = SimpleNamespace(engine=engine, receiver=None, rewards=rewards, workflow=None)
    rollout = Rollout(config, world, RunClock(0.0), compute)  # type: ignore[arg-type]

    def turn(num_pending: int) -> list[Any]:
        rewards.num_pending = num_pending
        posted.clear()
        rollout.decode()
        rollout.grant_credits()
        return [message for message in posted if isinstance(message, (Credits, Event))]

    assert turn(20) == [Credits(6)]  # 4 slots and a group
    rollout.credits_to_grant = 2
    (event,) = turn(21)
    assert event == Event("reward_backlog", "21 answers wait, reward.max_pending is 20: no new prompts for now")
    rollout.credits_to_grant = 6
    assert turn(30) == turn(11) == []
    event, credits = turn(10)
    assert event.text.startswith("new prompts again after ") and credits == Credits(6)
    assert engine.steps == 5, "every turn decoded"
