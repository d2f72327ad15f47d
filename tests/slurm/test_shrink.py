"""Smaller instead of dead: a run goes on without rollout ranks and hosts that die, where MPI lets the others live."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from areal_hpc import submit
from areal_hpc.exits import Exit
from areal_hpc.hetjob import RunJob
from areal_hpc.rundir import read_json
from areal_hpc.runlog import RunLog
from tests.runs import tiny_config, wait_until
from tests.slurm import conf
from tests.slurm.client import Cluster
from tests.slurm.openmpi_env import openmpi_python
from tests.slurm.test_jobs import HET, OPEN_MPI_AS_ROOT, simulated
from tests.slurm.test_survival import assert_whole, start_again_at_once

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(280)]
STEPS = 20
LONG = {
    "staleness.order": "strict",
    "steps": STEPS,
    "checkpoint.resume": True,
    "checkpoint.every_s": 1,
    "simulation.speedup": 60,
}
TWO_HOSTS = {"ranks": 3, "slots": 64}
SLURM = HET | {"rollout": {"partition": "rollout", "nodes": 2}}


def with_fault(fault: str, slurm: dict = SLURM) -> dict:
    return slurm | {"setup": [f"export AREAL_HPC_FAULT={fault}"]}


def assert_went_on(job: RunJob, lost: set[int], steps: int = STEPS, batch: int = 16, eta: int = 4) -> RunLog:
    """Completed in one attempt without these ranks, every step trained, no prompt lost or twice, none too old."""
    wait_until(lambda: "exit_code" in job.status or len(attempts(job)) > 1, 150, lambda: told(job))
    assert len(attempts(job)) == 1, told(job)
    wait_until(lambda: job.done(force_check=True), 60, lambda: told(job))
    assert job.state == "COMPLETED", told(job)
    assert job.result()["versions"] == steps
    log = RunLog(job.run_dir)
    assert log.steps.version_after.tolist() == list(range(1, steps + 1))
    events = log.events[log.events.kind == "rank_lost"]
    assert set(events["rank"]) == lost and set(job.status["lost_ranks"]) == {str(rank) for rank in lost}
    rows = log.trajectories
    trained = rows[rows.fate == "consumed"]
    assert len(trained) == steps * batch * 4 == len(trained.drop_duplicates(["group_id", "sample"]))
    groups = trained.drop_duplicates("group_id")
    assert groups.prompt_id.is_unique  # the data set is longer than the run
    seen = rows.drop_duplicates("group_id").group_id
    missing = set(range(int(groups.group_id.max()) + 1)) - set(seen)
    assert len(missing) <= (eta + 1) * batch  # at most what was running in the end
    assert trained.head_lag.max() <= eta
    return log


def attempts(job: RunJob) -> list[Path]:
    return sorted(job.run_dir.glob("attempt_*"))


def told(job: RunJob) -> str:
    """All that a run left to explain itself with."""
    logs = [path for attempt in attempts(job) for path in sorted(attempt.rglob("*.log"))]
    last = [f"{path}:\n" + "\n".join(path.read_text().splitlines()[-15:]) for path in logs]
    return "\n".join([str(job.component_states), str(job.status), str(job.stdout()), *last])


@pytest.mark.fault("rollout rank killed, the run goes on", row=1)
def test_a_killed_rollout_rank(place, cluster):
    """SIGKILL in mid-generation: the run goes on with the two others, nothing is requeued."""
    job = submit(simulated(place, slurm=with_fault("kill@rollout.decode#3*300"), rollout=TWO_HOSTS), LONG)
    log = assert_went_on(job, {3})
    text = log.events[log.events.kind == "rank_lost"].text.iloc[0]
    assert "died without a word" in text and "groups are generated anew elsewhere" in text
    after = log.trajectories[log.trajectories.consumed_step > STEPS - 3]
    assert set(after.rollout_rank) == {2, 4}


@pytest.mark.fault("rollout rank killed while reward ranks score its answers", row=1)
@pytest.mark.slow
def test_a_killed_rollout_rank_where_reward_ranks_score(place, cluster):
    """Each answer waits a second for its reward, so both reward ranks hold some of the dead rank when it is killed."""
    slurm = with_fault("kill@rollout.decode#3*300", SLURM | {"reward": {"partition": "trainer"}})
    reward = {"function": "areal_hpc.simulation:reward", "ranks": 2}
    job = submit(simulated(place, slurm=slurm, rollout=TWO_HOSTS, reward=reward), LONG | {"simulation.reward_s": 60})
    log = assert_went_on(job, {3})
    assert job.component_states["2"] == "COMPLETED"
    unclaimed = log.events[log.events.kind == "answers_unclaimed"]
    assert set(unclaimed["rank"]) == {5, 6} and all("rank 3 is lost: " in text for text in unclaimed.text)
    assert any(not text.startswith("rank 3 is lost: 0 answers") for text in unclaimed.text)


@pytest.mark.fault("rollout rank killed at a named moment, real weights", row=1)
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["idle*5", "decode*40", "ship*2", "receive*4", "swap*4"])
def test_every_moment(place, cluster, tiny_dir, moment):
    """Real weights over Gloo: idle, in mid-generation, in mid-send, in a weight update, and right after one."""
    shutil.copytree(tiny_dir, place / "tiny")
    point, _, count = moment.partition("*")
    config = tiny_config(
        place / "tiny",
        place / "run",
        steps=12,
        rollout={"ranks": 3},
        staleness={"order": "strict", "max_staleness": 1 if point == "idle" else 4},
        checkpoint={"every_s": 1.0},
        slurm=with_fault(f"kill@rollout.{point}#3*{count}"),
    )
    (place / "config.yaml").write_text(yaml.safe_dump(config))
    before = shared_memory(cluster)
    job = submit(place / "config.yaml")
    wait_until(lambda: job.status.get("lost_ranks"), 150, "the loss to be noticed")
    host = RunLog(job.run_dir).ranks.set_index("rank").loc[3].host
    wait_until(lambda: len(rewards_on(cluster, host)) <= 1, 15, "the reward processes of the dead rank to be gone")
    assert_went_on(job, {3}, steps=12, batch=4)
    wait_until(lambda: not any(processes(cluster, name) for name in conf.HOSTS), 20, "all processes to be gone")
    assert shared_memory(cluster) <= before


def processes(cluster: Cluster, host: str) -> list[str]:
    """Command lines of everything of ours on a host."""
    return [line for line in cluster.on(host, ["ps", "-eo", "args"]).splitlines() if "areal_hpc." in line]


def rewards_on(cluster: Cluster, host: str) -> list[str]:
    return [line for line in processes(cluster, host) if "reward" in line]


def shared_memory(cluster: Cluster) -> set[tuple[str, str]]:
    """(Host, file) of everything in /dev/shm."""
    return {(host, name) for host in conf.HOSTS for name in cluster.on(host, ["ls", "/dev/shm"]).split()}


@pytest.mark.fault("rollout host lost, one allocation", row=5)
@pytest.mark.slow
def test_a_lost_host_of_one_allocation(place, cluster):
    """Power loss under a rollout rank: its silence tells, Slurm shrinks the job, and the job ends COMPLETED."""
    slurm = {"shape": "steps", "mpi": "pmi2", "minutes": 5, "rollout": {"nodes": 3}}
    path = simulated(place, slurm=slurm, rollout=TWO_HOSTS, deadlines={"heartbeat_s": 8.0})
    job = submit(path, LONG | {"steps": 60})
    wait_until(lambda: job.status.get("version", 0) >= 5, 60, "the fifth step")
    victim = RunLog(job.run_dir).ranks.set_index("rank").loc[4].host
    cluster.kill(victim)
    try:
        log = assert_went_on(job, {4}, steps=60)
    finally:
        cluster.heal(victim)
    text = log.events[log.events.kind == "rank_lost"].text.iloc[0]
    assert f"on {victim} is lost: it has not been heard for" in text
    assert job.component_states == {"": "COMPLETED"}


@pytest.mark.fault("rollout rank killed over PMIx", row=1)
@pytest.mark.slow
def test_over_pmix_the_whole_step_ends_and_is_requeued(place, cluster):
    """PMIx takes the neighbours of a dead rank down, so nobody tries: within 30 s the job is back in the queue."""
    slurm = SLURM | {"mpi": "pmix", "python": str(openmpi_python())}
    path = simulated(place, slurm=slurm | {"setup": OPEN_MPI_AS_ROOT}, rollout=TWO_HOSTS)
    job = submit(path, LONG | {"steps": 60})
    wait_until(lambda: job.status.get("version", 0) >= 5, 60, "the fifth step")
    row = RunLog(job.run_dir).ranks.set_index("rank").loc[3]
    cluster.on(row.host, ["kill", "-9", row.pid])
    wait_until(lambda: set(cluster.states(job.job_id).values()) == {"PENDING"}, 30, "the requeue")
    start_again_at_once(cluster, job)
    assert_whole(job, 60, 2)


@pytest.mark.fault("rollout rank stopped, later woken", row=3)
@pytest.mark.slow
def test_a_stopped_rank_that_wakes_up_leaves(place, cluster):
    """SIGSTOP: silent for too long, so it is lost. Later it goes on: what it sends is ignored, and it is told to go."""
    slurm = with_fault("stop@rollout.decode#3*300")
    path = simulated(place, slurm=slurm, rollout=TWO_HOSTS, deadlines={"heartbeat_s": 8.0})
    job = submit(path, LONG | {"steps": 100})
    wait_until(lambda: job.status.get("lost_ranks"), 90, "the loss to be noticed")
    row = RunLog(job.run_dir).ranks.set_index("rank").loc[3]
    cluster.on(row.host, ["kill", "-CONT", row.pid])
    wait_until(lambda: not alive(cluster, row.host, row.pid), 30, "the rank to leave")
    log = assert_went_on(job, {3}, steps=100)
    assert (log.events.kind == "rank_dismissed").sum() == 1


@pytest.mark.fault("rollout rank stopped for good", row=3)
@pytest.mark.slow
def test_a_rank_that_stays_stopped_does_not_hold_the_job(place, cluster):
    slurm = with_fault("stop@rollout.decode#3*300")
    path = simulated(place, slurm=slurm, rollout=TWO_HOSTS, deadlines={"heartbeat_s": 8.0})
    job = submit(path, LONG)
    wait_until(lambda: job.status.get("lost_ranks"), 90, "the loss to be noticed")
    row = RunLog(job.run_dir).ranks.set_index("rank").loc[3]
    assert_went_on(job, {3})
    wait_until(lambda: not alive(cluster, row.host, row.pid), 20, "the stopped process to be gone")


def alive(cluster: Cluster, host: str, pid: int) -> bool:
    """A process that has ended but is not collected yet is gone."""
    state = cluster.on(host, ["ps", "-o", "state=", "-p", pid], check=False).strip()
    return state not in ("", "Z")


@pytest.mark.fault("more rollout ranks killed than may be lost", row=1)
@pytest.mark.slow
def test_more_than_may_be_lost(place, cluster):
    """Two of three: the second loss ends the attempt, and the job is requeued."""
    job = submit(simulated(place, slurm=SLURM, rollout=TWO_HOSTS), LONG | {"steps": 60})
    wait_until(lambda: job.status.get("version", 0) >= 5, 60, "the fifth step")
    ranks = RunLog(job.run_dir).ranks.set_index("rank")
    for rank in (2, 4):
        cluster.on(ranks.loc[rank].host, ["kill", "-9", ranks.loc[rank].pid])
    wait_until(lambda: set(cluster.states(job.job_id).values()) == {"PENDING"}, 30, "the requeue")
    end = read_json(job.run_dir / "attempt_1/end.json")
    assert end["exit_code"] == Exit.DEADLINE
    assert "died without a word; 1 rollout ranks are lost already, no more may be" in end["why_ended"]
    start_again_at_once(cluster, job)
    assert_whole(job, 60, 2)
