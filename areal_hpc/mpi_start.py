"""MPI_Init with a deadline, and with values that fit through Slurm's PMI.

MPICH 5.0.2 sends every rank's address through PMI as a block of 4 KiB, most of it whatever lies behind the address in
memory. Zeros are squeezed out of the text. With other remains there a value fills the length that Slurm's pmi2 plugin
has announced, the line with the command around it becomes longer than the plugin reads, and MPI_Init dies or waits for
ever. So a small process between the two announces less.
"""

from __future__ import annotations

import faulthandler
import os
import re
import selectors
import signal
import socket
from collections.abc import Callable

VALUE_BYTES = 512
"""Longest value we announce; Slurm says 1024, and reads lines of 1024 bytes."""


def start_mpi(init: Callable[[], object], deadline_s: float) -> None:
    """Call `init`. After `deadline_s` the process ends with its stacks: nothing can interrupt MPI_Init."""
    if "SLURM_STEP_ID" in os.environ and os.environ.get("PMI_FD", "").isdecimal():
        _announce_less(int(os.environ["PMI_FD"]))
    faulthandler.dump_traceback_later(deadline_s, exit=True)
    try:
        init()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _announce_less(pmi_fd: int) -> None:
    """Put a process of our own between this one and Slurm; it ends when either side does."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        try:
            ours.close()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, signal.SIG_IGN)  # they are for the rank
            _relay(theirs, socket.socket(fileno=pmi_fd))
        finally:
            os._exit(0)
    theirs.close()
    os.dup2(ours.detach(), pmi_fd)


def _relay(rank: socket.socket, slurm: socket.socket) -> None:
    selector = selectors.DefaultSelector()
    selector.register(rank, selectors.EVENT_READ, slurm)
    selector.register(slurm, selectors.EVENT_READ, rank)
    while True:
        for key, _ in selector.select():
            data = key.fileobj.recv(65536)  # type: ignore[union-attr]
            if not data:
                return
            if key.fileobj is slurm:
                data = re.sub(rb"(?<=vallen_max=)\d+", _at_most, data)
            key.data.sendall(data)


def _at_most(announced: re.Match[bytes]) -> bytes:
    return str(min(int(announced[0]), VALUE_BYTES)).encode()
