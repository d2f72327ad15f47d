"""`RewardService`: scores answers in a few killable processes, beside the loop of a rank.

A loop, a crash or a memory blow-up in a user's function costs one answer and one process start. A time-out is an
outcome of its own with reward NaN, where AReaL gives reward 0 and leaves the hung process in its pool.

What is covered: wall time, death, memory of a process, output, stray children in its process group, the end of the
rank. What is not: malice, and children that leave the process group (`setsid`) or outlive a SIGKILLed rank; those need
the sandbox or Slurm's cgroup.
"""

from __future__ import annotations

import logging
import math
import selectors
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from areal_hpc.rewards.child import Child, Job, command
from areal_hpc.rewards.recipe import Recipe, RewardError, Term
from areal_hpc.rewards.wire import MAX_SAMPLE_BYTES, Sample, one_line

if TYPE_CHECKING:
    from areal_hpc.trajectory import Key

CLOSE_TIMEOUT_S = 5.0
"""`close()` returns within this time; killed processes take milliseconds."""

MAX_FAILED_STARTS = 3
"""So many process starts may fail in a row before `poll()` gives up with RewardError."""

_RESTART_DELAY_S = 0.5
_WAIT_SLICE_S = 0.01
_TRIES = 2

Outcome = Literal["correct", "wrong", "unparsed", "timeout", "error", "truncated"]
UNSCORED: tuple[Outcome, ...] = ("timeout", "error", "truncated")

NO_FACTS: Mapping[str, Any] = {}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RewardResult:
    """What became of one answer.

    Attributes:
        key: as submitted.
        reward: finite for correct, wrong and unparsed; NaN for the others, so that nobody takes it for a 0.
        outcome: "timeout" is never retried; "error": the function raised or returned no reward, or died twice;
            "truncated": `Recipe.truncated` is "mask".
        seconds: time spent in the functions (of its whole batch); for timeout and death, from hand-over to the end of
            the process.
        detail: one line for timeout and error, else empty.
        answer: what the function read in it, for votes; None unless the function says.
    """

    key: Key
    reward: float
    outcome: Outcome
    seconds: float
    detail: str
    answer: str | None = None


class RewardService:
    """Scores answers in processes of its own. Not thread-safe.

    Make it and poll it in a thread that lives as long as the service (the main thread of the rank): Linux ties the
    parent-death signal of a process to the thread that started it.

    Args:
        recipe: what to compute, or the name of a single function. Functions run in the main thread of their process,
            with one OpenMP thread, no output, empty stdin, no MPI or Slurm environment.
        num_workers: processes, each with one answer (or batch of answers) at a time.
        timeout_s: limit for one answer (or batch), counted from the start of work and not while it waits in the queue.
            A batch that is not scored in time, or whose process dies, is tried again one answer at a time.
        start_timeout_s: limit for the start of a process, imports of the functions included.

    Raises:
        RewardError: no ":name" in a function; or a process could not start, with the reason and file:line in user code.
        ValueError: a number that makes no sense.

    Attributes:
        num_scored: answers with outcome correct, wrong or unparsed so far.
        num_timeouts: answers with outcome timeout.
        num_errors: answers with outcome error.
        num_restarts: processes started to replace another.
    """

    def __init__(
        self,
        recipe: Recipe | str,
        *,
        num_workers: int,
        timeout_s: float,
        start_timeout_s: float = 30,
    ) -> None:
        numbers = (num_workers, timeout_s, start_timeout_s)
        if not all(number > 0 for number in numbers):
            raise ValueError(f"num_workers, timeout_s and start_timeout_s must be above 0, got {numbers}")
        self.num_scored = self.num_timeouts = self.num_errors = self.num_restarts = 0
        self._recipe = Recipe([Term(recipe)]) if isinstance(recipe, str) else recipe
        self._command = command(self._recipe)
        self._num_workers, self._timeout_s, self._start_timeout_s = num_workers, timeout_s, start_timeout_s
        self._over = f"not scored within {timeout_s:g} s"
        self._pending: set[Key] = set()
        self._queue: deque[Job] = deque()
        self._results: list[RewardResult] = []
        self._num_submitted = 0
        self._selector = selectors.DefaultSelector()
        self._children: list[Child] = []
        self._dying: list[subprocess.Popen[bytes]] = []
        self._failed_starts = 0
        self._max_failed_starts = 1  # a function that cannot be imported stays so
        self._next_start = -math.inf
        self._closed = False
        try:
            for _ in range(num_workers):
                self._start_child()
            while not all(child.ready for child in self._children):
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

    def submit(
        self, key: Key, prompt: str, completion: str, metadata: dict[Any, Any], facts: Mapping[str, Any] = NO_FACTS
    ) -> None:
        """Queue one answer; never blocks.

        The functions get equal texts, lone surrogates included, and metadata as msgpack carries it (tuples become
        lists). Metadata that msgpack cannot carry makes an "error" result.

        Raises:
            RewardError: the service is closed, or an answer with this key is pending.
        """
        self._check_open()
        if key in self._pending:
            raise RewardError(f"answer {key} was submitted again while it is pending; keys must be unique")
        self._pending.add(key)
        self._num_submitted += 1
        try:
            sample = Sample.pack(self._num_submitted, prompt, completion, metadata, facts)
            self._queue.append(Job(self._num_submitted, key, sample))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            detail = one_line(f"cannot be sent to a reward process: {type(error).__name__}: {error}")
            self._settle(key, "error", 0.0, detail)
        self._hand_out()

    def poll(self) -> list[RewardResult]:
        """Results since the last call, each answer exactly once; never blocks.

        Costs microseconds, plus about a millisecond for the start of a process when one had to be replaced. Call it
        every few milliseconds: time-outs are enforced in here and idle processes get their next answers in here.

        Raises:
            RewardError: the service is closed, or MAX_FAILED_STARTS process starts in a row failed.
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
        """Kill all processes and their process groups, within CLOSE_TIMEOUT_S. Pending answers are abandoned."""
        if self._closed:
            return
        self._closed = True
        for child in list(self._children):
            self._bury(child)
        self._selector.close()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for process in self._dying:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _log.warning("reward process %d was killed and is not gone after %g s", process.pid, CLOSE_TIMEOUT_S)

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
        for child in list(self._children):
            if now >= child.deadline or child.failure() is not None:
                self._replace(child, now)
        self._dying = [process for process in self._dying if process.poll() is None]
        if len(self._children) < self._num_workers and now >= self._next_start:
            self.num_restarts += 1
            self._start_child()
        self._hand_out()
        results, self._results = self._results, []
        self._pending.difference_update(result.key for result in results)
        return results

    def _start_child(self) -> None:
        try:
            self._children.append(Child(self._command, self._selector, self._start_timeout_s))
        except OSError as error:
            self._failed_start(f"cannot be created: {error}")

    def _failed_start(self, reason: str) -> None:
        self._failed_starts += 1
        self._next_start = time.monotonic() + _RESTART_DELAY_S
        if self._failed_starts >= self._max_failed_starts:
            raise RewardError(f"reward function {self._recipe}: process {reason} (failed start {self._failed_starts})")
        _log.warning("reward function %s: process %s; trying again", self._recipe, reason)

    def _hand_out(self) -> None:
        for child in self._children:
            if not self._queue:
                return
            if child.is_free:
                child.take(self._next_jobs(), self._timeout_s)

    def _next_jobs(self) -> list[Job]:
        """As many waiting answers as make a batch; nobody waits for a batch to be full."""
        jobs = [self._queue.popleft()]
        num_bytes = memoryview(jobs[0].sample).nbytes
        while self._queue and len(jobs) < self._recipe.batch and num_bytes < MAX_SAMPLE_BYTES:
            if jobs[0].alone or self._queue[0].alone:
                break
            jobs.append(self._queue.popleft())
            num_bytes += memoryview(jobs[-1].sample).nbytes
        return jobs

    def _receive(self, child: Child) -> None:
        for answer in child.receive():
            if not child.ready:
                if answer.outcome == "ready":
                    child.ready, child.deadline, self._failed_starts = True, math.inf, 0
                else:
                    child.fault = f"cannot load it: {answer.detail}"
            elif answer.id not in child.jobs or answer.outcome == "ready":
                child.fault = "gave an answer nobody had asked for"
            elif answer.seconds > self._timeout_s:  # poll() came too late to kill it; the limit holds all the same
                self._timed_out(child, child.finish(answer.id), answer.seconds)
            else:
                key, found = child.finish(answer.id).key, (answer.reward, answer.answer)
                self._settle(key, answer.outcome, answer.seconds, answer.detail, found)
            if answer.last:
                child.fault = "ran out of memory"

    def _replace(self, child: Child, now: float) -> None:
        """Bury a process that is dead, faulty or over its deadline, and decide about its jobs."""
        self._receive(child)  # an answer that came in the meantime counts
        reason = child.failure()
        if reason is None and now < child.deadline:
            return
        self._bury(child)
        if not child.ready:
            self._failed_start(
                reason or f"was not ready after {self._start_timeout_s:g} s; does its import take so long?"
            )
            return
        seconds = now - child.started
        for job in reversed(child.jobs.values()):  # the first one comes first again
            if reason is None:
                self._timed_out(child, job, seconds)
            else:
                self._died(child, job, seconds, reason)

    def _timed_out(self, child: Child, job: Job, seconds: float) -> None:
        if child.in_batch:
            self._retry(job)
        else:
            self._settle(job.key, "timeout", seconds, self._over)

    def _died(self, child: Child, job: Job, seconds: float, reason: str) -> None:
        job.deaths += not child.in_batch
        if job.deaths < _TRIES:
            self._retry(job)
        else:
            self._settle(job.key, "error", seconds, f"its process died {job.deaths} times; the last one {reason}")

    def _retry(self, job: Job) -> None:
        job.alone = True
        self._queue.appendleft(job)

    def _bury(self, child: Child) -> None:
        child.bury()
        self._children.remove(child)
        self._dying.append(child.process)

    def _settle(
        self,
        key: Key,
        outcome: Outcome,
        seconds: float,
        detail: str,
        found: tuple[float, str | None] = (math.nan, None),
    ) -> None:
        self._results.append(RewardResult(key, found[0], outcome, seconds, detail, found[1]))
        self.num_timeouts += outcome == "timeout"
        self.num_errors += outcome == "error"
        self.num_scored += outcome not in UNSCORED
