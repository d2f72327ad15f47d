"""What Slurm's commands print about heterogeneous jobs (recorded from Slurm 22.05), read into states."""

from __future__ import annotations

import pytest

from areal_hpc.slurmstate import RANKING, has_ended, parse_scontrol, parse_table, worst

SACCT = """\
22+0|RUNNING|0:0|node[1-2]
22+0.batch|RUNNING|0:0|node1
22+0.0|RUNNING|0:0|node[1-2]
22+1|CANCELLED by 1000|0:0|node[3-4]
22+1.0|CANCELLED|0:15|node[3-4]
24|COMPLETED|0:0|node1
24.0+1|FAILED|1:0|node[2-3]
"""
SCONTROL = """\
JobId=22 HetJobId=22 HetJobOffset=0 JobName=sleeper
   HetJobIdSet=22-23
   JobState=COMPLETED Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   Command=/a/JobState=odd.sh 6
   Power=
   

JobId=23 HetJobId=22 HetJobOffset=1 JobName=sleeper
   JobState=NODE_FAIL Reason=None Dependency=(null)
   Power=
   
"""


def test_sacct_lists_components_and_steps():
    states = parse_table(SACCT)
    assert states == {"22": {"0": "RUNNING", "1": "CANCELLED"}, "24": {"": "COMPLETED"}}


def test_squeue_lists_the_last_component_first():
    assert parse_table("22+1|PENDING\n22+0|PENDING\n") == {"22": {"1": "PENDING", "0": "PENDING"}}


def test_scontrol_has_a_paragraph_for_each_component():
    assert parse_scontrol(SCONTROL) == {"22": {"0": "COMPLETED", "1": "NODE_FAIL"}}
    plain = "JobId=7 JobName=x\n   JobState=PENDING Reason=Priority\n"
    assert parse_scontrol(plain) == {"7": {"": "PENDING"}}


@pytest.mark.parametrize(
    "text", ["", "\n", "slurm_load_jobs error: Invalid job id specified", "JobID|State", "|", "x|y"]
)
def test_what_is_no_job_gives_no_state(text):
    assert parse_table(text) == {} and parse_scontrol(text) == {}


def test_a_state_without_a_word_is_unknown():
    assert parse_table("5|") == {"5": {"": "UNKNOWN"}}


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["RUNNING", "COMPLETED"], "RUNNING"),
        (["COMPLETED", "COMPLETED"], "COMPLETED"),
        (["RUNNING", "CANCELLED"], "CANCELLED"),
        (["CANCELLED", "FAILED"], "FAILED"),
        (["NODE_FAIL", "CANCELLED"], "NODE_FAIL"),
        (["PENDING", "RUNNING"], "PENDING"),
        (["TIMEOUT", "PREEMPTED"], "TIMEOUT"),
        (["COMPLETED", "NEW_IN_SLURM_30"], "NEW_IN_SLURM_30"),
        ([], "UNKNOWN"),
    ],
)
def test_the_worst_component_counts(states, expected):
    assert worst(states) == expected and worst(reversed(states)) == expected


def test_a_job_has_ended_when_every_component_has():
    assert has_ended(["COMPLETED", "FAILED"]) and has_ended(["PREEMPTED"])
    assert not has_ended([]) and not has_ended(["UNKNOWN"])
    running = [s for s in RANKING if not has_ended([s])]
    assert {"RUNNING", "PENDING", "COMPLETING", "REQUEUED", "SUSPENDED"} <= set(running)
    assert not any(has_ended(["CANCELLED", state]) for state in running)
