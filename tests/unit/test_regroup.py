"""The weights group without a dead rank: real processes, real Gloo, a real SIGKILL."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from areal_hpc.process_group import open_store, store_port

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("moment", ["idle", pytest.param("receiving", marks=pytest.mark.slow)])
def test_the_living_build_the_next_group_and_get_the_newest_version(moment):
    """Version 1 is torn on at least one side; version 2 comes to all through the new group, and so does version 3."""
    size, victim = 4, 2
    store = open_store("127.0.0.1", is_master=True, world_size=size + 1, timeout_s=60.0)
    command = [sys.executable, "-m", "tests.unit.regroup_rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(store_port(store)), str(victim), moment],
            cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0, -signal.SIGKILL, 0], said
    lines = [out.splitlines() for out, _ in said]
    assert lines[0][-2:] == ["sent 2", "sent 3"]
    for survivor in (1, 3):
        assert lines[survivor][-2:] == ["got 2, as sent", "got 3, as sent"], said
    assert any(line.startswith("torn: rank") and "rebuild the groups" in line for out in lines for line in out), said
