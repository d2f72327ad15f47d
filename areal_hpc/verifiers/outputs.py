"""When a program's output or value is the expected one."""

from __future__ import annotations

import math
import re
from typing import Any

TOLERANCE = 1e-6
"""Relative and absolute, for numbers that are written with a point or an exponent, and for floats."""

_FLOAT = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def same_text(got: str, expected: str) -> bool:
    """Equal line by line but for white space at the end of lines and of the text, and for float tolerance."""
    lines, wanted = _lines(got), _lines(expected)
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_line(got: str, expected: str) -> bool:
    if got == expected:
        return True
    words, wanted = got.split(), expected.split()
    return len(words) == len(wanted) and all(map(_same_word, words, wanted)) and any(map(_FLOAT.fullmatch, wanted))


def _same_word(got: str, expected: str) -> bool:
    if got == expected:
        return True
    if not (_FLOAT.fullmatch(expected) and _NUMBER.fullmatch(got)):
        return False
    return _close(float(got), float(expected))


def _close(got: float, expected: float) -> bool:
    return got == expected or math.isclose(got, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def same_value(got: Any, expected: Any) -> bool:
    """Equal as JSON: tuples are lists, keys of dicts may have been made texts, floats have a tolerance."""
    if isinstance(expected, (list, tuple)):
        return isinstance(got, (list, tuple)) and len(got) == len(expected) and all(map(same_value, got, expected))
    if isinstance(expected, dict):
        if not isinstance(got, dict) or len(got) != len(expected):
            return False
        named = {_key(key): value for key, value in got.items()}
        return named.keys() == expected.keys() and all(same_value(named[key], expected[key]) for key in expected)
    if isinstance(expected, bool) or isinstance(got, bool) or expected is None:
        return got is expected
    if isinstance(expected, (int, float)) and isinstance(got, (int, float)):
        if isinstance(expected, int) and isinstance(got, int):
            return got == expected
        return _close(float(got), float(expected)) if abs(got) < 1e300 else got == expected
    return type(got) is type(expected) and bool(got == expected)


def _key(key: Any) -> Any:
    """As json.dumps writes it."""
    if isinstance(key, bool) or key is None:
        return {True: "true", False: "false", None: "null"}[key]
    return str(key) if isinstance(key, (int, float)) else key
