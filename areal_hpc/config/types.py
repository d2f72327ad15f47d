"""What the sections of a configuration are made of: kinds of text and number, each with its limits and its unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


@dataclass(frozen=True)
class Unit:
    """What a number is counted in; shown in messages and in `areal-hpc check --explain`."""

    name: str


def _one_line(text: str) -> str:
    if any(ord(c) < 32 for c in text) or not text.strip():
        raise ValueError("must be one line of text without control characters (spaces are fine)")
    return text


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-6 as text; a number is what its writer meant. True is not a number."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


Text = Annotated[str, AfterValidator(_one_line)]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_number)]
Seconds = Annotated[Number, Field(gt=0), Unit("s")]
Tokens = Annotated[Whole, Field(gt=0), Unit("tokens")]
Ranks = Annotated[Whole, Field(gt=0), Unit("MPI ranks")]
Count = Annotated[Whole, Field(gt=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, a string under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True, protected_namespaces=())


def has_half_character(value: Any) -> bool:
    """Somewhere in a value stands half of a surrogate pair, which neither a file nor a message can hold."""
    if isinstance(value, Section):
        return any(has_half_character(getattr(value, name)) for name in type(value).model_fields)
    if isinstance(value, (dict, tuple, list)):
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        return any(map(has_half_character, inside))
    return isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value)
