"""One episode: a workflow's coroutine, driven by hand, and the tokens it has come to.

    begin() -> asks a Generate -> request() to the engine -> turned(...) -> asks a Run -> ran(result) -> ... -> end

Every answer goes into the journal. An episode that was begun by an earlier attempt has a journal to start with: its
coroutine runs through that without any decoding, and goes on where it was, in the middle of a turn if need be.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from areal_hpc.engines.base import Begun, Completion, Finish, Request
from areal_hpc.rewards import RewardResult
from areal_hpc.rewards.functions import BadReward, judge
from areal_hpc.rewards.service import Outcome
from areal_hpc.rewards.wire import one_line
from areal_hpc.trajectory import Key
from areal_hpc.workflows.api import (
    Generate,
    Prompt,
    Run,
    ToolError,
    ToolTimeout,
    Turn,
    Workflow,
    WorkflowEngine,
    WorkflowError,
)
from areal_hpc.workflows.journal import Entry, Journal, digest
from areal_hpc.workflows.tools import ToolResult, reference

STEP_LIMIT_S = 5.0
"""So long the code of a workflow between two awaits may hold up the rank."""
OUR_FILES = ("api.py", "episode.py", "journal.py", "tools.py")
SLACK_TOKENS = 16
"""Decoded before a stop string: what a tokenizer does at the beginning of a text, and special tokens, stay outside."""


@dataclass(frozen=True, slots=True)
class Language:
    """Between text and tokens.

    Attributes:
        more: text -> token ids, with nothing put before or after.
        read: token ids -> text without special tokens.
    """

    more: Callable[[str], Iterable[int]]
    read: Callable[[NDArray[np.int32]], str]


@dataclass(frozen=True, slots=True)
class End:
    """A finished episode; `result` is None when the reward function is to score it."""

    done: Completion
    journal: Journal
    result: RewardResult | None


class TooLong(BaseException):
    """Raised in a workflow that holds up the rank; not an Exception, so that it is not caught there."""


class Episode:
    """One sample in the making.

    Args:
        request: what a single turn would ask the engine for: prompt, budget, random stream, what has begun already.
        version: the engine's policy version now.
        journal: of an earlier attempt, together with `request.begun`.

    Attributes:
        begun: all tokens up to the last answer.
        asks: what it waits for; None when it has ended.
        end: what it came to.
    """

    def __init__(
        self,
        workflow: Workflow,
        prompt: Prompt,
        request: Request,
        language: Language,
        version: Callable[[], int],
        journal: Journal | None = None,
    ) -> None:
        self.key: Key = request.key
        self.begun = request.begun
        self.asks: Generate | Run | None = None
        self.end: End | None = None
        self.entries: list[Entry] = []
        self._known = deque(journal.entries if journal else ())
        self._request, self._language, self._version = request, language, version
        self._workflow, self._prompt = workflow, prompt
        self._num_settled = 0
        self._fault: str | None = None
        self._finish: Finish = "length"
        now_s = time.monotonic()
        self._started_s = now_s - self.begun.spent_s if len(self.begun.tokens) else None
        self.created_s = self._finished_s = now_s

    # ------------------------------------------------------------------------------------------ for its workflow
    @property
    def room(self) -> int:
        return self._request.max_new_tokens - self._num_settled

    @property
    def num_turns(self) -> int:
        return sum(entry.kind == "turn" for entry in self.entries)

    @property
    def text(self) -> str:
        return self._language.read(self.begun.tokens[: self._num_settled])

    def append(self, text: str) -> int:
        tokens = np.array(list(self._language.more(text)), np.int32)
        tokens, is_cut = tokens[: self.room], len(tokens) > self.room
        asked = digest("append", text)
        if self._known:
            entry = self._known.popleft()
            there = self.begun.tokens[self._num_settled : self._num_settled + len(tokens)]
            if (entry.kind, entry.asked, entry.num_tokens) != ("append", asked, len(tokens)) or (there != tokens).any():
                raise WorkflowError(self._differs("puts in something else"))
        elif self._num_unsettled:
            raise WorkflowError(self._differs("puts something in, where there was a turn"))
        else:
            entry = Entry("append", asked, len(tokens))
            self.begun = _extended(self.begun, tokens, max(self._version(), self._request.earliest_version))
        self.entries.append(entry)
        self._num_settled += len(tokens)
        self._finish = "length" if is_cut else self._finish
        return len(tokens)

    def call(self, function: Callable[..., Any] | str, args: tuple[Any, ...]) -> Run:
        try:
            return Run(reference(function), msgspec.msgpack.encode(args))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise WorkflowError(f"cannot be run in another process: {error}") from None

    # --------------------------------------------------------------------------------------------- for its rank
    def begin(self) -> None:
        """Run up to the first thing that is not known yet."""
        try:
            self._coroutine = self._workflow(self._prompt, WorkflowEngine(self)).__await__()
        except Exception as error:
            self._fail("error", where_and_what(error))
            return
        self._drive(None)

    def request(self) -> Request:
        """What the engine has to do now."""
        assert isinstance(self.asks, Generate)
        limit, settled, request = self.asks.max_new_tokens, self._num_settled, self._request
        budget = request.max_new_tokens if limit is None else min(request.max_new_tokens, settled + limit)
        stop = _Stop(self.asks.stop, settled, self._language.read) if self.asks.stop else None
        return replace(request, max_new_tokens=budget, begun=self.so_far(), given=settled, stop=stop)

    def turned(self, done: Completion) -> None:
        """The engine has done it."""
        assert isinstance(self.asks, Generate)
        self.begun, self._finished_s = done.begun, done.finished_s
        if self._started_s is None:
            self._started_s = done.started_s
        entry = Entry("turn", _asked(self.asks), len(done.tokens) - self._num_settled, done.finish)
        self._drive(self._answer(entry))

    def ran(self, result: ToolResult) -> None:
        """The tool has."""
        assert isinstance(self.asks, Run)
        value = result.value if result.outcome == "done" else result.detail.encode()
        self._drive(self._answer(Entry("run", _asked(self.asks), 0, result.outcome, value)))

    def expire(self, timeout_s: float) -> None:
        """It has taken too long."""
        self._fail("timeout", f"the episode was not done within {timeout_s:g} s")

    def so_far(self) -> Begun:
        """All its tokens; those of a turn under way are with the engine."""
        spent_s = 0.0 if self._started_s is None else time.monotonic() - self._started_s
        begun = self.begun
        return Begun(begun.tokens, begun.logprobs, begun.versions, begun.interruptions, spent_s)

    def close(self) -> None:
        """Let go of the coroutine; what it says to that does not matter any more."""
        self.asks = None
        try:
            with at_most(STEP_LIMIT_S):
                self._coroutine.close()  # type: ignore[attr-defined]
        except (Exception, TooLong):
            pass

    # ----------------------------------------------------------------------------------------------- driving it
    @property
    def _num_unsettled(self) -> int:
        """Tokens of a turn that an earlier attempt did not finish."""
        return len(self.begun.tokens) - self._num_settled

    def _drive(self, answer: Any) -> None:
        """Go on with the coroutine until it needs what is not known yet, or ends."""
        while self.end is None:
            self.asks = None
            try:
                with at_most(STEP_LIMIT_S):
                    asks = self._coroutine.throw(answer) if isinstance(answer, Exception) else self._send(answer)
            except StopIteration as stop:
                self._close_books(stop.value)
                return
            except TooLong:
                self._fail("error", f"the workflow held up its rank for {STEP_LIMIT_S:g} s; use engine.run")
                return
            except (Exception, SystemExit, GeneratorExit) as error:
                timed_out = isinstance(error, ToolTimeout)
                self._fail("timeout" if timed_out else "error", self._fault or where_and_what(error))
                return
            if self._fault or not isinstance(asks, (Generate, Run)):
                self._fail("error", self._fault or f"the workflow awaits {asks!r}, not its engine's generate or run")
                return
            if (entry := self._found(asks)) is None:
                self.asks = None if self.end else asks
                return
            answer = self._answer(entry)

    def _send(self, answer: Any) -> Any:
        return self._coroutine.send(answer)  # type: ignore[attr-defined]

    def _found(self, asks: Generate | Run) -> Entry | None:
        """What is known already of what it asks for, from the journal or because there is no room."""
        if self._known:
            entry = self._known.popleft()
            if (entry.kind, entry.asked) != (_kind(asks), _asked(asks)):
                what = f"is a {_kind(asks)}, where there was a {entry.kind}, or another one"
                self._fail("error", self._differs(what))
                return None
            return entry
        if isinstance(asks, Run) and self._num_unsettled:
            self._fail("error", self._differs("is a run, where there was a turn"))
            return None
        if isinstance(asks, Generate) and self.room == 0:
            last = self.entries[-1] if self.entries else None
            if last is not None and last.kind == "turn" and last.num_tokens == 0:
                detail = "the workflow asks for another turn without any room; look at turn.finish or engine.room"
                self._fail("error", detail)
                return None
            return Entry("turn", _asked(asks), 0, "length")
        return None

    def _answer(self, entry: Entry) -> Any:
        """Write it down; what the workflow gets for it."""
        self.entries.append(entry)
        if entry.kind == "turn":
            tokens = self.begun.tokens[self._num_settled : self._num_settled + entry.num_tokens]
            self._num_settled += entry.num_tokens
            self._finish = entry.note  # type: ignore[assignment]
            return Turn(self._language.read(tokens), tokens.copy(), self._finish)
        if entry.note == "done":
            return msgspec.msgpack.decode(entry.value)
        return (ToolTimeout if entry.note == "timeout" else ToolError)(entry.value.decode())

    def _differs(self, what: str) -> str:
        """What is wrong; remembered, because the workflow may catch what is raised about it."""
        self._fault = f"after a restart the workflow did not repeat itself: request {len(self.entries) + 1} {what}"
        return self._fault

    def _close_books(self, value: Any) -> None:
        journal = Journal(self.entries)
        try:
            if self._fault or self._num_unsettled or self._known:
                raise BadReward(self._fault or "after a restart the workflow did not repeat itself: it ended too early")
            if not sum(journal.turn_tokens):
                raise BadReward("the workflow ended without any token from the policy")
            result = None if value is None else self._judge(journal, value)
        except BadReward as error:
            self._fail("error", one_line(str(error)))
            return
        self.end = End(self._completion(), journal, result)

    def _judge(self, journal: Journal, value: Any) -> RewardResult:
        """What its workflow says about it. Raises BadReward."""
        rewards, verdict = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        if isinstance(rewards, list):
            journal.rewards = [judge(reward).reward for reward in rewards]
            if len(rewards) != len(journal.turn_tokens):
                raise BadReward(f"{len(rewards)} rewards for {len(journal.turn_tokens)} turns")
            rewards = sum(journal.rewards)
        judged = judge(rewards if verdict is None else (rewards, verdict))
        return RewardResult(self.key, judged.reward, judged.outcome, 0.0, "")

    def _fail(self, outcome: Outcome, detail: str) -> None:
        self.close()
        seconds = time.monotonic() - self.created_s
        result = RewardResult(self.key, float("nan"), outcome, seconds, detail)
        begun, n = self.begun, self._num_settled  # a turn under way is lost
        arrays = (begun.tokens[:n], begun.logprobs[:n], begun.versions[:n])
        self.begun = Begun(*arrays, begun.interruptions, begun.spent_s)
        self.end = End(self._completion(), Journal(self.entries), result)

    def _completion(self) -> Completion:
        begun, started_s = self.begun, self._started_s
        arrays = (begun.tokens, begun.logprobs, begun.versions)
        started_s = self.created_s if started_s is None else started_s
        return Completion(self.key, *arrays, self._finish, begun.interruptions, started_s, self._finished_s)


class _Stop:
    """Whether a response ends here: its turn, which began at `start`, contains one of the strings."""

    def __init__(self, strings: tuple[str, ...], start: int, read: Callable[[NDArray[np.int32]], str]) -> None:
        self._strings, self._start, self._read = strings, start, read
        self._reach = SLACK_TOKENS + max(len(string.encode()) for string in strings)  # a token holds a byte or more

    def __call__(self, response: NDArray[np.int32]) -> bool:
        text = self._read(response[max(self._start, len(response) - self._reach) :])
        return any(string in text for string in self._strings)


def where_and_what(error: BaseException) -> str:
    """One line: the last place in the workflow's own code, type and message."""
    place, traceback = "", error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if os.path.dirname(file) != os.path.dirname(__file__) or os.path.basename(file) not in OUR_FILES:
            place = f"{file}:{traceback.tb_lineno}: "
        traceback = traceback.tb_next
    return one_line(f"{place}{type(error).__name__}: {error}")


def _kind(asks: Generate | Run) -> str:
    return "turn" if isinstance(asks, Generate) else "run"


def _asked(asks: Generate | Run) -> bytes:
    if isinstance(asks, Generate):
        return digest("turn", asks.stop, asks.max_new_tokens)
    return digest("run", asks.function.rpartition("/")[2], asks.args)  # a file may lie elsewhere in the next attempt


def _extended(begun: Begun, tokens: NDArray[np.int32], version: int) -> Begun:
    """The tokens of the environment: certain, and of this moment."""
    last, size = begun.last_version, len(tokens)
    version = max(version, 0 if last is None else last)
    return Begun(
        np.concatenate([begun.tokens, tokens]),
        np.concatenate([begun.logprobs, np.zeros(size, np.float32)]),
        np.concatenate([begun.versions, np.full(size, version, np.int32)]),
        begun.interruptions + (size > 0 and last is not None and last < version),
        begun.spent_s,
    )


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TooLong in what runs in here after `seconds`; only in the main thread, whose signals these are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def too_long(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
