"""Reading a configuration so that everything wrong with it is said at once, in the words of the file.

YAML file, then `a.b=value` overrides, then pydantic, then the rules of rules.py on whatever is well-formed.
Importing this module needs neither torch nor MPI nor h5py.
"""

from __future__ import annotations

import datetime
import difflib
import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from areal_hpc import slurmrules  # noqa: F401 - its rules join those of rules.py
from areal_hpc.config import Config, datarules  # noqa: F401 - so do its
from areal_hpc.config.rules import Problem, broken_rules
from areal_hpc.config.schema import (
    Setting,
    in_list,
    items_of,
    list_members,
    members,
    nearest,
    required_under,
    settings,
    without_item,
)
from areal_hpc.config.types import has_half_character
from areal_hpc.exits import Exit, RunError

Places = dict[str, tuple[float, str]]
"""Dotted name -> (sort key, in words) of the place where a setting was written."""

_TEXT_TAG = "tag:yaml.org,2002:str"
_MERGE_TAG = "tag:yaml.org,2002:merge"
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Checked:
    """A usable configuration, as written (not resolved by mode), and what its writer should know about it."""

    config: Config
    warnings: list[Problem]


class ConfigErrors(RunError):
    """Everything that is wrong with a configuration."""

    def __init__(self, problems: list[Problem], source: str = "configuration", places: Places | None = None) -> None:
        self.problems = problems
        self.source = source
        self.places = places or {}
        super().__init__(Exit.CONFIG, self.render())

    def render(self) -> str:
        """A headline, one line per problem in the order of the file, and the legal keys where one was unknown."""
        if len(self.problems) == 1 and self.problems[0].where.startswith(self.source):
            return str(self.problems[0])
        out = [f"{self.source}: {len(self.problems)} problem{'s' * (len(self.problems) != 1)}"]
        for problem in self.problems:
            _, place = self.places.get(problem.where, (0, ""))
            out.append(f"  {problem}" + (f" ({place})" if place else ""))
        for section in dict.fromkeys(p.section for p in self.problems if p.section is not None):
            text = f"{section or 'the top level'} takes: {list_members(section)}"
            out.append(textwrap.fill(text, 110, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
        return "\n".join(out)


def check_config(path: Path, overrides: Sequence[str] = (), files_are_elsewhere: bool = False) -> Checked:
    """Read, override and check a configuration; `files_are_elsewhere` makes missing files a warning.

    Raises ConfigErrors: with all problems at once; only a file that is no YAML ends the search early.
    """
    document = read_file(path)
    problems = document.problems
    problems += _override(document, overrides)
    for setting in ("preset", "slurm.site"):
        problems += _lay_under(document, setting)
    config, malformed = _validate(document.data)
    problems += malformed
    if config is not None:
        problems += _unstorable(config)
        problems += broken_rules(config, {problem.where for problem in problems}, files_are_elsewhere)
    problems.sort(key=lambda problem: _position(problem.where, document.places))
    fatal = [problem for problem in problems if problem.fatal]
    if fatal or config is None:
        raise ConfigErrors(fatal, str(path), document.places)
    return Checked(config, problems)


# --------------------------------------------------------------------------------------------------------- YAML
@dataclass
class _Document:
    data: dict[str, Any] = field(default_factory=dict)
    places: Places = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_file(path: Path) -> _Document:
    """A YAML mapping with the line of every key; raises ConfigErrors when it is none."""
    document = _Document()
    try:
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigErrors([Problem(str(path), f"cannot be read: {reason}")], str(path)) from None
    try:
        value = _parse(raw, document)
    except yaml.YAMLError as error:
        raise ConfigErrors([_syntax_problem(error, raw, str(path))], str(path)) from None
    except (ValueError, RecursionError) as error:  # a date like 2024-99-99, 5000 digits, 1000 nested brackets
        raise ConfigErrors([Problem(str(path), f"cannot be read as YAML: {error}")], str(path)) from None
    if not isinstance(value, (dict, type(None))):
        raise ConfigErrors(
            [Problem(str(path), f"must be a mapping of settings, got {shown(value)}", section="")], str(path)
        )
    document.data = value or {}
    return document


def _parse(raw: bytes | str, document: _Document) -> Any:
    loader = yaml.SafeLoader(raw)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _survey(root, (), document, set())
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _survey(node: Node, path: tuple[str, ...], document: _Document, seen: set[int]) -> None:
    """Note the line of every key, report keys given twice, and make every key text (YAML reads `on` as true)."""
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, SequenceNode):
        for i, item in enumerate(node.value):
            inside, line = (*path[:-1], f"{path[-1] if path else ''}[{i}]"), item.start_mark.line + 1
            document.places[".".join(inside)] = (line, f"line {line}")
            _survey(item, inside, document, seen)
    if not isinstance(node, MappingNode):
        return
    first: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            continue  # refused when the mapping is constructed
        if key.tag == _MERGE_TAG:
            _survey(value, path, document, seen)
            continue
        key.tag = _TEXT_TAG
        line, name = key.start_mark.line + 1, ".".join((*path, key.value))
        if key.value in first:
            document.problems.append(Problem(name, f"is given twice, first in line {first[key.value]}"))
        first.setdefault(key.value, line)
        document.places[name] = (line, f"line {line}")
        _survey(value, (*path, key.value), document, seen)


def _syntax_problem(error: yaml.YAMLError, raw: bytes, source: str) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        return Problem(source, f"is no YAML text: {' '.join(str(error).split())}")
    text = raw.decode(errors="replace").splitlines()
    line = text[mark.line] if mark.line < len(text) else ""
    message = ", ".join(part for part in (getattr(error, "context", ""), getattr(error, "problem", "")) if part)
    if "\t" in line:
        message += "; indent with spaces, YAML takes no tabs"
    if line.strip():
        message += f"\n    {line.expandtabs(1)}\n    {' ' * mark.column}^"
    return Problem(f"{source}:{mark.line + 1}:{mark.column + 1}", message)


# ---------------------------------------------------------------------------------------------------- overrides
def _override(document: _Document, overrides: Sequence[str]) -> Iterator[Problem]:
    """Write `a.b=value` into the data, later ones over earlier ones; yields what cannot be written."""
    for text in overrides:
        name, equals, written = text.partition("=")
        name = name.strip()
        if not equals or not name:
            example = (nearest(name) or ["trainer.batch_size"])[0]
            yield Problem(text, "is no override, the form is a.b=value", f"for instance {example}=VALUE")
        elif name not in settings():
            yield _unknown((name,))
        else:
            inner = _Document()
            try:
                value = _as_text(_parse(written, inner), written, settings()[name])
            except (yaml.YAMLError, ValueError, RecursionError) as error:
                reason = getattr(error, "problem", None) or str(error).partition("\n")[0]
                yield Problem(text, f"the value is no YAML: {reason}", "quote text that has special characters")
                continue
            if inner.problems:
                yield Problem(text, f"gives {inner.problems[0].where} twice")
            _put(document.data, name.split("."), value)
            stale = [known for known in document.places if known.startswith(f"{name}.")]
            for known in (name, *stale):
                document.places[known] = (math.inf, "command line")


def _as_text(value: Any, written: str, setting: Setting) -> Any:
    """`name=2024` is text: quotes that YAML would ask for do not survive the shell."""
    scalar = isinstance(value, (bool, int, float, datetime.date))
    return written.strip() if scalar and setting.legal.startswith("one line of text") else value


def _put(data: dict[str, Any], parts: list[str], value: Any) -> None:
    """data[a][b] = value; a section that is no mapping in the file stays as it is, and is reported as that."""
    *above, leaf = parts
    for part in above:
        inner = data.get(part)
        if not isinstance(inner, (dict, type(None))):
            return
        data[part] = dict(inner or {})  # a copy: an alias may share it
        data = data[part]
    data[leaf] = value


# ------------------------------------------------------------------------------------------------ preset and site
def _lay_under(document: _Document, setting: str) -> list[Problem]:
    """Lay the settings of the file that `setting` names under the data; returns what is wrong with that file."""
    name: Any = document.data
    for part in setting.split("."):
        name = name.get(part) if isinstance(name, dict) else None
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        return []  # _validate says so
    try:
        below = read_file(Path(name))
    except ConfigErrors as errors:
        return [Problem(setting, str(problem)) for problem in errors.problems]
    document.data = _laid_under(below.data, document.data)
    for known, (line, words) in below.places.items():
        document.places.setdefault(known, (line, f"{name} {words}"))
    return below.problems


def _laid_under(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both mappings in one; where both give a value, that of `above` counts."""
    both = {
        k: _laid_under(below[k], v) for k, v in above.items() if isinstance(v, dict) and isinstance(below.get(k), dict)
    }
    return below | above | both


# --------------------------------------------------------------------------------------------------- validation
def _validate(data: dict[str, Any]) -> tuple[Config | None, list[Problem]]:
    """What pydantic rejects, and the configuration that is left without it, to be looked at by the other rules."""
    try:
        return Config.model_validate(data), []
    except ValidationError as error:
        found = dict(_translate(error))
    try:
        config = Config.model_validate(_repaired(data, {without_item(path) for path in found}))
    except ValidationError:  # pragma: no cover - a part that cannot be cut out; its problem is reported all the same
        config = None
    return config, list(found.values())


def _repaired(data: dict[str, Any], broken: set[tuple[str, ...]], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """The data without its broken parts; what is required and absent is filled with a placeholder."""
    kept = {
        key: _repaired(value, broken, (*path, key)) if isinstance(value, dict) else value
        for key, value in data.items()
        if (*path, key) not in broken
    }
    for member in members(".".join(path)):
        if member.default is None and member.leaf not in kept:
            kept[member.leaf] = _repaired({}, broken, (*path, member.leaf)) if member.is_section else "unset"
    return kept


def _translate(error: ValidationError) -> Iterator[tuple[tuple[str, ...], Problem]]:
    """(Path in the data, problem) of everything pydantic found; a field that has several errors counts once."""
    for entry in error.errors(include_url=False, include_context=False):
        loc, item = in_list(entry["loc"])
        if item is not None:
            yield loc, _about_item(loc, item, entry)
        elif entry["type"] in ("extra_forbidden", "invalid_key"):
            yield loc, _unknown(loc)
        elif entry["type"] == "missing":
            for leaf in required_under(".".join(loc)):
                yield tuple(leaf.split(".")), Problem(leaf, "is missing", settings()[leaf].doc)
        else:
            while ".".join(loc) not in settings():  # pydantic adds which arm of a union it tried
                loc = loc[:-1]
            setting = settings()[".".join(loc)]
            value = entry["input"]
            yield loc, Problem(setting.name, f"{setting.must_be}, got {shown(value)}", _advice(setting, value))


def _about_item(path: tuple[str, ...], setting: Setting, entry: Any) -> Problem:
    where, value = ".".join(path), entry["input"]
    if entry["type"] == "extra_forbidden":
        known = items_of(setting.name)
        near = difflib.get_close_matches(path[-1], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"legal are {', '.join(known)}"
        return Problem(where, "unknown setting", hint)
    if entry["type"] == "missing":
        return Problem(where, "is missing", setting.doc)
    if path[-1].endswith("]"):
        return Problem(where, f"must be a mapping of settings, got {shown(value)}", "give at least its path")
    return Problem(where, f"{setting.must_be}, got {shown(value)}", _advice(setting, value))


def _unstorable(config: Config) -> Iterator[Problem]:
    """Values that Python accepts and that neither the log nor the copy of the configuration can hold."""
    for setting in settings().values():
        value: Any = config
        for part in setting.name.split("."):
            value = getattr(value, part, None)
        if isinstance(value, int) and value > _LARGEST:
            yield Problem(setting.name, f"must be at most 2^63 - 1, got {shown(value)}")
        elif not setting.is_section and has_half_character(value):
            yield Problem(setting.name, f"must be text, got half a character in {shown(value)}")


def _unknown(loc: tuple[str, ...]) -> Problem:
    name = ".".join(loc)
    where = name if name and name.isprintable() else json.dumps(name)
    section = name.rpartition(".")[0]
    while section not in ("", *settings()):
        section = section.rpartition(".")[0]
    if name in settings():  # a dot inside a key of the file
        return Problem(where, "is no key of a file", f"write {loc[-1].rpartition('.')[2]} indented under {section}")
    near = nearest(name)
    return Problem(where, "unknown setting", f"did you mean {' or '.join(near)}?" if near else "", section=section)


def _advice(setting: Setting, value: Any) -> str:
    if value is None and setting.is_section:
        return "indent its settings under it, or delete the line"
    if isinstance(value, dict) and items_of(setting.name):
        return "put a dash before it, it is the first of a list"
    if isinstance(value, list) and items_of(setting.name):
        return "name at least one source"
    if value is None and setting.default is not None:
        return f"delete the line for the default, {setting.default}"
    if isinstance(value, float) and math.isinf(value) and " inf" in setting.legal:
        return "write inf without the dot"
    if isinstance(value, str) and "matching" in setting.legal:
        return setting.doc
    if isinstance(value, str) and "whole number" in setting.legal:
        return _as_whole(value)
    if "line of text" in setting.legal and isinstance(value, (bool, int, float, datetime.date)):
        return "put it in quotes"
    return ""


def _as_whole(text: str) -> str:
    try:
        number = float(text)
    except ValueError:
        return ""
    return f"write {int(number)}" if abs(number) < 1e15 and number == int(number) else ""


def shown(value: Any) -> str:
    """A value as it would be written in YAML, cut to a readable length."""
    if isinstance(value, (dict, list, tuple)):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, datetime.date):
        return f"the date {value}"
    if isinstance(value, int) and value.bit_length() > 100:
        return f"a number of about {round(value.bit_length() * math.log10(2))} digits"
    if isinstance(value, float) and not math.isfinite(value):
        return yaml.safe_dump(value).split()[0]
    text = json.dumps(value) if isinstance(value, (str, int, type(None))) else str(value)
    return text if len(text) <= 64 else f"{text[:60]}..."


def _position(where: str, places: Places) -> tuple[float, float]:
    """Where a problem stands in the report: its line, else the line of its section, else the order of the schema."""
    name = where
    while name and name not in places:
        name = name.rpartition(".")[0]
    setting = where.partition("[")[0]
    order = list(settings()).index(setting) if setting in settings() else math.inf
    return places.get(name, (math.inf, ""))[0], order
