"""Plain Python values as JSON, and back: what crosses between a program and whoever judges it.

JSON's own types stand for themselves, every other type is `{"type": content}`. Decoding builds values of built-in
types only, so whatever comparison a program's own classes define stays behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

_SAFE_INT = 1 << 63


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """`value` as JSON types; subclasses of built-in types go as their base. `other` encodes what is not plain."""
    if value is None or isinstance(value, (bool, str, float)):
        return value
    if isinstance(value, int):
        return value if -_SAFE_INT < value < _SAFE_INT else {"int": hex(value)}
    if isinstance(value, list):
        return [encode(item, other) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key, other), encode(item, other)] for key, item in value.items()]}
    for kind in (tuple, set, frozenset, deque):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, other) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {type(value).__name__: value.decode("latin-1")}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    module, name = type(value).__module__, type(value).__name__
    if (module, name) in (("decimal", "Decimal"), ("fractions", "Fraction")):
        return {name: str(value)}
    if module == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), other)
    return other(value)


def decode(data: Any, other: Callable[[str, Any], Any]) -> Any:
    """The value behind `data`; `other` decodes tags that are not of `encode`. Raises ValueError for anything else."""
    if isinstance(data, list):
        return [decode(item, other) for item in data]
    if not isinstance(data, dict):
        return data
    try:
        ((tag, content),) = data.items()
        if tag == "dict":
            return {decode(key, other): decode(item, other) for key, item in content}
        if tag in ("tuple", "set", "frozenset", "deque"):
            items = [decode(item, other) for item in content]
            return {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}[tag](items)
        if tag in ("bytes", "bytearray"):
            return {"bytes": bytes, "bytearray": bytearray}[tag](content, "latin-1")
        if tag == "int":
            return int(content, 16)
        if tag == "complex":
            return complex(*content)
        if tag == "range":
            return range(*content)
        if tag == "Decimal":
            from decimal import Decimal

            return Decimal(content)
        if tag == "Fraction":
            from fractions import Fraction

            return Fraction(content)
    except (TypeError, ArithmeticError) as error:
        raise ValueError(f"not a value: {error}") from None
    return other(tag, content)
