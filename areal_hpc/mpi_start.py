"""MPI_Init with a deadline, and with values that Slurm's PMI has right.

MPICH 5.0.2 sends every rank's address through PMI as a block of 4 KiB, most of it whatever lies behind the address in
memory. Zeros are squeezed out of the text. With other remains there a value fills the length that Slurm's pmi2 plugin
has announced, the line with the command around it becomes longer than the plugin reads, and MPI_Init dies or waits for
ever. So a small process between the two announces less.

Slurm's pmi2 plugin says which ranks share a host (PMI_process_mapping). In a heterogeneous job it counts hosts in the
order of their names and ranks in the order of components (seen with 22.05). Where these differ MPICH takes ranks of
two hosts for neighbours in shared memory, and hangs or crashes. So the process between them hides the value there, and
MPICH compares host names instead.

The same process sees at once when its rank dies. Where Slurm lets the others live (`--kill-on-bad-exit=0`), it ends the
step in the name of a rank that they cannot do without: a controller or trainer, or any rank before the run has begun.
"""

from __future__ import annotations

import faulthandler
import os
import re
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path

VALUE_BYTES = 512
"""Longest value we announce; Slurm says 1024, and reads lines of 1024 bytes."""
READY, GOODBYE = b"ready\n", b"goodbye\n"
LAST_WORDS = {GOODBYE, b"cmd=finalize", b"cmd=abort"}
ABORT = b"cmd=abort exitcode=1\n"
DRAIN_S = 1.0
MAPPING = b"cmd=get_result rc=0 value=(vector,"
UNKNOWN = b"cmd=get_result rc=-1 msg=not_found value=unknown\n"


class LastWill(Enum):
    """When the whole step ends with a rank that dies without MPI_Finalize, MPI_Abort or `say_goodbye`."""

    ALWAYS = 0
    UNTIL_READY = 1


_pmi_fd: int | None = None
_will: LastWill | None = None


def make_will(will: LastWill) -> None:
    """Before MPI starts: what the death of this process means."""
    global _will
    _will = will


def start_mpi(init: Callable[[], object], deadline_s: float) -> None:
    """Call `init`. After `deadline_s` the process ends with its stacks: nothing can interrupt MPI_Init."""
    global _pmi_fd
    if "SLURM_STEP_ID" in os.environ and os.environ.get("PMI_FD", "").isdecimal():
        _pmi_fd = int(os.environ["PMI_FD"])
        _announce_less(_pmi_fd)
    faulthandler.dump_traceback_later(deadline_s, exit=True)
    try:
        init()
    finally:
        faulthandler.cancel_dump_traceback_later()


def unlink_shared_memory() -> None:
    """Take away the names of MPICH's shared memory, once every rank of the world has mapped it: else a rank that is
    killed leaves it in /dev/shm for ever."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for name in set(re.findall(r"/dev/shm/mpich_shm_\w+", maps)):
        with suppress(OSError):
            os.unlink(name)


def say_ready() -> None:
    """From now on the others can do without this rank, if it is one of those."""
    _say(READY)


def say_goodbye() -> None:
    """This process is about to end without MPI_Finalize, and all is well."""
    _say(GOODBYE)


def _say(word: bytes) -> None:
    if _pmi_fd is not None:
        with suppress(OSError):
            os.write(_pmi_fd, word)


def _announce_less(pmi_fd: int) -> None:
    """Put a process of our own between this one and Slurm; it ends when either side does."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        try:
            ours.close()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, signal.SIG_IGN)  # they are for the rank
            slurm = socket.socket(fileno=pmi_fd)
            said = _relay(theirs, slurm)
            if said is not None and (_will is LastWill.ALWAYS or (_will is LastWill.UNTIL_READY and READY not in said)):
                slurm.sendall(ABORT)
                time.sleep(DRAIN_S)
        finally:
            os._exit(0)
    theirs.close()
    os.dup2(ours.detach(), pmi_fd, inheritable=False)  # a child that outlives the rank must not hide its death


def _relay(rank: socket.socket, slurm: socket.socket) -> set[bytes] | None:
    """Pass on what both say until one of them ends. What the rank has said, if it was the rank and without a word."""
    selector = selectors.DefaultSelector()
    selector.register(rank, selectors.EVENT_READ, slurm)
    selector.register(slurm, selectors.EVENT_READ, rank)
    said: set[bytes] = set()
    while True:
        for key, _ in selector.select():
            try:
                data = key.fileobj.recv(65536)  # type: ignore[union-attr]
            except ConnectionError:
                data = b""
            if not data:
                return None if key.fileobj is slurm or said & LAST_WORDS else said
            if key.fileobj is slurm:
                data = _mended(data)
            else:
                said |= {word for word in (READY, *LAST_WORDS) if word in data}
                data = data.replace(READY, b"").replace(GOODBYE, b"")
            key.data.sendall(data)


def _mended(answer: bytes) -> bytes:
    """An answer of Slurm as the rank gets it."""
    if answer.startswith(MAPPING) and "SLURM_HET_SIZE" in os.environ:
        return UNKNOWN
    return re.sub(rb"(?<=vallen_max=)\d+", _at_most, answer)


def _at_most(announced: re.Match[bytes]) -> bytes:
    return str(min(int(announced[0]), VALUE_BYTES)).encode()
