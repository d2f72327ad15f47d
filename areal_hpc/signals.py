"""Signals that ask a rank to end: remembered in the handler, looked at between messages."""

from __future__ import annotations

import signal

SAVE_AND_REQUEUE = signal.SIGUSR2
"""What `#SBATCH --signal` sends before the time limit."""

_caught: list[str] = []


def catch(*numbers: signal.Signals) -> None:
    """Remember these signals from now on instead of dying by them."""
    for number in numbers:
        signal.signal(number, lambda caught, _: _caught.append(signal.Signals(caught).name))


def take() -> str | None:
    """The name of the oldest signal that was not taken yet."""
    return _caught.pop(0) if _caught else None
