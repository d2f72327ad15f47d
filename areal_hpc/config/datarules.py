"""Rules about prompts: are the files there and not empty, are there enough of them, does the chat fit the model.

Only what the standard library can tell at a glance; what a row holds is told by `data.survey` and by the reader.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from areal_hpc.config import Config
from areal_hpc.config.rules import Problem, is_prepared, rule
from areal_hpc.config.sources import REPOSITORIES, ExamplesConfig, SourceConfig

_BINARY = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")
_ENDINGS = (".jsonl", ".json", ".parquet", ".arrow", ".gz")


def _named(c: Config, which: str) -> Iterator[tuple[str, SourceConfig]]:
    """(Dotted name, source) of data.train or data.heldout; a path alone is the setting itself."""
    value = getattr(c.data, which)
    sources = c.data.train_sources if which == "train" else c.data.heldout_sources
    for i, source in enumerate(sources):
        yield f"data.{which}" if isinstance(value, str) else f"data.{which}[{i}]", source


# ------------------------------------------------------------------------------------------------------ settings
@rule("data.prompt_field", "data.id_field")
def fields_differ(c: Config) -> Iterator[Problem]:
    if c.data.prompt_field == c.data.id_field:
        yield Problem("data.id_field", f'must not be the prompt field too, got "{c.data.id_field}"')


@rule("data.train")
def train_names_differ(c: Config) -> Iterator[Problem]:
    yield from _names_differ(c, "train")


@rule("data.heldout")
def heldout_names_differ(c: Config) -> Iterator[Problem]:
    yield from _names_differ(c, "heldout")


def _names_differ(c: Config, which: str) -> Iterator[Problem]:
    first: dict[str, str] = {}
    for where, source in _named(c, which):
        if (other := first.setdefault(source.title, where)) != where:
            yield Problem(f"{where}.name", f"{source.title} is the name of {other} already", "give it another name")


@rule("data.train", "data.heldout", "data.chat.examples")
def generators_are_set_up_once(c: Config) -> Iterator[Problem]:
    sources: list[tuple[str, ExamplesConfig]] = [*_named(c, "train"), *_named(c, "heldout")]
    if c.data.chat.examples is not None:
        sources.append(("data.chat.examples", c.data.chat.examples))
    for where, source in sources:
        for name in ("size", "seed"):
            if name in source.options:
                yield Problem(f"{where}.options", f"{name} is a setting of the source", f"write it as {where}.{name}")
        if source.options and source.generator is None:
            yield Problem(f"{where}.options", "are for generators; a file has none")


@rule("data.chat")
def few_shot_has_examples(c: Config) -> Iterator[Problem]:
    chat = c.data.chat
    if chat.few_shot and chat.examples is None:
        yield Problem("data.chat.few_shot", "needs data.chat.examples", "give the path and layout of solved problems")
    if chat.options and chat.template == "none":
        yield Problem("data.chat.options", "have no effect without data.chat.template", fatal=False)


# --------------------------------------------------------------------------------------------------------- files
@rule("data.train", "prepare", files=True)
def train_is_there(c: Config) -> Iterator[Problem]:
    if c.is_evaluation:
        return  # nobody reads it
    for where, source in _named(c, "train"):
        yield from _is_there(c, where, source)


@rule("data.heldout", "data.train", "prepare", files=True)
def heldout_is_there(c: Config) -> Iterator[Problem]:
    trained = {_identity(source) for source in c.data.train_sources}
    for where, source in _named(c, "heldout"):
        yield from _is_there(c, where, source)
        if _identity(source) in trained and not c.is_evaluation:
            yield Problem(where, "is the training file, so it measures memory, not skill", fatal=False)


def _identity(source: SourceConfig) -> tuple[object, ...]:
    if source.generator is not None:
        return source.path, source.seed, str(source.options)
    return Path(source.path).resolve(), source.split


@rule("data.chat", "prepare", files=True)
def examples_are_there(c: Config) -> Iterator[Problem]:
    if c.data.chat.few_shot and c.data.chat.examples is not None:
        yield from _is_there(c, "data.chat.examples", c.data.chat.examples)


@rule("data.chat", "model.path", "rollout.engine", files=True)
def template_is_there(c: Config) -> Iterator[Problem]:
    template, model = c.data.chat.template, Path(c.model.path)
    if template not in ("none", "model") and not Path(template).is_file():
        yield Problem("data.chat.template", f"must be none, model or a Jinja file; no such file: {template}")
    settings = model / "tokenizer_config.json"
    if template != "model" or c.is_simulated or not model.is_dir():
        return
    if not any(model.glob("chat_template*")) and not (
        settings.is_file() and '"chat_template"' in settings.read_text(encoding="utf-8", errors="replace")
    ):
        yield Problem("data.chat.template", f"{model} has no chat template", "name a Jinja file, or none")


def _is_there(c: Config, where: str, source: ExamplesConfig) -> Iterator[Problem]:
    path = Path(source.path)
    if source.generator is not None:
        return
    if not path.exists():
        if not is_prepared(c, path):
            yield Problem(where, f"no such file: {path}", _how_to_get(source))
    elif path.is_dir():
        if not any(entry.name.endswith(_ENDINGS) for entry in path.iterdir()):
            yield Problem(where, f"{path} holds no JSONL, JSON, Parquet or Arrow file")
    elif not path.is_file():
        yield Problem(where, f"{path} is not a file")
    else:
        try:
            if _count_rows(path, at_most=1) == 0:
                yield Problem(where, f"{path} holds no prompt")
        except (OSError, EOFError, zlib.error) as error:
            yield Problem(where, f"{path} cannot be read: {error}")


def _how_to_get(source: ExamplesConfig) -> str:
    repository = REPOSITORIES.get(source.layout)
    if repository is None and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source.path) and not Path(source.path).suffix:
        repository = source.path
    if repository is not None:
        command = f"hf download {repository} --repo-type dataset --local-dir DIR"
        return f"fetch it where there is internet, on a login node: `{command}`, and give the path of what it brings"
    return "give the path of a JSONL, JSON, Parquet or Arrow file or a directory of them, or let `prepare` make it"


# -------------------------------------------------------------------------------------------------------- enough
@rule("trainer.batch_size", "steps", "data.train", "data.epochs", "prepare", files=True)
def enough_prompts(c: Config) -> Iterator[Problem]:
    batch, epochs, sources = c.trainer.batch_size, c.data.epochs, c.data.train_sources
    counts = [_size(source) for source in sources] if epochs is not None else []
    if epochs is None or not all(counts):
        return
    known = [count for count in counts if count is not None]
    weights = [Fraction(repr(source.weight)) for source in sources]
    # The last draw before source i would begin one pass more comes before the deadline of that pass's first prompt.
    total = min(-(-(epochs * n + 1) * sum(weights) // w) - 1 for n, w in zip(known, weights, strict=True))
    held = f"{c.data.train} holds {known[0]}" if isinstance(c.data.train, str) else f"the sources hold {known}"
    if batch > total:
        yield Problem(
            "trainer.batch_size",
            f"no batch of {batch} prompts will ever be full: {held}, data.epochs = {epochs}",
            f"set trainer.batch_size to at most {total} or raise data.epochs",
        )
    elif c.steps * batch > total:
        passes = f"{epochs} x {known[0]}" if len(known) == 1 else f"at most {total}"
        yield Problem(
            "steps",
            f"the run will end after at most {total // batch} of {c.steps} steps, data set exhausted: "
            f"{passes} prompts, {batch} per step",
            fatal=False,
        )


def _size(source: SourceConfig) -> int | None:
    """Prompts of a source, if that is easily known."""
    path = Path(source.path)
    if source.generator is not None:
        return source.size
    if not path.is_file():
        return None
    try:
        return _count_rows(path)
    except (OSError, EOFError, zlib.error):
        return None  # train_is_there says so, unless only the end of the file is torn: the reader names that line


def _count_rows(path: Path, at_most: int | None = None) -> int | None:
    """Lines that are not blank, of a plain or a gzip file; counting stops at `at_most`. None for other formats."""
    with path.open("rb") as file:
        magic = file.read(8)
    if magic.startswith(_BINARY):
        return None
    count, filled = 0, False
    with gzip.open(path) if magic.startswith(b"\x1f\x8b") else path.open("rb") as lines:
        while piece := lines.readline(1 << 20):  # a line, or a part of a long one
            if count == 0 and not filled and piece.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
                return None
            filled = filled or bool(piece.removeprefix(b"\xef\xbb\xbf").strip())
            if filled and count + 1 == at_most:
                return at_most
            if piece.endswith(b"\n"):
                count, filled = count + filled, False
    return count + filled
