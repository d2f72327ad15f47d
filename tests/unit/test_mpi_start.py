"""The process between a rank and Slurm: what it passes on, and what it does when the rank dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

RANK = """
import os, signal, sys
from areal_hpc import mpi_start
if sys.argv[2] != "None":
    mpi_start.make_will(mpi_start.LastWill[sys.argv[2]])
mpi_start.start_mpi(lambda: None, 10.0)
fd = int(os.environ["PMI_FD"])
for word in sys.argv[3:]:
    if word == "ready":
        mpi_start.say_ready()
    elif word == "goodbye":
        mpi_start.say_goodbye()
    elif word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        os.write(fd, f"cmd={word}\\n".encode())
os._exit(0)
"""


def what_slurm_hears(will: str, *words: str) -> bytes:
    """All that comes out of the PMI connection of a rank that says these words and ends."""
    slurm, rank = socket.socketpair()
    environment = os.environ | {"PMI_FD": str(rank.fileno()), "SLURM_STEP_ID": "0"}
    command = [sys.executable, "-c", RANK, "-", will, *words]
    process = subprocess.Popen(command, env=environment, pass_fds=[rank.fileno()])
    rank.close()
    process.wait(20)
    assert process.returncode == (-signal.SIGKILL if "kill" in words else 0)
    slurm.settimeout(10)
    heard = b""
    while data := slurm.recv(1000):
        heard += data
    return heard


@pytest.mark.parametrize(
    ("will", "words", "aborts"),
    [
        ("ALWAYS", ["init", "ready", "kill"], True),
        ("ALWAYS", ["init"], True),  # leaving without a word is dying
        ("ALWAYS", ["init", "ready", "goodbye"], False),
        ("ALWAYS", ["init", "finalize"], False),
        ("UNTIL_READY", ["init", "kill"], True),
        ("UNTIL_READY", ["init", "ready", "kill"], False),
        ("UNTIL_READY", ["init", "ready", "goodbye"], False),
        ("None", ["init", "kill"], False),
    ],
)
def test_a_death_ends_the_step_only_if_nobody_can_do_without_the_rank(will, words, aborts):
    heard = what_slurm_hears(will, *words)
    said = [word for word in words if word in ("init", "finalize")]
    assert heard == b"".join(f"cmd={word}\n".encode() for word in said) + b"cmd=abort exitcode=1\n" * aborts


@pytest.mark.parametrize("het", [True, False])
def test_in_a_het_job_slurm_does_not_say_which_ranks_share_a_host(het):
    """Its figures are those of another order of the hosts there; MPICH asks for host names where it is told none."""
    mapping = b"cmd=get_result rc=0 value=(vector,(0,1,2),(1,1,3))\n"
    other = b"cmd=get_result rc=0 value=other\n"
    slurm, rank = socket.socketpair()
    environment = os.environ | {"PMI_FD": str(rank.fileno()), "SLURM_STEP_ID": "0"}
    environment |= {"SLURM_HET_SIZE": "2"} if het else {}
    process = subprocess.Popen(
        [sys.executable, "-c", ASKS], env=environment, pass_fds=[rank.fileno()], stdout=subprocess.PIPE
    )
    rank.close()
    slurm.settimeout(10)
    for answer in (mapping, other):
        assert slurm.recv(1000) == b"cmd=get\n"
        slurm.sendall(answer)
    heard, _ = process.communicate(timeout=20)
    hidden = b"cmd=get_result rc=-1 msg=not_found value=unknown\n"
    assert heard == (hidden if het else mapping) + other


ASKS = """
import os, sys
from areal_hpc import mpi_start
mpi_start.start_mpi(lambda: None, 10.0)
fd = int(os.environ["PMI_FD"])
for _ in range(2):
    os.write(fd, b"cmd=get\\n")
    os.write(1, os.read(fd, 1000))
os._exit(0)
"""
