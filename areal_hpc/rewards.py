"""Rewards of finished answers, computed in worker processes that can be killed, never in the rank itself.

`RewardService` lives in a rank beside the decode loop. The user's function runs in a few plain Python processes
(`areal_hpc.reward_worker`); a loop, a crash or a memory blow-up in it costs one answer and one process start. A
time-out is an outcome of its own with reward NaN, where AReaL gives reward 0 and leaves the hung process in its pool.

What is covered: wall time, death, output, stray children in the worker's process group, the end of the rank. What is
not: malice, and children that leave the process group (`setsid`) or outlive a SIGKILLed rank; those need the sandbox
or Slurm's cgroup.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from dataclasses import dataclass
from typing import IO, Any, Literal

import msgspec

from areal_hpc import reward_worker
from areal_hpc.reward_worker import Answer, RewardError
from areal_hpc.trajectory import Key

CLOSE_TIMEOUT_S = 5.0
"""`close()` returns within this time; killed processes take milliseconds."""

MAX_FAILED_STARTS = 3
"""So many worker starts may fail in a row before `poll()` gives up with RewardError."""

_RESTART_DELAY_S = 0.5
_WAIT_SLICE_S = 0.01
_TRIES = 2

Outcome = Literal["correct", "wrong", "unparsed", "timeout", "error"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RewardResult:
    """What became of one answer.

    Attributes:
        key: as submitted.
        reward: finite for correct, wrong and unparsed; NaN for timeout and error, so that nobody takes it for a 0.
        outcome: "timeout" is never retried; "error": the function raised or returned no reward, or died twice.
        seconds: time spent in the function; for timeout and death, from hand-over to the end of the worker.
        detail: one line for timeout and error, else empty. answer: what the function read, for majority votes.
    """

    key: Key
    reward: float
    outcome: Outcome
    seconds: float
    detail: str
    answer: str | None = None


@dataclass(slots=True)
class _Job:
    id: int
    key: Key
    frame: bytes
    tries: int = 0


class _Worker:
    """One worker process, seen from the rank: two non-blocking pipes, at most one job, one deadline."""

    def __init__(self, function: str, selector: selectors.BaseSelector, start_timeout_s: float) -> None:
        self.process = subprocess.Popen(
            reward_worker.command(function),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
            env=reward_worker.environment(),
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._requests: IO[bytes] = self.process.stdin
        self._answers: IO[bytes] = self.process.stdout
        for pipe in (self._requests, self._answers):
            os.set_blocking(pipe.fileno(), False)
        self._selector = selector
        selector.register(self._answers, selectors.EVENT_READ, self)
        self._outgoing = memoryview(b"")
        self._incoming = bytearray()
        self.ready = False
        self.job: _Job | None = None
        self.started = time.monotonic()
        self.deadline = self.started + start_timeout_s
        self.fault: str | None = None

    def take(self, job: _Job, timeout_s: float) -> None:
        """Start on a job."""
        job.tries += 1
        self.job, self._outgoing = job, memoryview(job.frame)
        self._selector.register(self._requests, selectors.EVENT_WRITE, self)
        self.deadline = time.monotonic() + timeout_s
        self.send(timeout_s)

    def send(self, timeout_s: float) -> None:
        """Hand over what the pipe takes now. The time of the job runs anew from its last byte on."""
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self._requests.fileno(), self._outgoing) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            pass  # the worker is dead or about to be: `failure` will see it
        self._forget(self._requests)
        self.started = time.monotonic()
        self.deadline = self.started + timeout_s

    def receive(self) -> list[Answer]:
        """Answers that have arrived; bytes that are no answer are a fault of the worker."""
        try:
            chunk = os.read(self._answers.fileno(), 2 * reward_worker.MAX_ANSWER_BYTES)
        except BlockingIOError:
            return []
        if not chunk:  # dead or about to be; `failure` reads the exit status as soon as there is one
            self._forget(self._answers)
            self.kill()
        self._incoming += chunk
        answers: list[Answer] = []
        try:
            while (body := reward_worker.pop_frame(self._incoming)) is not None:
                answers.append(msgspec.msgpack.decode(body, type=Answer))
        except (ValueError, msgspec.MsgspecError) as error:
            self.fault = f"sent a broken answer ({error})"
        return answers

    def finish_job(self) -> _Job:
        """Become idle; returns the job it had."""
        assert self.job is not None
        job, self.job, self.deadline = self.job, None, math.inf
        return job

    def failure(self) -> str | None:
        """Why this worker is of no use any more; None while it is. Leaves a dead process unreaped, see `kill`."""
        if self.fault is not None:
            return self.fault
        try:
            status = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # this rank was started with SIGCHLD ignored
            return "vanished"
        if status is None:
            return None
        if status.si_code == os.CLD_EXITED:
            return f"exited with status {status.si_status}"
        return f"was killed by signal {status.si_status} ({signal.strsignal(status.si_status)})"

    def kill(self) -> None:
        """SIGKILL the process group. The leader must not be reaped before, else its group id may be a stranger's."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def bury(self) -> None:
        """Kill and let go of the pipes; only `process` is left, to be reaped."""
        self.kill()
        for pipe in (self._requests, self._answers):
            self._forget(pipe)
            pipe.close()

    def _forget(self, pipe: IO[bytes]) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(pipe)


class RewardService:
    """Scores answers in worker processes. Not thread-safe.

    Make it and poll it in a thread that lives as long as the service (the main thread of the rank): Linux ties the
    parent-death signal of a worker to the thread that started it.

    Args:
        function: "package.module:name" (importable from the working directory or the rank's sys.path) or
            "/path/file.py:name"; a plain function `(prompt: str, completion: str, metadata: dict)` that returns a
            finite number (> 0 is correct, else wrong), `(number, "correct" | "wrong" | "unparsed")`, or both and, for
            votes, the answer. It runs in the main thread, with one OpenMP thread, no output, no MPI or Slurm variables.
        num_workers: processes, each with one answer at a time.
        timeout_s: limit for one answer, counted from the start of work and not while it waits in the queue.
        max_pending: `submit` refuses above this number of answers not yet returned; None: no limit.
        start_timeout_s: limit for the start of a worker, imports of the function included.

    Raises:
        RewardError: no ":name" in function; or a worker could not start, with the reason and file:line in user code.
        ValueError: a number that makes no sense.

    Attributes:
        num_scored: answers with outcome correct, wrong or unparsed so far.
        num_timeouts: answers with outcome timeout.
        num_errors: answers with outcome error.
        num_restarts: workers started to replace another.
    """

    def __init__(
        self,
        function: str,
        *,
        num_workers: int,
        timeout_s: float,
        max_pending: int | None = None,
        start_timeout_s: float = 30,
    ) -> None:
        numbers = (num_workers, timeout_s, start_timeout_s, 1 if max_pending is None else max_pending)
        if not all(number > 0 for number in numbers):
            raise ValueError(f"num_workers, timeout_s, start_timeout_s and max_pending must be above 0, got {numbers}")
        self.num_scored = self.num_timeouts = self.num_errors = self.num_restarts = 0
        self._function = reward_worker.full_name(function)
        self._num_workers, self._timeout_s, self._start_timeout_s = num_workers, timeout_s, start_timeout_s
        self._max_pending, self._over = max_pending, f"not scored within {timeout_s:g} s"
        self._pending: set[Key] = set()
        self._queue: deque[_Job] = deque()
        self._results: list[RewardResult] = []
        self._num_submitted = 0
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._dying: list[subprocess.Popen[bytes]] = []
        self._failed_starts = 0
        self._max_failed_starts = 1  # a function that cannot be imported stays so
        self._next_start = -math.inf
        self._closed = False
        try:
            for _ in range(num_workers):
                self._start_worker()
            while not all(worker.ready for worker in self._workers):
                self._step(_WAIT_SLICE_S)
        except BaseException:
            self.close()
            raise
        self._max_failed_starts = MAX_FAILED_STARTS

    def __enter__(self) -> RewardService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_pending(self) -> int:
        """Answers submitted and not yet returned; after `close()`, those that were abandoned."""
        return len(self._pending)

    def submit(self, key: Key, prompt: str, completion: str, metadata: dict[Any, Any]) -> None:
        """Queue one answer; never blocks.

        The function gets equal texts, lone surrogates included, and metadata as msgpack carries it (tuples become
        lists). Metadata that msgpack cannot carry makes an "error" result.

        Raises:
            RewardError: the service is closed or full, or an answer with this key is pending.
        """
        self._check_open()
        if key in self._pending:
            raise RewardError(f"answer {key} was submitted again while it is pending; keys must be unique")
        if self._max_pending is not None and len(self._pending) >= self._max_pending:
            raise RewardError(f"answer {key} refused: {len(self._pending)} pending, max_pending is {self._max_pending}")
        self._pending.add(key)
        self._num_submitted += 1
        try:
            request = reward_worker.request_frame(self._num_submitted, prompt, completion, metadata)
            self._queue.append(_Job(self._num_submitted, key, request))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            detail = reward_worker.one_line(f"cannot be sent to a worker: {type(error).__name__}: {error}")
            self._settle(key, "error", 0.0, detail)
        self._hand_out()

    def poll(self) -> list[RewardResult]:
        """Results since the last call, each answer exactly once; never blocks.

        Costs microseconds, plus about a millisecond for the start of a process when one had to be replaced. Call it
        every few milliseconds: time-outs are enforced in here and idle workers get their next answer in here.

        Raises:
            RewardError: the service is closed, or MAX_FAILED_STARTS worker starts in a row failed.
        """
        return self._step(0.0)

    def wait(self, timeout_s: float) -> list[RewardResult]:
        """Block until nothing is pending or `timeout_s` is over; returns every result of that time."""
        deadline = time.monotonic() + timeout_s
        results = self._step(0.0)
        while self._pending and (left := deadline - time.monotonic()) > 0:
            results += self._step(min(left, _WAIT_SLICE_S))
        return results

    def close(self) -> None:
        """Kill all workers and their process groups, within CLOSE_TIMEOUT_S. Pending answers are abandoned."""
        if self._closed:
            return
        self._closed = True
        for worker in list(self._workers):
            self._bury(worker)
        self._selector.close()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for process in self._dying:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _log.warning("reward worker %d was killed and is not gone after %g s", process.pid, CLOSE_TIMEOUT_S)

    def _check_open(self) -> None:
        if self._closed:
            raise RewardError("the reward service is closed")

    def _step(self, timeout_s: float) -> list[RewardResult]:
        self._check_open()
        for key, events in self._selector.select(timeout_s):
            if events & selectors.EVENT_WRITE:
                key.data.send(self._timeout_s)
            else:
                self._receive(key.data)
        now = time.monotonic()
        for worker in list(self._workers):
            if now >= worker.deadline or worker.failure() is not None:
                self._replace(worker, now)
        self._dying = [process for process in self._dying if process.poll() is None]
        if len(self._workers) < self._num_workers and now >= self._next_start:
            self.num_restarts += 1
            self._start_worker()
        self._hand_out()
        results, self._results = self._results, []
        self._pending.difference_update(result.key for result in results)
        return results

    def _start_worker(self) -> None:
        try:
            self._workers.append(_Worker(self._function, self._selector, self._start_timeout_s))
        except OSError as error:
            self._failed_start(f"cannot be created: {error}")

    def _failed_start(self, reason: str) -> None:
        self._failed_starts += 1
        self._next_start = time.monotonic() + _RESTART_DELAY_S
        if self._failed_starts >= self._max_failed_starts:
            raise RewardError(f"reward function {self._function}: worker {reason} (failed start {self._failed_starts})")
        _log.warning("reward function %s: worker %s; trying again", self._function, reason)

    def _hand_out(self) -> None:
        for worker in self._workers:
            if not self._queue:
                return
            if worker.ready and worker.job is None and worker.fault is None:
                worker.take(self._queue.popleft(), self._timeout_s)

    def _receive(self, worker: _Worker) -> None:
        for answer in worker.receive():
            if not worker.ready:
                if answer.outcome == "ready":
                    worker.ready, worker.deadline, self._failed_starts = True, math.inf, 0
                else:
                    worker.fault = f"cannot load it: {answer.detail}"
            elif worker.job is None or answer.id != worker.job.id or answer.outcome == "ready":
                worker.fault = "gave an answer nobody had asked for"
            elif answer.seconds > self._timeout_s:  # poll() came too late to kill it; the limit holds all the same
                self._settle(worker.finish_job().key, "timeout", answer.seconds, self._over)
            else:
                key = worker.finish_job().key
                self._settle(key, answer.outcome, answer.seconds, answer.detail, (answer.reward, answer.answer))

    def _replace(self, worker: _Worker, now: float) -> None:
        """Bury a worker that is dead, faulty or over its deadline, and decide about its job."""
        self._receive(worker)  # an answer that came in the meantime counts
        reason = worker.failure()
        if reason is None and now < worker.deadline:
            return
        self._bury(worker)
        if not worker.ready:
            self._failed_start(
                reason or f"was not ready after {self._start_timeout_s:g} s; does its import take so long?"
            )
        elif worker.job is not None:
            job, seconds = worker.finish_job(), now - worker.started
            if reason is None:
                self._settle(job.key, "timeout", seconds, self._over)
            elif job.tries < _TRIES:
                self._queue.appendleft(job)
            else:
                self._settle(job.key, "error", seconds, f"its worker died {job.tries} times; the last one {reason}")

    def _bury(self, worker: _Worker) -> None:
        worker.bury()
        self._workers.remove(worker)
        self._dying.append(worker.process)

    def _settle(self, key: Key, outcome: Outcome, seconds: float, detail: str, found: Any = (math.nan, None)) -> None:
        self._results.append(RewardResult(key, found[0], outcome, seconds, detail, found[1]))
        self.num_timeouts += outcome == "timeout"
        self.num_errors += outcome == "error"
        self.num_scored += outcome not in ("timeout", "error")
