"""What the reward of an answer is made of."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from areal_hpc.config import RewardConfig

FACTS = ("num_tokens", "max_new_tokens", "prompt_tokens", "truncated", "purpose")
"""What a function may ask for by naming a parameter so: tokens of the response, the most it may have, tokens of the
prompt, whether the response met its limit (bool), "train" or "evaluate". A batched function gets a list of each."""

TruncatedRule = Literal["as_is", "wrong", "mask"]


class RewardError(RuntimeError):
    """The reward service cannot do its work: the run cannot go on without a change by the user."""


class Term(msgspec.Struct, frozen=True):
    """One function of a sum.

    Attributes:
        function: "package.module:name" (importable from the working directory or the rank's sys.path) or
            "/path/file.py:name".
        weight: factor of its reward.
        kwargs: passed to it by name.
        batch: with 1 it is called with one answer; with more it gets lists of up to so many prompts, completions,
            metadata and facts, and returns one reward for each.
    """

    function: str
    weight: float = 1.0
    kwargs: dict[str, Any] = {}
    batch: int = 1

    @property
    def full_name(self) -> str:
        """The function with the absolute path of its file. Raises RewardError where there is no ":name"."""
        place, colon, name = self.function.rpartition(":")
        if not (place and colon and name.isidentifier()):
            raise RewardError(f"reward function {self.function!r}: write package.module:name or /path/file.py:name")
        return f"{os.path.abspath(place)}:{name}" if place.endswith(".py") else self.function


class Recipe(msgspec.Struct, frozen=True):
    """The reward of one answer: sum over terms of weight * reward. The first term alone decides what the outcome is.

    Attributes:
        terms: at least one.
        scale: outcome -> what the first term is worth with it, in place of the number that it returned; "unparsed"
            counts as "wrong" where it is not named. Empty: the number itself.
        truncated: what to do with an answer that met its token limit. as_is: nothing. wrong: the first term is not
            asked, it is "wrong" and worth `scale["wrong"]`, or 0 without a scale. mask: it gets no reward (NaN) and the
            outcome "truncated", so it is not trained on; in an evaluation as_is.
        memory_bytes: address space of a process, imports included; None: no limit.
    """

    terms: list[Term]
    scale: dict[str, float] = {}
    truncated: TruncatedRule = "as_is"
    memory_bytes: int | None = None

    @classmethod
    def of(cls, settings: RewardConfig) -> Recipe:
        """The recipe of a configuration."""
        first = Term(settings.function, 1.0, settings.kwargs, settings.batch)
        others = [Term(f.function, f.weight, f.kwargs, f.batch) for f in settings.functions]
        scale = settings.scale.by_outcome if settings.scale else {}
        return cls([first, *others], scale, settings.truncated, settings.memory_bytes)

    @property
    def batch(self) -> int:
        """Answers that a process takes at once."""
        return max(term.batch for term in self.terms)

    def absolute(self) -> Recipe:
        """The same for a process with any working directory. Raises RewardError."""
        return msgspec.structs.replace(
            self, terms=[msgspec.structs.replace(term, function=term.full_name) for term in self.terms]
        )

    def to_text(self) -> str:
        """JSON. Raises RewardError for kwargs that JSON cannot carry."""
        try:
            return json.dumps(msgspec.to_builtins(self))
        except (TypeError, ValueError) as error:
            raise RewardError(f"reward kwargs: {error}") from None

    @classmethod
    def from_text(cls, text: str) -> Recipe:
        return msgspec.convert(json.loads(text), cls)

    def __str__(self) -> str:
        return " + ".join(term.function for term in self.terms)
