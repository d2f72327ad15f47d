"""From the configuration to prompts: what is read, what of it is unusable, and in which order it is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from areal_hpc.config import Config, DataConfig
from areal_hpc.config.sources import ExamplesConfig, SourceConfig
from areal_hpc.data import gym
from areal_hpc.data.layouts import make_prompt
from areal_hpc.data.order import Mixture, PromptSource, Source
from areal_hpc.data.prompts import SHOWN, DatasetError, Prompt, bad, shown
from areal_hpc.data.rows import Row, read_rows


@dataclass(slots=True)
class Loaded:
    """All prompts of a source.

    Attributes:
        bad: "file:line: reason" of every line that was left out; there are at most data.max_bad_lines.
    """

    prompts: list[Prompt] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)


def rows_of(source: ExamplesConfig, data: DataConfig) -> Iterator[Row]:
    """The rows of a file, a directory or a generator. Raises DatasetError, RunError: it cannot be read."""
    if source.generator is not None:
        return gym.read(source)
    return read_rows(Path(source.path), source.split, data.max_line_bytes)


def read_prompts(source: SourceConfig, data: DataConfig) -> Loaded:
    """Read a source as a whole: each row is a prompt, or is named with its reason, so that none can shift a cursor.

    A row is bad when it cannot be read, when its layout finds a field missing or of the wrong kind, when its id was
    used before, and when anything in it could not be sent or logged: half a surrogate pair, NaN, a number beyond 64
    bits, NUL in prompt or id.

    Raises:
        DatasetError: it cannot be read to its end, has no prompt, or more than data.max_bad_lines bad lines (20 are
            named, all are counted).
        RunError: CONFIG, a library is missing.
    """
    loaded, first_place = Loaded(), dict[str, str]()
    broken: list[str] = []
    num_bad = 0
    try:
        for row in rows_of(source, data):
            try:
                prompt, _ = _made(row, source, data)
                first = first_place.setdefault(prompt.prompt_id, row.place)
                if first != row.place:
                    named = source.id_field or data.id_field
                    bad(named, f"{shown(prompt.prompt_id)} names the prompt of {_where(first, source)} already")
                loaded.prompts.append(prompt)
            except (ValueError, RecursionError) as error:
                num_bad += 1
                if num_bad <= max(SHOWN, data.max_bad_lines):
                    loaded.bad.append(f"{row.place}: {error}")
    except DatasetError as error:
        broken = error.problems
    if not loaded.prompts and not loaded.bad and not broken:
        broken = [f"{source.path}: the file holds no prompt"]
    if broken or num_bad > data.max_bad_lines:
        raise DatasetError([*loaded.bad[: SHOWN - len(broken)], *broken], num_bad + len(broken))
    if not loaded.prompts:
        raise DatasetError([f"{source.path}: no line can be used; the first: {loaded.bad[0]}"])
    return loaded


def _where(place: str, source: ExamplesConfig) -> str:
    """`line 3` of the same file, or the whole place."""
    line = place.removeprefix(f"{source.path}:")
    return f"line {line}" if line.isdecimal() else line.strip()


def _made(row: Row, source: ExamplesConfig, data: DataConfig) -> tuple[Prompt, str]:
    if row.fields is None:
        raise ValueError(row.reason)
    return make_prompt(row.fields, row.number, source, data)


def first_prompts(source: ExamplesConfig, data: DataConfig, count: int) -> list[tuple[Prompt, str]]:
    """The first prompts of a source with their solutions ("" where there is none), without reading the others.

    Raises:
        DatasetError: more than data.max_bad_lines lines before them are bad, or the source has fewer.
        RunError: CONFIG, a library is missing.
    """
    found: list[tuple[Prompt, str]] = []
    problems: list[str] = []
    for row in rows_of(source, data):
        try:
            found.append(_made(row, source, data))
        except (ValueError, RecursionError) as error:
            problems.append(f"{row.place}: {error}")
        if len(problems) > data.max_bad_lines:
            raise DatasetError(problems)
        if len(found) == count:
            return found
    raise DatasetError(problems or [f"{source.path}: holds {len(found)} of {count} prompts that are needed"])


def read_train(config: Config) -> tuple[Source, list[str]]:
    """What the controller draws from, and the bad lines that were left out.

    A path alone keeps the ids of its file; in a list of sources an id begins with the name of its source, as in
    gsm8k/17.

    Raises DatasetError: with the problems of all sources.
    """
    data = config.data
    alone = isinstance(data.train, str)
    sources, bad_lines = _read_all(data.train_sources, data, qualify=not alone)
    epochs = data.epochs if alone else None
    drawn = [
        PromptSource(prompts, seed=config.seed, shuffle=data.shuffle, epochs=epochs, name=name)
        for name, prompts in sources.items()
    ]
    if alone:
        return drawn[0], bad_lines
    return Mixture(drawn, [source.weight for source in data.train_sources], data.epochs), bad_lines


def read_heldout(config: Config) -> tuple[dict[str, list[Prompt]], list[str]]:
    """Held-out prompts by name of their set, and the bad lines that were left out; a path alone is named heldout.

    Ids are unique over all sets: in a list of sets an id begins with the name of its set.

    Raises DatasetError: with the problems of all sets.
    """
    data = config.data
    return _read_all(data.heldout_sources, data, qualify=not isinstance(data.heldout, str))


def _read_all(
    sources: tuple[SourceConfig, ...], data: DataConfig, qualify: bool
) -> tuple[dict[str, list[Prompt]], list[str]]:
    found: dict[str, list[Prompt]] = {}
    bad_lines: list[str] = []
    problems: list[str] = []
    num_bad = 0
    for source in sources:
        try:
            loaded = read_prompts(source, data)
        except DatasetError as error:
            problems, num_bad = [*problems, *error.problems], num_bad + error.num_bad
            continue
        bad_lines += loaded.bad
        prompts = loaded.prompts
        if qualify:
            prompts = [replace(prompt, prompt_id=f"{source.title}/{prompt.prompt_id}") for prompt in prompts]
        found[source.title] = prompts
    if problems:
        raise DatasetError(problems[:SHOWN], num_bad)
    return found, bad_lines
