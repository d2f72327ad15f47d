"""The executor without a cluster: parameters, script, and how it asks Slurm. Jobs really run in tests/slurm."""

from __future__ import annotations

import re
import shlex
import stat
import subprocess
import time
from pathlib import Path

import pytest

from areal_hpc import hetjob
from areal_hpc.exits import RunError
from areal_hpc.hetjob import HetJob, HetSlurmExecutor, RunJob, job_states
from areal_hpc.rundir import write_json
from areal_hpc.submission import as_texts, submit


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A PATH that holds nothing but what a test writes there: `commands(sacct="echo ...")`."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setattr(HetJob, "watcher", hetjob.HetInfoWatcher())

    def write(**scripts: str) -> Path:
        for name, text in scripts.items():
            path = directory / name
            path.write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/calls\n{text}\n')
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return tmp_path / "calls"

    return write


# ------------------------------------------------------------------------------------------------------ asking
def test_sacct_is_enough_for_a_running_job(commands):
    calls = commands(sacct="echo '5+0|RUNNING'; echo '5+1|RUNNING'", squeue="exit 1", scontrol="exit 1")
    assert job_states(["5"]) == {"5": {"0": "RUNNING", "1": "RUNNING"}}
    assert calls.read_text().split()[0] == "sacct" and "squeue" not in calls.read_text()


@pytest.mark.parametrize("sacct", ["exit 1", "echo 'Slurm accounting storage is disabled'", "true", None])
def test_without_accounting_the_queue_is_asked(commands, sacct):
    commands(squeue="echo '5+1|PENDING'; echo '5+0|PENDING'", **({"sacct": sacct} if sacct else {}))
    assert job_states(["5"]) == {"5": {"0": "PENDING", "1": "PENDING"}}


def test_without_accounting_and_queue_the_controller_is_asked_about_the_job(commands):
    commands(scontrol="echo 'JobId=5 JobName=x'; echo '   JobState=FAILED Reason=None'")
    assert job_states(["5"]) == {"5": {"": "FAILED"}}


def test_what_nobody_knows_is_left_out(commands):
    commands(sacct="exit 1", squeue="exit 1", scontrol="exit 1")
    assert job_states(["5"]) == {} and job_states([]) == {}


def test_a_preempted_job_that_waits_again_has_not_ended(commands):
    commands(sacct="echo '5+0|PREEMPTED'; echo '5+1|PREEMPTED'", squeue="echo '5+0|PENDING'; echo '5+1|PENDING'")
    job = HetJob("folder", "5")
    assert job.state == "PENDING" and not job.done(force_check=True)


def test_accounting_that_forgets_a_component_at_first_is_not_believed(commands):
    """Seen on Slurm 22.05: for a moment after the end sacct shows the leader alone, as if it were the whole job."""
    commands(sacct="echo '5|COMPLETED'", squeue="echo '5+1|RUNNING'; echo '5+0|COMPLETED'")
    assert job_states(["5"]) == {"5": {"0": "COMPLETED", "1": "RUNNING"}}


def test_the_state_is_that_of_the_worst_component_and_ended_means_all(commands):
    commands(sacct="echo '5+0|RUNNING'; echo '5+1|CANCELLED by 0'")
    job = HetJob("folder", "5")
    assert job.state == "CANCELLED" and not job.done(force_check=True)
    assert job.component_states == {"0": "RUNNING", "1": "CANCELLED"}
    commands(sacct="echo '5+0|FAILED'; echo '5+1|CANCELLED by 0'", squeue="true")
    time.sleep(0.01)  # submitit does not ask twice within a millisecond, not even when forced
    assert job.done(force_check=True) and job.state == "FAILED"


def test_one_component_is_cancelled_by_its_index(commands):
    calls = commands(scancel="true")
    HetJob("folder", "5").cancel(component=1)
    HetJob("folder", "5").cancel()
    assert calls.read_text() == "scancel 5+1\nscancel 5\n"


# -------------------------------------------------------------------------------------------------- parameters
@pytest.fixture
def executor(commands, tmp_path):
    commands(srun="true", sbatch="echo Submitted batch job 77")
    return HetSlurmExecutor(tmp_path / "jobs")


def test_an_unknown_parameter_is_refused_with_the_legal_list(executor):
    with pytest.raises(
        ValueError, match=r"unknown parameter: nodes; there are:\n(.*\n)*  - components \(default: \{\}\)"
    ):
        executor.update_parameters(nodes=3)
    with pytest.raises(
        ValueError, match=r"component a: partitions; there are:\n(.*\n)*  - partition \(default: None\)"
    ):
        executor.update_parameters(components={"a": {"partitions": "x"}})
    with pytest.raises(ValueError, match="component a: nodes: .*greater than 0, got 0"):
        executor.update_parameters(components={"a": {"nodes": 0}})
    assert executor.parameters == {}


def test_without_components_nothing_is_submitted(executor):
    with pytest.raises(ValueError, match="no components"):
        executor.submit(print)


def test_a_function_runs_in_every_task_of_every_component(executor, tmp_path):
    executor.update_parameters(
        components={"a": {"nodes": 2, "tasks": 3, "partition": "p"}, "b": {"tasks": 2}}, mpi="pmi2", minutes=7
    )
    job = executor.submit(print, "x")
    assert isinstance(job, HetJob) and job.job_id == "77" and job.num_tasks == 5
    text = (tmp_path / "jobs/77_submission.sh").read_text()
    assert text.count("submitit.core._submit") == 2 and "#SBATCH --time=7" in text and "#SBATCH hetjob" in text
    assert f'>{tmp_path}/jobs/"$SLURM_JOB_ID"_"$SLURM_PROCID"_log.out' in text
    assert (tmp_path / "jobs/77_submitted.pkl").exists()


def test_a_warning_before_submitit_listens_does_not_end_a_task(executor, tmp_path):
    """Slurm may send it a minute early; Python has not even started then."""
    executor.update_parameters(components={"a": {}}, mpi="pmi2", minutes=2)
    executor.submit(print)
    task = shlex.split((tmp_path / "jobs/77_submission.sh").read_text().splitlines()[-1])[-1]
    early = re.sub(r"exec .* >", r"exec sh -c 'kill -USR2 $$; echo lives' >", task)
    assert early != task
    environ = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "77", "SLURM_PROCID": "0"}
    done = subprocess.run(["bash", "-c", early], env=environ, timeout=20)
    assert done.returncode == 0 and (tmp_path / "jobs/77_0_log.out").read_text() == "lives\n"


def test_many_functions_become_many_jobs(executor):
    executor.update_parameters(components={"a": {}})
    jobs = executor.map_array(abs, [1, 2, 3])
    assert len(jobs) == 3 and all(isinstance(job, HetJob) for job in jobs)


# --------------------------------------------------------------------------------------------------------- runs
def test_submit_refuses_without_slurm(commands, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(RunError, match="not submitted.*srun"):
        submit("configs/demo.yaml")


def test_submit_says_what_sbatch_said(commands, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    commands(srun="true", sbatch="echo 'invalid partition specified: gpuu' >&2; exit 1")
    with pytest.raises(RunError, match="invalid partition specified: gpuu"):
        submit("configs/demo.yaml", {"run_dir": str(tmp_path / "run")})
    assert list((tmp_path / "run/slurm").iterdir()) == []


def test_a_run_is_submitted_with_its_script_beside_its_output(commands, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    calls = commands(srun="true", sbatch="echo Submitted batch job 78")
    job = submit("configs/demo.yaml", {"run_dir": str(tmp_path / "run"), "steps": 3}, dependency="afterok:5")
    assert "sbatch --dependency=afterok:5 " in calls.read_text()
    assert [path.name for path in (tmp_path / "run/slurm").iterdir()] == ["78.sbatch"]
    assert (
        f"areal_hpc.attempt configs/demo.yaml run_dir={tmp_path}/run steps=3" in job.paths.submission_file.read_text()
    )
    assert job.paths.stdout == job.paths.stderr == tmp_path / "run/slurm/78.out"
    assert list(tmp_path.rglob("*.pkl")) == []


def test_the_result_of_a_run_is_its_summary_or_why_it_failed(commands, tmp_path, monkeypatch):
    monkeypatch.setattr(hetjob, "SUMMARY_WAIT_S", 0.1)
    commands(sacct="echo '9+0|COMPLETED'; echo '9+1|COMPLETED'", squeue="true")
    (tmp_path / "slurm").mkdir()
    job = RunJob(tmp_path, "9", f"{tmp_path}/slurm/%j.out")
    job.paths.stdout.write_text("first\nlast words\n")
    write_json(tmp_path / "summary.json", {"versions": 4})
    write_json(tmp_path / "status.json", {"job_id": "9", "exit_code": 0, "why_ended": "last step reached"})
    assert job.result() == {"versions": 4} and job.exception() is None
    write_json(tmp_path / "status.json", {"job_id": "9", "exit_code": 4, "why_ended": "diverged at step 3"})
    with pytest.raises(Exception, match=r"(?s)diverged at step 3.*last words"):
        job.result()
    write_json(tmp_path / "status.json", {"job_id": "10", "exit_code": 0})
    with pytest.raises(Exception, match="no rank had time to say why"):  # a later job's word is not this one's
        job.result()


def test_waiting_ends_with_the_job(commands, tmp_path):
    commands(sacct=f"[ -e {tmp_path}/over ] && echo '9|COMPLETED' || echo '9|RUNNING'", squeue="true")
    job = HetJob(tmp_path, "9")
    assert not job.done(force_check=True)
    (tmp_path / "over").touch()
    began_s = time.monotonic()
    job.wait()
    assert time.monotonic() - began_s < 10 and job.state == "COMPLETED"


def test_overrides_may_be_a_mapping():
    assert as_texts({"steps": 3, "name": "x", "slurm.setup": ["a b"], "filter.min_success": 0.5}) == [
        "steps=3", "name=x", "slurm.setup=[a b]", "filter.min_success=0.5",
    ]  # fmt: skip
    assert as_texts(["a=1"]) == ["a=1"]
