"""Twenty minutes in which something breaks every minute, and a run that is whole in the end."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml

from areal_hpc import submit
from areal_hpc.hetjob import RunJob
from areal_hpc.rundir import read_json
from areal_hpc.runlog import RunLog, RunLogError
from tests import tiny
from tests.faults import assert_bound, assert_nothing_lost
from tests.runs import tiny_config, wait_until
from tests.slurm.client import Cluster
from tests.slurm.test_jobs import HET
from tests.slurm.test_survival import version

SOAK_S = float(os.environ.get("AREAL_HPC_SOAK_S", "1200"))
MEAN_S = 60.0
BATCH, GROUP, ETA = 8, 4, 2
PROMPTS = 100_000  # for more than twice the steps that 1200 s have been seen to take
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(int(SOAK_S) + 600)]


class Operator(threading.Thread):
    """Makes a requeued job eligible again, which waits two minutes otherwise; it does nothing else for the run."""

    def __init__(self, cluster: Cluster, job: RunJob) -> None:
        super().__init__(daemon=True)
        self.cluster, self.job, self.over = cluster, job, threading.Event()

    def run(self) -> None:
        waiting = 0
        while not self.over.wait(1.0):
            states = self.cluster.states(self.job.job_id)
            waiting = waiting + 1 if states and set(states.values()) == {"PENDING"} else 0
            if waiting > 3:  # within two seconds of a requeue hosts take the new start for the old one
                for number in range(len(states)):
                    update = ["scontrol", "update", f"jobid={int(self.job.job_id) + number}", "StartTime=now"]
                    self.cluster.run(update, check=False)


class Vandal:
    """Breaks the run in a way drawn by a seed; says what it did."""

    def __init__(self, cluster: Cluster, job: RunJob, seed: int) -> None:
        self.cluster, self.job, self.draw = cluster, job, random.Random(seed)
        self.done: Counter[str] = Counter()

    def ranks(self):
        """The table of ranks of the newest attempt, or nothing while it starts."""
        try:
            return RunLog(self.job.run_dir).ranks
        except RunLogError:
            return []

    def strike(self) -> str:
        kind = self.draw.choice(["kill", "kill", "stop", "warn", "requeue", "host", "cut"])
        ranks, place = self.ranks(), self.draw.random()
        if kind in ("kill", "stop", "host", "cut") and not len(ranks):
            kind = "requeue"
        target = ranks.iloc[int(place * len(ranks))] if len(ranks) else None
        getattr(self, kind)(target)
        self.done[kind] += 1
        return f"{kind} rank {target['rank']}" if kind in ("kill", "stop") else kind

    def kill(self, target) -> None:
        self.cluster.on(target.host, ["kill", "-9", target.pid], check=False)

    def stop(self, target) -> None:
        self.cluster.on(target.host, ["kill", "-STOP", target.pid], check=False)

    def warn(self, _) -> None:
        self.cluster.run(["scancel", "--signal=USR2", self.job.job_id], check=False)

    def requeue(self, _) -> None:
        self.cluster.run(["scontrol", "requeue", self.job.job_id], check=False)

    def host(self, _) -> None:
        victim = self.ranks().host.iloc[-1]
        self.cluster.kill(victim)
        with contextlib.suppress(AssertionError):  # a busy machine takes longer to say so
            self.cluster.wait_for_node(victim, ("down", "down*"), 60)
        self.cluster.heal(victim)

    def cut(self, _) -> None:
        victim = self.ranks().host.iloc[-1]
        self.cluster.cut(victim)
        time.sleep(5)
        self.cluster.heal(victim)


def configuration(place: Path) -> Path:
    """A real model, 1 trainer and 2 rollout ranks on three hosts."""
    made = tiny.make(place / "tiny", num_prompts=PROMPTS)
    config = tiny_config(
        made,
        place / "run",
        steps=PROMPTS // BATCH,
        rollout={"ranks": 2, "slots": 32},
        trainer={"batch_size": BATCH, "group_size": GROUP},
        staleness={"max_staleness": ETA},
        checkpoint={"every_s": 1.0, "max_fruitless": 30},
        evaluation={"at_start": False, "at_end": False},
        deadlines={"exit_s": 10.0, "startup_s": 90.0, "heartbeat_s": 10.0, "weights_s": 30.0},
        slurm=HET | {"minutes": 60, "rollout": {"partition": "rollout", "nodes": 2}},
    )
    path = place / "soak.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.fault(f"soak of {SOAK_S:.0f} s, something every {MEAN_S:.0f} s", row=0)
def test_soak(place, cluster, capsys):
    path = configuration(place)
    job = submit(path)
    operator, vandal = Operator(cluster, job), Vandal(cluster, job, seed=4)
    operator.start()
    recoveries: list[float] = []
    began_s, reached = time.monotonic(), 0
    try:
        while time.monotonic() - began_s < SOAK_S:
            time.sleep(vandal.draw.expovariate(1 / MEAN_S))
            struck_s, what = time.monotonic(), vandal.strike()
            time.sleep(1)  # what is left of the attempt may still finish a step
            reached = max(reached, version(job))  # an attempt that begins says 0
            wait_until(lambda at=reached: version(job) > at, 180, f"a version above {reached} after {what}")
            recoveries.append(time.monotonic() - struck_s)
            with capsys.disabled():
                print(
                    f"  {struck_s - began_s:6.0f} s  version {reached:5}  {what:<14} {recoveries[-1]:6.1f} s",
                    flush=True,
                )
    finally:
        operator.over.set()
        operator.join()
        job.cancel()
    wait_until(lambda: job.done(force_check=True), 60, "the end of the job")
    steps = version(job) + 20
    last = submit(path, {"steps": steps})
    wait_until(lambda: last.done(force_check=True), 150, "the last twenty steps")
    assert last.state == "COMPLETED", last.stdout()
    assert last.result()["versions"] == steps
    logs = [RunLog(path) for path in sorted((place / "run/log").glob("*.h5"), key=lambda p: int(p.stem.split("_")[1]))]
    assert_nothing_lost(logs, steps=steps, batch=BATCH, group=GROUP, eta=ETA)
    assert_bound(logs, batch=BATCH, eta=ETA)
    again = sum(len(log.steps) for log in logs) - steps
    with capsys.disabled():
        mean_s = sum(recoveries) / len(recoveries)
        print(f"  {len(recoveries)} faults {dict(vandal.done)}, {len(logs)} attempts, {steps} steps, {again} again")
        print(f"  recovery {min(recoveries):.0f} to {max(recoveries):.0f} s, mean {mean_s:.0f} s")
    for host in ("node1", "node2", "node3", "node4", "node5"):
        assert "areal_hpc" not in cluster.on(host, ["ps", "-eo", "args"])
    assert read_json(place / "run/status.json")["state"] == "done"
