"""The caller's side of a sandbox."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc.sandbox import wire
from areal_hpc.sandbox.enter import NOBODY, UID
from areal_hpc.sandbox.languages import Language
from areal_hpc.sandbox.limits import Limits, SandboxError
from areal_hpc.sandbox.plan import HOME, bwrap_arguments, interpreter, plan

MODES = ("bwrap", "namespaces", "rlimits")
START_TIMEOUT_S = 20.0
_GRACE_S = 5.0
_BOOT = "import sys; sys.path[0] = {!r}; from areal_hpc.sandbox.init import main; main()"
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",  # the same program gets the same verdict
    "PYTHONDONTWRITEBYTECODE": "1",
}
_BWRAP = [
    "--unshare-pid",
    "--unshare-net",
    "--unshare-ipc",
    "--unshare-uts",
    "--unshare-cgroup-try",
    "--die-with-parent",
    "--new-session",
    "--as-pid-1",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a test ended.

    Attributes:
        end: "exit" or "signal" (with `code`), or the limit that stopped it: "wall", "memory", "processes", "files",
            "output"; "lost" if the sandbox itself died.
        output: what it wrote to standard output, or the value of a call as JSON; at most `Limits.output_bytes`.
    """

    end: str
    code: int
    output: bytes

    @property
    def well(self) -> bool:
        return self.end == "exit" and self.code == 0


class Sandbox:
    """One program in one isolation of its own, for all of its tests; nothing of it is alive after `close`.

    Args:
        mode: one of MODES. "bwrap" and "namespaces" give the same guarantees; "rlimits" neither hides files and
            processes nor kills reliably.

    Raises:
        SandboxError: this machine does not offer it; the reason as the machine gives it.
    """

    def __init__(self, mode: str, limits: Limits | None = None) -> None:
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")
        self.mode, self.limits = mode, limits or Limits()
        self._program: dict[str, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: str | None = None
        self._start()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def program(self, language: Language, source: str) -> None:
        """The program that the next tests are about."""
        self._program = {"source": source, "command": language.command, "file": language.file}
        self._tell({"do": "program", **self._program})

    def run_main(self, text: str) -> Ended:
        """Run the program with `text` on its standard input."""
        return self._ask({"do": "main", "input": text.encode("utf-8", "replace").decode("latin-1")})

    def call(self, name: str, args: list[Any]) -> Ended:
        """Call `name` of a Python program, or of its class Solution, with JSON values."""
        return self._ask({"do": "call", "name": name, "args": args})

    def check(self, setup: str, code: str, entry_point: str | None) -> tuple[bool, str]:
        """Run Python statements against a Python program; True if they raise nothing, else False and why.

        Names that neither `setup` nor Python explains, and `entry_point`, are the program's.
        """
        self._revive()
        test = {"setup": setup, "code": code, "entry_point": entry_point}
        try:
            wire.send(self._control, {"do": "check"})
            wire.send(self._tests, test)
        except wire.Closed:
            pass
        ended = self._answer()
        if ended.well:
            with contextlib.suppress(wire.Closed):
                passed, why = wire.receive(self._tests, 1 << 20)
                return passed is True, str(why)
        self.close()  # the test may lie unread in the socket: the next one gets a new start
        return False, f"the tests ended by {ended.end} {ended.code}"

    def close(self) -> None:
        """End it and wait until all of its processes are gone."""
        if self._process is None:
            return
        self._control.close()
        self._tests.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            _log.warning("a sandbox did not end within %g s and was killed", _GRACE_S)
            self._process.kill()
            self._process.wait()
        self._process = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        (self._control, control), (self._tests, tests) = pairs
        settings: dict[str, Any] = {"mode": self.mode, "limits": self.limits, "parent": os.getpid()}
        steps = plan(self.limits) if self.mode != "rlimits" else []
        if self.mode == "rlimits":
            self._directory = settings["directory"] = tempfile.mkdtemp(prefix="areal_hpc_sandbox_")
            if os.geteuid() == 0:
                os.chown(self._directory, NOBODY, NOBODY)
        settings["plan"] = steps
        place = HOME if self.mode == "bwrap" else str(Path(__file__).parents[2])
        python = [interpreter(), "-s", "-S", "-c", _BOOT.format(place), str(control.fileno()), str(tests.fileno())]
        try:
            self._process = subprocess.Popen(
                [*_bwrap(steps), *python] if self.mode == "bwrap" else python,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(control.fileno(), tests.fileno()),
                env=_environment(),
                cwd="/",
            )
        except OSError as error:
            self._control.close()
            self._tests.close()
            raise SandboxError(f"{self.mode}: {error}") from None
        finally:
            control.close()
            tests.close()
        self._hello(settings)

    def _hello(self, settings: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stderr is not None
        self._control.settimeout(START_TIMEOUT_S)
        self._tests.settimeout(self.limits.wall_s + START_TIMEOUT_S)
        try:
            wire.send(self._control, settings)
            answer = wire.receive(self._control, 1 << 16)
        except wire.Closed as error:
            answer = {"ready": False, "reason": ""}
            reason = str(error)
        if not answer["ready"]:
            process = self._process
            self.close()
            said = process.stderr.read().decode(errors="replace").split("\n") if process.stderr else []
            last = [line for line in said if line.strip()][-1:]
            raise SandboxError(f"{self.mode}: {answer['reason'] or ' '.join(last) or reason}")
        self._process.stderr.close()
        self.pid_namespace: str = answer["pid_namespace"]
        self._control.settimeout(self.limits.wall_s + START_TIMEOUT_S)

    def _revive(self) -> None:
        if self._process is None:
            self._start()
            if self._program is not None:
                self._tell({"do": "program", **self._program})

    def _tell(self, message: dict[str, Any]) -> None:
        self._revive()
        with contextlib.suppress(wire.Closed):  # the next answer will show it
            wire.send(self._control, message)

    def _ask(self, message: dict[str, Any]) -> Ended:
        self._tell(message)
        ended = self._answer()
        if ended.end == "lost":
            self.close()
        return ended

    def _answer(self) -> Ended:
        try:
            answer = wire.receive(self._control, 8 * self.limits.output_bytes + 4096)
            return Ended(str(answer["end"]), int(answer["code"]), answer["output"].encode("latin-1"))
        except wire.Closed:
            return Ended("lost", 0, b"")


def _environment() -> dict[str, str]:
    libraries = os.environ.get("LD_LIBRARY_PATH")  # an interpreter from a module may not start without
    return {**_ENVIRONMENT, **({"LD_LIBRARY_PATH": libraries} if libraries else {})}


def _bwrap(steps: list[list[Any]]) -> list[str]:
    place = shutil.which("bwrap")
    if place is None:
        raise FileNotFoundError("bubblewrap is not installed (no `bwrap` in PATH)")
    if os.geteuid() == 0:  # process 1 changes to nobody and gives these up
        user = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        user = ["--unshare-user", "--uid", str(UID), "--gid", str(UID)]
    return [place, *_BWRAP, *user, *bwrap_arguments(steps), "--chdir", "/tmp", "--"]
