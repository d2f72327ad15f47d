"""What a data set comes to: prompts, or an error that says what is wrong with which line."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from areal_hpc.exits import Exit, RunError

SHOWN = 20
"""So many bad lines are named in an error; all are counted."""

MAX_BYTES = 48 * 1024 * 1024
"""Largest prompt with its metadata: it goes to a rollout rank in the header of one message (codec.py)."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a data set.

    Attributes:
        prompt_id: its identity, unique in the data set; the number of the row where the row has none.
        text: the prompt, before any chat template.
        metadata: what the reward function gets with it.
    """

    prompt_id: str
    text: str
    metadata: dict[str, Any]


class DatasetError(RunError):
    """A source that cannot be used as a data set; `problems` are "file:line: reason", the first 20 of them."""

    def __init__(self, problems: Sequence[str], num_bad: int | None = None) -> None:
        self.problems = list(problems)
        self.num_bad = len(problems) if num_bad is None else num_bad
        more = self.num_bad - len(self.problems)
        super().__init__(
            Exit.CONFIG, "\n".join([*self.problems, f"and {more} more bad lines"] if more else self.problems)
        )


def bad(field: str, reason: str) -> NoReturn:
    """Raises ValueError: this field of a row cannot be used."""
    raise ValueError(f"field {shown(field)}: {reason}")


def shown(value: Any) -> str:
    """A JSON value as it stands in the line, cut to a readable length."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value) if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 64 else f"{text[:60]}..."


def check_storable(name: str, value: Any) -> int:
    """About how many bytes a value takes in a message; `name` is the field that holds it.

    Raises ValueError: it is no JSON, or nothing that could be sent or logged.
    """
    if value is None or isinstance(value, bool):
        return 1
    if isinstance(value, str):
        try:
            return 5 + len(value.encode())
        except UnicodeEncodeError:
            bad(name, "holds half of a surrogate pair, which is no character")
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            bad(name, "holds an integer that does not fit into 64 bits; write it as text")
        return 9
    if isinstance(value, float):
        if not math.isfinite(value):
            bad(name, f"holds {value}, which is no number")
        return 9
    if isinstance(value, list):
        return 5 + sum(check_storable(name, inner) for inner in value)
    if not isinstance(value, dict):
        bad(name, f"holds a {type(value).__name__}, which is no JSON")
    if odd := [key for key in value if not isinstance(key, str)]:
        bad(name, f"holds an object with the key {shown(odd[0])}, which is no text")
    return 5 + sum(check_storable(name, part) for pair in value.items() for part in pair)
