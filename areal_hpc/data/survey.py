"""What is told about the data before any rank starts: whether first rows fit, how much there is, the first prompt."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from areal_hpc.config import Config
from areal_hpc.config.sources import SourceConfig
from areal_hpc.data.chat import Chat
from areal_hpc.data.prompts import DatasetError, Prompt
from areal_hpc.data.reading import first_prompts
from areal_hpc.data.rows import count_rows

COUNT_S = 2.0
"""Counting the lines of a source stops after this long."""
_LINES, _WIDTH = 8, 100


def survey(config: Config) -> list[str]:
    """Lines for people: each source with its size, and the first prompt as the model gets it.

    What `prepare` has still to make is left out.

    Raises:
        DatasetError: a source cannot be counted; or as `first_of_each`.
        RunError: as `first_of_each`.
    """
    lines, problems = list[str](), list[str]()
    total = sum(source.weight for source in config.data.train_sources)
    found = first_of_each(config)
    for what, source, _ in found:
        named = f"{what}:" if source.title == what else f"{what} {source.title}:"
        share = f", {source.weight / total:.1%} of the prompts" if what == "train" and source.weight < total else ""
        try:
            lines.append(f"{named} {_size(source)}, layout {_layout(source)}{share}")
        except DatasetError as error:
            problems += error.problems
    if problems:
        raise DatasetError(problems)
    return lines + (list(_first(config, found[0][2].text)) if found else [])


def first_of_each(config: Config) -> list[tuple[str, SourceConfig, Prompt]]:
    """("train" or "heldout", source, its first prompt) of every source that the run reads and that is there.

    Raises:
        DatasetError: a first line cannot be used, for all sources.
        RunError: CONFIG, a library is missing, examples have no answers.
    """
    data, problems, found = config.data, list[str](), list[tuple[str, SourceConfig, Prompt]]()
    train = () if config.is_evaluation else data.train_sources
    for what, sources in (("train", train), ("heldout", data.heldout_sources)):
        for source in sources:
            if not _exists(source):
                continue
            try:
                ((prompt, _),) = first_prompts(source, data, 1)
                found.append((what, source, prompt))
            except DatasetError as error:
                problems += error.problems
    if problems:
        raise DatasetError(problems)
    return found


def _exists(source: SourceConfig) -> bool:
    """Rules of the configuration have told of a missing file, unless `prepare` makes it."""
    return source.generator is not None or Path(source.path).exists()


def _layout(source: SourceConfig) -> str:
    return source.layout if source.generator is None else "reasoning-gym"


def _size(source: SourceConfig) -> str:
    if source.generator is not None:
        return f"{source.size:,} prompts"
    count = count_rows(Path(source.path), source.split, COUNT_S)
    return f"{'' if count.is_all else 'more than '}{count.num_rows:,} prompts"


def _first(config: Config, prompt: str) -> Iterator[str]:
    settings = config.data.chat
    text = Chat(config.data).plain(prompt)
    templated = "" if settings.template == "none" else f" (rollout ranks apply template {settings.template})"
    yield f"first prompt{templated}:"
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, _WIDTH) or [""]]
    yield from (f"  | {line}" for line in lines[:_LINES])
    if len(lines) > _LINES:
        yield f"  | ... ({len(lines) - _LINES} more lines)"
