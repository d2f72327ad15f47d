"""Sandboxes that are used again: to start one costs more than most programs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from areal_hpc.sandbox.box import Sandbox
from areal_hpc.sandbox.limits import Limits

_idle = threading.local()  # bubblewrap's end with the thread that started them


@contextmanager
def lent(mode: str, limits: Limits | None = None) -> Iterator[Sandbox]:
    """A sandbox without a program, such as a new one: the last one of this thread if it has been emptied.

    Raises:
        SandboxError: this machine does not offer `mode`.
    """
    limits = limits or Limits()
    sandbox = _take(mode, limits) or Sandbox(mode, limits)
    emptied = False
    try:
        yield sandbox
        emptied = sandbox.empty()
    finally:
        if emptied:
            _idle.sandbox, _idle.owner = sandbox, os.getpid()
        else:
            sandbox.close()


def close_idle() -> None:
    """End the one that waits, if this thread has one."""
    if (sandbox := _pop()) is not None:
        sandbox.close()


def _take(mode: str, limits: Limits) -> Sandbox | None:
    sandbox = _pop()
    if sandbox is None or (sandbox.mode, sandbox.limits) == (mode, limits) and sandbox.empty():  # it may be dead by now
        return sandbox
    sandbox.close()
    return None


def _pop() -> Sandbox | None:
    """The one that waits; a forked process leaves its parent's alone."""
    sandbox: Sandbox | None = _idle.__dict__.pop("sandbox", None)
    return sandbox if sandbox is not None and _idle.owner == os.getpid() else None
