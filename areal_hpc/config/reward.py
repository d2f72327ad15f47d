"""How answers are judged."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from areal_hpc.config.types import Count, Number, Seconds, Section, Text, Unit, Whole


class FunctionConfig(Section):
    """One more function whose reward is added."""

    function: Text
    """As `reward.function`."""
    weight: Number = 1.0
    """Factor of its reward."""
    kwargs: dict[str, JsonValue] = {}
    """Arguments that it gets by name."""
    batch: Count = 1
    """As `reward.batch`."""


class ScaleConfig(Section):
    """What an outcome is worth."""

    correct: Number = 1.0
    """Reward of a right answer."""
    wrong: Number = 0.0
    """Reward of a wrong one."""
    unparsed: Number | None = None
    """Reward of one in which no answer was found; null: that of a wrong one."""

    @property
    def by_outcome(self) -> dict[str, float]:
        unparsed = self.wrong if self.unparsed is None else self.unparsed
        return {"correct": self.correct, "wrong": self.wrong, "unparsed": unparsed}


class RewardConfig(Section):
    function: Text
    """`package.module:function` or `/path/file.py:function` of (prompt, completion, metadata) -> reward."""
    kwargs: dict[str, JsonValue] = {}
    """Arguments that it gets by name, for instance {tolerance: 1.0e-6}."""
    batch: Annotated[Count, Unit("answers")] = 1
    """With more than 1 it is called with lists of up to so many answers and returns a list of rewards."""
    functions: tuple[FunctionConfig, ...] = ()
    """Further functions, {function, weight, kwargs, batch}; weight * reward is added, right or wrong stays as above."""
    scale: ScaleConfig | None = None
    """What a right and a wrong answer are worth, in place of the number that `function` returns; null: that number."""
    truncated: Literal["as_is", "wrong", "mask"] = "as_is"
    """Answers that met max_new_tokens: as_is: judged like others; wrong: wrong unseen; mask: left out of training."""
    sandbox: Literal["auto", "namespaces", "bwrap", "rlimits"] = "auto"
    """Isolation of programs from answers; auto: bwrap, else namespaces, else refused; rlimits: limits, no isolation."""
    ranks: Annotated[Whole, Field(ge=0), Unit("MPI ranks")] = 0
    """MPI ranks that only score answers; 0: every rollout rank does it on its spare cores."""
    workers: Annotated[Count, Unit("processes per rank")] = 1
    """Processes in which answers are scored, on each rollout rank, or on each reward rank if there are any."""
    timeout_s: Seconds = 10.0
    """Longest time for one answer (or batch), counted from the start of its scoring."""
    memory_bytes: Annotated[Count, Unit("bytes")] | None = None
    """Address space of such a process, its imports included; what needs more is an error; null: no limit."""
    max_pending: Annotated[Count, Unit("answers")] | None = None
    """Most answers that may wait for a reward before a rollout rank takes in no new prompts; null: rollout.slots."""
