"""Smaller instead of dead: a run goes on without rollout ranks and hosts that die, where MPI lets the others live."""

from __future__ import annotations

import time

import pandas as pd
import pytest

from areal_hpc import submit
from areal_hpc.hetjob import RunJob
from areal_hpc.runlog import RunLog
from tests.runs import wait_until
from tests.slurm.test_jobs import HET, simulated

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(280)]
STEPS = 30
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


def assert_went_on(job: RunJob, lost: set[int], steps: int = STEPS, eta: int = 4) -> RunLog:
    """Completed in one attempt without these ranks, every step trained, no prompt lost or twice, none too old."""
    wait_until(lambda: job.done(force_check=True), 150, "the end of the job")
    assert job.state == "COMPLETED", f"{job.component_states}\n{job.stdout()}"
    assert job.result()["versions"] == steps
    assert len(list(job.run_dir.glob("attempt_*"))) == 1
    log = RunLog(job.run_dir)
    assert log.steps.version_after.tolist() == list(range(1, steps + 1))
    events = log.events[log.events.kind == "rank_lost"]
    assert set(events["rank"]) == lost and set(job.status["lost_ranks"]) == {str(rank) for rank in lost}
    rows = log.trajectories
    trained = rows[rows.fate == "consumed"]
    assert len(trained) == steps * 16 * 4 == len(trained.drop_duplicates(["group_id", "sample"]))
    groups = trained.drop_duplicates("group_id")
    assert groups.prompt_id.is_unique  # the data set is longer than the run
    seen = rows.drop_duplicates("group_id").group_id
    missing = set(range(int(groups.group_id.max()) + 1)) - set(seen)
    assert len(missing) <= (eta + 1) * 16  # at most what was running in the end
    assert trained.head_lag.max() <= eta
    return log


def test_a_killed_rollout_rank(place, cluster):
    """SIGKILL in mid-generation: the run goes on with the two others, nothing is requeued."""
    job = submit(simulated(place, slurm=with_fault("kill@rollout.decode#3*300"), rollout=TWO_HOSTS), LONG)
    log = assert_went_on(job, {3})
    text = log.events[log.events.kind == "rank_lost"].text.iloc[0]
    assert "died without a word" in text and "groups are generated anew elsewhere" in text
    after = log.trajectories[log.trajectories.consumed_step > 25]
    assert set(after.rollout_rank) == {2, 4}
