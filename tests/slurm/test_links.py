"""Cables between the hosts of a running job: pulled for a moment, pulled for good, and very slow."""

from __future__ import annotations

import time

import pytest

from areal_hpc import submit
from areal_hpc.runlog import RunLog
from tests.faults import assert_bound, assert_nothing_lost
from tests.runs import wait_until
from tests.slurm.test_jobs import HET, assert_completed, simulated
from tests.slurm.test_survival import LONG, start_again_at_once, version

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(280)]
SPREAD = HET | {"trainer": {"partition": "trainer"}, "rollout": {"partition": "rollout", "nodes": 2}}
STEPS, BATCH, GROUP, ETA = 40, 16, 4, 4


def start(place, cluster, **sections):
    """A job on three hosts that has trained three steps; returns it with the last host of its rollout ranks."""
    job = submit(simulated(place, slurm=SPREAD, **sections), LONG | {"steps": STEPS})
    wait_until(lambda: version(job) >= 3, 60, "the third step")
    return job, RunLog(job.run_dir).ranks.host.iloc[-1]


def assert_whole(job, num_attempts: int) -> None:
    logs = [RunLog(job.run_dir, number) for number in range(1, num_attempts + 1)]
    assert len(list(job.run_dir.glob("attempt_*"))) == num_attempts
    assert_nothing_lost(logs, steps=STEPS, batch=BATCH, group=GROUP, eta=ETA)
    assert_bound(logs, batch=BATCH, eta=ETA)


@pytest.mark.fault("link of a rollout host cut for 5 s", row=6)
@pytest.mark.slow
def test_a_link_is_cut_for_a_moment(place, cluster):
    """Messages wait, and the attempt goes on; where Slurm takes the host for dead first, the next one does. Nothing is
    lost or doubled either way."""
    job, victim = start(place, cluster)
    cluster.cut(victim)
    time.sleep(5)
    cluster.heal(victim)
    if set(cluster.states(job.job_id).values()) == {"PENDING"}:
        start_again_at_once(cluster, job)
    assert_completed(job)
    assert_whole(job, len(list(job.run_dir.glob("attempt_*"))))


@pytest.mark.fault("link of a rollout host cut for good", row=6)
@pytest.mark.slow
def test_a_link_is_cut_for_good(place, cluster):
    """The ranks behind it live on and can reach nobody; the next attempt has other hosts."""
    job, victim = start(place, cluster)
    cluster.cut(victim)
    try:
        start_again_at_once(cluster, job)
        assert_completed(job)
    finally:
        cluster.heal(victim)
    assert victim not in set(RunLog(job.run_dir, 2).ranks.host)
    assert_whole(job, 2)


@pytest.mark.fault("link of a rollout host at 10 Mbit/s", row=7)
@pytest.mark.slow
def test_a_slow_link(place, cluster):
    """Less is generated; what comes is as fresh as the rule says, and everything of it is trained on."""
    job, victim = start(place, cluster)
    cluster.slow(victim, "10mbit")
    try:
        assert_completed(job)
    finally:
        cluster.heal(victim)
    assert_whole(job, 1)
