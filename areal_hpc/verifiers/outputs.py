"""When a program's output or value is the expected one."""

from __future__ import annotations

import json
import math
import re
from typing import Any

TOLERANCE = 1e-6
"""Relative and absolute, for numbers that are written with a point or an exponent, and for floats."""

_FLOAT = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_MAX_DIGITS = 4000
"""Of an integer in decimal: reading takes quadratic time, and Python itself refuses some more."""
_HUGE = 1e300


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
    return math.isfinite(got) and math.isclose(got, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def same_value(got: Any, expected: Any) -> bool:
    """Equal as JSON: tuples are lists, keys of dicts may have been made texts, expected floats have a tolerance."""
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
        if isinstance(expected, int) or not abs(got) < _HUGE:
            return got == expected
        return _close(float(got), expected)
    return type(got) is type(expected) and bool(got == expected)


class _Nothing:
    """Equal to no expected value."""


def json_value(frame: bytes) -> Any:
    """A value as `areal_hpc.sandbox.values` encodes it, if JSON has the like, else one that equals nothing.

    A hostile program wrote it: nothing is built whose size or time is not that of the text, no hash but of texts.
    """
    try:
        return _plain(json.loads(frame, parse_int=_int))
    except (ValueError, TypeError, RecursionError):
        return _Nothing()


def _plain(data: Any) -> Any:
    if isinstance(data, list):
        return [_plain(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((tag, content),) = data.items()
    if tag == "tuple":
        return _plain(list(content))
    if tag == "int":
        return int(content, 16)
    if tag == "dict":
        named = {_key(_plain(key)): _plain(value) for key, value in content}
        if len(named) < len(content):
            raise ValueError("two keys with one name")
        return named
    raise ValueError(f"JSON has no {tag}")


def _int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError("an integer of too many digits")
    return int(digits)


def _key(key: Any) -> Any:
    """As json.dumps writes it."""
    if isinstance(key, bool) or key is None:
        return {True: "true", False: "false", None: "null"}[key]
    if isinstance(key, int) and key.bit_length() > 3 * _MAX_DIGITS:
        raise ValueError("a key of too many digits")
    if isinstance(key, (int, float, str)):
        return str(key)
    raise TypeError("no key in JSON")
