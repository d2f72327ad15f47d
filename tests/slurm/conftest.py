"""A real Slurm cluster for the tests of this directory."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import conf, services
from tests.slurm.client import PROGRAM, Cluster

REPOSITORY = Path(__file__).parents[2]


def why_not() -> str:
    """Why this machine cannot have the cluster; empty if it can."""
    if os.geteuid():
        return "virtual hosts need root"
    missing = services.missing_programs()
    if missing and not os.path.exists("/etc/debian_version"):
        return f"{', '.join(missing)} missing, and only on Debian they are installed"
    return ""


@pytest.fixture(scope="session")
def alone() -> Iterator[None]:
    """Nobody else tests on the cluster: jobs of two sessions would wait for each other's nodes."""
    with socket.socket(socket.AF_UNIX) as name:
        try:
            name.bind("\0areal-hpc-cluster-tests")  # a name without a file, free again when this process is gone
        except OSError:
            pytest.fail("another test session, or another pytest process of this one, uses the cluster")
        yield


@pytest.fixture(scope="session")
def cluster(alone) -> Iterator[Cluster]:
    """The cluster of tests/slurm/cluster; brought up if it is down, and taken down at the end in that case only."""
    reason = why_not()
    if reason:
        pytest.skip(f"no Slurm cluster: {reason}")
    was_up = subprocess.run([PROGRAM, "status"], capture_output=True).returncode != 3
    done = subprocess.run([PROGRAM, "up"], capture_output=True, text=True, timeout=1200)
    if done.returncode:
        pytest.skip(f"no Slurm cluster: {done.stderr.strip() or done.stdout.strip()}")
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(conf.CONF)
    try:
        yield Cluster(ours=not was_up)
    finally:
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before
        if not was_up:
            subprocess.run([PROGRAM, "down"], check=True, timeout=120)


@pytest.fixture
def place(cluster: Cluster, request, monkeypatch) -> Path:
    """A directory that all hosts see, for one test; jobs run in the repository."""
    monkeypatch.chdir(REPOSITORY)
    directory = cluster.shared / request.node.name.replace("[", "-").replace("]", "")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slurm: runs on the cluster of tests/slurm/cluster")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call):
    report = (yield).get_result()
    report.on_cluster = report.when == "call" and "cluster" in getattr(item, "fixturenames", ())
    if report.on_cluster and report.failed:
        report.sections.append(("the cluster then", item.funcargs["cluster"].what_is_going_on()))


def pytest_terminal_summary(terminalreporter) -> None:
    ends = [report for end in ("passed", "failed") for report in terminalreporter.getreports(end)]
    num = sum(getattr(report, "on_cluster", False) for report in ends)
    where = f"a real cluster of {len(conf.HOSTS)} hosts" if num else "a cluster: see the reasons for skipping with -ra"
    terminalreporter.write_line(f"slurm: {num} test{'' if num == 1 else 's'} ran on {where}")
