"""What the settings are called, what each may hold, and which one a misspelt name probably meant.

Everything is read from the annotations and the doc strings of the sections, so that a message, the list of legal keys
and `areal-hpc check --explain` can never disagree with what the configuration accepts.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic.fields import FieldInfo

from areal_hpc.config import Config
from areal_hpc.config.types import Section, Unit

_BASES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "one line of text",
    bool: "true or false",
    type(None): "null",
}
_BOUNDS = {"gt": "greater than", "ge": "of at least", "lt": "less than", "le": "at most"}


@dataclass(frozen=True)
class Setting:
    """One field of the configuration, or one section of fields.

    Attributes:
        name: dotted path, for instance `trainer.optimizer.lr`.
        legal: what it may hold, in words that follow "must be".
        unit: what a number is counted in, with brackets; empty without a unit.
        default: as written in YAML; None when the setting is required.
        doc: its documentation as one line.
        is_section: it holds settings, not a value.
    """

    name: str
    legal: str
    unit: str
    default: str | None
    doc: str
    is_section: bool

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def must_be(self) -> str:
        return f"must be {self.legal}{self.unit and ' ' + self.unit}"


@cache
def settings() -> dict[str, Setting]:
    """Every setting by its dotted name, a section before what it holds, in the order of the sections."""
    return {setting.name: setting for setting in walk(Config, "")}


def members(section: str) -> list[Setting]:
    """The settings directly under a section; "" is the top level."""
    return [setting for setting in settings().values() if setting.parent == section]


@cache
def items_of(name: str) -> dict[str, Setting]:
    """By key, what an item of the list `name` holds; empty where the setting is no list of sections."""
    hint: Any = Config
    for part in name.split("."):
        section = _section_in(hint)
        hints = get_type_hints(section, include_extras=True) if section is not None else {}
        hint = hints.get(part)
    item = next(_items_in(hint), None)
    return {setting.leaf: setting for setting in walk(item, f"{name}[].")} if item is not None else {}


def in_list(loc: tuple[int | str, ...]) -> tuple[tuple[str, ...], Setting | None]:
    """The path of an error; inside an item of a list as (..., "train[0]", "weight") with the setting that it is of."""
    path = [str(part) for part in loc]
    at = next((i for i, part in enumerate(loc) if isinstance(part, int)), None)
    if at is None:
        return tuple(path), None
    above = path[:at]
    while above and ".".join(above) not in settings():  # pydantic adds which arm of a union it tried
        above.pop()
    item = items_of(".".join(above))
    if not item or not above:
        return tuple(path), None
    leaf = path[at + 1] if len(path) > at + 1 else ""
    where = (*above[:-1], f"{above[-1]}[{path[at]}]", *([leaf] if leaf else []))
    return where, item.get(leaf, settings()[".".join(above)])


def without_item(path: tuple[str, ...]) -> tuple[str, ...]:
    """The path of the list, where a path leads into one of its items."""
    at = next((i for i, part in enumerate(path) if part.endswith("]")), None)
    return path if at is None else (*path[:at], path[at].partition("[")[0])


def required_under(name: str) -> list[str]:
    """Dotted names that a file has to give when it gives `name`: the name itself, or what a section requires."""
    if not settings()[name].is_section:
        return [name]
    return [leaf for m in members(name) if m.default is None for leaf in required_under(m.name)]


def list_members(section: str) -> str:
    """The legal keys of a section with their defaults, as one line of text."""
    return ", ".join(f"{m.leaf}={_shown_default(m)}" for m in members(section))


def explain() -> str:
    """Table of every setting: name, default, what it may hold, unit, and its documentation on a line below."""
    known: set[tuple[str, ...]] = set()
    lines = ["name".ljust(34) + "default".ljust(15) + "what it may hold [unit]"]
    for s in settings().values():
        if s.is_section:
            lines += ["", f"{s.name}: {s.doc}"]
        else:
            lines += _explained(s)
            if (keys := tuple(items := items_of(s.name))) and keys not in known:
                lines += [line for item in items.values() for line in _explained(item)]
            known.add(keys)
    return "\n".join(lines)


def _explained(s: Setting) -> list[str]:
    return [f"{s.name:<33} {_shown_default(s):<14} {s.legal} {s.unit}".rstrip(), f"    {s.doc}"]


def nearest(name: str) -> list[str]:
    """Up to three dotted names that somebody who wrote the unknown `name` may have meant, best first."""
    wanted = name.lower().replace("-", "_")
    section, _, leaf = wanted.rpartition(".")
    scores: dict[str, float] = {}
    for setting in settings().values():
        likeness = difflib.SequenceMatcher(None, leaf, setting.leaf).ratio()
        if f".{setting.name}".endswith(f".{wanted}"):
            likeness += 1.0
        elif setting.doc.lower().startswith(leaf.replace("_", " ") + " "):  # eta, learning_rate
            likeness = max(likeness, 0.9)
        scores[setting.name] = likeness + (0.1 if setting.parent == section else 0.0)
    good = [n for n, score in scores.items() if score >= max(0.6, max(scores.values()) - 0.2)]
    return sorted(good, key=lambda n: -scores[n])[:3]


def walk(section: type[Section], prefix: str) -> Iterator[Setting]:
    """Every setting of a section, and of the sections in it."""
    hints = get_type_hints(section, include_extras=True)
    for key, field in section.model_fields.items():
        name, inner = prefix + key, _section_in(hints[key])
        yield Setting(
            name=name,
            legal=_legal(hints[key]),
            unit=next((f"[{unit}]" for unit in _units(hints[key])), ""),
            default=None if field.is_required() else as_yaml(field.default),
            doc=" ".join((field.description or "").split()),
            is_section=inner is not None,
        )
        if inner is not None:
            yield from walk(inner, name + ".")


def _shown_default(setting: Setting) -> str:
    if setting.is_section:
        return "{...}"
    return "(required)" if setting.default is None else setting.default


def as_yaml(value: Any) -> str:
    """A value on one line, as it may stand in a file."""
    if isinstance(value, Section):
        return "{...}"
    value = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _section_in(hint: Any) -> type[Section] | None:
    arms = get_args(hint) if _is_union(hint) else (hint,)
    return next((arm for arm in arms if isinstance(arm, type) and issubclass(arm, Section)), None)


def _items_in(hint: Any) -> Iterator[type[Section]]:
    """The section that a list in this hint is made of."""
    if get_origin(hint) is tuple and (section := _section_in(get_args(hint)[0])) is not None:
        yield section
    for part in get_args(hint):
        yield from _items_in(part)


def _units(hint: Any) -> Iterator[str]:
    for part in get_args(hint):
        if isinstance(part, Unit):
            yield part.name
        else:
            yield from _units(part)


def _legal(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        base, *extras = get_args(hint)
        return _legal(base) + _bounds(extras)
    if _is_union(hint):
        return " or ".join(_legal(arm) for arm in get_args(hint))
    if get_origin(hint) is Literal:
        *first, last = get_args(hint)
        return f"{', '.join(first)} or {last}" if first else str(last)
    if get_origin(hint) is tuple:
        return f"a list, each item {_legal(get_args(hint)[0])}"
    return _BASES.get(hint, "a mapping of settings")


def _bounds(extras: list[Any]) -> str:
    flat = [m for extra in extras for m in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
    words = [f"{word} {getattr(m, bound)}" for m in flat for bound, word in _BOUNDS.items() if hasattr(m, bound)]
    patterns = [f" matching {m.pattern}" for m in flat if getattr(m, "pattern", None)]
    lengths = [f" of at most {m.max_length} characters" for m in flat if hasattr(m, "max_length")]
    return "".join(lengths + patterns) + (" " + " and ".join(words) if words else "")
