"""A generation engine without a model: continuous batching on simulated time.

With n sequences running that hold c tokens in the KV cache, one decoding step takes

    decode_s + (decode_sequence_s * n + decode_context_s * c) / gpus_per_rank

and gives each of them a token, so c grows by n per step and k steps take first * k + slope * k (k - 1) / 2. The engine
therefore leaps from one event (a sequence ends, one may start) to the next instead of going token by token: a sequence
is the number of the step that ends it, in a heap. Prefill stops decoding and takes its tokens / prefill_tokens_per_s /
gpus_per_rank; every sequence's prompt counts, a prefix cache is not modelled.

How long a response is depends on its seed alone, so a sample that had begun before decodes what is left of it, after a
prefill of prompt and beginning.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from areal_hpc.config import SimulationConfig
from areal_hpc.engines.base import Begun, Completion, Request, Swap
from areal_hpc.simulation.clock import Clock
from areal_hpc.trajectory import Key

TOKEN = 1
TOKENS, LOGPROBS = np.int32(TOKEN), np.float32(-0.5)  # of any length: they become real arrays when they are shipped
ROUNDING = 1e-6  # of a decoding step


def response_length(settings: SimulationConfig, seed: int, limit: int) -> tuple[int, bool]:
    """Tokens of the response with this seed, and whether it ends by itself, at or before `limit`."""
    spread = np.random.Generator(np.random.Philox(key=seed)).standard_normal()
    length = max(1, round(settings.response_median * math.exp(settings.response_sigma * spread)))
    return min(length, limit), length <= limit


@dataclass(slots=True)
class Running:
    """One running sample.

    `began`: the step before its first token, as if its beginning had been decoded just now, so it may be below 0;
    `marks`: (version, step from which it is used).
    """

    request: Request
    serial: int
    started_s: float
    began: int
    num_tokens: int
    ends_itself: bool
    marks: list[tuple[int, int]]
    interruptions: int = 0

    @property
    def end(self) -> int:
        return self.began + self.num_tokens

    @classmethod
    def of(
        cls, request: Request, serial: int, started_s: float, step: int, version: int, settings: SimulationConfig
    ) -> Running:
        """A sample that starts or goes on after decoding step `step`."""
        begun = request.begun
        began = step - len(begun.tokens)
        firsts = np.flatnonzero(np.diff(begun.versions, prepend=-1)).tolist()
        marks = [(int(begun.versions[first]), began + first) for first in firsts]
        length, ends_itself = response_length(settings, request.seed, request.max_new_tokens)
        return cls(
            request=request,
            serial=serial,
            started_s=started_s,
            began=began,
            num_tokens=length,
            ends_itself=ends_itself,
            marks=[*marks, (version, step)],
            interruptions=request.interruptions(version),
        )

    def begun(self, step: int, now_s: float, clock: Clock) -> Begun:
        """What it has after decoding step `step`, at `now_s`."""
        versions, since = zip(*self.marks, strict=True)
        num_tokens = step - self.began
        return Begun(
            tokens=np.broadcast_to(TOKENS, num_tokens),
            logprobs=np.broadcast_to(LOGPROBS, num_tokens),
            versions=np.repeat(np.array(versions, np.int32), np.diff([*since, step])),
            interruptions=self.interruptions,
            spent_s=clock.real(now_s - self.started_s),
        )

    def completion(self, now_s: float, clock: Clock) -> Completion:
        all_of_it = replace(self.request, begun=self.begun(self.end, now_s, clock))
        return all_of_it.ended("eos" if self.ends_itself else "length", clock.real(now_s))


@dataclass(slots=True)
class Waiting:
    request: Request
    since_s: float


@dataclass(slots=True)
class Decoding:
    """What is running, and how fast. `step` counts decoding steps, `context` tokens in the KV cache."""

    settings: SimulationConfig
    step: int = 0
    context: int = 0
    running: dict[Key, Running] = field(default_factory=dict)
    ends: list[tuple[int, int, Key]] = field(default_factory=list)

    def add(self, run: Running) -> None:
        self.running[run.request.key] = run
        heapq.heappush(self.ends, (run.end, run.serial, run.request.key))
        self.context += len(run.request.prompt) + self.step - run.began

    def remove(self, keys: Iterable[Key]) -> None:
        for key in keys:
            run = self.running.pop(key)
            self.context -= len(run.request.prompt) + self.step - run.began
        self.ends = [(run.end, run.serial, key) for key, run in self.running.items()]
        heapq.heapify(self.ends)

    def pop_ended(self) -> list[Running]:
        """Take out what has ended by now, oldest first."""
        ended = []
        while self.ends and self.ends[0][0] <= self.step:
            run = self.running.pop(heapq.heappop(self.ends)[2])
            self.context -= len(run.request.prompt) + run.num_tokens
            ended.append(run)
        return ended

    def _speed(self) -> tuple[float, float]:
        """Seconds of the next step, and how much longer each further one is."""
        s, n = self.settings, len(self.running)
        first = s.decode_s + (s.decode_sequence_s * n + s.decode_context_s * self.context) / s.gpus_per_rank
        return first, s.decode_context_s * n / s.gpus_per_rank

    def steps_within(self, budget_s: float) -> int:
        """The most steps that take `budget_s` or less: slope / 2 k^2 + (first - slope / 2) k = budget, solved for k."""
        if budget_s <= 0:
            return 0
        first, slope = self._speed()
        half = (first - slope / 2) / 2
        return int(budget_s / (half + math.sqrt(half * half + slope * budget_s / 2)) + ROUNDING)

    def seconds(self, steps: int) -> float:
        first, slope = self._speed()
        return first * steps + slope * steps * (steps - 1) / 2

    def leap(self, steps: int) -> None:
        self.step += steps
        self.context += steps * len(self.running)


class SimulatedEngine:
    """An `Engine`; see `areal_hpc.engines.base` for the promises.

    Args:
        num_slots: samples decoded side by side.
        max_len: most tokens of one sample, prompt included; a request that might exceed it is refused.
        interrupt: False keeps new weights aside until the running samples have ended on the old ones.
    """

    def __init__(
        self, settings: SimulationConfig, clock: Clock, *, num_slots: int, max_len: int, interrupt: bool = True
    ) -> None:
        self.version = -1
        self._settings, self._clock = settings, clock
        self._num_slots, self._max_len, self._interrupt = num_slots, max_len, interrupt
        self._time_s = clock.now()  # decoding is simulated up to here; in a prefill, ahead of the clock
        self._decoding = Decoding(settings)
        self._waiting: deque[Waiting] = deque()
        self._done: list[Completion] = []
        self._num_started = 0
        self._kept_aside: int | None = None
        self._swap: Swap | None = None

    @property
    def num_running(self) -> int:
        """Those that have ended and are not returned yet count as well."""
        return len(self._decoding.running) + len(self._done)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free(self) -> int:
        return self._num_slots - len(self._decoding.running)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue samples; the oldest whose min_version is reached starts first.

        Raises:
            ValueError: a request is empty, too long, or its key is in flight; none of `requests` is queued then.
        """
        self._advance()
        taken = {w.request.key for w in self._waiting} | self._decoding.running.keys() | {c.key for c in self._done}
        for request in requests:
            size, budget = len(request.prompt), request.max_new_tokens
            if request.key in taken:
                raise ValueError(f"sample {request.key} is in flight already")
            if size < 1 or budget < 1 or size + budget > self._max_len:
                raise ValueError(
                    f"sample {request.key}: prompt of {size} + budget of {budget} tokens; both need at least one, "
                    f"and together at most {self._max_len}"
                )
            taken.add(request.key)
        for request in requests:
            self._queue(request, self._clock.now())

    def _queue(self, request: Request, now_s: float) -> None:
        """Let it wait; a sample whose beginning is all of it is done."""
        if (drawn := len(request.begun.tokens)) > 0:
            length, ends_itself = response_length(self._settings, request.seed, request.max_new_tokens)
            if drawn >= length:
                self._done.append(request.ended("eos" if ends_itself else "length", self._clock.real(now_s)))
                return
        self._waiting.append(Waiting(request, now_s))

    def step(self) -> list[Completion]:
        """Decode up to now; returns those that finished, oldest first. Without one it sleeps for 5 to 20 ms."""
        self._advance()
        if self._decoding.running and not self._done:
            next_end = self._decoding.ends[0][0] - self._decoding.step
            self._clock.nap(self._time_s + self._decoding.seconds(next_end))
        done, self._done = self._done, []
        return done

    def partials(self) -> dict[Key, Begun]:
        """All samples that have begun and are not returned by `step` yet, as far as decoding is simulated."""
        step, clock = self._decoding.step, self._clock
        running = {key: run.begun(step, self._time_s, clock) for key, run in self._decoding.running.items()}
        waiting = {w.request.key: w.request.begun for w in self._waiting if len(w.request.begun.tokens)}
        return running | waiting | {completion.key: completion.begun for completion in self._done}

    def cancel(self, keys: Iterable[Key]) -> int:
        """Forget samples that wait or run; those that have ended by now are still returned by the next step."""
        self._advance()
        unwanted = set(keys)
        before = len(self._waiting)
        self._waiting = deque(w for w in self._waiting if w.request.key not in unwanted)
        running = unwanted & self._decoding.running.keys()
        self._decoding.remove(running)
        self._swap_if_idle()
        return before - len(self._waiting) + len(running)

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Any]]) -> Swap | None:
        """Go on with this version after load_s and a prefill of all that runs; returns when that time is over.

        With interrupt=False and samples running, nothing new starts and None is returned; the step that ends the last
        sample swaps. A newer set replaces one kept aside.

        Raises:
            ValueError: version does not rise.
        """
        newest = self.version if self._kept_aside is None else self._kept_aside
        if version <= newest:
            raise ValueError(f"policy versions must rise: have {newest}, got {version}")
        if self._kept_aside is None:
            self._advance()
            self._time_s = max(self._time_s, self._clock.now())
            if self._interrupt or not self._decoding.running:
                return self._load(version)
        self._kept_aside = version
        return None

    def take_swap(self) -> Swap | None:
        """The swap a `step` or `cancel` made since the last call, if any (interrupt=False only)."""
        swap, self._swap = self._swap, None
        return swap

    # ------------------------------------------------------------------------------------------ simulated time
    def _advance(self) -> None:
        """Bring decoding up to the clock, from event to event."""
        now_s, decoding = self._clock.now(), self._decoding
        while True:
            self._start_waiting()
            if not decoding.running:
                return
            steps = min(decoding.steps_within(now_s - self._time_s), decoding.ends[0][0] - decoding.step)
            if self.num_free and self._next_waiting() is not None:
                steps = min(steps, 1)  # submitted within the current step: starts when that is over
            if steps == 0:
                return
            self._time_s += decoding.seconds(steps)
            decoding.leap(steps)
            self._done += [run.completion(self._time_s, self._clock) for run in decoding.pop_ended()]
            self._swap_if_idle()

    def _next_waiting(self) -> int | None:
        """Position of the oldest sample that may start."""
        if self._kept_aside is not None:
            return None
        return next((i for i, w in enumerate(self._waiting) if w.request.earliest_version <= self.version), None)

    def _start_waiting(self) -> None:
        """Give free slots to waiting samples; each one's prefill takes its time."""
        while self.num_free and (position := self._next_waiting()) is not None:
            waiting = self._waiting[position]
            if not self._decoding.running:
                self._time_s = max(self._time_s, waiting.since_s)
            if waiting.since_s > self._time_s:
                return
            del self._waiting[position]
            request, step = waiting.request, self._decoding.step
            started_s = self._time_s - request.begun.spent_s * self._clock.speedup
            run = Running.of(request, self._num_started, started_s, step, self.version, self._settings)
            self._num_started += 1
            self._decoding.add(run)
            self._time_s += self._prefill_s(len(request.prompt) + len(request.begun.tokens))

    def _prefill_s(self, num_tokens: int) -> float:
        return num_tokens / (self._settings.prefill_tokens_per_s * self._settings.gpus_per_rank)

    def _swap_if_idle(self) -> None:
        if self._kept_aside is not None and not self._decoding.running:
            version, self._kept_aside = self._kept_aside, None
            self._swap = self._load(version)

    def _load(self, version: int) -> Swap:
        """From `_time_s` on decoding stands still; like a real engine this blocks until it goes on."""
        decoding = self._decoding
        pause_s = self._settings.load_s + self._prefill_s(decoding.context)
        for run in decoding.running.values():
            run.marks.append((version, decoding.step))
            run.interruptions += 1
        self.version = version
        self._time_s += pause_s
        self._clock.sleep_until(self._time_s)
        return Swap(version, self._clock.real(pause_s), len(decoding.running), decoding.context)
