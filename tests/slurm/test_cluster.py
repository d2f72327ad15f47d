"""The cluster itself: one MPI world across a het job, GPUs, accounting, hosts that die, are cut off or slow."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm import conf, hosts
from tests.slurm.client import PROGRAM, Cluster
from tests.slurm.openmpi_env import ENVIRONMENT, openmpi_python

pytestmark = pytest.mark.slurm

EXCHANGE = Path(__file__).with_name("exchange.py")


@pytest.fixture
def place(cluster: Cluster, request: pytest.FixtureRequest) -> Path:
    """An empty directory that all hosts see."""
    path = cluster.shared / f"{request.node.name}-{time.time_ns()}"
    path.mkdir()
    return path


@pytest.fixture
def healed(cluster: Cluster):
    """Name of a host for a test to maltreat; healed afterwards, whatever happens."""
    yield "node5"
    cluster.heal("node5")


def script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/bash", f"#SBATCH --output={path}.out", *lines, ""]))
    return path


def test_up_again_changes_nothing(cluster):
    before = hosts.init_pid(conf.HEAD)
    assert cluster.run([PROGRAM, "up"]) == "already up\n"
    assert hosts.init_pid(conf.HEAD) == before


def test_status_is_one_healthy_screen(cluster):
    lines = cluster.run([PROGRAM, "status"]).splitlines()
    assert lines[-1] == "healthy" and len(lines) <= 24
    assert [line.split()[:2] for line in lines if line.startswith("  node")] == [
        [f"node{i}", f"172.31.77.{10 + i}"] for i in range(1, 6)
    ]


def test_env_is_what_a_shell_needs(cluster):
    shell = 'eval "$("$0" env)"; test -d "$AREAL_HPC_CLUSTER_SHARED" && sinfo -h -p trainer -o %D'
    assert cluster.run(["env", "-u", "SLURM_CONF", "bash", "-c", shell, PROGRAM]) == "2\n"


def test_names_resolve_both_ways_and_tmp_is_private(cluster):
    for node in ("node2", "node4"):
        assert cluster.on(node, ["hostname"]) == f"{node}\n"
        assert cluster.on(node, ["getent", "hosts", "node3"]).split() == ["172.31.77.13", "node3"]
        assert cluster.on(node, ["getent", "hosts", "172.31.77.13"]).split() == ["172.31.77.13", "node3"]
    cluster.on("node2", ["touch", "/tmp/only_here", "/dev/shm/only_here"])
    assert cluster.on("node4", ["ls", "/tmp", "/dev/shm"]).count("only_here") == 0
    assert cluster.on("node2", ["ls", "/tmp", "/dev/shm"]).count("only_here") == 2
    cluster.on("node2", ["rm", "/tmp/only_here", "/dev/shm/only_here"])


@pytest.mark.parametrize("library", ["MPICH", "Open"])
def test_a_het_job_is_one_mpi_world(cluster, place, library):
    python, mpi = (sys.executable, "pmi2") if library == "MPICH" else (openmpi_python(), "pmix")
    exchange = shlex.join([str(python), str(EXCHANGE)])
    result = place / "result.json"
    job = cluster.sbatch(
        script(
            place / "job",
            "#SBATCH --partition=trainer --nodes=2 --ntasks=3 --exclusive --gpus-per-node=8",
            "#SBATCH hetjob",
            "#SBATCH --partition=rollout --nodes=1 --ntasks=2 --gpus-per-node=4",
            *(f"export {key}={value}" for key, value in ENVIRONMENT.items()),
            f"srun --mpi={mpi} --het-group=0 {exchange} {result} a : --het-group=1 {exchange} {result} b",
        )
    )
    rows = cluster.wait_for_job(job)
    assert result.exists(), Path(f"{place}/job.out").read_text()
    lines = json.loads(result.read_text())
    assert [line[:3] for line in lines] == [
        ["a", "node1", library],
        ["a", "node1", library],
        ["a", "node2", library],
        ["b", lines[3][1], library],
        ["b", lines[3][1], library],
    ]
    far = lines[3][1]
    assert far in ("node3", "node4", "node5")
    assert [line[3] for line in lines] == ["0,1,2,3,4,5,6,7"] * 3 + ["0,1,2,3"] * 2
    assert [line[4] for line in lines] == [f"4 on {far}", f"3 on {far}", "2 on node2", "1 on node1", "0 on node1"]
    assert {name: rows[name]["NodeList"] for name in (f"{job}+0", f"{job}+1")} == {
        f"{job}+0": "node[1-2]",
        f"{job}+1": far,
    }
    assert all(row["State"] == "COMPLETED" and row["ExitCode"] == "0:0" for row in rows.values())


def test_three_components_start_at_once(cluster, place):
    job = cluster.sbatch(
        script(
            place / "job",
            "#SBATCH --partition=head --ntasks=1",
            "#SBATCH hetjob",
            "#SBATCH --partition=trainer --nodes=1 --exclusive",
            "#SBATCH hetjob",
            "#SBATCH --partition=rollout --nodes=3 --ntasks=3 --exclusive",
            f"srun --het-group=0,1,2 bash -c 'echo $SLURM_PROCID $SLURMD_NODENAME' > {place}/ranks",
            "exit 7",
        )
    )
    start = time.monotonic()
    rows = cluster.wait_for_job(job)
    assert time.monotonic() - start < 15
    ranks = dict(line.split() for line in (place / "ranks").read_text().splitlines())
    assert ranks == {"0": "node1", "1": "node2", "2": "node3", "3": "node4", "4": "node5"}
    assert rows[f"{job}+0"]["State"] == "FAILED" and rows[f"{job}+0"]["ExitCode"] == "7:0"


def test_a_slow_host_is_slow_both_ways(cluster, healed):
    def seconds(source: str, target: str, num_bytes: int) -> float:
        code = (
            "import socket, sys; s = socket.create_server(('', 5999)); s.settimeout(30); c = s.accept()[0]\n"
            "n = 0\nwhile d := c.recv(65536): n += len(d)\nc.sendall(b'%d' % n)"
        )
        server = subprocess.Popen([PROGRAM, "exec", target, sys.executable, "-c", code])
        send = (
            "import socket, sys, time\n"
            "for _ in range(100):\n"
            f"    try: s = socket.create_connection(('{target}', 5999), 30); break\n"
            "    except OSError: time.sleep(0.1)\n"
            f"t = time.time(); s.sendall(bytes({num_bytes})); s.shutdown(1)\n"
            f"assert int(s.recv(99)) == {num_bytes}; print(time.time() - t)"
        )
        try:
            return float(cluster.on(source, [sys.executable, "-c", send]))
        finally:
            assert server.wait(timeout=30) == 0

    # 512 KiB at 4 Mbit/s are 1.05 s; the bucket lets a few kilobytes through at once.
    for source, target in (("node4", healed), (healed, "node4")):
        assert seconds(source, target, 2**19) < 0.3
        cluster.slow(healed, "4mbit")
        assert 0.9 < seconds(source, target, 2**19) < 2.5
        cluster.heal(healed)
    with pytest.raises(AssertionError, match="such as 1mbit"):
        cluster.slow(healed, "fast")


def test_a_cut_off_host_comes_back(cluster, healed):
    cluster.cut(healed)
    ping = [sys.executable, "-c", f"import socket; socket.create_connection(('{healed}', {conf.SLURMD_PORT}), 1)"]
    with pytest.raises(AssertionError, match="OSError|TimeoutError|timed out"):
        cluster.on("node4", ping)
    shown = subprocess.run([PROGRAM, "status"], capture_output=True, text=True)
    assert shown.returncode == 1 and shown.stdout.endswith("ill: node5 is cut off\n")
    cluster.heal(healed)
    cluster.on("node4", ping)
    assert cluster.node_state(healed) == "idle"


@pytest.mark.slow
def test_a_dead_host_is_noticed_and_its_job_requeued(cluster, place, healed):
    job = cluster.sbatch(
        script(
            place / "job",
            "#SBATCH --nodes=2 --nodelist=node4,node5 --exclusive --requeue",
            f"echo $SLURM_RESTART_COUNT >> {place}/starts",
            "test -z $SLURM_RESTART_COUNT || exit 0",
            "srun --kill-on-bad-exit=0 sleep 200",
        )
    )
    cluster.wait_until_state(job, "RUNNING")
    cluster.run(["sleep", "1"])
    victim = hosts.init_pid(healed)
    cluster.kill(healed)
    assert not Path(f"/proc/{victim}").exists()
    seconds = cluster.wait_for_node(healed, ("down", "down*"), 60)
    print(f"noticed after {seconds:.1f} s")
    cluster.wait_until_state(job, "PENDING")
    cluster.heal(healed)
    assert cluster.node_state(healed) == "idle"
    cluster.run(["sleep", "3"])  # within two seconds of the requeue hosts take the new start for the old one
    cluster.run(["scontrol", "update", f"jobid={job}", "StartTime=now"])
    rows = cluster.wait_for_job(job)
    assert rows[job]["State"] == "COMPLETED"
    assert (place / "starts").read_text() == "\n1\n"
