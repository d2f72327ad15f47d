"""What tests of sandboxes share."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from areal_hpc.sandbox.isolation import _WHAT, FULL, probe
from areal_hpc.sandbox.limits import SandboxError

_reasons: dict[str, str] = {}


def need(mode: str) -> None:
    """Skip, with the reason of this machine, where `mode` does not work."""
    if mode not in _reasons:
        try:
            probe(mode)
            _reasons[mode] = ""
        except SandboxError as error:
            _reasons[mode] = str(error)
    assert not any(hole in _reasons[mode] for hole in _WHAT.values()), _reasons[mode]  # it works, but badly
    if _reasons[mode]:
        pytest.skip(f"no sandbox here: {_reasons[mode]}")


def need_any() -> None:
    for mode in FULL:
        try:
            need(mode)
            return
        except pytest.skip.Exception:
            continue
    pytest.skip(f"no sandbox here: {'; '.join(_reasons.values())}")


@functools.lru_cache
def python_for_nobody() -> str:
    """An interpreter that a user without rights can start; where the tests themselves run as root, that is another."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("the tests run as an ordinary user already, or there is no setpriv to become one")
    repository = Path(__file__).parents[2]
    for place in (sys.executable, "/usr/bin/python3"):
        look = "import os, sys; from areal_hpc.sandbox.plan import interpreter as i; open(i()).close()"
        command = [*AS_NOBODY, place, "-c", f"{look}; assert sys.version_info >= (3, 10)"]
        environment = {"PYTHONPATH": str(repository)}
        if subprocess.run(command, env=environment, cwd="/", capture_output=True, timeout=60).returncode == 0:
            return place
    pytest.skip("no Python 3.10 or newer, or not this directory, that an ordinary user can read")


AS_NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]


def as_nobody(arguments: list[str], mode: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": os.environ["PATH"], "AREAL_HPC_SANDBOX": mode}
    command = [*AS_NOBODY, python_for_nobody(), *arguments]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=250)
