"""The ready-made layouts: what the rows of well-known data sets mean, and what a prompt of each looks like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from areal_hpc.config import DataConfig
from areal_hpc.config.sources import ExamplesConfig
from areal_hpc.data import gym, maths, programs
from areal_hpc.data.fields import Fields, Made, has
from areal_hpc.data.prompts import MAX_BYTES, Prompt, bad, check_storable, shown


@dataclass(frozen=True, slots=True)
class Layout:
    """One ready-made mapping.

    Attributes:
        needs: the fields that a row must have, for people.
        make: what it makes of a row; raises ValueError.
        identity: names of the field that identifies a row, if the data set has one.
    """

    needs: str
    make: Callable[[Fields], Made]
    identity: tuple[str, ...] = ()


LAYOUTS: dict[str, Layout] = {
    "maths": Layout("problem or question, and answer (or \\boxed{} in solution)", maths.maths, ("id", "unique_id")),
    "gsm8k": Layout("question and answer (with ####)", maths.gsm8k),
    "math": Layout("problem, and answer or solution (with \\boxed{})", maths.maths, ("unique_id",)),
    "math500": Layout("problem and answer", maths.maths, ("unique_id",)),
    "deepscaler": Layout("problem and answer", maths.maths),
    "aime": Layout("problem or question, and answer", maths.integer, ("id",)),
    "amc": Layout("problem or question, and answer", maths.integer, ("id",)),
    "humaneval": Layout("task_id, prompt, entry_point and test", programs.humaneval, ("task_id",)),
    "mbpp": Layout("prompt or text, and test_list", programs.mbpp, ("task_id",)),
    "livecodebench": Layout(
        "question_id, question_content, public_test_cases, private_test_cases, starter_code and metadata",
        programs.livecodebench,
        ("question_id",),
    ),
}


def make_prompt(values: Mapping[str, Any], number: int, source: ExamplesConfig, data: DataConfig) -> tuple[Prompt, str]:
    """The prompt of one row, and an answer to show as an example ("" if it has none).

    Raises ValueError: what is wrong with the row, with the name of the field.
    """
    identity: Any
    if source.generator is not None:
        made, named, identity = gym.made(values, source.generator), "id", number
    elif source.layout == "plain":
        made, named, identity = _plain(dict(values), number, source, data)
    else:
        layout = LAYOUTS[source.layout]
        row = Fields(values, source, layout.needs)
        made = layout.make(row)
        known = source.id_field or row.find(*layout.identity)
        if known is not None and known not in values:
            bad(known, f"is missing (id_field), {has(values)}")
        named, identity = known or "id", number if known is None else values[known]
    if "\0" in made.text:
        bad(source.prompt_field or data.prompt_field, "holds a NUL character")
    num_bytes = check_storable("prompt", made.text)
    num_bytes += sum(check_storable(name, name) + check_storable(name, value) for name, value in made.metadata.items())
    if num_bytes > MAX_BYTES:
        raise ValueError(f"comes to {num_bytes:,} bytes; at most {MAX_BYTES:,} can be sent to a rollout rank")
    text = f"{made.text.rstrip()}\n\n{source.instruction}" if source.instruction else made.text
    return Prompt(_identity(named, identity), text, made.metadata), made.solution


def _plain(
    values: dict[str, Any], number: int, source: ExamplesConfig, data: DataConfig
) -> tuple[Made, str, str | int]:
    prompt_field, id_field = source.prompt_field or data.prompt_field, source.id_field or data.id_field
    if prompt_field not in values:
        bad(prompt_field, f"is missing (data.prompt_field), {has(values)}")
    row = Fields(dict(values), source, "")
    text, identity = values.pop(prompt_field), values.pop(id_field, number)
    if not isinstance(text, str) or not text.strip():
        bad(prompt_field, f"must be text that is not blank, got {shown(text)}")
    if source.answer_field is not None:
        answer = row.answer()
        values.pop(source.answer_field, None)
        values["answer"] = answer
    solution = values.get("answer")
    return Made(text, values, solution if isinstance(solution, str) else ""), id_field, identity


def _identity(field: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        bad(field, f"must be text or a whole number, got {shown(value)}")
    if isinstance(value, str):
        if not value.strip() or any(ord(c) < 32 for c in value):
            bad(field, f"must be one line of text, got {shown(value)}")
        check_storable(field, value)
    return str(value)
