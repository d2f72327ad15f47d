"""Jobs that end before their run does: walltime, preemption, lost hosts and ranks. The run goes on until it is done."""

from __future__ import annotations

import time
from pathlib import Path

import pandas as pd
import pytest

from areal_hpc import submit
from areal_hpc.exits import Exit
from areal_hpc.hetjob import RunJob
from areal_hpc.rundir import read_json
from areal_hpc.runlog import RunLog
from tests.runs import wait_until
from tests.slurm.client import Cluster
from tests.slurm.test_jobs import HET, simulated

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(280)]
LONG = {"steps": 40, "checkpoint.resume": True, "checkpoint.every_s": 1, "simulation.speedup": 60}


def version(job: RunJob) -> int:
    """Policy version as status.json has it, whichever attempt wrote it."""
    return read_json(job.run_dir / "status.json").get("version", 0)


def ends(job: RunJob) -> list[dict]:
    return [read_json(path / "end.json") for path in sorted(job.run_dir.glob("attempt_*"))]


def seconds_left_at_start(job: RunJob) -> int:
    """What the controller of the first attempt heard of Slurm."""
    events = RunLog(job.run_dir, 1).events
    return int(events[events.kind == "walltime"].text.iloc[0].removesuffix(" s left"))


def start_again_at_once(cluster: Cluster, job: RunJob) -> None:
    """A requeued job waits two minutes before it is eligible (BeginTime); a test does not."""

    def waits() -> bool:
        states = cluster.states(job.job_id)
        return bool(states) and set(states.values()) == {"PENDING"}

    wait_until(waits, 60, "the job to be in the queue again")
    time.sleep(3)  # within two seconds the hosts take the new start for the old one, and refuse it
    deadline_s = time.monotonic() + 60
    while set(cluster.states(job.job_id).values()) == {"PENDING"}:
        for number in range(len(cluster.states(job.job_id))):
            cluster.run(["scontrol", "update", f"jobid={int(job.job_id) + number}", "StartTime=now"], check=False)
        assert time.monotonic() < deadline_s, cluster.states(job.job_id)
        time.sleep(0.5)


def assert_whole(job: RunJob, steps: int, num_attempts: int) -> None:
    """The run is done, every step was trained once in the end, no group twice, in so many attempts."""
    wait_until(lambda: job.done(force_check=True), 150, "the end of the job")
    assert job.state == "COMPLETED", f"{job.component_states}\n{job.stdout()}"
    assert job.result()["versions"] == steps
    logs = [RunLog(job.run_dir, number) for number in range(1, num_attempts + 1)]
    kept = pd.concat([log.steps for log in logs]).drop_duplicates("step", keep="last").sort_values("step")
    assert kept.version_after.tolist() == list(range(1, steps + 1))
    rows = pd.concat([log.trajectories for log in logs])
    trained = rows[rows.fate == "consumed"].drop_duplicates(["group_id", "sample"], keep="last")
    assert len(trained) == steps * 16 * 4
    assert len(list(job.run_dir.glob("attempt_*"))) == num_attempts


@pytest.mark.fault("walltime", row=8)
def test_walltime(place, cluster):
    """Two minutes are too short: Slurm's warning saves the run, the job requeues itself and goes on.

    It comes between 15 s after the start (Slurm may be a minute early) and 45 s before the end, or later on a busy
    machine; from 10 s before the end on the run would not wait.
    """
    path = simulated(place, slurm=HET | {"minutes": 2, "signal_s": 45, "reserve_s": 10})
    job = submit(path, LONG | {"steps": 400})
    wait_until(lambda: read_json(place / "run/attempt_1/end.json"), 170, lambda: str(job.component_states))
    (first,) = ends(job)
    assert first["exit_code"] == Exit.REQUEUE and "SIGUSR2" in first["why_ended"] and "is saved" in first["why_ended"]
    assert first["steps_done_after"] > 0
    assert 80 <= seconds_left_at_start(job) <= 120
    start_again_at_once(cluster, job)
    wait_until(lambda: version(job) > first["steps_done_after"], 60, "a step of the second attempt")
    job.cancel()
    log = RunLog(job.run_dir, 2)
    assert log.steps.step.iloc[0] == first["steps_done_after"] + 1


@pytest.mark.fault("walltime, warning lost", row=8)
@pytest.mark.slow
@pytest.mark.parametrize(("shape", "steps", "speedup"), [("het", 100, 60), ("steps", 120, 30)])
def test_walltime_without_a_warning(place, cluster, shape, steps, speedup):
    """Nobody tells the run that its minute is over, and it saves and requeues itself; the next attempt finishes.

    In one allocation the limit is put off by a minute meanwhile, and the run uses it.
    """
    slurm = (HET if shape == "het" else {"shape": "steps", "mpi": "pmi2"}) | {"minutes": 1, "signal_s": 0}
    settings = {"steps": steps, "simulation.speedup": speedup, "checkpoint.every_s": None}
    job = submit(simulated(place, slurm=slurm), LONG | settings)
    wait_until(lambda: version(job) >= 1, 60, "the first step")
    assert "--signal" not in job.paths.submission_file.read_text()
    if shape == "steps":
        cluster.run(["scontrol", "update", f"jobid={job.job_id}", "TimeLimit=2"])
    wait_until(lambda: read_json(place / "run/attempt_1/end.json"), 110, "the end of the first attempt")
    (first,) = ends(job)
    reached, log = first["steps_done_after"], RunLog(job.run_dir, 1)
    assert first["exit_code"] == Exit.REQUEUE and "no warning came" in first["why_ended"], first
    assert f"step {reached} is saved" in first["why_ended"] and 0 < reached < steps
    told = log.events[log.events.kind == "walltime"].text.tolist()
    assert ["no new prompts" in text for text in told].count(True) == 1 and "no warning came" in told[-1], told
    assert any("was changed" in text for text in told) == (shape == "steps"), told
    for number in range(len(cluster.states(job.job_id))):
        cluster.run(["scontrol", "update", f"jobid={int(job.job_id) + number}", "TimeLimit=5"])
    start_again_at_once(cluster, job)
    assert_whole(job, steps, 2)
    assert RunLog(job.run_dir, 2).steps.step.iloc[0] == reached + 1
    assert "no new prompts" in (job.stdout() or "")


@pytest.mark.fault("preemption", row=9)
@pytest.mark.slow
def test_preemption(place, cluster):
    """A job of the partition above takes the nodes away; the run saves itself and comes back."""
    slurm = HET | {"trainer": {"partition": "low"}, "rollout": {"partition": "low"}, "common": {"exclusive": True}}
    job = submit(simulated(place, slurm=slurm), LONG)
    wait_until(lambda: version(job) >= 3, 60, "the third step")
    urgent = place / "urgent.sh"
    urgent.write_text("#!/bin/sh\nsleep 8\n")
    cluster.sbatch("--partition=high", "--nodes=5", "--exclusive", f"--output={place}/urgent.out", urgent)
    wait_until(lambda: read_json(place / "run/attempt_1/end.json"), 60, "the end of the first attempt")
    (first,) = ends(job)
    assert "SIGTERM" in first["why_ended"] and "is saved" in first["why_ended"]
    start_again_at_once(cluster, job)
    assert_whole(job, 40, 2)
    assert RunLog(job.run_dir, 2).steps.step.iloc[0] == first["steps_done_after"] + 1


@pytest.mark.fault("host lost", row=5)
def test_a_lost_host(place, cluster):
    """A host of the rollout ranks dies; Slurm requeues the job, and the run goes on without that host."""
    slurm = HET | {"trainer": {"partition": "trainer"}, "rollout": {"partition": "rollout", "nodes": 2}}
    job = submit(simulated(place, slurm=slurm), LONG)
    wait_until(lambda: version(job) >= 5, 60, "the fifth step")
    victim = RunLog(job.run_dir).ranks.host.iloc[-1]
    cluster.kill(victim)
    try:
        start_again_at_once(cluster, job)
        assert_whole(job, 40, 2)
    finally:
        cluster.heal(victim)
    assert victim not in set(RunLog(job.run_dir, 2).ranks.host)
    resumed = RunLog(job.run_dir, 2).steps.step.iloc[0]
    assert resumed > 1  # the checkpoint was there before the host was lost


@pytest.mark.fault("rank killed in a job", row=1)
@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(1, id="trainer"), pytest.param(2, id="rollout")])
def test_a_killed_rank(place, cluster, rank):
    """One that the run cannot do without: the whole step ends at once; the job puts itself back into the queue and goes
    on from the checkpoint."""
    job = submit(simulated(place), LONG | ({"survive.lost_rollouts": 0.0} if rank == 2 else {}))
    wait_until(lambda: version(job) >= 5, 60, "the fifth step")
    row = RunLog(job.run_dir).ranks.set_index("rank").loc[rank]
    cluster.on(row.host, ["kill", "-9", row.pid])
    killed_s = time.monotonic()
    wait_until(lambda: set(cluster.states(job.job_id).values()) == {"PENDING"}, 30, "the requeue")
    assert time.monotonic() - killed_s < 25
    start_again_at_once(cluster, job)
    assert_whole(job, 40, 2)


@pytest.mark.fault("the same failure at every start", row=10)
@pytest.mark.slow
def test_a_job_that_never_gets_anywhere_is_given_up(place, cluster):
    """The controller dies at its first batch, again and again: three attempts, then FAILED with all reasons."""
    path: Path = simulated(place, slurm=HET | {"setup": ["export AREAL_HPC_FAULT=exception@controller.compose#0*1"]})
    job = submit(path, LONG)
    for number in (1, 2, 3):
        wait_until(lambda n=number: read_json(place / f"run/attempt_{n}/end.json"), 60, f"the end of attempt {number}")
        start_again_at_once(cluster, job)
    wait_until(lambda: job.done(force_check=True), 60, "the end of the job")
    assert job.state == "FAILED"
    assert "the last 3 attempts finished no step beyond 0" in (job.stdout() or "")
    assert (job.stdout() or "").count("controller.compose") >= 3
    assert len(list((place / "run").glob("attempt_*"))) == 3
