"""Sweeps without Slurm: what a file comes to, who changes it, in which order jobs run, and what the table says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import yaml

from areal_hpc.cli import main as cli
from areal_hpc.config.check import ConfigErrors
from areal_hpc.exits import Exit, RunError
from areal_hpc.logschema import Activity
from areal_hpc.runlog_writer import RunLogWriter
from areal_hpc.sweep import command as sweep
from areal_hpc.sweep import table as sweeptable
from areal_hpc.sweep.command import submit_sweep
from areal_hpc.sweep.record import PointRecord, Submitted, SweepRecord, locked, undisturbed
from areal_hpc.sweep.spec import load_spec, points, split_gpus
from areal_hpc.sweep.table import aligned, look, results, status_table

BASE = {
    "steps": 4,
    "prepare": {"function": "areal_hpc.simulation:prepare", "directory": "data"},
    "model": {"path": "none"},
    "data": {"train": "data/train.jsonl"},
    "reward": {"function": "areal_hpc.simulation:reward"},
    "rollout": {"engine": "simulated"},
    "trainer": {"engine": "simulated"},
}


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A directory to work in, with a base configuration of simulated compute."""
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(yaml.safe_dump(BASE))
    return tmp_path


def write_spec(vary, name: str = "sweep.yaml", **other) -> Path:
    content = {"base": "base.yaml", "directory": "runs", "vary": vary, **other}
    Path(name).write_text(yaml.safe_dump(content, sort_keys=False))
    return Path(name)


def names(spec: Path) -> list[str]:
    return [point.name for point in points(load_spec(spec))]


class Queue:
    """Takes jobs as sbatch would; `ended` is what Slurm says of each afterwards."""

    def __init__(self) -> None:
        self.jobs: dict[str, tuple[str, str | None]] = {}
        self.states: dict[str, str] = {}
        self.refuse_after = 10**9

    def send(self, spec, dependency):
        if len(self.jobs) >= self.refuse_after:
            raise RunError(Exit.CONFIG, "areal-hpc: not submitted: QOSMaxSubmitJobPerUserLimit")
        job_id = str(100 + 2 * len(self.jobs))
        self.jobs[job_id] = (spec.name, dependency)
        self.states[job_id] = "PENDING"
        return SimpleNamespace(job_id=job_id, paths=SimpleNamespace(stdout=Path(f"{spec.folder}/{job_id}.out")))

    def ask(self, job_ids):
        return {j: {"0": self.states[j], "1": self.states[j]} for j in job_ids if j in self.states}


@pytest.fixture
def queue(place, monkeypatch) -> Queue:
    queue = Queue()
    monkeypatch.setattr(sweep, "send", queue.send)
    monkeypatch.setattr("areal_hpc.hetjob.job_states", queue.ask)
    return queue


def end(name: str, job_id: str | None, code: int, why: str = "last step reached", **status) -> None:
    directory = Path("runs") / name
    directory.mkdir(parents=True, exist_ok=True)
    content = {"job_id": job_id, "exit_code": code, "why_ended": why, "attempt": 1, "version": 4, "steps": 4}
    (directory / "status.json").write_text(json.dumps(content | status))


# ------------------------------------------------------------------------------------------------- specification
def test_points_are_the_product_with_names_made_from_what_varies(place):
    spec = write_spec({"gpus": [64, 128], "seed": [1, 2]}, gpus_per_rank=8)
    assert names(spec) == ["gpus-64_seed-1", "gpus-64_seed-2", "gpus-128_seed-1", "gpus-128_seed-2"]


def test_names_are_short_safe_and_different(place):
    vary = {
        "trainer.optimizer.lr": ["1e-5", 2.0e-5],
        "trainer.threads": [1],
        "rollout.threads": [2],
        "data.train": ["a/b.jsonl", "a-b.jsonl"],
    }
    found = names(write_spec(vary))
    assert len(set(found)) == 4
    assert found[1] == "lr-1e-05_trainer.threads-1_rollout.threads-2_train-a-b.jsonl"
    assert found[0].startswith("lr-1e-05_trainer.threads-1_rollout.threads-2_train-")
    assert all(len(name) <= 64 and set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-") for name in found)


def test_a_name_does_not_depend_on_the_other_values(place):
    assert names(write_spec({"data.train": ["x y"]}))[0] in names(write_spec({"data.train": ["x-y", "x y", "x/y"]}))


def test_everything_wrong_with_a_sweep_is_said_at_once_with_lines(place):
    Path("bad.yaml").write_text(
        """directory: runs
vary:
  gpus: [64, 64, many]
  trainer.bach_size: [1, 2]
  trainer: [1]
  seed: 3
  run_dir: [a]
  rollout.ranks: [4]
  steps: []
max_job: 2
trainer_share: 1.5
overrides:
  steps: 4
  mode: sync
"""
    )
    with pytest.raises(ConfigErrors) as caught:
        load_spec(Path("bad.yaml"))
    text = caught.value.reason
    assert "bad.yaml: 12 problems" in text
    for part in (
        "base: is missing; Configuration file of all points",
        "vary.gpus: holds 64 more than once (line 3)",
        'vary.gpus: must hold whole numbers of GPUs, got "many" (line 3)',
        "vary.trainer.bach_size: unknown setting; did you mean trainer.batch_size",
        "vary.trainer: is a section",
        "vary.seed: must be a list of values, got 3 (line 6)",
        "vary.run_dir: is set by the sweep",
        "vary.rollout.ranks: follows from vary.gpus",
        "vary.steps: is an empty list (line 9)",
        "max_job: unknown key; did you mean max_jobs?",
        "trainer_share: must be a number greater than 0 and less than 1, got 1.5",
        "overrides.steps: is one of the axes under vary",
    ):
        assert part in text, part


@pytest.mark.parametrize("text", ["", "vary: {}", "[1, 2]", "vary: {gpus: [true]}", "vary: 3\nbase: [1]", "a: b: c"])
def test_no_sweep_at_all_is_no_traceback(place, text, capsys):
    Path("odd.yaml").write_text(text)
    assert cli(["sweep", "odd.yaml"]) == 2
    assert "odd.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "share", "per_rank", "node", "ranks"),
    [(64, 0.25, 1, 8, (16, 48)), (512, 0.25, 8, 8, (16, 48)), (64, 0.25, 8, 8, (2, 6)), (12, 1 / 3, 1, 4, (4, 8))],
)
def test_ranks_follow_from_gpus(gpus, share, per_rank, node, ranks):
    assert split_gpus(gpus, share, per_rank, node, node) == ranks


@pytest.mark.parametrize(
    ("gpus", "share", "per_rank", "nodes", "said"),
    [
        (
            80,
            0.25,
            1,
            (8, 8),
            "80 GPUs with trainer_share = 0.25 are 20 to train and 60 to generate.*64 or 96 would do",
        ),
        (8, 0.25, 1, (8, 8), "32 would do"),
        (8, 0.01, 1, (8, 8), "no whole nodes"),
        (
            48,
            0.25,
            1,
            (8, 4),
            "12 to train and 36 to generate, which are no whole nodes of 8 and 4 GPUs; 32 or 64 would",
        ),
        (32, 0.25, 1, (4, 16), "8 to train and 24 to generate, which are no whole nodes of 4 and 16 GPUs; 64 would"),
        (64, 0.25, 3, (8, 8), "a node of 8 GPUs holds no whole number of ranks with gpus_per_rank = 3"),
    ],
)
def test_gpus_that_are_no_whole_nodes(gpus, share, per_rank, nodes, said):
    with pytest.raises(ValueError, match=said):
        split_gpus(gpus, share, per_rank, *nodes)


def test_problems_of_points_are_told_together_before_anything_is_submitted(queue, capsys):
    spec = write_spec({"gpus": [64, 80, 96], "rollout.slots": [8, 0]}, overrides={"trainer.micro_batch_tokens": 5})
    assert cli(["sweep", str(spec)]) == 2
    error = capsys.readouterr().err
    assert "all 6 points: trainer.micro_batch_tokens: must hold the longest sequence" in error
    assert "gpus-64_slots-0, gpus-80_slots-0, gpus-96_slots-0: rollout.slots: must be a whole number" in error
    assert not queue.jobs and not Path("runs").exists()
    Path("base.yaml").write_text(yaml.safe_dump(BASE | {"slurm": {"common": {"gpus_per_node": 8}}}))
    assert cli(["sweep", str(write_spec({"gpus": [64, 80]}))]) == 2
    assert "gpus-80: vary.gpus: 80 GPUs with trainer_share = 0.25 are 20 to train" in capsys.readouterr().err


def test_a_rank_of_several_gpus_must_be_simulated(queue, capsys):
    real = {key: value for key, value in BASE.items() if key not in ("rollout", "trainer")}
    real |= {"reward": {"function": "areal_hpc.demo.gcd:reward"}, "model": {"path": "data/model"}}
    Path("base.yaml").write_text(yaml.safe_dump(real))
    assert cli(["sweep", str(write_spec({"gpus": [64]}, gpus_per_rank=8))]) == 2
    assert "gpus_per_rank = 8 needs simulated compute" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- submission
def test_what_is_submitted_carries_ranks_directory_and_settings(queue):
    spec = write_spec({"gpus": [64], "seed": [7]}, gpus_per_rank=8, overrides={"staleness.max_staleness": 2})
    planned = sweep.plan(load_spec(spec), spec)["gpus-64_seed-7"]
    config = planned.config
    assert (config.trainer.ranks, config.rollout.ranks, config.simulation.gpus_per_rank) == (2, 6, 8)
    assert (config.seed, config.staleness.max_staleness) == (7, 2)
    assert (config.name, config.run_dir) == ("gpus-64_seed-7", "runs/gpus-64_seed-7")
    job = planned.job(load_spec(spec), spec)
    assert job.num_tasks == 9 and job.folder == "runs/gpus-64_seed-7/slurm"
    assert any("base.yaml" in line and "trainer.ranks=2" in line for line in job.prologue)


def test_a_second_call_submits_nothing_and_failed_points_wait_for_their_flag(queue):
    spec = write_spec({"seed": [1, 2, 3, 4]})
    assert submit_sweep(spec) == {"seed-1": "100", "seed-2": "102", "seed-3": "104", "seed-4": "106"}
    queue.states |= {"100": "COMPLETED", "102": "FAILED", "104": "RUNNING"}
    end("seed-1", "100", 0)
    end("seed-2", "102", 4, "diverged at step 2")
    said: list[str] = []
    assert submit_sweep(spec, say=said.append) == {}
    assert said[1] == "seed-2: FAILED, left alone; --retry-failed submits it again (diverged at step 2)"
    assert submit_sweep(spec, retry_failed=True) == {"seed-2": "108"}
    record = SweepRecord.read(Path("runs"))
    assert [job.job_id for job in record.points["seed-2"].jobs] == ["102", "108"]
    assert look(record)["seed-2"].kind == "live"  # the status.json of job 102 is not taken for that of job 108
    assert status_table(record, look(record)).splitlines()[2].split()[:4] == ["seed-2", "108", "PENDING", "0/4"]


def test_a_point_added_later_is_submitted_and_one_removed_stays_in_the_table(queue):
    submit_sweep(write_spec({"seed": [1, 2]}))
    assert submit_sweep(write_spec({"seed": [2, 3]})) == {"seed-3": "104"}
    assert list(SweepRecord.read(Path("runs")).points) == ["seed-2", "seed-3", "seed-1"]


def test_changed_settings_of_a_submitted_point_are_told(queue, capsys):
    submit_sweep(write_spec({"seed": [1]}))
    submit_sweep(write_spec({"seed": [1]}))
    assert "settings have changed" not in capsys.readouterr().err
    submit_sweep(write_spec({"seed": [1]}, overrides={"steps": 9}))
    assert "seed-1: settings have changed since it was submitted" in capsys.readouterr().err


@pytest.mark.parametrize("max_jobs", [1, 2, 3])
def test_job_k_waits_for_job_k_minus_max_jobs(queue, max_jobs):
    submit_sweep(write_spec({"seed": list(range(6))}, max_jobs=max_jobs))
    waits = [dependency for _, dependency in queue.jobs.values()]
    assert waits == [None] * max_jobs + [f"afterany:{100 + 2 * k}" for k in range(6 - max_jobs)]


@pytest.mark.parametrize("seed", range(20))
def test_never_more_than_max_jobs_can_run(queue, seed):
    """Random ends, failures, additions and retries: the jobs that wait for nothing are at most max_jobs."""
    random, max_jobs = np.random.default_rng(seed), 3
    for points_so_far in (4, 7, 12):
        submit_sweep(write_spec({"seed": list(range(points_so_far))}, max_jobs=max_jobs), retry_failed=True)
        for _ in range(4):
            live = {job for job, state in queue.states.items() if state == "PENDING"}
            free = [j for j in live if not live & set((queue.jobs[j][1] or "").removeprefix("afterany:").split(":"))]
            assert min(1, len(live)) <= len(free) <= max_jobs
            if free:
                job = str(random.choice(sorted(free)))
                queue.states[job] = "COMPLETED"
                end(queue.jobs[job][0], job, int(random.integers(2)))


def test_a_smaller_max_jobs_waits_for_all_lanes_it_merges(queue):
    submit_sweep(write_spec({"seed": [1, 2, 3]}, max_jobs=3))
    submit_sweep(write_spec({"seed": [1, 2, 3, 4]}, max_jobs=1))
    assert queue.jobs["106"] == ("seed-4", "afterany:100:102:104")


def test_a_refusal_keeps_what_was_submitted_and_the_same_command_goes_on(queue, capsys):
    queue.refuse_after = 2
    spec = write_spec({"seed": [1, 2, 3]})
    assert cli(["sweep", str(spec)]) == 2
    assert "QOSMaxSubmitJobPerUserLimit\n  2 of 3 points were submitted before seed-3" in capsys.readouterr().err
    queue.refuse_after = 99
    assert submit_sweep(spec) == {"seed-3": "104"}


def test_ctrl_c_inside_a_submission_takes_effect_after_it_is_recorded(queue, monkeypatch):
    def send(spec, dependency):
        os.kill(os.getpid(), signal.SIGINT)
        child = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
        assert subprocess.check_output([sys.executable, "-c", child], text=True).strip() == "True"
        return queue.send(spec, dependency)

    monkeypatch.setattr(sweep, "send", send)
    assert cli(["sweep", str(write_spec({"seed": [1, 2]}))]) == 130
    record = SweepRecord.read(Path("runs"))
    assert [len(record.points[name].jobs) for name in ("seed-1", "seed-2")] == [1, 0]
    monkeypatch.setattr(sweep, "send", queue.send)
    assert submit_sweep(Path("sweep.yaml")) == {"seed-2": "102"}


def test_a_job_that_could_not_be_recorded_is_found_by_its_script(queue):
    script = Path("runs/seed-1/slurm/100.sbatch")
    script.parent.mkdir(parents=True)
    script.touch()
    queue.states["100"] = "RUNNING"
    said: list[str] = []
    assert submit_sweep(write_spec({"seed": [1]}), say=said.append) == {}
    assert said == ["seed-1: RUNNING, job 100"]


def test_a_dry_run_submits_and_changes_nothing_and_writes_scripts(queue, capsys):
    spec = write_spec({"gpus": [64, 512]}, gpus_per_rank=8, overrides={"slurm.common.ranks_per_node": 8})
    assert cli(["sweep", str(spec), "--dry-run", "--scripts", "scripts"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].split() == ["gpus-64", "2", "6", "1+1", "64", "would", "be", "submitted"]
    assert out[2].split()[:5] == ["gpus-512", "16", "48", "2+6", "512"]
    assert "#SBATCH hetjob" in Path("scripts/gpus-512.sbatch").read_text()
    assert not queue.jobs and not Path("runs").exists()


# ---------------------------------------------------------------------------------------------------------- lock
def test_a_second_sweep_at_the_same_time_is_refused_with_the_owner(place):
    with (
        locked(Path("runs")),
        pytest.raises(RunError, match=f"changed by process {os.getpid()} on"),
        locked(Path("runs")),
    ):
        pass
    assert Path("runs/sweep.lock").read_text() == ""  # or other hosts would wait for ever
    with locked(Path("runs")):
        pass


def test_the_lock_of_a_killed_process_is_taken_over(place):
    code = (
        "import os, signal; from pathlib import Path; from areal_hpc.sweep.record import locked\n"
        "with locked(Path('runs')): os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -signal.SIGKILL
    assert socket.gethostname() in Path("runs/sweep.lock").read_text()
    with locked(Path("runs")):
        pass


def test_the_lock_of_another_host_counts(place):
    Path("runs").mkdir()
    Path("runs/sweep.lock").write_text("1 elsewhere\n")
    said = "process 1 on elsewhere; wait for its end; if it is gone, delete"
    with pytest.raises(RunError, match=said), locked(Path("runs")):
        pass


@pytest.mark.parametrize(("pid", "free"), [(os.getpid(), False), (2**22 + 1, True)], ids=["alive", "gone"])
def test_where_the_file_system_has_no_locks_the_process_counts(place, monkeypatch, pid, free):
    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    Path("runs").mkdir()
    Path("runs/sweep.lock").write_text(f"{pid} {socket.gethostname()}\n")
    if free:
        with locked(Path("runs")):
            pass
    else:
        with pytest.raises(RunError, match="is being changed"), locked(Path("runs")):
            pass


def test_a_signal_that_another_thread_takes_waits_too(place):
    """numpy has threads of its own, whose signals the main thread cannot block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGINT)
    done, began = [], threading.Event()
    idle = threading.Thread(target=lambda: began.wait(20))
    idle.start()
    with pytest.raises(KeyboardInterrupt), undisturbed():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        done.append(True)
    began.set()
    idle.join()
    assert done == [True]
    assert (signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize("text", ["{", "[]", '{"points": {"a": {}}}', '{"points": 3}'])
def test_a_damaged_record_is_said_and_nothing_is_submitted(queue, capsys, text):
    Path("runs").mkdir()
    Path("runs/sweep.json").write_text(text)
    assert cli(["sweep", str(write_spec({"seed": [1]}))]) == 2
    assert "runs/sweep.json cannot be read as the record of a sweep" in capsys.readouterr().err
    assert not queue.jobs and Path("runs/sweep.json").read_text() == text


# -------------------------------------------------------------------------------------------------------- states
def make_record(**jobs: str | None) -> SweepRecord:
    made = {
        name: PointRecord({"seed": 1}, 0, 3, 4, "simulated", 2.0, "f", [Submitted(job_id)] if job_id else [])
        for name, job_id in jobs.items()
    }
    return SweepRecord(Path("runs"), made)


@pytest.mark.parametrize(
    ("slurm", "status", "kind", "state"),
    [
        ({}, None, "failed", "UNKNOWN"),
        ({"0": "PENDING", "1": "PENDING"}, None, "live", "PENDING"),
        ({"0": "COMPLETED", "1": "RUNNING"}, (7, 0), "live", "RUNNING"),
        ({"0": "COMPLETED", "1": "COMPLETED"}, (7, 0), "done", "COMPLETED"),
        ({"0": "FAILED", "1": "CANCELLED"}, (7, 1), "failed", "FAILED"),
        ({"0": "TIMEOUT"}, (7, None), "failed", "TIMEOUT"),
        ({}, (7, 0), "done", "COMPLETED"),
        ({}, (7, 4), "failed", "FAILED"),
        ({}, (6, 4), "failed", "UNKNOWN"),  # status.json is that of an older job
        ({"0": "NODE_FAIL"}, (6, 4), "failed", "NODE_FAIL"),
    ],
)
def test_state_of_a_point(place, slurm, status, kind, state):
    if status:
        end("a", str(status[0]), status[1])
        if status[1] is None:
            content = json.loads(Path("runs/a/status.json").read_text())
            del content["exit_code"], content["why_ended"]
            Path("runs/a/status.json").write_text(json.dumps(content))
    at = look(make_record(a="7"), lambda ids: {"7": slurm} if slurm else {})["a"]
    assert (at.kind, at.state) == (kind, state)
    if kind == "failed" and (not status or status[0] == 6 or status[1] is None):
        assert at.why == "its job wrote nothing: it never began"
        Path("runs/a/slurm").mkdir(parents=True)
        Path("runs/a/slurm/7.out").touch()
        at = look(make_record(a="7"), lambda ids: {"7": slurm} if slurm else {})["a"]
        assert at.why == "no rank had time to say why; see a/slurm/7.out"


def test_a_point_without_job_and_without_trace_is_missing_and_one_with_a_trace_is_not(place):
    assert look(make_record(a=None), lambda ids: {})["a"].kind == "missing"
    (Path("runs/a")).mkdir(parents=True)
    Path("runs/a/status.json").write_text('{"state": "training", "job_id": null}')
    assert look(make_record(a=None), lambda ids: {})["a"].kind == "failed"
    end("a", None, 0)
    assert look(make_record(a=None), lambda ids: {})["a"].kind == "done"


def test_the_status_table_is_aligned_and_fits_120_columns(place):
    end("long", "7", 1, "an exception on rank 3: " + "x" * 200 + "\nline", tokens_per_s=30_000)
    record = make_record(long="7", b=None)
    lines = status_table(record, look(record, lambda ids: {"7": {"0": "FAILED"}})).splitlines()
    assert lines[0].split() == ["point", "job", "state", "steps", "tokens/s", "why", "it", "ended"]
    assert lines[1].startswith("long     7  FAILED           4/4    15,000  an exception on rank 3: xxx")
    assert len(lines[1]) == 120 and lines[1].endswith("...")
    assert lines[2] == "b        -  NOT SUBMITTED    0/4         -"
    assert "simulated second" in lines[3]


@pytest.mark.parametrize("flags", [["--deadline", "5"], ["--scripts", "d"], ["--status", "--wait"], ["--results", "x"]])
def test_flags_that_do_not_go_together_submit_nothing(queue, flags, capsys):
    with pytest.raises(SystemExit) as caught:
        cli(["sweep", str(write_spec({"seed": [1]})), *flags])
    assert caught.value.code == 2 and not queue.jobs


def test_aligned():
    assert aligned([("a", "10"), ("bcd", "9")], right=(1,)) == "a    10\nbcd   9"


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 4), 1), ((0, None), 1)])
def test_exit_code_of_status_and_wait(queue, capsys, codes, expected):
    spec = write_spec({"seed": [1, 2]})
    submit_sweep(spec)
    for number, code in enumerate(codes):
        queue.states[str(100 + 2 * number)] = "COMPLETED" if code == 0 else "FAILED"
        if code is not None:
            end(f"seed-{number + 1}", str(100 + 2 * number), code)
    for flag in ("--status", "--wait"):
        assert cli(["sweep", str(spec), flag]) == expected
        assert "seed-2" in capsys.readouterr().out


def test_status_of_a_sweep_that_was_never_submitted(queue, capsys):
    assert cli(["sweep", str(write_spec({"seed": [1]})), "--status"]) == 1
    assert "NOT SUBMITTED" in capsys.readouterr().out
    assert not Path("runs").exists()


def test_wait_tells_changes_and_has_a_deadline(queue, monkeypatch, capsys):
    spec = write_spec({"seed": [1]})
    submit_sweep(spec)
    capsys.readouterr()
    naps: list[float] = []

    def nap(seconds):
        naps.append(seconds)
        queue.states["100"] = ["RUNNING", "COMPLETED"][len(naps) - 1]
        if len(naps) == 2:
            end("seed-1", "100", 0)

    monkeypatch.setattr("time.sleep", nap)
    assert cli(["sweep", str(spec), "--wait"]) == 0
    out = capsys.readouterr().out
    assert "seed-1: PENDING -> RUNNING\n" in out and "seed-1: RUNNING -> COMPLETED\n" in out
    queue.states["100"] = "RUNNING"
    assert cli(["sweep", str(spec), "--wait", "--deadline", "1"]) == Exit.DEADLINE
    assert "after 1 s 1 points have not ended: seed-1; their jobs go on" in capsys.readouterr().err


def test_cancel_takes_what_lives(queue, monkeypatch, tmp_path, capsys):
    submit_sweep(spec := write_spec({"seed": [1, 2, 3]}))
    queue.states["100"] = "COMPLETED"
    end("seed-1", "100", 0)
    scancel = tmp_path / "bin" / "scancel"
    scancel.parent.mkdir()
    scancel.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/cancelled\nexit ${{CODE:-0}}\n')
    scancel.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scancel.parent}:/usr/bin:/bin")
    assert cli(["sweep", str(spec), "--cancel"]) == 0
    assert (tmp_path / "cancelled").read_text() == "102 104\n"
    monkeypatch.setenv("CODE", "1")
    assert cli(["sweep", str(spec), "--cancel"]) == 1
    assert "not cancelled" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- results
def write_log(name: str, speedup: float = 2.0) -> None:
    """Three steps that end at 10, 12 and 16 s, with 1 trainer and 2 rollout ranks."""
    config = {
        "rollout": {"engine": "simulated", "ranks": 2},
        "trainer": {"ranks": 1},
        "simulation": {"speedup": speedup},
    }
    path = Path("runs") / name / "log" / "attempt_1.h5"
    path.parent.mkdir(parents=True, exist_ok=True)
    with RunLogWriter(path, attributes={"config": yaml.safe_dump(config)}) as log:
        fill(log, "steps", 3, time_s=[10.0, 12.0, 16.0], consumed_tokens=[500, 600, 1200], num_filtered=[0, 2, 5])
        fates = ["consumed", "consumed", "consumed", "leftover"]
        fill(log, "trajectories", 4, head_lag=[0, 1, 5, -1], fate=fates)
        fill(log, "weight_loads", 2, interrupted=[3, 4])
        rows = [
            (0, Activity.IDLE, 0.0, 13.0),
            (0, Activity.SCHEDULE, 13.0, 14.5),
            (0, Activity.IDLE, 14.5, 16.0),
            (1, Activity.TRAIN_UPDATE, 5.0, 13.0),
            (1, Activity.WAIT_BATCH, 13.0, 14.0),  # not reported further
            (2, Activity.GENERATE, 0.0, 16.0),
            (3, Activity.GENERATE, 0.0, 12.0),
            (3, Activity.IDLE, 12.0, 20.0),
        ]
        columns = zip(("rank", "kind", "start_s", "stop_s"), zip(*rows, strict=True), strict=True)
        fill(log, "activity", 8, **{key: list(values) for key, values in columns})


def fill(log: RunLogWriter, table: str, count: int, **given) -> None:
    from areal_hpc import logschema

    schema = next(t for t in logschema.TABLES if t.name == table)
    blank = {c.name: ["x"] * count if c.dtype.startswith("S") else np.zeros(count) for c in schema.columns}
    rows = {**blank, **given}
    if table == "steps":
        for number in range(count):
            log.step({name: values[number] for name, values in rows.items()})
    else:
        getattr(log, table)(rows)


def test_results_are_one_typed_row_per_point_failed_ones_included(queue):
    submit_sweep(write_spec({"seed": [1, 2, 3], "trainer.optimizer.lr": ["1e-5"]}, overrides={"simulation.speedup": 2}))
    queue.states |= {"100": "COMPLETED", "102": "FAILED"}
    end("seed-1_lr-1e-05", "100", 0)
    Path("runs/seed-1_lr-1e-05/summary.json").write_text('{"pass1_before": 0.25, "pass1_after": null}')
    write_log("seed-1_lr-1e-05")
    end("seed-2_lr-1e-05", "102", 1, "an exception, on rank 3")
    results("runs").to_csv("table.csv", index=False)
    table = pd.read_csv("table.csv").set_index("seed")
    assert table.state.tolist() == ["COMPLETED", "FAILED", "PENDING"]
    assert table["trainer.optimizer.lr"].tolist() == [1e-5] * 3
    first = table.loc[1]
    assert (first.steps_done, first.consumed_tokens, first.interruptions, first.filtered_groups) == (3, 2300, 7, 5)
    assert first.tokens_per_s == pytest.approx((600 + 1200) / 6 / 2)  # 6 s at speedup 2 are 12 simulated ones
    assert first.step_s == pytest.approx(3 * 2)
    assert (first.staleness_mean, first.staleness_max) == (2.0, 5)
    assert first.trainer_idle == pytest.approx(1 / 4)  # between 10 and 16 s known up to 14 s, of which 13 to 14 idle
    assert first.rollout_idle == pytest.approx((0 + 4) / 12)
    assert first.controller_busy == pytest.approx(1.5 / 6)
    assert first.pass1_before == 0.25 and np.isnan(first.pass1_after)
    assert table.loc[2].why_ended == "an exception, on rank 3" and np.isnan(table.loc[2].tokens_per_s)
    assert table.gpus.tolist() == [16, 16, 16] and table.world_size.tolist() == [3, 3, 3]
    assert table.job_id.tolist() == [100, 102, 104]


def test_one_step_gives_no_rate_and_a_damaged_log_no_figures(queue):
    submit_sweep(write_spec({"seed": [1]}))
    end("seed-1", "100", 0)
    path = Path("runs/seed-1/log/attempt_1.h5")
    path.parent.mkdir()
    config = yaml.safe_dump({"rollout": {"engine": "transformers"}, "trainer": {"ranks": 1}})
    with RunLogWriter(path, attributes={"config": config}) as log:
        fill(log, "steps", 1, time_s=[10.0], consumed_tokens=[500])
    row = results("runs").iloc[0]
    assert row.consumed_tokens == 500 and np.isnan(row.tokens_per_s) and np.isnan(row.trainer_idle)
    path.write_bytes(b"no log")
    assert pd.isna(results("runs").iloc[0].consumed_tokens)


def test_the_picture_has_the_ideal_line_and_says_what_is_missing_and_simulated(queue):
    pytest.importorskip("matplotlib")
    submit_sweep(write_spec({"gpus": [64, 128, 256]}, gpus_per_rank=8))
    for name, job_id in (("gpus-64", "100"), ("gpus-128", "102")):
        end(name, job_id, 0)
        queue.states[job_id] = "COMPLETED"
        write_log(name)
    code = Path(__file__).parents[2] / "analysis" / "scaling.py"
    scaling = {"__name__": "scaling"}
    exec(compile(code.read_text(), code, "exec"), scaling)
    figure = scaling["draw"](results("runs"))
    speed, ideal = (line.get_ydata() for line in figure.axes[0].lines)
    assert list(speed) == [150, 150] and list(ideal) == [150, 300]
    assert figure.get_suptitle().startswith("SIMULATED")
    assert figure.get_suptitle().endswith("not shown: gpus-256 (PENDING)")
    assert scaling["main"](["runs", "--output", "out.png"]) == 0 and Path("out.png").stat().st_size > 10_000
    assert scaling["main"](["nothing"]) == 1


def test_no_sweep_here(place):
    with pytest.raises(RunError, match="no sweep in elsewhere"):
        results("elsewhere")


def test_results_go_into_a_csv_only(queue, capsys):
    spec = write_spec({"seed": [1]})
    with pytest.raises(SystemExit):
        cli(["sweep", str(spec), "--results", "table.parquet"])
    assert "a table is written as .csv" in capsys.readouterr().err
    assert cli(["sweep", str(spec), "--results", "out/table.csv"]) == 0
    assert pd.read_csv("out/table.csv").state.tolist() == ["NOT SUBMITTED"]


def test_the_configurations_that_are_shipped(monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    source = Path("configs/sweep_64_512.yaml")
    planned = sweep.plan(load_spec(source), source, files_are_elsewhere=True)
    ranks = {name: (p.config.trainer.ranks, p.config.rollout.ranks) for name, p in planned.items()}
    assert ranks == {"gpus-64": (2, 6), "gpus-128": (4, 12), "gpus-256": (8, 24), "gpus-512": (16, 48)}
    assert sweeptable.WIDTH == 120


def test_the_base_for_real_gpus_makes_whole_nodes(place, monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    spec = place / "real.yaml"
    vary = {"gpus": [64, 128, 256, 512]}
    spec.write_text(yaml.safe_dump({"base": "configs/scale.yaml", "directory": str(place / "runs"), "vary": vary}))
    planned = sweep.plan(load_spec(spec), spec, files_are_elsewhere=True)
    nodes = {name: [c.nodes for c in p.job(load_spec(spec), spec).components] for name, p in planned.items()}
    assert nodes == {"gpus-64": [2, 6], "gpus-128": [4, 12], "gpus-256": [8, 24], "gpus-512": [16, 48]}
