"""CPU time and memory for a piece of work in this process, so that a usual hang costs no process.

The second line behind refusing what is too large before it is read. One long operation inside a C function cannot be
interrupted; then the time-out of the reward service kills the process.
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_REPEAT_S = 0.05


class OutOfTime(BaseException):
    """The CPU time is over. No Exception, so that `except Exception` inside a library does not swallow it."""


@contextmanager
def limited(seconds: float, num_bytes: int) -> Iterator[None]:
    """Let the body use `seconds` of CPU time and `num_bytes` of new memory; a no-op outside the main thread.

    CPU time, not wall time: a busy node must not change a reward. Signal handler, timer and limit are restored.

    Raises:
        OutOfTime, MemoryError.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handler = signal.signal(signal.SIGPROF, _stop)
    old_memory = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        _set_memory(_data_bytes() + num_bytes, old_memory)
        signal.setitimer(signal.ITIMER_PROF, seconds, _REPEAT_S)  # again and again, in case one is swallowed
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, old_memory)
        signal.signal(signal.SIGPROF, old_handler if old_handler is not None else signal.SIG_DFL)


def _stop(number: int, frame: FrameType | None) -> None:
    raise OutOfTime


def _set_memory(num_bytes: int, old: tuple[int, int]) -> None:
    known = [limit for limit in old if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([num_bytes, *known]), old[1]))


def _data_bytes() -> int:
    """Size of this process's data segments, as RLIMIT_DATA counts them (statm's sixth field, in pages)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()
