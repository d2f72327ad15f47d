"""What the time that a job has left leads to, and how it is known."""

from __future__ import annotations

import math
import os
import stat
import threading
from pathlib import Path

import pytest

from areal_hpc.config import Config
from areal_hpc.slurmstate import seconds_left
from areal_hpc.walltime import GIVE_UP_S, Stage, Walltime, ask_slurm, by_environment, decide, reserve

ADMIT, CLOSE, END = Stage.ADMIT, Stage.CLOSE, Stage.END
JOB = """JobId=29 HetJobId=29 HetJobOffset=0 JobName=EndTime=5
   StartTime=1000 EndTime={} Deadline=N/A

JobId=30 HetJobId=29 HetJobOffset=1 JobName=x
   StartTime=1000 EndTime={} Deadline=N/A
"""
AS_OF = "Configuration data as of 1100\nAccountingStorageTRES = cpu\n"


@pytest.mark.parametrize(
    ("left_s", "answer_s", "warning_s", "reserve_s", "stage"),
    [
        (3600, 60, 150, 110, ADMIT),
        (211, 60, 150, 110, ADMIT),  # 61 s before the warning
        (210, 60, 150, 110, CLOSE),
        (111, 60, 150, 110, CLOSE),  # the warning is late
        (110, 60, 150, 110, END),
        (-5, 0, 0, 0, END),
        (161, 60, 0, 100, ADMIT),  # without a warning the run's own end counts
        (160, 60, 0, 100, CLOSE),
        (450, 60, 150, 400, CLOSE),  # as where saving takes longer than the warning leaves
        (math.inf, 60, 150, 110, ADMIT),
    ],
)
def test_what_the_time_allows(left_s, answer_s, warning_s, reserve_s, stage):
    assert decide(left_s, answer_s, warning_s, reserve_s) is stage


@pytest.mark.parametrize(
    ("part_s", "signal_s", "at_start_s", "seconds"),
    [
        (None, 0, 3600, 60 + 30 + 12),  # no checkpoint yet
        (20, 0, 3600, 2 * 2 * 20 + 30 + 12),
        (20, 120, 3600, 122),
        (1, 120, 3600, 110),  # the warning should have come 10 s before
        (1, 900, 3600, 890),
        (None, 0, 58, 29),  # a job of a minute works for half of it
        (400, 120, 1200, 600),
    ],
)
def test_time_to_save_and_requeue(part_s, signal_s, at_start_s, seconds):
    assert reserve(part_s, 30, signal_s, at_start_s) == seconds


def test_seconds_left_are_of_one_clock_and_of_the_component_that_ends_first():
    assert seconds_left(JOB.format(4600, 1900), AS_OF) == 800
    assert seconds_left(JOB.format("Unknown", 1900), AS_OF) == 800
    assert seconds_left(JOB.format("Unknown", "Unknown"), AS_OF) == math.inf
    assert seconds_left(JOB.format("2026-11-30T08:00:00", 1900), AS_OF) is None
    assert seconds_left(JOB.format(4600, 1900), "slurm_load_ctl_conf error") is None
    assert seconds_left("Invalid job id specified", AS_OF) is None


def scontrol(directory: Path, script: str, monkeypatch) -> None:
    """A program of that name, first on PATH."""
    path = directory / "scontrol"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def test_slurm_is_asked_for_plain_seconds(tmp_path, monkeypatch):
    answers = (
        f"case \"$*\" in 'show job 29') printf '{JOB.format(4600, 1900)}' ;; 'show config') printf '{AS_OF}' ;; esac"
    )
    scontrol(tmp_path, f'[ "$SLURM_TIME_FORMAT" = %s ] || exit 1\n{answers}', monkeypatch)
    assert ask_slurm("29") == 800


def test_a_slurm_that_cannot_be_asked_is_no_error(tmp_path, monkeypatch):
    scontrol(tmp_path, "echo 'slurm_load_jobs error:  Unable to contact' >&2; exit 1", monkeypatch)
    assert ask_slurm("29") == "scontrol: slurm_load_jobs error: Unable to contact"
    scontrol(tmp_path, "echo nothing", monkeypatch)
    assert ask_slurm("29") == "scontrol names no end of the job"
    monkeypatch.setenv("PATH", "/nowhere")
    assert "No such file" in str(ask_slurm("29"))


@pytest.mark.parametrize(("clock_s", "left_s"), [(1000, 600), (1500, 100), (999, None), (1600, None)])
def test_a_clock_that_must_be_wrong_is_not_believed(clock_s, left_s):
    environ = {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "1600"}
    assert by_environment(environ, clock_s) == left_s
    assert by_environment({"SLURM_JOB_END_TIME": "1600"}, clock_s) is None


class Job:
    """A job of `left_s` seconds on a clock of its own; `said` is what Slurm answers, `asked` how often it was."""

    def __init__(
        self, left_s: float, signal_s: int = 120, environ: dict[str, str] | None = None, said=None, **slurm
    ) -> None:
        sections = {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"function": "a:b"}}
        config = Config.model_validate(sections | {"slurm": {"signal_s": signal_s} | slurm})
        self.clock, self.asked, self.ends_s = 7000.0, 0, 7000 + left_s
        self.said: float | str | None = said
        environ = {"SLURM_JOB_ID": "29"} if environ is None else environ
        self.walltime = Walltime(config, environ, lambda: self.clock, self.answer)

    def answer(self, job_id: str) -> float | str:
        assert job_id == "29"
        self.asked += 1
        return self.ends_s - self.clock if self.said is None else self.said

    def at(self, left_s: float, part_s: float | None = 1.0) -> list[str]:
        """What is new when, by the limit of the beginning, so much is left."""
        self.clock = 7000 + 3600 - left_s
        news = []
        for _ in range(3):
            if (question := self.walltime.question) is not None:
                question.thread.join()
            news += self.walltime.look(part_s)
        return news


def test_the_story_of_a_job_that_is_never_warned():
    job = Job(3600)
    assert job.at(3600) == ["3600 s left"] and job.walltime.stage is ADMIT
    for seconds in (10, 20, 300):
        job.walltime.answered(seconds)
    assert job.at(171) == [] and job.asked == 1  # 120 s, 30 s that the warning may be early, the median
    assert job.at(170) == ["170 s left, no new prompts"] and job.walltime.closed and job.asked == 2
    assert job.at(111) == []
    assert job.at(110) == ["110 s left, and no warning came"] and job.walltime.stage is END and job.asked == 3


def test_slow_answers_keep_no_place_empty_for_long():
    job = Job(3600)
    job.at(3600)
    assert job.walltime.answer_s == 72  # before there is any answer: 2% of the time
    job.walltime.answered(5000)
    assert job.walltime.answer_s == 72
    assert job.at(223) == [] and job.at(222) == ["222 s left, no new prompts"]


def test_a_short_job_does_not_wait_for_an_early_warning():
    job = Job(100, signal_s=35)
    job.clock = 7000
    assert job.at(3600) == ["100 s left"]
    job.walltime.answered(1.0)
    assert job.walltime._warning_s == 37


def test_a_limit_that_was_changed_counts_before_anything_is_done():
    job = Job(3600)
    job.at(3600)
    job.ends_s += 1800
    assert job.at(110) == ["the time limit was changed: 1910 s left"] and job.walltime.stage is ADMIT
    assert job.at(-1577) == [] and job.at(-1578) == ["222 s left, no new prompts"]
    job.ends_s += 600  # while there are no new prompts
    assert job.at(-1690) == ["the time limit was changed: 710 s left", "710 s left, new prompts again"]
    assert job.walltime.stage is ADMIT and job.asked == 4


def test_a_slurm_that_falls_silent_leaves_what_it_said():
    job = Job(3600)
    job.at(3600)
    job.said = "scontrol: Unable to contact"
    first, second = job.at(100)
    assert "(scontrol: Unable to contact): what it said before counts" in first
    assert second == "100 s left, and no warning came" and job.walltime.stage is END


def test_a_question_without_an_end_is_given_up():
    job = Job(3600)
    job.at(3600)
    job.clock = 7000 + 3500
    late = threading.Event()
    job.walltime.ask = lambda job_id: str(late.wait(30))
    assert list(job.walltime.look()) == [] and list(job.walltime.look()) == []
    job.clock += GIVE_UP_S
    assert ["no answer in 12 s" in text for text in job.walltime.look()] == [True, False]
    late.set()
    assert job.walltime.stage is END


def test_where_nobody_knows_the_warning_alone_decides():
    job = Job(3600, said="scontrol: not found")
    assert job.at(3600) == ["the time of this job is not known (scontrol: not found): Slurm's warning alone decides"]
    assert job.at(5) == [] and job.walltime.stage is ADMIT and job.asked == 1


def test_a_job_without_a_limit():
    job = Job(math.inf)
    assert job.at(3600) == ["this job has no time limit"]
    job.walltime.answered(3.0)
    assert job.at(-1e6) == [] and job.walltime.stage is ADMIT and job.asked == 1


@pytest.mark.parametrize("why", ["no job", "slurm.reserve_s=0", "checkpoint.resume=false"])
def test_nothing_is_asked_and_nothing_happens(why):
    job = Job(3600, environ={}) if why == "no job" else Job(3600, reserve_s=0)
    if why == "checkpoint.resume=false":
        sections = {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"function": "a:b"}}
        config = Config.model_validate(sections | {"checkpoint": {"resume": False}})
        job.walltime = Walltime(config, {"SLURM_JOB_ID": "29"}, lambda: job.clock, job.answer)
    assert job.at(0) == [] and job.walltime.stage is ADMIT and job.asked == 0


def test_the_configuration_may_say_when():
    job = Job(3600, signal_s=0, reserve_s=300)
    job.at(3600)
    assert job.at(301, part_s=1000) and job.walltime.stage is CLOSE
    assert job.at(300, part_s=1000) and job.walltime.stage is END
