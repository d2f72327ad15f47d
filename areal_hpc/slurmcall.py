"""One call of a Slurm command."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence


class NoAnswer(Exception):
    """Slurm gave none; the text says which command and why."""


def call(command: Sequence[str], timeout_s: float, **environment: str) -> str:
    """What a Slurm command prints, with these variables of the environment besides.

    Raises:
        NoAnswer: it is not there, failed, or took longer.
    """
    try:
        done = subprocess.run(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoAnswer(f"{command[0]}: {error}") from None
    if done.returncode:
        raise NoAnswer(f"{command[0]}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
    return done.stdout
