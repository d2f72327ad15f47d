"""The doctor on a real cluster: healthy worlds, and ones that cannot come up, each told as it is."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from areal_hpc.exits import Exit
from areal_hpc.hetjob import job_states
from areal_hpc.slurmstate import has_ended
from tests.slurm.client import Cluster
from tests.slurm.openmpi_env import openmpi_python

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(420)]
REPOSITORY = Path(__file__).parents[2]
PYTHON = shlex.quote(sys.executable)
HET = {
    "mpi": "pmi2",
    "common": {"exclusive": False, "memory": "1G", "gpus_per_node": 1},
    "trainer": {"partition": "trainer"},
    "rollout": {"partition": "rollout"},
}
STEPS = {"shape": "steps", "common": {"exclusive": False, "memory": "1G"}, "trainer": {"nodes": 1}}


@pytest.fixture
def place(cluster: Cluster, request) -> Path:
    """A directory that all hosts see, for one test."""
    directory = cluster.shared / request.node.name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def configuration(place: Path, slurm: dict) -> Path:
    """Two trainers and two rollouts; nothing is computed, so the model is an empty directory."""
    (place / "model").mkdir(exist_ok=True)
    (place / "train.jsonl").write_text('{"prompt": "x"}\n')
    config = {
        "name": "doc",
        "run_dir": str(place / "run"),
        "model": {"path": str(place / "model")},
        "data": {"train": str(place / "train.jsonl")},
        "reward": {"function": "areal_hpc.demo.gcd:reward"},
        "trainer": {"ranks": 2, "batch_size": 4, "group_size": 4},
        "rollout": {"ranks": 2},
        "slurm": slurm,
    }
    path = place / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def command(place: Path, slurm: dict, *more: str) -> list[str]:
    return [sys.executable, "-m", "areal_hpc.cli", "doctor", str(configuration(place, slurm)), *more]


def examine(place: Path, slurm: dict, *more: str) -> tuple[int, str]:
    """Exit code and screen of `areal-hpc doctor --submit`."""
    ask = command(place, slurm, "--submit", "--wait", "5", *more)
    done = subprocess.run(ask, capture_output=True, text=True, timeout=400, cwd=REPOSITORY)
    print(done.stdout, done.stderr)
    return done.returncode, " ".join(done.stdout.split())


def python_that(place: Path, does: str) -> str:
    """An interpreter for slurm.python that begins with other shell commands where it is to be a rank."""
    path = place / "python"
    path.write_text(f'#!/bin/bash\ncase "$*" in *--component*) {does} ;; esac\nexec {PYTHON} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_healthy_het_job(place):
    code, screen = examine(place, HET)
    assert code == Exit.DONE
    assert "one MPI world of 5 ranks = 1 controller + 2 trainer + 2 rollout" in screen
    assert "ok trainer 3 ranks on 2 hosts: node[1-2]" in screen
    assert "ok rollout 2 ranks on 2 hosts: node" in screen
    assert "every rank reaches the other components and is answered (5 exchanges)" in screen
    assert "ok link trainer node1 - rollout node" in screen and "ok link trainer node1 - trainer node2" in screen
    assert "ok gpu 4 ranks, a GPU each (rank 1 on node1: 0)" in screen
    assert "ok offline" in screen and " bad " not in screen.replace("0 bad", "")
    assert not list((place / "run").glob(".doctor*"))


def test_one_allocation_with_open_mpi(place):
    slurm = STEPS | {"mpi": "pmix", "python": str(openmpi_python()), "rollout": {"ranks_per_node": 1}}
    code, screen = examine(place, slurm)
    assert code == Exit.DONE
    assert "shape steps, Open MPI 5" in screen and "one MPI world of 5 ranks" in screen
    assert "ok trainer 3 ranks on 1 host:" in screen and "ok rollout 2 ranks on 2 hosts" in screen
    assert "no rank was given a GPU" in screen


def test_a_plugin_that_the_library_refuses(place):
    code, screen = examine(place, HET | {"mpi": "pmix"})
    assert code == Exit.PREFLIGHT
    assert "bad mpi MPICH ends at start-up under the plugin pmix -> set slurm.mpi=pmi2" in screen
    assert "did not come through the start of MPI" in screen


def test_ranks_that_are_each_alone(place):
    alone = "unset ${!PMI*}"
    code, screen = examine(place, HET | {"python": python_that(place, alone)})
    assert code == Exit.PREFLIGHT
    assert "ranks came up, but each is alone in a world of its own" in screen


def test_a_host_whose_ranks_never_start(place):
    stuck = 'if [ "$SLURM_PROCID" = 2 ]; then sleep 300; fi'
    code, screen = examine(place, HET | {"python": python_that(place, stuck)}, "--deadline", "25")
    assert code == Exit.PREFLIGHT
    assert "rank 2 did not start (none on node2): no result after 25 s, given up" in screen


def test_ranks_that_slurm_packs_onto_too_few_gpus(place):
    """Without whole nodes Slurm fills the first host: three of four ranks where there are two GPUs."""
    two = {"exclusive": False, "memory": "1G", "gpus_per_node": 2}
    slurm = HET | {"common": two, "rollout": {"partition": "rollout", "nodes": 2}}
    code, screen = examine(place, slurm, "rollout.ranks=4")
    assert code == Exit.PREFLIGHT
    assert "bad gpu 5 of 6 ranks have a GPU: rank 5 on node" in screen
    assert "warn rollout ranks lie unevenly: 3 on node" in screen and "-> whole nodes are filled evenly" in screen


def test_inside_an_allocation_of_the_wrong_shape(place):
    ask = ["salloc", "--quiet", "--nodes=1", "--ntasks=1", "--mem=100M", "--time=2", *command(place, HET)]
    done = subprocess.run(ask, capture_output=True, text=True, timeout=200, cwd=REPOSITORY)
    assert done.returncode == Exit.PREFLIGHT
    assert "slurm.shape=het needs 2 components, this job has 1" in done.stdout


def test_outside_an_allocation(place):
    done = subprocess.run(command(place, HET), capture_output=True, text=True, timeout=100, cwd=REPOSITORY)
    assert done.returncode == Exit.CONFIG
    assert "22.05.8 with plugin pmi2, shape het, MPICH" in done.stdout
    assert "not inside a Slurm job: add --submit" in done.stderr


def test_ctrl_c_cancels_the_job(place):
    slow = HET | {"python": python_that(place, "sleep 300")}
    process = subprocess.Popen(command(place, slow, "--submit"), stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert process.stderr is not None
    job_id = process.stderr.readline().split()[3]
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == Exit.INTERRUPTED
    deadline_s = time.monotonic() + 60
    while not has_ended((states := job_states([job_id]).get(job_id, {})).values()):
        assert time.monotonic() < deadline_s, states
        time.sleep(1)
