"""The caller's side of a sandbox."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from areal_hpc.sandbox import nursery, wire
from areal_hpc.sandbox.languages import Language
from areal_hpc.sandbox.limits import Limits, SandboxError
from areal_hpc.sandbox.plan import plan

MODES = ("namespaces", "bwrap", "rlimits")
_GRACE_S = 5.0

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
    """A program in an isolation of its own, for all of its tests; nothing of it is alive after `close` or `empty`.

    Args:
        mode: one of MODES. "bwrap" and "namespaces" give the same guarantees; "rlimits" neither hides files and
            processes nor kills reliably.

    Attributes:
        deadline: when the tests of the program must have ended, on the clock `time.monotonic`; None: whenever.

    Raises:
        SandboxError: this machine does not offer it; the reason as the machine gives it.
    """

    def __init__(self, mode: str, limits: Limits | None = None) -> None:
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")
        self.mode, self.limits = mode, limits or Limits()
        self.deadline: float | None = None
        self._program: dict[str, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._alive = False
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
            wire.send(self._control, {"do": "check", "wall_s": self._wall_s()})
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

    def empty(self) -> bool:
        """Make it ready for another program. False: it cannot be shown to be as it was at the start, so close it."""
        if self.mode == "rlimits" or not self._alive:
            return False
        self._program = self.deadline = None
        try:
            wire.send(self._control, {"do": "empty"})
        except wire.Closed:
            return False
        return self._answer().well

    def close(self) -> None:
        """End it and wait until all of its processes are gone."""
        if not self._alive:
            return
        self._alive = False
        self._control.close()
        self._tests.close()
        if not select.select([self._gone], [], [], _GRACE_S)[0]:
            _log.warning("a sandbox did not end within %g s and was killed", _GRACE_S)
            self._process.kill() if self._process else nursery.stop_zygote()
        os.close(self._gone)
        if self._process is not None:
            self._process.wait()
            self._process = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _start(self) -> None:
        (self._control, control), (self._tests, tests) = socket.socketpair(), socket.socketpair()
        self._gone, gone = os.pipe()
        self._alive = True
        settings: dict[str, Any] = {"mode": self.mode, "limits": self.limits, "plan": []}
        try:
            if self.mode == "rlimits":
                self._directory = settings["directory"] = nursery.scratch()
            else:
                settings["plan"] = plan(self.limits)
            descriptors = [control.fileno(), tests.fileno(), gone]
            if self.mode == "bwrap":
                self._process = nursery.bubblewrap(settings["plan"], descriptors)
            else:
                nursery.fork(descriptors)
        except SandboxError:
            os.close(gone)
            self.close()
            raise
        finally:
            control.close()
            tests.close()
        os.close(gone)
        self._greet(settings)

    def _greet(self, settings: dict[str, Any]) -> None:
        self._control.settimeout(nursery.START_TIMEOUT_S)
        try:
            wire.send(self._control, settings)
            answer = wire.receive(self._control, 1 << 16)
            reason = answer.get("reason")
        except wire.Closed as error:
            reason = nursery.last_words(self._process) if self._process else str(error)
        if reason is not None:
            self.close()
            raise SandboxError(f"{self.mode}: {reason}")
        if self._process is not None and self._process.stderr is not None:
            self._process.stderr.close()
        self.pid_namespace: str = answer["pid_namespace"]
        for sock in (self._control, self._tests):
            sock.settimeout(self.limits.wall_s + nursery.START_TIMEOUT_S)

    def _wall_s(self) -> float:
        left = self.limits.wall_s if self.deadline is None else self.deadline - time.monotonic()
        return min(self.limits.wall_s, max(left, 0.0))

    def _revive(self) -> None:
        if not self._alive:
            self._start()
            if self._program is not None:
                self._tell({"do": "program", **self._program})

    def _tell(self, message: dict[str, Any]) -> None:
        self._revive()
        with contextlib.suppress(wire.Closed):  # the next answer will show it
            wire.send(self._control, message)

    def _ask(self, message: dict[str, Any]) -> Ended:
        self._tell({**message, "wall_s": self._wall_s()})
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
