"""Scoring on real ranks: it never holds up decoding, and it makes no difference where it happens."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from areal_hpc.exits import Exit
from areal_hpc.faults import VARIABLE
from areal_hpc.runlog import RunLog
from tests.runs import processes_of, run, tiny_config

pytestmark = pytest.mark.mpi
TINY = Path(__file__).parents[1] / "tiny.py"


def test_decoding_never_waits_for_a_reward(tiny_dir, tmp_path):
    """The first reward takes until 16 other answers are scored. Only 6 are admitted at the start (4 slots and a group
    of 2), so the others were begun, decoded and ended while it was being computed."""
    config = tiny_config(
        tiny_dir,
        tmp_path / "run",
        steps=10,
        staleness={"max_staleness": "inf"},
        rollout={"slots": 4},
        trainer={"batch_size": 2, "group_size": 2},
        reward={
            "function": f"{TINY}:waits_for_others",
            "kwargs": {"directory": str(tmp_path), "others": 16},
            "workers": 2,
            "timeout_s": 100,
        },
    )
    finished = run(config)
    finished.assert_done()
    rows = finished.log().trajectories
    assert set(rows.outcome) <= {"correct", "wrong"} and not rows.reward.isna().any()
    assert (tmp_path / "others").stat().st_size >= 16 and finished.summary["versions"] == 10


@pytest.fixture(scope="module")
def both(tiny_dir, tmp_path_factory):
    """The same synchronous run, scored on the rollout rank and on a reward rank of which a process is killed."""
    finished = []
    for ranks in (0, 1):
        directory = tmp_path_factory.mktemp(f"reward_ranks_{ranks}")
        killed = {"kwargs": {"mark": str(directory / "killed")}, "function": f"{TINY}:killed_once"} if ranks else {}
        config = tiny_config(
            tiny_dir,
            directory / "run",
            mode="sync",
            steps=4,
            seed=3,
            filter={"min_success": 0.05, "max_success": 0.95, "refill": False},
            reward={"ranks": ranks, "workers": 2, "function": f"{TINY}:reward", **killed},
        )
        finished.append((config, run(config)))
        finished[-1][1].assert_done()
    return finished


def test_reward_ranks_change_nothing_about_what_is_learnt(both):
    (_, alone), (_, apart) = both
    a, b = alone.log(), apart.log()
    assert b.steps.loss.tolist() == pytest.approx(a.steps.loss.tolist(), abs=2e-6)
    assert b.steps.reward_mean.tolist() == a.steps.reward_mean.tolist() and a.steps.loss.std() > 1e-3
    columns = ["group_id", "sample", "reward", "outcome", "fate", "consumed_step"]
    order = ["group_id", "sample"]
    rows = [log.trajectories[columns].sort_values(order).reset_index(drop=True) for log in (a, b)]
    assert rows[0].equals(rows[1])


def test_a_process_killed_on_a_reward_rank_costs_nothing_and_nothing_is_left(both):
    config, apart = both[1]
    log = apart.log()
    assert Path(config["reward"]["kwargs"]["mark"]).exists()
    replaced = log.events.query("kind == 'reward_process_replaced'")
    assert replaced["rank"].tolist() == [3] and replaced.text.iloc[0].startswith("1 replaced so far")
    assert (log.trajectories.reward.abs() == 5).all(), "the answer was scored again"
    assert log.ranks.role.tolist() == ["controller", "trainer", "rollout", "reward"]
    assert log.activity.query("rank == 3 and kind == 'score'").shape[0] > 0
    assert apart.summary["why_ended"] == "last step reached" and processes_of(config) == []


def test_without_refill_batches_are_smaller_and_counted(both):
    log = both[0][1].log()
    groups = log.trajectories.drop_duplicates("group_id")
    consumed = groups[groups.fate == "consumed"].groupby("consumed_step").size()
    assert log.steps.num_groups.tolist() == consumed.tolist() and log.steps.num_groups.min() < 4
    assert log.steps.num_filtered.iloc[-1] == (groups.fate == "filtered").sum()
    places = log.steps.num_consumed.iloc[-1] + 4 * log.steps.num_empty_batches.iloc[-1]
    assert places == log.steps.num_groups.sum() + log.steps.num_filtered.iloc[-1]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["exception@reward.score#3*40", "kill@reward.score#3*40"])
def test_a_lost_reward_rank_ends_the_attempt_and_the_next_one_scores_anew(fault, tiny_dir, tmp_path):
    config = tiny_config(
        tiny_dir, tmp_path / "run", mode="sync", steps=4, reward={"ranks": 1}, checkpoint={"every_s": 0.001}
    )
    config["reward"]["function"] = f"{TINY}:reward"
    first = run(config, environment={VARIABLE: fault})
    assert first.returncode != 0
    if fault.startswith("exception"):
        assert first.returncode == Exit.FAILED and "rank 3 (reward)" in first.stderr
    second = run(config)
    second.assert_done()
    assert second.summary["versions"] == 4
    parts = [RunLog(config["run_dir"], attempt) for attempt in (1, 2)]
    trained = pd.concat([log.trajectories.query("fate == 'consumed'") for log in parts])
    trained = trained.drop_duplicates(["group_id", "sample"], keep="last")
    assert len(trained) == 4 * 4 * 4 and (trained.reward.abs() == 5).all()
    assert processes_of(config) == []
