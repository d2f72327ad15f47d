"""The fields of one row, by what they are for and not by what a file calls them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from areal_hpc.config.sources import ExamplesConfig
from areal_hpc.data.prompts import bad, shown


class Made(NamedTuple):
    """What a layout makes of a row.

    Attributes:
        text: the prompt.
        metadata: what the reward function gets.
        solution: an answer to show as an example; "" if the row has none.
    """

    text: str
    metadata: dict[str, Any]
    solution: str = ""


class Fields:
    """One row, and the names that the source gives its prompt and its answer.

    Every method raises ValueError, naming the field and, where it is missing, what the layout needs and the row has.
    """

    def __init__(self, values: Mapping[str, Any], source: ExamplesConfig, needs: str) -> None:
        self.values = values
        self.needs = needs
        self.layout = source.layout
        self._own = {"prompt_field": source.prompt_field, "answer_field": source.answer_field}
        self._by_lower = {name.lower(): name for name in reversed(list(values))}

    def find(self, *names: str, setting: str = "") -> str | None:
        """The first of these names that the row has, in capitals or not; `setting` may name another one."""
        if (own := self._own.get(setting)) is not None:
            if own not in self.values:
                bad(own, f"is missing ({setting}), {self._has()}")
            return own
        exact = next((name for name in names if name in self.values), None)
        return exact or next((self._by_lower[name] for name in names if name in self._by_lower), None)

    def text(self, *names: str, setting: str = "", empty: bool = False) -> str:
        """A text that is not blank."""
        name = self.find(*names, setting=setting)
        if name is None:
            self.missing(*names)
        value = self.values[name]
        if not isinstance(value, str) or not (empty or value.strip()):
            bad(name, f"must be text{'' if empty else ' that is not blank'}, got {shown(value)}")
        return value

    def optional(self, *names: str) -> str:
        """A text, or "" where the row has none."""
        name = self.find(*names)
        return self.text(*names, empty=True) if name is not None and self.values[name] is not None else ""

    def texts(self, *names: str) -> list[str]:
        """A list of texts."""
        name = self.find(*names)
        if name is None:
            self.missing(*names)
        value = self.values[name]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            bad(name, f"must be a list of texts, got {shown(value)}")
        return value

    def answer(self, *names: str) -> str:
        """A right answer as text; a number is written without needless zeros."""
        name = self.find(*names, setting="answer_field")
        if name is None:
            self.missing(*names)
        value = self.values[name]
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return str(int(value)) if value == int(value) else repr(value)
        if not isinstance(value, str) or not value.strip():
            bad(name, f"must be the answer, as text or a number, got {shown(value)}")
        return value.strip()

    def missing(self, *names: str) -> NoReturn:
        bad(names[0], f"is missing; layout {self.layout} needs {self.needs}, {self._has()}")

    def _has(self) -> str:
        return has(self.values)


def has(names: Sequence[str] | Mapping[str, Any]) -> str:
    """What a row has, for a message."""
    listed = ", ".join(names) or "no field"
    return f"the line has {shown(listed).strip(chr(34))}"
