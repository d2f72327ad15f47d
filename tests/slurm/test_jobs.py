"""Runs of this package as jobs on the cluster: nothing is mocked, every test waits for what Slurm says in the end."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from areal_hpc import submit
from areal_hpc.exits import Exit
from areal_hpc.hetjob import HetSlurmExecutor, RunJob, job_states
from areal_hpc.rundir import read_json
from areal_hpc.runlog import RunLog
from tests.runs import tiny_config, wait_until
from tests.slurm.openmpi_env import openmpi_python

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]
REPOSITORY = Path(__file__).parents[2]
SHARED_NODES = {"exclusive": False}
HET = {
    "mpi": "pmi2",
    "minutes": 5,
    "common": SHARED_NODES,
    "trainer": {"partition": "trainer"},
    "rollout": {"partition": "rollout"},
}
ONE_RANK_PER_HOST = {"trainer": {"partition": "trainer", "nodes": 2}, "rollout": {"partition": "rollout", "nodes": 3}}


def simulated(place: Path, **sections) -> Path:
    """A configuration with simulated compute that takes seconds; `sections` are merged one level deep."""
    config = yaml.safe_load((REPOSITORY / "configs/simulated.yaml").read_text())
    config |= {"name": "sim", "run_dir": str(place / "run"), "steps": 3, "slurm": HET}
    config["prepare"]["directory"] = str(place / "data")
    config["data"] = {"train": str(place / "data/train.jsonl")}
    config["trainer"] |= {"ranks": 1, "batch_size": 16, "group_size": 4, "minibatches": 1}
    config["rollout"] |= {"ranks": 2, "slots": 64}
    config["simulation"] |= {"speedup": 100}
    for name, value in sections.items():
        config[name] = config[name] | value if name in ("trainer", "rollout", "simulation") else value
    path = place / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "areal_hpc.cli", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


def assert_completed(job: RunJob) -> dict:
    """The summary of a job that must end well."""
    deadline_s = time.monotonic() + 200
    while not job.done(force_check=True):
        assert time.monotonic() < deadline_s, f"{job.component_states}\n{job.stdout()}"
        time.sleep(0.5)
    assert job.state == "COMPLETED", f"{job.component_states}\n{job.stdout()}"
    return job.result()


def hosts_of_ranks(job: RunJob) -> list[str]:
    """The host of every rank, in world order."""
    return RunLog(job.run_dir).ranks.sort_values("rank").host.tolist()


# ------------------------------------------------------------------------------------------------------- shapes
def test_the_demo_trains_on_five_hosts(place, cluster):
    """The command line; 1 controller + 2 trainer ranks on two hosts, 3 rollout ranks on three."""
    overrides = [
        f"run_dir={place}/run", "steps=3", "trainer.ranks=2", "rollout.ranks=3", "slurm.mpi=pmi2", "slurm.minutes=8",
        "slurm.trainer.nodes=2", "slurm.rollout.nodes=3", "slurm.trainer.partition=trainer",
        "slurm.rollout.partition=rollout", "slurm.common.gpus_per_node=1", "evaluation.at_start=false",
    ]  # fmt: skip
    dry = command("submit", "configs/demo.yaml", *overrides, "--dry-run")
    assert dry.returncode == 0 and not (place / "run").exists()
    done = command("submit", "configs/demo.yaml", *overrides)
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.split()[2].rstrip(":")
    job = RunJob(place / "run", job_id, f"{place}/run/slurm/%j.out")
    assert job.paths.submission_file.read_text() == dry.stdout
    summary = assert_completed(job)
    assert summary["versions"] == 3 and summary["why_ended"] == "last step reached"
    kept = (place / "run/attempt_1/batch.sbatch").read_text()  # Slurm takes empty lines out
    assert kept.splitlines() == [line for line in dry.stdout.splitlines() if line]
    accounting = cluster.wait_for_job(job_id)
    assert accounting[f"{job_id}+0"]["NodeList"] == "node[1-2]" and accounting[f"{job_id}+1"]["NodeList"] == "node[3-5]"
    assert {row["State"] for row in accounting.values()} == {"COMPLETED"}
    assert hosts_of_ranks(job) == ["node1", "node1", "node2", "node3", "node4", "node5"]
    steps = RunLog(place / "run").steps
    assert len(steps) == 3 and (steps.grad_norm > 0).all()
    assert "step 3/3" in (job.stdout() or "") and "done, exit code 0" in (job.stdout() or "")


def test_head_and_reward_components_make_four(place, cluster):
    """Hosts that do not come in the order of their names, as a queue would give them."""
    partitions = {"head": "rollout", "trainer": "trainer", "rollout": "rollout", "reward": "trainer"}
    slurm = HET | {name: {"partition": partition} for name, partition in partitions.items()}
    reward = {"function": "areal_hpc.simulation:reward", "ranks": 2}
    job = submit(simulated(place, slurm=slurm, rollout={"ranks": 3}, reward=reward))
    assert assert_completed(job)["versions"] == 3
    assert job.component_states == {str(number): "COMPLETED" for number in range(4)}
    hosts = hosts_of_ranks(job)
    assert hosts == [hosts[0], hosts[1], *[hosts[2]] * 3, *[hosts[5]] * 2] and len(set(hosts)) == 4
    assert {hosts[1], hosts[5]} == {"node1", "node2"}, "the trainer and the rewards, between hosts of higher names"
    log = RunLog(job.run_dir)
    assert set(log.activity[log.activity.kind == "score"]["rank"]) == {5, 6}, "both score, and nobody else"
    trained = log.trajectories[log.trajectories.fate == "consumed"]
    assert len(trained) == 3 * 16 * 4 and set(trained.outcome) == {"correct", "wrong"}
    assert "ranks    7 = 1 controller + 1 trainer + 3 rollout + 2 reward" in (job.stdout() or "")


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["het", "steps"])
def test_an_evaluation_is_the_same_in_the_queue_and_under_mpiexec(place, cluster, tiny_dir, shape):
    """Other ranks and reward ranks in the job; answers depend on model, settings and seed alone."""
    shutil.copytree(tiny_dir, place / "tiny")
    asked: list[object] = ["evaluate", place / "tiny/model", "--data", place / "tiny/heldout.jsonl", "--seed", 5]
    asked += ["--reward", "tests/tiny.py:reward_with_answer", "--samples", 4, "--max-new-tokens", 24]
    asked += ["--max-prompt-tokens", 8]
    here = command(*asked, "--out", place / "here")
    assert here.returncode == 0, here.stderr
    slurm = ["slurm.mpi=pmi2", f"slurm.shape={shape}", "slurm.minutes=5", "slurm.rollout.nodes=2"]
    slurm += ["slurm.common.exclusive=false", "reward.ranks=2"]
    in_queue = [*asked, "--out", place / "queue", "--ranks", 2, "--submit", *slurm]
    jobs = []
    for _ in range(2):
        sent = command(*in_queue)
        assert sent.returncode == 0, sent.stderr
        job_id = sent.stdout.split()[2].rstrip(":")
        jobs.append(RunJob(place / "queue", job_id, f"{place}/queue/slurm/%j.out"))
        wait_until(lambda: jobs[-1].done(force_check=True), 90, lambda: jobs[-1].stdout())
        assert jobs[-1].state == "COMPLETED", jobs[-1].stdout()
    assert len(list((place / "queue").glob("attempt_*"))) == 1, "the second job finds it complete"
    assert answers(place / "queue") == answers(place / "here") and len(answers(place / "here")) == 64
    figures = read_json(place / "here/summary.json")["data"]
    assert read_json(place / "queue/summary.json")["data"] == figures
    first, again = (job.stdout() or "" for job in jobs)
    table = shown(here.stdout)
    assert len(table) > 10 and shown(first) == table == shown(again) and "is complete: 64 answers" in again
    assert "ranks    5 = 1 controller + 2 rollout + 2 reward" in first and "arning" not in first


def shown(text: str) -> list[str]:
    """Lines of the table with shares in them."""
    return [line.rstrip() for line in text.splitlines() if "%" in line]


def answers(out: Path) -> list[dict]:
    """All answers in order, without what may differ: how long they took."""
    lines = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    return sorted((line | {"seconds": 0} for line in lines), key=lambda line: (line["prompt_id"], line["sample"]))


@pytest.mark.parametrize("mpi", ["pmi2", "pmix"])
def test_one_allocation_with_steps(place, mpi):
    python = str(openmpi_python()) if mpi == "pmix" else sys.executable
    slurm = {"shape": "steps", "mpi": mpi, "python": python, "minutes": 5, "setup": OPEN_MPI_AS_ROOT}
    job = submit(simulated(place, slurm=slurm, rollout={"ranks": 2}))
    assert assert_completed(job)["versions"] == 3
    assert job.component_states == {"": "COMPLETED"}
    hosts = hosts_of_ranks(job)
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]


OPEN_MPI_AS_ROOT = ["export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"]


def test_open_mpi_over_pmix(place, tiny_dir):
    """Real compute; the model lies where the hosts see it."""
    shutil.copytree(tiny_dir, place / "tiny")
    slurm = HET | ONE_RANK_PER_HOST | {"mpi": "pmix", "python": str(openmpi_python()), "setup": OPEN_MPI_AS_ROOT}
    config = tiny_config(place / "tiny", place / "run", trainer={"ranks": 2}, rollout={"ranks": 3}, slurm=slurm)
    (place / "config.yaml").write_text(yaml.safe_dump(config))
    job = submit(place / "config.yaml")
    assert assert_completed(job)["versions"] == 3
    assert hosts_of_ranks(job) == ["node1", "node1", "node2", "node3", "node4", "node5"]


@pytest.mark.slow
def test_every_script_by_hand(place, cluster):
    """`sbatch` of what a user finds in slurm/, unchanged but for the places of its files."""
    text = (REPOSITORY / "slurm/demo_1_1_nodes.sbatch").read_text()
    text = text.replace("slurm-%j.out", f"{place}/%j.out").replace(".venv/bin/python", shlex.quote(sys.executable))
    assert text.count("configs/demo.yaml") == 2
    path = simulated(place)
    (place / "job.sbatch").write_text(text.replace("configs/demo.yaml", str(path)))
    job_id = cluster.sbatch(place / "job.sbatch")
    accounting = cluster.wait_for_job(job_id, timeout_s=100)
    assert {row["State"] for row in accounting.values()} == {"COMPLETED"}, (place / f"{job_id}.out").read_text()
    assert read_json(place / "run/status.json")["job_id"] == job_id


# ------------------------------------------------------------------------------------------------------- python
def test_submit_from_python_wait_and_look(place):
    overrides = {"name": "my-hetjob", "run_dir": f"{place}/hetjob/run", "steps": 2, "slurm.common.gpus_per_node": 2}
    job = submit(simulated(place), overrides)
    assert job.state in ("UNKNOWN", "PENDING", "RUNNING", "CONFIGURING")
    job.wait()
    assert job.done() and job.state == "COMPLETED", job.stdout()
    assert job.result()["versions"] == 2 and job.exception() is None
    assert RunLog(job.run_dir).ranks.gpu.tolist() == ["", "0", "0", "1"]  # each its own, the controller none
    assert job.paths.stdout == place / f"hetjob/run/slurm/{job.job_id}.out" and "step 2/2" in (job.stdout() or "")
    assert list(place.rglob("*.pkl")) == []


def test_where_accounting_is_absent(place, monkeypatch):
    """A site without slurmdbd: sacct fails, the queue and the controller know for minutes after the end."""
    (place / "bin").mkdir()
    sacct = place / "bin/sacct"
    sacct.write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n")
    sacct.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}/bin:/usr/bin:/bin")
    job = submit(simulated(place), ["steps=1"])
    assert assert_completed(job)["versions"] == 1
    assert job_states([job.job_id]) == {job.job_id: {"0": "COMPLETED", "1": "COMPLETED"}}


@pytest.mark.fault("damaged data set in a job", row=19)
def test_a_failure_has_a_reason(place):
    """The data set is damaged: the attempt ends before any rank starts, with the words of the check."""
    path = simulated(place)
    job = submit(path, {"steps": 2, "data.train": f"{place}/data/nothing.jsonl"})
    with pytest.raises(Exception, match=r"(?s)ended as FAILED.*nothing.jsonl"):
        job.result()
    assert job.state == "FAILED"


def test_an_mpi_library_that_does_not_fit_is_refused_before_any_rank_starts(place):
    job = submit(simulated(place), {"slurm.mpi": "pmix"})
    wait_until(lambda: job.done(force_check=True), 60, "the end of the job")
    assert job.state == "FAILED"
    assert "MPICH ends at start-up under the plugin pmix; set slurm.mpi=pmi2" in (job.stdout() or "")
    assert not list((place / "run/attempt_1").glob("rank_*.log"))
    status = read_json(place / "run/status.json")
    assert status["state"] == "failed" and "set slurm.mpi=pmi2" in status["why_ended"]


def test_mpich_starts_whatever_lies_in_memory(cluster):
    """MPICH sends memory it never wrote to through PMI; what does not shrink made MPI_Init die (mpi_start.py)."""
    rank = [sys.executable, REPOSITORY / "tests/slurm/dirty_heap.py"]
    first = ["srun", "--mpi=pmi2", "--kill-on-bad-exit=1", "-p", "trainer", "-N1", "-n2", *rank]
    said = cluster.run([*first, ":", "-p", "rollout", "-N1", "-n2", *rank], timeout_s=60)
    assert said.split() == ["size", "4"] * 4


def test_a_function_in_every_task_of_both_components(place):
    """What submitit users know, on a heterogeneous job."""
    executor = HetSlurmExecutor(place / "%j")
    own = {"exclusive": False}
    components = {
        "a": own | {"partition": "trainer", "tasks": 1},
        "b": own | {"partition": "rollout", "nodes": 2, "tasks": 2},
    }
    executor.update_parameters(components=components, mpi="pmi2", minutes=2)
    job = executor.submit(socket.gethostname)
    job.wait()
    assert job.results() == ["node1", "node3", "node4"], job.stderr()
    assert all("completed successfully" in (job.task(task).stdout() or "") for task in range(3))


def test_a_job_ends_although_srun_hangs_after_its_step(place):
    """Over PMIx it sometimes does (areal_hpc/srun.py); here always. Two jobs: what their tasks end with is kept."""
    lingering = place / "bin/srun"
    lingering.parent.mkdir()
    child = "(while kill -0 $$ 2> /dev/null; do sleep 0.5; done)"  # srun has one, too
    lingering.write_text(f'#!/bin/bash\n{shutil.which("srun")} "$@"\n{child} &\nwait\n')
    lingering.chmod(0o755)
    jobs = []
    for partition, function in (("trainer", socket.gethostname), ("rollout", sys.exit)):
        executor = HetSlurmExecutor(place / f"{partition}-%j")
        component = {"exclusive": False, "partition": partition}
        executor.update_parameters(components={"a": component, "b": component}, mpi="pmix", minutes=4)
        executor.update_parameters(setup=[f"PATH={lingering.parent}:$PATH"])
        jobs.append(executor.submit(function, *([3] if function is sys.exit else [])))
    good, bad = jobs
    wait_until(lambda: all(job.watcher.is_done(job.job_id, mode="force") for job in jobs), 150, "the end of both")
    assert good.state == "COMPLETED" and len(good.results()) == 2
    assert bad.state == "FAILED"
    printed = [next(place.glob(f"*-{job.job_id}/{job.job_id}_0_log.out")).read_text() for job in jobs]
    assert ["its job step has ended (exit code 0)" in text for text in printed] == [True, False], printed


# ------------------------------------------------------------------------------------------------------- cancel
def start_long_run(place: Path) -> RunJob:
    """A run that would take very long, in training."""
    job = submit(simulated(place, simulation={"speedup": 20}), {"steps": 100000})
    wait_until(lambda: job.status.get("version", 0) >= 1, 60, "the first step")
    return job


@pytest.mark.fault("scancel of the job", row=11)
def test_cancel_the_job(place):
    job = start_long_run(place)
    job.cancel()
    job.wait()
    assert job.state == "CANCELLED"
    assert job.status["exit_code"] == Exit.INTERRUPTED and "SIGTERM" in job.status["why_ended"]


@pytest.mark.fault("scancel of one component", row=11)
def test_cancel_one_component(place, cluster):
    """Without its rollout ranks a run cannot go on: the rest of the job must not hold its nodes until walltime."""
    job = start_long_run(place)
    began_s = time.monotonic()
    job.cancel(component=1)
    wait_until(lambda: job.done(force_check=True), 60, "the end of the other component")
    assert time.monotonic() - began_s < 45
    assert job.component_states["1"] == "CANCELLED" and job.component_states["0"] == "FAILED"
    assert any(word in job.status["why_ended"] for word in ("rollout", "rank 2", "rank 3"))
