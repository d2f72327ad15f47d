"""What an answer can be: a number, words, a formula, or a list, interval, matrix or equation made of such."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from areal_hpc.verifiers import units
from areal_hpc.verifiers.numerals import Number


@dataclass(frozen=True)
class Based:
    """A numeral in a base other than ten."""

    digits: str
    base: int


@dataclass(frozen=True)
class Words:
    """Text, in small letters, without articles and punctuation."""

    text: str


@dataclass(frozen=True)
class Formula:
    """Tidy LaTeX for math-verify."""

    latex: str


@dataclass(frozen=True)
class Group:
    """Values in brackets; `opening` is "" for a bare list and "u" for a union, where order does not matter."""

    opening: str
    items: tuple[Value, ...]
    closing: str

    @property
    def unordered(self) -> bool:
        return self.opening in ("", "{", "u")


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple[Value, ...], ...]
    kind: str
    latex: str


@dataclass(frozen=True)
class Equation:
    """Sides of an equation that does not just give a name to a value, as tidy LaTeX."""

    left: str
    right: str


Body = Number | Based | Words | Formula | Group | Matrix | Equation


@dataclass(frozen=True)
class Value:
    """One answer.

    Attributes:
        text: tidy text without blanks and `\\text`; equal texts are equal answers.
        name: the variable of `x = ...` or `x \\in ...`, if it was written.
        claims: other sides of a chain `a = b = ...`: all must equal the body, or (`rough`) nearly so.
    """

    text: str
    body: Body
    unit: units.Unit = units.NONE
    scale: int = 1
    name: str | None = None
    claims: tuple[Value, ...] = field(default=())
    rough: bool = False


def plain(text: str) -> str:
    r"""Without blanks and \text, to see whether two texts are the same."""
    text = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", text).strip()
    text = re.sub(r"(?<!\d) | (?!\d)", "", text)  # 1 3 is not 13
    return re.sub(r"(?<![\w}^_\]])\{([^{}]*)\}", r"\1", re.sub(r"([\^_])\{(\w)\}", r"\1\2", text)).removeprefix("+")
