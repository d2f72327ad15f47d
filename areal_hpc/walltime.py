"""How much of the job's time is left, and what follows from it: new prompts, no new ones, or the end.

Slurm's warning (`slurm.signal_s`) decides when a run saves and requeues itself. This module decides two things more.

No new prompts. An answer that is cut off is carried over to the next attempt: that costs a place in the checkpoint and
a prefill, while a place that stays empty costs all that could have been generated there. So a prompt is refused only
when its answer would more likely be cut off than finished: when the time before the warning is shorter than the median
of this run's recent prompt groups, and than SHARE of the job's time (which is all that is known before the first one).
Held-out answers that are cut off are lost; they wait as well. Groups of an earlier attempt are taken up at any time.

The end. If the warning does not come, the run behaves as if it had, while a checkpoint can still be written.

Slurm is asked at the start, and again before each of the two, because a limit can be changed; there is no polling. Its
answer is two moments of one clock, so that no clock of a host matters; from then on monotonic time counts.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from statistics import median

from areal_hpc.config import Config
from areal_hpc.slurmcall import NoAnswer, call
from areal_hpc.slurmstate import seconds_left

EARLY_S = 30.0
"""Slurm may warn up to 60 s too early: so much on average."""
LATE_S = 10.0
"""A warning that is so late is not waited for."""
SHARE = 0.02
"""Of the time that was left at the start: neither for an answer nor for an early warning more is set aside."""
NUM_RECENT = 256
"""Groups whose times count; lengths change while a model learns."""
PARTS = 2
"""Trainers and rollout ranks write their parts of a checkpoint one after the other."""
MARGIN = 2
UNKNOWN_SAVE_S = 60.0
"""For a checkpoint, before this attempt has written one."""
COMMAND_TIMEOUT_S = 5.0
GIVE_UP_S = 2 * COMMAND_TIMEOUT_S + 2
"""For an answer of Slurm: two commands, and a thread that may be held up."""
FRESH_S = 15.0
"""What Slurm has said counts for so long before it is asked again."""
CHANGED_S = 2.0
"""Slurm counts whole seconds; a smaller difference is no change of the limit."""


class Stage(IntEnum):
    """What the time that is left allows."""

    ADMIT = 0
    CLOSE = 1
    END = 2


def decide(left_s: float, answer_s: float, warning_s: float, reserve_s: float) -> Stage:
    """What may be done with `left_s` seconds before the time limit.

    Args:
        answer_s: what a prompt group takes.
        warning_s: when Slurm's warning is expected, in seconds before the limit; 0 without one.
        reserve_s: when the run has to end by itself, in seconds before the limit.
    """
    if left_s <= reserve_s:
        return Stage.END
    return Stage.ADMIT if left_s - max(warning_s, reserve_s) > answer_s else Stage.CLOSE


def reserve(part_s: float | None, exit_s: float, signal_s: float, left_at_start_s: float) -> float:
    """Seconds before the time limit that a run without a warning needs to save and to requeue itself.

    At least until the warning must have come, if there is one, and at most half of the time there was: whoever needs
    more would do nothing else.

    Args:
        part_s: the longest time a rank took for its part of the last checkpoint; None before there was one.
        exit_s: `deadlines.exit_s`.
        signal_s: `slurm.signal_s`.
    """
    save_s = UNKNOWN_SAVE_S if part_s is None else MARGIN * PARTS * part_s
    needed_s = save_s + exit_s + GIVE_UP_S
    return min(max(needed_s, signal_s - LATE_S), left_at_start_s / 2)


def ask_slurm(job_id: str) -> float | str:
    """Seconds that a job has left by the clock of Slurm's controller, inf without a limit; or why nobody knows."""
    try:
        job = call(["scontrol", "show", "job", job_id], COMMAND_TIMEOUT_S, SLURM_TIME_FORMAT="%s")
        config = call(["scontrol", "show", "config"], COMMAND_TIMEOUT_S, SLURM_TIME_FORMAT="%s")
    except NoAnswer as error:
        return str(error)
    left_s = seconds_left(job, config)
    return "scontrol names no end of the job" if left_s is None else left_s


def by_environment(environ: Mapping[str, str], clock_s: float) -> float | None:
    """Seconds left by SLURM_JOB_END_TIME, which versions after 22.05 set, and this host's clock, if that can be true.

    Only for where Slurm cannot be asked: of all figures here it is the one that believes the clock of a host.
    """
    try:
        ends_s, began_s = (float(environ[f"SLURM_JOB_{name}_TIME"]) for name in ("END", "START"))
    except (KeyError, ValueError):
        return None
    return ends_s - clock_s if began_s <= clock_s < ends_s else None


class Question:
    """Slurm is asked in a thread, since it may take its time; `answer` is empty until then."""

    def __init__(self, ask: Callable[[], float | str]) -> None:
        self.answer: list[float | str] = []
        self.thread = threading.Thread(target=lambda: self.answer.append(ask()), daemon=True)
        self.thread.start()


class Walltime:
    """The time of the job that this process runs in; without a job there is always enough.

    Args:
        environ: variables of this process.
        now: seconds of any clock that does not jump.
        ask: seconds that a job has left, or why nobody knows.

    Attributes:
        stage: what the time that is left allows.
    """

    def __init__(
        self,
        config: Config,
        environ: Mapping[str, str] = os.environ,
        now: Callable[[], float] = time.monotonic,
        ask: Callable[[str], float | str] = ask_slurm,
    ) -> None:
        settings = config.slurm
        self.environ, self.now, self.ask = environ, now, ask
        self.signal_s, self.exit_s, self.own_reserve_s = settings.signal_s, config.deadlines.exit_s, settings.reserve_s
        self.job_id = environ.get("SLURM_JOB_ID") if config.checkpoint.resume and settings.reserve_s != 0 else None
        self.stage = Stage.ADMIT
        self.times: deque[float] = deque(maxlen=NUM_RECENT)
        self.at_start_s = self.ends_s = self.asked_s = self.heard_s = math.inf
        self.answer_s = 0.0
        self.is_first = True
        self.question: Question | None = None
        if self.job_id is not None:
            self._ask()

    @property
    def closed(self) -> bool:
        """No new prompts."""
        return self.stage > Stage.ADMIT

    @property
    def left_s(self) -> float:
        """Seconds before the time limit, as far as is known; inf if it is not."""
        return self.ends_s - self.now()

    def answered(self, seconds: float) -> None:
        """A prompt group was finished, so long after it was admitted."""
        self.times.append(seconds)
        self.answer_s = min(median(self.times), SHARE * self.at_start_s)

    def look(self, part_s: float | None = None) -> Iterator[str]:
        """One look at the clock, which may change `stage`; yields what is new, for people.

        Args:
            part_s: see `reserve`.
        """
        if self.question is not None:
            if not self.question.answer and self.now() - self.asked_s < GIVE_UP_S:
                return
            answer = next(iter(self.question.answer), f"no answer in {GIVE_UP_S:.0f} s")
            self.question, self.heard_s = None, self.now()
            yield from self._heard(answer)
        if self.ends_s == math.inf:
            return
        stage = decide(self.left_s, self.answer_s, self._warning_s, self._reserve_s(part_s))
        if stage < self.stage:  # the limit was put off
            self.stage = stage
            yield f"{self.left_s:.0f} s left, new prompts again"
        elif stage > self.stage and self.now() - self.heard_s > FRESH_S:
            self._ask()
        elif stage > self.stage:
            self.stage = stage
            yield f"{self.left_s:.0f} s left, " + ("no new prompts" if stage is Stage.CLOSE else "and no warning came")

    @property
    def _warning_s(self) -> float:
        return self.signal_s + min(EARLY_S, SHARE * self.at_start_s) if self.signal_s else 0.0

    def _reserve_s(self, part_s: float | None) -> float:
        if self.own_reserve_s is not None:
            return self.own_reserve_s
        return reserve(part_s, self.exit_s, self.signal_s, self.at_start_s)

    def _ask(self) -> None:
        assert self.job_id is not None
        self.asked_s = self.now()
        ask, job_id = self.ask, self.job_id
        self.question = Question(lambda: ask(job_id))

    def _heard(self, answer: float | str) -> Iterator[str]:
        """Take what Slurm has answered; the seconds count from the question on."""
        is_first, self.is_first = self.is_first, False
        source = ""
        if isinstance(answer, str) and not is_first:
            yield f"Slurm does not say whether the limit has changed ({answer}): what it said before counts"
            return
        if isinstance(answer, str):
            left_s = by_environment(self.environ, time.time())
            if left_s is None:
                yield f"the time of this job is not known ({answer}): Slurm's warning alone decides"
                return
            answer, source = left_s, f" by SLURM_JOB_END_TIME and the clock of this host ({answer})"
        ends_s = self.asked_s + answer
        if is_first:
            self.at_start_s, self.ends_s, self.answer_s = answer, ends_s, SHARE * answer
            yield f"{answer:.0f} s left{source}" if answer < math.inf else "this job has no time limit"
        elif abs(ends_s - self.ends_s) > CHANGED_S:
            self.ends_s = ends_s
            yield f"the time limit was changed: {answer:.0f} s left"
