"""Into fresh user, mount, process, network, IPC, host name and control group namespaces, without a helper program."""

from __future__ import annotations

import os
import re
import signal
from typing import Any, NoReturn

from areal_hpc.sandbox import kernel

UID = 1000
"""The user inside: nobody in particular, and not root."""

_OLD, _NEW = "/old", "/new"


NOBODY = 65534
"""Who programs run as, seen from outside, when the caller is root."""


def namespaces() -> None:
    """Leave the namespaces of the machine; the next child is process 1 of its own. Raises OSError.

    Root leaves its user namespace later, in `become_nobody`: until then it may need to read what only root can.
    """
    flags = kernel.CLONE_NEWANY & ~kernel.CLONE_NEWUSER
    if not os.path.exists("/proc/self/ns/cgroup"):
        flags &= ~kernel.CLONE_NEWCGROUP
    if os.geteuid() == 0:
        kernel.unshare(flags)
    else:
        _new_user(flags)


def become_nobody(own_user_namespace: bool) -> None:
    """From root to a user without rights, for good; the namespace makes Linux count its processes apart."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user has cleared it
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # and closed /proc/self
    if own_user_namespace:
        _new_user(0)


def _new_user(flags: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER | flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{UID} {uid} 1"), ("gid_map", f"{UID} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def stay(child: int, gone_fd: int) -> NoReturn:
    """Outside: live, and keep `gone_fd` open, as long as process 1, which takes all of its namespace with it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.closerange(0, gone_fd)
    os.closerange(gone_fd + 1, 1 << 12)
    os.waitpid(child, 0)
    os._exit(0)


def build_root(steps: list[list[Any]]) -> None:
    """Replace the file system of this mount namespace by the one that `steps` describe (see `plan`)."""
    os.umask(0o022)
    kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    os.mkdir(f"/tmp{_OLD}")
    os.mkdir(f"/tmp{_NEW}")
    kernel.mount("tmpfs", f"/tmp{_NEW}", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    kernel.pivot_root("/tmp", f"/tmp{_OLD}")
    os.chdir("/")
    for kind, *rest in steps:
        _build(kind, rest)
    tops = tuple(_NEW + rest[-1] for kind, *rest in steps if kind == "bind")
    for place in _mounts():
        if place in tops or place.startswith(tuple(top + "/" for top in tops)):
            kernel.remount_readonly(place)
    kernel.unmount(_OLD)
    os.chdir(_NEW)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")
    kernel.remount_readonly("/")


def _build(kind: str, rest: list[Any]) -> None:
    target = _NEW + rest[-1]
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if kind == "link":
        os.symlink(rest[0], target)
        return
    if kind == "device" or (kind == "bind" and not os.path.isdir(_OLD + rest[0])):
        if not os.path.exists(target):
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    else:
        os.makedirs(target, exist_ok=True)
    if kind == "proc":
        kernel.mount("proc", target, "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    elif kind == "tmpfs":
        kernel.mount("tmpfs", target, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"mode=1777,size={rest[0]}")
    elif kind in ("bind", "device"):
        kernel.mount(_OLD + rest[0], target, "", kernel.MS_BIND | kernel.MS_REC)


def _mounts() -> list[str]:
    with open(f"{_OLD}/proc/self/mountinfo") as file:
        return [re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), line.split()[4]) for line in file]
