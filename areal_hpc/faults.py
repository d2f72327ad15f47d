"""Faults on purpose, for tests: named points in the code where a rank can be made to fail.

`AREAL_HPC_FAULT=KIND@POINT#RANK*COUNT` makes world rank RANK fail when it passes POINT for the COUNT-th time:

    exception   raise InjectedFault         kill   SIGKILL to the process itself
    stop        SIGSTOP                     nan    returned to the caller, which spoils a number
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter

VARIABLE = "AREAL_HPC_FAULT"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

_passed: Counter[str] = Counter()
_due = re.fullmatch(r"(exception|kill|stop|nan)@([\w.]+)#(\d+)\*(\d+)", os.environ.get(VARIABLE, ""))


class InjectedFault(Exception):
    """Raised on purpose."""


def fault(point: str, rank: int) -> str | None:
    """Pass a named point; does nothing unless the environment asks for a fault here. Returns "nan" when that is due."""
    if _due is None or _due[2] != point or int(_due[3]) != rank:
        return None
    _passed[point] += 1
    if _passed[point] != int(_due[4]):
        return None
    if _due[1] == "exception":
        raise InjectedFault(f"injected at {point}, pass {_due[4]}")
    if _due[1] in SIGNALS:
        os.kill(os.getpid(), SIGNALS[_due[1]])
    return _due[1]
