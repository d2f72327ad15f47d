"""A killed world leaves nothing in /dev/shm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mpi.mpirun import run_ranks

pytestmark = pytest.mark.mpi

RANK = """
import os, re, signal, time
from pathlib import Path
from areal_hpc.codec import Codec
from areal_hpc.comm import World
from areal_hpc.messages import MESSAGE_TYPES, Event
world = World(Codec(MESSAGE_TYPES), 1)
names = set(re.findall(r"/dev/shm/mpich_shm_\\w+", Path("/proc/self/maps").read_text()))
print("mapped", *names, flush=True)
world.post(1 - world.rank, Event("kind", "x" * 100_000))  # through that memory
assert len(world.recv(20.0).message.text) == 100_000
world.flush(20.0)
if END == "kill":
    time.sleep(0.5)  # the launcher passes on what was printed
    os.kill(os.getpid(), signal.SIGKILL)
world.close()
"""


@pytest.mark.fault("shared memory of a killed world", row=31)
@pytest.mark.parametrize("end", ["kill", "close"])
def test_no_shared_memory_stays_behind(end):
    result = run_ranks(2, ["-c", f"END = {end!r}\n{RANK}"], timeout_s=60)
    names = re.findall(r"/dev/shm/\S+", result.stdout)
    assert names or "mapped" in result.stdout, result.stderr  # another MPI library has none of these
    assert not [name for name in names if Path(name).exists()]
    assert (result.returncode == 0) == (end == "close"), result.stderr
