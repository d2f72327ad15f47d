"""The caller's side of the zygote, and how a sandbox comes to life in each mode."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

from areal_hpc.sandbox import init, zygote  # noqa: F401  imported here, so that their byte code is there for the sandbox
from areal_hpc.sandbox.enter import UID
from areal_hpc.sandbox.limits import SandboxError
from areal_hpc.sandbox.plan import HOME, bwrap_arguments, interpreter

START_TIMEOUT_S = 20.0

_BOOT = "import sys; sys.path[0] = {!r}; from areal_hpc.sandbox.{} import main; main()"
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",  # the same program gets the same verdict
    "PYTHONDONTWRITEBYTECODE": "1",
}
_BWRAP = "unshare-pid unshare-net unshare-ipc unshare-uts unshare-cgroup-try die-with-parent new-session as-pid-1"

_zygote: tuple[int, subprocess.Popen[bytes], socket.socket] | None = None
_lock = threading.Lock()


def fork(descriptors: list[int]) -> None:
    """Have the zygote of this process fork an init with these descriptors (see `zygote.NUM_DESCRIPTORS`).

    The zygote dies with the thread that needed it first, and everything in its sandboxes with it.

    Raises:
        SandboxError: it cannot be started.
    """
    with _lock:
        for last_try in (False, True):
            try:
                socket.send_fds(_requests(), [b"+"], descriptors)
                return
            except OSError as error:
                stop_zygote()
                if last_try:
                    raise SandboxError(f"the zygote of sandboxes is gone: {error}") from None


def stop_zygote() -> None:
    """Kill the zygote of this process and, with it, all of its sandboxes."""
    global _zygote
    if _zygote is not None and _zygote[0] == os.getpid():
        _, process, requests = _zygote
        requests.close()
        process.kill()
        process.wait()
    _zygote = None


def _requests() -> socket.socket:
    global _zygote
    if _zygote is None or _zygote[0] != os.getpid():
        ours, theirs = socket.socketpair()
        numbers = [str(theirs.fileno()), str(os.getpid())]
        try:
            process = _popen([*_python(str(Path(__file__).parents[2]), "zygote"), *numbers], [theirs.fileno()])
        except OSError as error:
            raise SandboxError(f"{interpreter()} does not start: {error}") from None
        finally:
            theirs.close()
        ours.settimeout(START_TIMEOUT_S)
        with contextlib.suppress(OSError):
            if ours.recv(1):
                process.stderr.close() if process.stderr else None
                _zygote = os.getpid(), process, ours
                return ours
        raise SandboxError(f"{interpreter()} does not start: {last_words(process)}")
    return _zygote[2]


def bubblewrap(steps: list[list[Any]], descriptors: list[int]) -> subprocess.Popen[bytes]:
    """Start an init inside of bubblewrap. Raises SandboxError."""
    place = shutil.which("bwrap")
    if place is None:
        raise SandboxError("bwrap: bubblewrap is not installed (no `bwrap` in PATH)")
    if os.geteuid() == 0:  # process 1 changes to nobody and gives these up
        user = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        user = ["--unshare-user", "--uid", str(UID), "--gid", str(UID)]
    command = [
        place,
        *(f"--{option}" for option in _BWRAP.split()),
        *user,
        *bwrap_arguments(steps),
        "--chdir",
        "/tmp",
        "--",
        *_python(HOME, "init"),
    ]
    try:
        return _popen([*command, *map(str, descriptors)], descriptors)
    except OSError as error:
        raise SandboxError(f"bwrap: {error}") from None


def last_words(process: subprocess.Popen[bytes]) -> str:
    """Kill it; returns the last line that it wrote to standard error."""
    process.kill()
    _, said = process.communicate()
    return ([line for line in said.decode(errors="replace").split("\n") if line.strip()] or ["no reason given"])[-1]


def scratch() -> str:
    """A directory for programs that run with limits only."""
    directory = tempfile.mkdtemp(prefix="areal_hpc_sandbox_")
    if os.geteuid() == 0:
        os.chmod(directory, 0o777)  # they run as nobody
    return directory


def _python(place: str, module: str) -> list[str]:
    return [interpreter(), "-s", "-S", "-c", _BOOT.format(place, module)]


def _popen(command: list[str], descriptors: list[int]) -> subprocess.Popen[bytes]:
    libraries = os.environ.get("LD_LIBRARY_PATH")  # an interpreter from a module may not start without
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=descriptors,
        env={**_ENVIRONMENT, **({"LD_LIBRARY_PATH": libraries} if libraries else {})},
        cwd="/",
    )
