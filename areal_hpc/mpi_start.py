"""MPI_Init with a deadline and clean memory.

MPICH 5.0.2 sends the addresses of its ranks through PMI as whole buffers, most of it memory that it never wrote to. Run
lengths are squeezed out of the text, but what is no run (remains of anything this process did before) makes a line too
long for PMI-1, which is what MPICH speaks to Slurm's pmi2 plugin: MPI_Init dies, or waits for ever. With memory that
malloc hands out zeroed the text stays short.
"""

from __future__ import annotations

import ctypes
import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager

M_PERTURB = -6
"""glibc: malloc fills what it hands out with the complement of this byte; 0: not at all."""


@contextmanager
def careful_start(deadline_s: float) -> Iterator[None]:
    """Around MPI_Init. After `deadline_s` the process ends with the stacks of all threads: it holds no lock we have."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)  # other C libraries have none
    faulthandler.dump_traceback_later(deadline_s, exit=True)
    mallopt(M_PERTURB, 0xFF)
    try:
        yield
    finally:
        mallopt(M_PERTURB, 0)
        faulthandler.cancel_dump_traceback_later()
