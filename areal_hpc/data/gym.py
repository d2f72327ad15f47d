"""Problems that a generator of reasoning-gym makes, by its name and a seed. The only file that imports it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from typing import Any

from areal_hpc.config.sources import GENERATOR, ExamplesConfig
from areal_hpc.data.fields import Made
from areal_hpc.data.prompts import DatasetError, bad, shown
from areal_hpc.data.rows import Row
from areal_hpc.exits import Exit, RunError


def read(source: ExamplesConfig, size: int | None = None) -> Iterator[Row]:
    """The problems of a generator: the same ones for the same seed, options and version of reasoning-gym.

    Args:
        size: instead of that of the source.

    Raises:
        RunError: CONFIG, reasoning-gym is not installed.
        DatasetError: there is no such generator, or it does not take these options.
    """
    name = source.generator or ""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # some generators greet
            from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError:
        reason = f'{source.path}: needs reasoning-gym; install it with `pip install "areal-hpc[gym]"`'
        raise RunError(Exit.CONFIG, reason) from None
    if name not in DATASETS:
        raise DatasetError([f"{source.path}: no such generator; there are {', '.join(sorted(DATASETS))}"])
    try:
        entries = create_dataset(name, **source.options, seed=source.seed, size=size or source.size)
    except (TypeError, ValueError, AssertionError) as error:
        raise DatasetError([f"{source.path}: the generator does not take these options: {error}"]) from None
    for number in range(1, (size or source.size) + 1):
        place = f"{GENERATOR}{name}: problem {number}"
        try:
            entry = dict(entries[number - 1])
        except Exception as error:  # whatever a generator may raise
            yield Row(number, place, None, f"could not be made: {type(error).__name__}: {error}")
            continue
        if number == 1 and (why := _unusable(entries, entry)):
            raise DatasetError([f"{source.path}: {why}"])
        yield Row(number, place, entry)


def _unusable(entries: Any, entry: dict[str, Any]) -> str:
    """Why its scorer cannot be used, or "": it has to think as well of the right answer to a problem that has been
    JSON in between."""
    too_much = "its scorer needs more than JSON can carry to a reward process"
    try:
        answer = entry["answer"]
        expected = entries.score_answer(answer, entry)
    except Exception as error:  # whatever a scorer may raise
        return f"its scorer fails at its own problem: {type(error).__name__}: {error}"
    try:
        got = entries.score_answer(answer, _plain(entry))
        return "" if got >= expected else f"{too_much}: it gives the right answer {got} instead of {expected}"
    except Exception as error:
        return f"{too_much}: {type(error).__name__}: {error}"


def made(entry: Mapping[str, Any], name: str) -> Made:
    """A problem for the generator's own scorer; raises ValueError."""
    text, answer = entry.get("question"), entry.get("answer")
    if not isinstance(text, str) or not text.strip():
        bad("question", f"must be text that is not blank, got {shown(text)}")
    metadata = {"generator": name, "entry": _plain(dict(entry))}
    return Made(text, metadata, answer if isinstance(answer, str) else "")


def _plain(value: Any) -> Any:
    """As JSON would have it: tuples are lists, keys are text, numbers of numpy are numbers."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    item = getattr(value, "tolist", None)  # numpy
    return _plain(item()) if item is not None else value
