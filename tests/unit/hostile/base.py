"""What a hostile program is, and how one is run."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

SECRET = "EXPECTED_" + "77"
ASSERT = [{"kind": "assert", "code": "assert f(3) == 4"}]
CALL = [{"kind": "call", "name": "f", "args": [3], "expected": 4}]
STDIN = [{"kind": "stdin", "input": "3\n", "output": ["4"]}]
SECRET_ASSERT = [{"kind": "assert", "code": f"assert f(3) == {SECRET!r}"}]
NOTHING = [{"kind": "call", "name": "f", "args": [], "expected": []}]
"""f reports what it got at; there must be nothing."""


@dataclass(frozen=True)
class Hostile:
    name: str
    program: str
    tests: list[dict[str, Any]]
    outcome: str = "wrong"
    wall_s: float = 20.0
    setup: str = ""
    limits: dict[str, Any] = field(default_factory=dict)

    @property
    def takes_long(self) -> bool:
        return "cpu_s" in self.limits or 1 <= self.wall_s < 20


def private() -> list[str]:
    """Paths of this machine that no program may see: the home, the project, whatever does not lead to Python."""
    home = os.path.expanduser("~")
    paths = ["/etc/passwd", "/etc/shadow", "/etc/hosts", "/var/log", "/run", "/sys", "/boot", __file__, f"{home}/.ssh"]
    with contextlib.suppress(OSError):
        paths += [os.path.join(home, name) for name in os.listdir(home)] if home != "/" else []
    shown = {os.path.realpath(sys.executable), os.__file__}
    return [path for path in paths if not any(place.startswith(path + "/") for place in shown)]


CORPUS: list[Hostile] = []


def hostile(name: str, tests: list[dict[str, Any]], program: str, outcome: str = "", **more: Any) -> None:
    outcome = outcome or ("correct" if tests is NOTHING else "wrong")
    CORPUS.append(Hostile(name, textwrap.dedent(program), tests, outcome, **more))


def ancestors(pid: int) -> list[int]:
    """All processes above one, nearest first. Raises OSError when one of them ends meanwhile."""
    above = []
    while pid > 1:
        with open(f"/proc/{pid}/status") as file:
            pid = int(file.read().partition("PPid:")[2].split()[0])
        above.append(pid)
    return above


def alive(pid_namespace: str) -> list[int]:
    """Processes below this one in that namespace, as far as this user may see. Others may have one of the same name:
    Linux gives a number that is free again to whoever comes next."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{name}/ns/pid") == pid_namespace and os.getpid() in ancestors(int(name)):
                found.append(int(name))
    return found


def running(pids: Iterable[int]) -> list[int]:
    """Those that have not ended."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
            found += [pid] if file.read().rpartition(")")[2].split()[0] not in "ZX" else []
    return found


def of_the_program(pid_namespace: str) -> list[int]:
    """Processes in that namespace but the first, which waits for the next program."""
    found = []
    for pid in alive(pid_namespace):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
            found += [pid for line in file if line.startswith("NSpid:") and line.split()[-1] != "1"]
    return found


def run(mode: str, case: Hostile) -> tuple[str, list[int], float]:
    """Outcome, processes that were left, seconds."""
    os.environ["AREAL_HPC_SANDBOX"] = mode
    from areal_hpc.sandbox import pool
    from areal_hpc.sandbox.limits import Limits
    from areal_hpc.verifiers import code

    namespaces = []

    class Watched(pool.Sandbox):
        def _greet(self, settings):
            super()._greet(settings)
            namespaces.append(self.pid_namespace)

    limits = Limits(**{"wall_s": case.wall_s, "cpu_s": 10, "memory_bytes": 1 << 28, **case.limits})
    metadata = {"tests": case.tests, "setup": case.setup, "entry_point": None}
    started = time.monotonic()
    pool.close_idle()
    original, pool.Sandbox, code._MODE = pool.Sandbox, Watched, mode
    try:
        outcome = code.reward("", f"```python\n{case.program}\n```", metadata, limits=limits)[1]
    finally:
        pool.Sandbox = original
    seconds = time.monotonic() - started
    left = [pid for namespace in namespaces for pid in of_the_program(namespace)]
    everything = [pid for namespace in namespaces for pid in alive(namespace)]
    pool.close_idle()
    return outcome, [*left, *running(everything)], seconds
