"""What of the file system a program sees: one list for both ways to build it.

Everything stands on an empty read-only root. Sources are paths of the machine, targets are paths inside:

    ["link", text, target]  ["tmpfs", num_bytes, target]  ["proc", target]
    ["bind", source, target]  read-only, with all mounts below    ["device", source, target]
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any

from areal_hpc.sandbox.limits import Limits

HOME = "/sandbox"
"""Where this package lies inside: HOME/areal_hpc/sandbox."""

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/alternatives", "/etc/localtime")
_DEVICES = ("null", "full", "random", "urandom")
"""Without /dev/zero: mapping it makes memory that no limit counts (see `kernel._filter`)."""

Plan = list[list[Any]]


def interpreter() -> str:
    """The Python that runs programs: the one behind this virtual environment, without its packages."""
    return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


@lru_cache(maxsize=8)
def plan(limits: Limits) -> Plan:
    """Mounts and files of a sandbox on this machine."""
    steps: Plan = []
    for path in _SYSTEM:
        if os.path.islink(path):
            steps.append(["link", os.readlink(path), path])
        elif os.path.isdir(path):
            steps.append(["bind", path, path])
    steps += [["bind", os.path.realpath(path), path] for path in _SETTINGS if os.path.exists(path)]
    steps += [["tmpfs", 4096, home] for home in _homes() if _below(home, _SYSTEM)]
    steps += [["bind", path, path] for path in _of_interpreter()]
    steps += [["bind", os.path.dirname(__file__), f"{HOME}/areal_hpc/sandbox"]]
    steps += [["device", f"/dev/{name}", f"/dev/{name}"] for name in _DEVICES]
    steps += [["link", "/proc/self/fd", "/dev/fd"]]
    steps += [["link", f"/proc/self/fd/{fd}", f"/dev/{name}"] for fd, name in enumerate(("stdin", "stdout", "stderr"))]
    return [*steps, ["proc", "/proc"], ["tmpfs", limits.tmp_bytes, "/tmp"], ["tmpfs", limits.tmp_bytes, "/dev/shm"]]


def _below(path: str, tops: tuple[str, ...]) -> bool:
    return any(path == top or path.startswith(top + "/") for top in tops)


def _homes() -> list[str]:
    """Directories that must not be seen although a site keeps them below a system directory."""
    homes = {os.path.realpath(os.path.expanduser("~")), os.path.realpath(os.getcwd())}
    return [home for home in sorted(homes) if home not in _SYSTEM]


@lru_cache(maxsize=1)
def _of_interpreter() -> list[str]:
    """What the interpreter needs outside the system directories: itself, its library and shared objects."""
    paths = [interpreter(), os.path.dirname(os.__file__)]
    paths += [
        os.path.join(prefix, name) for prefix in (sys.base_prefix, sys.base_exec_prefix) for name in ("lib", "lib64")
    ]
    code = "print(*{line.split()[-1] for line in open('/proc/self/maps') if '.so' in line}, sep='\\n')"
    command = [interpreter(), "-s", "-S", "-c", code]
    paths += subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=30, check=True).stdout.split("\n")
    kept: list[str] = []
    for path in sorted(path for path in paths if os.path.isabs(path) and os.path.exists(path)):
        visible = _below(path, _SYSTEM) and not _below(path, tuple(_homes()))
        if not visible and path not in _homes() and not _below(path, tuple(kept)):
            kept.append(path)
    return kept


def bwrap_arguments(steps: Plan) -> list[str]:
    """The plan in bubblewrap's words."""
    words: list[str] = []
    made = {"/"}
    for kind, *rest in steps:
        for parent in list(reversed(PurePosixPath(rest[-1]).parents))[1:]:
            if str(parent) not in made:
                words += ["--perms", "0755", "--dir", str(parent)]  # else 0700, and root's programs run as nobody
                made.add(str(parent))
        if kind == "tmpfs":
            words += ["--perms", "1777", "--size", str(rest[0]), "--tmpfs", rest[1]]
        else:
            option = {"link": "symlink", "proc": "proc", "bind": "ro-bind", "device": "dev-bind"}[kind]
            words += [f"--{option}", *rest]
    return [*words, "--remount-ro", "/"]
