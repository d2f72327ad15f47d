"""Runs functions for workflows in processes that can be killed, beside the decode loop.

Each process has a thread of the rank that waits for it, so that the rank itself never does. Nothing is retried: what
dies or takes too long is told to the workflow, which knows what that means.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any, Literal

import msgspec

from areal_hpc.rewards.child import environment
from areal_hpc.rewards.wire import frame
from areal_hpc.trajectory import Key
from areal_hpc.workflows.tool_worker import MAX_ANSWER_BYTES, Call, Reply

START_TIMEOUT_S = 60.0
"""Start of a process and import of a function, each."""
CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What became of a call: `value` as msgpack for done, else one line in `detail`."""

    key: Key
    outcome: Literal["done", "error", "timeout"]
    value: bytes
    detail: str
    seconds: float


@dataclass(slots=True)
class _Job:
    key: Key
    call: Call
    unwanted: bool = False


class ToolPool:
    """Calls functions for the episodes of one rank; of each at most one at a time.

    Args:
        num_workers: processes; they are started when they are first needed.
        timeout_s: limit for one call, from its start; its process is killed then.

    Attributes:
        num_restarts: processes that had to be replaced.
    """

    def __init__(self, num_workers: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.num_restarts = 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[_Job, ToolResult]] = queue.SimpleQueue()
        self._pending: dict[Key, _Job] = {}
        self._processes: dict[int, _Process] = {}
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), name=f"tool_{number}", daemon=True)
            for number in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> ToolPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, key: Key, function: str, args: bytes) -> None:
        """Queue a call; never blocks."""
        job = self._pending[key] = _Job(key, Call(function, args))
        self._jobs.put(job)

    def cancel(self, key: Key) -> None:
        """Its result is not wanted any more; what runs already runs to its end, or to its deadline."""
        if (job := self._pending.pop(key, None)) is not None:
            job.unwanted = True

    def poll(self) -> list[ToolResult]:
        """What has come since the last call; never blocks."""
        results = []
        with contextlib.suppress(queue.Empty):
            while True:
                job, result = self._results.get_nowait()
                if not job.unwanted:
                    self._pending.pop(job.key, None)
                    results.append(result)
        return results

    def close(self) -> None:
        """Kill all processes, whatever they are doing."""
        for job in self._pending.values():
            job.unwanted = True
        for _ in self._threads:
            self._jobs.put(None)
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        for number, thread in enumerate(self._threads):
            while thread.is_alive() and time.monotonic() < deadline_s:
                if (process := self._processes.get(number)) is not None:
                    process.kill()
                thread.join(0.02)

    def _serve(self, number: int) -> None:
        """The thread of one process."""
        while (job := self._jobs.get()) is not None:
            if job.unwanted:
                continue
            result = self._run(number, job)
            process = self._processes.get(number)
            if process is not None and (result.outcome == "timeout" or process.fault):
                del self._processes[number]
                process.bury()
                self.num_restarts += 1
            self._results.put((job, result))
        if (process := self._processes.pop(number, None)) is not None:
            process.bury()

    def _run(self, number: int, job: _Job) -> ToolResult:
        began_s = time.monotonic()
        try:
            if number not in self._processes:
                self._processes[number] = _Process()
            process = self._processes[number]
            reply = process.ask(job.call, self.timeout_s)
        except OSError as error:
            reply = Reply("error", detail=f"the process that runs tools cannot be used: {error}")
        seconds = time.monotonic() - began_s
        if reply is None:
            detail = f"{job.call.function} was not done within {self.timeout_s:g} s"
            return ToolResult(job.key, "timeout", b"", detail, seconds)
        outcome: Literal["done", "error"] = "done" if reply.kind == "done" else "error"
        return ToolResult(job.key, outcome, reply.value, reply.detail, reply.seconds or seconds)


class _Process:
    """One worker process, seen from the thread that waits for it."""

    def __init__(self) -> None:
        self.fault = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "areal_hpc.workflows.tool_worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
            env=environment(),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        os.set_blocking(self._requests.fileno(), False)
        self._incoming = bytearray()

    def ask(self, call: Call, timeout_s: float) -> Reply | None:
        """The answer, or None if there was none in time; after a death, the answer says so."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        try:
            self._send(frame(msgspec.msgpack.encode(call)), deadline_s)
            reply = self._receive(deadline_s)
            if reply is not None and reply.kind == "begun":
                reply = self._receive(time.monotonic() + timeout_s)
            return reply
        except (EOFError, BrokenPipeError):
            self.fault = True
            return Reply("error", detail=f"{call.function}: its process died{self._cause()}")
        except (ValueError, msgspec.MsgspecError) as error:
            self.fault = True
            return Reply("error", detail=f"{call.function}: its process sent a broken answer ({error})")

    def kill(self) -> None:
        """SIGKILL the process group; its leader is not reaped yet, so the group id is still its own."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def bury(self) -> None:
        self.kill()
        self._process.wait(CLOSE_TIMEOUT_S)
        self._requests.close()
        self._answers.close()

    def _send(self, data: bytes, deadline_s: float) -> None:
        view = memoryview(data)
        while view and (left_s := deadline_s - time.monotonic()) > 0:
            if select.select([], [self._requests], [], left_s)[1]:
                with contextlib.suppress(BlockingIOError):
                    view = view[os.write(self._requests.fileno(), view) :]

    def _receive(self, deadline_s: float) -> Reply | None:
        while (body := self._pop()) is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._answers], [], [], left_s)[0]:
                return None
            chunk = os.read(self._answers.fileno(), 1 << 16)
            if not chunk:
                raise EOFError
            self._incoming += chunk
        return msgspec.msgpack.decode(body, type=Reply)

    def _pop(self) -> bytes | None:
        """The first whole frame body. Raises ValueError when it is longer than any answer."""
        size = int.from_bytes(self._incoming[:4], "little")
        if len(self._incoming) >= 4 and size > MAX_ANSWER_BYTES + 4096:
            raise ValueError(f"answer of {size} bytes")
        if len(self._incoming) < 4 + size or len(self._incoming) < 4:
            return None
        body = bytes(self._incoming[4 : 4 + size])
        del self._incoming[: 4 + size]
        return body

    def _cause(self) -> str:
        """Why it died, as far as that is known; it is left unreaped, see `kill`."""
        deadline_s = time.monotonic() + 1.0
        while time.monotonic() < deadline_s:
            with contextlib.suppress(ChildProcessError):  # this rank was started with SIGCHLD ignored
                status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if status is not None:
                    what = "exit status" if status.si_code == os.CLD_EXITED else "signal"
                    return f" ({what} {status.si_status})"
            time.sleep(0.01)
        return ""


def reference(function: Callable[..., Any] | str) -> str:
    """The name by which another process finds a function: `module:name`, or `/path/file.py:name`.

    Raises:
        ValueError: it does not stand at the top of a module or file.
    """
    if isinstance(function, str):
        place, _, name = function.rpartition(":")
        if not place or not name.isidentifier():
            raise ValueError(f"{function!r}: write package.module:name or /path/file.py:name")
        return f"{os.path.abspath(place)}:{name}" if place.endswith(".py") else function
    name, module = getattr(function, "__qualname__", "?"), sys.modules.get(getattr(function, "__module__", ""))
    if not name.isidentifier() or module is None:
        raise ValueError(f"{function!r} is no plain function that stands at the top of a file")
    if PathFinder.find_spec(module.__name__.partition(".")[0]) is None:  # loaded from a file, under a made-up name
        return f"{os.path.abspath(module.__file__ or '')}:{name}"
    return f"{module.__name__}:{name}"
