"""Faults on purpose, for tests: named points in the code where a rank can be made to fail.

`AREAL_HPC_FAULT=KIND@POINT#RANK*COUNT[,...]` makes world rank RANK fail when it passes POINT for the COUNT-th time:

    exception   raise InjectedFault         kill   SIGKILL to the process itself
    stop        SIGSTOP                     hold   a call that never returns and keeps the interpreter's lock
    full        raise OSError, disk full    nan    returned to the caller, which spoils a number
    slow        from this pass on every pass takes SLOW_S longer
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "AREAL_HPC_FAULT"
MARK = "AREAL_HPC_FAULT_MARK"
"""Name of a file that is made when a fault happens, so that a test knows that it did, and when."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
SLOW_S = 0.05
FOR_EVER_S = 2**31 - 1

_PATTERN = re.compile(r"(exception|kill|stop|hold|full|nan|slow)@([\w.]+)#(\d+)\*(\d+)")


class InjectedFault(Exception):
    """Raised on purpose."""


@dataclass(frozen=True, slots=True)
class Due:
    """One fault that the environment asks for."""

    kind: str
    point: str
    rank: int
    count: int


def parse(text: str) -> list[Due]:
    """Raises ValueError for a fault that is none: a test that injects nothing proves nothing."""
    found = []
    for part in filter(None, text.split(",")):
        match = _PATTERN.fullmatch(part)
        if match is None:
            raise ValueError(f"{VARIABLE}: {part!r} is no fault, write {_PATTERN.pattern}")
        found.append(Due(match[1], match[2], int(match[3]), int(match[4])))
    return found


_due = parse(os.environ.get(VARIABLE, ""))
_passed: Counter[str] = Counter()


def fault(point: str, rank: int) -> str | None:
    """Pass a named point; does nothing unless the environment asks for a fault here. Returns "nan" when that is due."""
    mine = [due for due in _due if due.point == point and due.rank == rank]
    if not mine:
        return None
    _passed[point] += 1
    for due in mine:
        if due.kind == "slow" and _passed[point] >= due.count:
            time.sleep(SLOW_S)
        elif _passed[point] == due.count:
            return _commit(due)
    return None


def _commit(due: Due) -> str:
    if mark := os.environ.get(MARK):
        Path(mark).touch()
    if due.kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[due.kind])
    elif due.kind == "hold":
        ctypes.PyDLL(None).sleep(FOR_EVER_S)
    elif due.kind == "full":
        raise OSError(errno.ENOSPC, f"injected at {due.point}, pass {due.count}")
    elif due.kind == "exception":
        raise InjectedFault(f"injected at {due.point}, pass {due.count}")
    return due.kind
