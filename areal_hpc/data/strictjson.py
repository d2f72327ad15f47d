"""JSON as the standard has it: every key once, no NaN, numbers that fit into 64 bits, whole characters."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from areal_hpc.data.prompts import bad, check_storable, shown


def parse(text: str) -> Any:
    """The value of a JSON text. Raises ValueError: what is wrong with it, and where."""
    try:
        value = DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON at character {error.pos + 1}: {error.msg}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if "\\ud" in text or "\\uD" in text:
        check_whole_characters(value)
    return value


def as_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got {shown(value)}")
    return value


def check_whole_characters(value: Any) -> None:
    """Raises ValueError for half a surrogate pair, which only an escape can have brought in."""
    for name, inner in value.items() if isinstance(value, dict) else [("", value)]:
        check_storable(name, name)
        check_storable(name, inner)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        bad(next(name for name in names if names.count(name) > 1), "is given twice")
    return fields


def _whole(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        raise ValueError(f"the integer {digits[:24]} does not fit into 64 bits; write it as text")
    return int(digits)


def _real(digits: str) -> float:
    if math.isinf(float(digits)):
        raise ValueError(f"the number {digits[:24]} does not fit into 64 bits; write it as text")
    return float(digits)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_whole, parse_float=_real, parse_constant=_no_number)
