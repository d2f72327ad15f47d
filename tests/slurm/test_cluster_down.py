"""`cluster down` leaves the machine as it was; `cluster up` copes with what a dead one left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm import conf, hosts
from tests.slurm.client import PROGRAM, Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ORPHAN = ["setsid", "sleep", "98765"]
FOLDERS = ["/etc", "/run", "/var/lib", "/var/log", "/var/spool", "/dev", "/run/netns"]


def processes() -> dict[int, bytes]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = (entry / "cmdline").read_bytes()
            except OSError:
                continue
    return found


def namespaces() -> set[str]:
    found = set()
    for pid in processes():
        for kind in ("mnt", "uts", "net", "pid", "ipc"):
            try:
                found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
            except OSError:
                continue
    return found


def machine() -> dict[str, object]:
    """What a cluster might leave behind."""
    ports = [f":{port:04X}" for port in (conf.CTLD_PORT, conf.SLURMD_PORT, conf.DBD_PORT)]
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    words = [str(conf.STATE).encode(), hosts.MARK.encode(), b"\0".join(word.encode() for word in ORPHAN[1:])]
    return {
        "processes": [line for line in processes().values() if any(word in line for word in words)],
        "namespaces": namespaces(),
        "network": hosts.run("ip", "-o", "-brief", "link").splitlines(),
        "addresses": hosts.run("ip", "-o", "-brief", "address").splitlines(),
        "mounts": Path("/proc/self/mounts").read_text().splitlines(),
        "cgroups": sorted(str(path) for path in Path("/sys/fs/cgroup").glob("*/**")),
        "hosts file": Path("/etc/hosts").read_text(),
        "files": [sorted(os.listdir(folder)) if os.path.isdir(folder) else [] for folder in FOLDERS],
        "listening": [words[1] for words in sockets if words[3] == "0A" and words[1].endswith(tuple(ports))],
    }


def same_soon(before: dict[str, object]) -> None:
    deadline = time.monotonic() + 10
    while (now := machine()) != before and time.monotonic() < deadline:
        time.sleep(0.2)
    for what, there in before.items():
        assert now[what] == there, what


def start_job(cluster: Cluster) -> None:
    job = cluster.sbatch("-N3", "-n3", "-o", f"{cluster.shared}/o", "--wrap", f"{' '.join(ORPHAN)} & srun sleep 600")
    cluster.wait_until_state(job, "RUNNING")
    cluster.run(["timeout", "10", "bash", "-c", f"until pgrep -fx '{' '.join(ORPHAN[1:])}'; do sleep 0.1; done"])


@pytest.fixture
def own(cluster: Cluster) -> Cluster:
    """The cluster, if these tests may take it down."""
    if not cluster.ours:
        pytest.skip("the cluster was up before the tests, so it stays up: `tests/slurm/cluster down` first")
    yield cluster
    cluster.run([PROGRAM, "up"], timeout_s=120)


def test_down_leaves_nothing_behind(own):
    own.run([PROGRAM, "down"])
    assert subprocess.run([PROGRAM, "status"], stdout=subprocess.DEVNULL).returncode == 3
    assert not conf.STATE.exists()
    before = machine()
    assert before["processes"] == [] and before["listening"] == []
    start = time.monotonic()
    both = [subprocess.Popen([PROGRAM, "up"], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(process.communicate(timeout=120)[0] for process in both)
    print(f"two at once: {said}, {time.monotonic() - start:.1f} s")
    assert said[0] == "already up\n" and said[1].startswith("up: 5 hosts in ")
    start_job(own)
    own.kill("node5")
    assert machine() != before
    start = time.monotonic()
    assert own.run([PROGRAM, "down"]) == "down\n"
    print(f"down: {time.monotonic() - start:.1f} s")
    same_soon(before)
    assert own.run([PROGRAM, "down"]) == "was not up\n"


def test_up_after_a_crash(own):
    own.run([PROGRAM, "down"])
    before = machine()
    own.run([PROGRAM, "up"], timeout_s=120)
    start_job(own)
    own.kill("node2")
    assert own.run([PROGRAM, "up"], timeout_s=120) == "already up, healing node2\nnode2 is idle\n"
    os.kill(hosts.init_pid(conf.HEAD), signal.SIGKILL)
    shown = subprocess.run([PROGRAM, "status"], capture_output=True, text=True)
    assert shown.returncode == 1 and "slurmctld does not answer" in shown.stdout
    assert own.run([PROGRAM, "up"], timeout_s=120).startswith("up: 5 hosts in ")
    assert own.run(["srun", "-N5", "-n5", sys.executable, "-c", "print('here')"]) == "here\n" * 5
    own.run(["rm", "-r", conf.STATE])
    own.run([PROGRAM, "down"])
    same_soon(before)
