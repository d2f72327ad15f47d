"""An srun that outlives its job step: what ends it, and which exit code the job gets. Slurm's commands are scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_hpc import srun
from tests.runs import wait_until

RUNS, OVER, UNKNOWN = ["7+0.0", "7+1.0", "7.batch"], ["7.batch", "7.extern", "7+1.extern"], None
MADE = 40
"""When srun has made its step, in those that look at it, in seconds."""


@pytest.mark.parametrize(
    ("looks", "over_at_s"),
    [
        ([(2, RUNS), (4, OVER), (23.9, OVER), (24, OVER)], 24),  # 20 s after the first look without it
        ([(2, RUNS), (4, OVER), (20, UNKNOWN), (34, OVER), (53, OVER), (54, OVER)], 54),  # no answer: from the start
        ([(2, RUNS), (4, OVER), (20, RUNS), (34, OVER), (53, OVER), (54, OVER)], 54),
        ([(2, OVER), (899, OVER), (900, OVER)], 900),  # hosts may take long to get ready
        ([(2, []), (899, RUNS), (1000, []), (1019, []), (1020, [])], 1020),
        ([(2, UNKNOWN), (2000, UNKNOWN), (9000, UNKNOWN)], None),
        ([(2, RUNS), (50, ["7.1", "7.batch"]), (90, RUNS)], None),
        ([(39, OVER), (41, OVER), (60, OVER), (61, OVER)], 61),  # it began and ended between two looks
        ([(39, OVER), (41, UNKNOWN), (70, OVER), (89, OVER), (90, OVER)], 90),
    ],
)
def test_when_a_step_is_over(looks, over_at_s):
    step = srun.Step(0.0)
    short = looks[0] == (39, OVER)
    over = (now_s for now_s, steps in looks if step.is_over(steps, short and now_s >= MADE, now_s))
    assert next(over, None) == over_at_s


def start(directory: Path, does: str, ends: str = "DerivedExitCode=0:0", steps: str = "7+1.0 7.batch"):
    """areal_hpc.srun with short times, and commands of Slurm that are shell scripts; a file `over` ends the step."""
    scripts = {
        "srun": does,
        "squeue": f'echo "squeue $*" >> {directory}/asked; [ -e {directory}/over ] && echo 7.batch || echo {steps}',
        "scontrol": f'echo "scontrol $*" >> {directory}/asked; printf "JobId=7 %s\\n" {ends}',
    }
    for name, text in scripts.items():
        (directory / name).write_text(f"#!/bin/bash\n{text}\n")
        (directory / name).chmod(0o755)
    code = "import sys; from areal_hpc import srun; srun.GONE_S = 0.3; srun.UNSEEN_S = 1.0; srun.FIRST_PAUSE_S = 0.1; "
    code += "srun.LONGEST_PAUSE_S = 0.2; sys.exit(srun.main(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", code, "--mpi=pmix", "a b", ":", "c"],
        env=os.environ | {"PATH": f"{directory}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(("ends", "code"), [("exit 0", 0), ("exit 5", 5), ("kill -9 $$", 137), ("kill -TERM $$", 143)])
def test_an_srun_that_ends_gives_its_words_and_its_code(tmp_path, ends, code):
    process = start(tmp_path, f"printf '<%s>' \"$@\"; sleep 0.5; {ends}")
    said, errors = process.communicate(timeout=20)
    assert (process.returncode, said, errors) == (code, "<--mpi=pmix><a b><:><c>", "")
    assert "scontrol" not in (tmp_path / "asked").read_text()


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("DerivedExitCode=0:0", 0),
        ("DerivedExitCode=0:0 DerivedExitCode=75:0", 75),
        ("DerivedExitCode=0:9 DerivedExitCode=3:0", 137),
        ("ExitCode=0:0", 1),
    ],
)
def test_an_srun_that_outlives_its_step_is_ended_with_the_code_of_the_step(tmp_path, ends, code):
    process = start(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 60", ends)
    wait_until(lambda: (tmp_path / "asked").exists(), 20, "a look while the step is there")
    (tmp_path / "over").touch()
    _, errors = process.communicate(timeout=20)
    assert process.returncode == code, errors
    assert errors == f"areal-hpc: srun was still waiting although its job step has ended (exit code {code}): ended it\n"
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0] == "squeue --noheader --steps --jobs=7 --format=%i"
    assert asked[-1] == "scontrol --details show job 7"


def test_a_step_that_nobody_has_seen_is_known_by_the_child_that_srun_has_then(tmp_path):
    (tmp_path / "over").touch()
    process = start(tmp_path, "sleep 60 > /dev/null 2>&1; exit 8", "DerivedExitCode=4:0")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 4
    assert errors == "areal-hpc: srun was still waiting although its job step has ended (exit code 4): ended it\n"


def test_an_srun_that_never_makes_a_step_is_given_up(tmp_path):
    process = start(tmp_path, "exec sleep 60", steps="7.batch 7.extern")
    began_s = time.monotonic()
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1 and time.monotonic() - began_s > 1.0
    assert errors == "areal-hpc: srun was still waiting although it has not made a job step: ended it\n"


def test_outside_a_cluster_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert srun.main(["true"]) == 127
    assert capsys.readouterr().err == (
        "areal-hpc: srun: command not found; this is for jobs of sbatch on a cluster with Slurm\n"
    )


def test_outside_a_job_nobody_is_asked_about_steps(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(srun, "call", lambda *command: pytest.fail(f"asked {command}"))
    assert srun.steps_of_this_job() is None


def test_an_srun_is_left_alone_while_slurm_does_not_answer(tmp_path):
    process = start(tmp_path, "sleep 2; exit 4", steps="; echo out of reach >&2; exit 1")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 4
    assert errors == "areal-hpc: while squeue: out of reach: an srun that hangs is not noticed\n", "once"
    assert len((tmp_path / "asked").read_text().splitlines()) > 5


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 9), (signal.SIGHUP, 9), (signal.SIGUSR2, 3), (signal.SIGINT, 3)]
)
def test_what_ends_a_job_reaches_srun_and_other_signals_end_neither(tmp_path, number, code):
    """srun gets the others from Slurm or the terminal itself."""
    process = start(tmp_path, "trap 'exit 9' TERM HUP; for i in {1..12}; do sleep 0.1; done; exit 3")
    wait_until(lambda: (tmp_path / "asked").exists(), 20, "a look")
    process.send_signal(number)
    assert process.wait(20) == code
