"""Calling reward functions, inside a reward process: whatever they return or raise becomes a reward or an error."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import math
import numbers
import os
import reprlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from areal_hpc.rewards.recipe import FACTS, Recipe, Term
from areal_hpc.rewards.wire import MAX_ANSWER_TEXT_BYTES, Sample, Verdict, one_line

_OUTCOMES: tuple[Verdict, ...] = ("correct", "wrong", "unparsed")
_HERE = os.path.dirname(os.path.abspath(__file__))


class BadReward(Exception):
    """The function returned something that is not a reward."""


class Value(NamedTuple):
    """What one function made of one answer; `answer` is what it read in it."""

    reward: float
    outcome: Verdict
    answer: str | None = None


class Judgement(NamedTuple):
    """A reward and its outcome; for "error" and "truncated" the reward is NaN."""

    reward: float
    outcome: str
    detail: str = ""
    answer: str | None = None


TRUNCATED = Judgement(math.nan, "truncated")


def load_function(name: str) -> Callable[..., Any]:
    """The function called `package.module:name` or `/path/file.py:name`. Raises whatever its import raises."""
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        sys.path.insert(0, os.path.dirname(place))  # as for a script: files beside it can be imported
        spec = importlib.util.spec_from_file_location("reward_file_" + os.path.basename(place)[:-3], place)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = getattr(module, attribute)
    if not callable(function):
        raise TypeError(f"{name} is {type(function).__name__}, not a function")
    return function


def facts_of(function: Callable[..., Any], term: Term) -> list[str]:
    """The facts that a function asks for.

    Raises:
        TypeError: it needs a parameter that nobody gives, or does not take one of its kwargs.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return []
    positional = [name for name, p in signature.parameters.items() if p.kind is not p.KEYWORD_ONLY]
    facts = [name for name in signature.parameters if name in FACTS and name not in [*positional[:3], *term.kwargs]]
    try:
        signature.bind("", "", {}, **dict.fromkeys(facts), **term.kwargs)
    except TypeError as error:
        given = f"(prompt, completion, metadata), kwargs {sorted(term.kwargs)} and the facts {', '.join(FACTS)}"
        raise TypeError(f"{term.function} {error}; it can have {given}") from None
    return facts


def judge(value: object) -> Value:
    """What a function returned, as reward, outcome and answer; a bare number above 0 is correct. Raises BadReward."""
    outcome: object = None
    answer: object = None
    if isinstance(value, tuple):
        if len(value) not in (2, 3) or value[1] not in _OUTCOMES:
            raise BadReward(f"expected (reward, 'correct' | 'wrong' | 'unparsed'), got {reprlib.repr(value)}")
        value, outcome, answer = value if len(value) == 3 else (*value, None)
    if not isinstance(value, numbers.Real):
        raise BadReward(f"expected a number or (number, outcome), got {type(value).__name__}: {reprlib.repr(value)}")
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise BadReward(f"expected a finite reward, got {reprlib.repr(value)}")
    for known in _OUTCOMES:
        if outcome == known:
            return Value(reward, known, shortened(answer))
    return Value(reward, "correct" if reward > 0 else "wrong")


def shortened(answer: object) -> str | None:
    """The answer that a function read. Votes are counted by it, so a long one is cut and ends in a hash of all of it.

    Raises:
        BadReward: it is neither text nor None.
    """
    if answer is None:
        return None
    if not isinstance(answer, str):
        raise BadReward(f"expected the answer as text or None, got {type(answer).__name__}: {reprlib.repr(answer)}")
    data = answer.encode("utf-8", "backslashreplace")
    if len(data) > MAX_ANSWER_TEXT_BYTES:
        mark = hashlib.blake2b(data, digest_size=8).hexdigest().encode()
        data = data[: MAX_ANSWER_TEXT_BYTES - len(mark) - 1] + b"~" + mark
    return data.decode("utf-8", "ignore")


def describe(error: BaseException) -> str:
    """One line: file:line where it was raised, then type and message as in the last line of a traceback."""
    try:
        message = str(error)
    except BaseException:  # user code may raise anything
        message = "(message unreadable)"
    place, traceback = "", error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith((_HERE, "<")):
            place = f"{file}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
    return (f"{place}: " if place else "") + one_line(f"{type(error).__name__}: {message}")


def fact(sample: Sample, name: str) -> Any:
    """One fact of an answer. Raises BadReward where nobody gave it."""
    if name not in sample.facts:
        raise BadReward(f"the function asks for {name}, and this answer came without it")
    return sample.facts[name]


class Function:
    """A loaded term. Called with samples, it gives a reward with outcome, or an exception, for each."""

    def __init__(self, term: Term) -> None:
        self.term = term
        self.function = load_function(term.function)
        self.facts = facts_of(self.function, term)
        self._pid = os.getpid()

    def __call__(self, samples: Sequence[Sample]) -> list[Value | BaseException]:
        size = self.term.batch
        if size == 1:
            return [self._one(sample) for sample in samples]
        starts = range(0, len(samples), size)
        return [value for start in starts for value in self._many(samples[start : start + size])]

    def _one(self, sample: Sample) -> Value | BaseException:
        try:
            facts = {name: fact(sample, name) for name in self.facts}
            return judge(self._call(sample.prompt_text, sample.completion_text, sample.metadata, facts))
        except BaseException as error:  # user code may raise anything
            return error

    def _many(self, samples: Sequence[Sample]) -> list[Value | BaseException]:
        """One call for all of them. If it fails, each is called alone: one bad answer shall not spoil the others."""
        texts = [sample.prompt_text for sample in samples], [sample.completion_text for sample in samples]
        try:
            facts = {name: [fact(sample, name) for sample in samples] for name in self.facts}
            values = list(self._call(*texts, [sample.metadata for sample in samples], facts))
            if len(values) != len(samples):
                raise BadReward(f"expected a list of {len(samples)} rewards, got {len(values)}")
        except BaseException as error:  # user code may raise anything
            return [error] if len(samples) == 1 else [value for sample in samples for value in self._many([sample])]
        return [_judged(value) for value in values]

    def _call(self, prompt: Any, completion: Any, metadata: Any, facts: dict[str, Any]) -> Any:
        try:
            return self.function(prompt, completion, metadata, **facts, **self.term.kwargs)
        finally:
            if os.getpid() != self._pid:
                os._exit(0)  # a child forked by the function came back from it: the answer is its parent's to give


def _judged(value: object) -> Value | BaseException:
    try:
        return judge(value)
    except BadReward as error:
        return error


class Scorer:
    """All terms of a recipe, loaded. Raises whatever the import of one raises, and TypeError as `facts_of`.

    `exhausted`: memory ran out; the process should be replaced, what it holds may be broken.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.first, *self.others = [Function(term) for term in recipe.terms]
        self.exhausted = False

    def __call__(self, samples: Sequence[Sample]) -> list[Judgement]:
        """One judgement for each, in order; raises nothing."""
        live = [sample for sample in samples if not self._is_masked(sample)]
        columns = [self._first(live), *(other(live) for other in self.others)]
        judged = iter([self._sum(values) for values in zip(*columns, strict=True)])
        return [TRUNCATED if self._is_masked(sample) else next(judged) for sample in samples]

    def _is_masked(self, sample: Sample) -> bool:
        facts = sample.facts
        return self.recipe.truncated == "mask" and facts.get("truncated", False) and facts.get("purpose") == "train"

    def _first(self, samples: Sequence[Sample]) -> list[Value | BaseException]:
        """Values of the term that decides about the outcome, with the rules for it."""
        cut = [self.recipe.truncated == "wrong" and sample.facts.get("truncated", False) for sample in samples]
        asked = iter(self.first([sample for sample, is_cut in zip(samples, cut, strict=True) if not is_cut]))
        return [self._scaled(Value(0.0, "wrong") if is_cut else next(asked)) for is_cut in cut]

    def _scaled(self, value: Value | BaseException) -> Value | BaseException:
        scale = self.recipe.scale
        if not scale or isinstance(value, BaseException):
            return value
        return value._replace(reward=scale[value.outcome if value.outcome in scale else "wrong"])

    def _sum(self, values: Sequence[Value | BaseException]) -> Judgement:
        total = 0.0
        for term, value in zip(self.recipe.terms, values, strict=True):
            if isinstance(value, BaseException):
                return self._failed(value)
            total += term.weight * value.reward
        if not math.isfinite(total):
            return Judgement(math.nan, "error", f"the weighted sum of the rewards is {total}, not a finite number")
        first = values[0]
        assert isinstance(first, Value)
        return Judgement(total, first.outcome, "", first.answer)

    def _failed(self, error: BaseException) -> Judgement:
        detail, limit = one_line(describe(error)), self.recipe.memory_bytes
        if limit is not None and isinstance(error, MemoryError):
            self.exhausted = True
            detail = one_line(f"needed more memory than reward.memory_bytes = {limit:,} allows: {detail}")
        return Judgement(math.nan, "error", detail)
