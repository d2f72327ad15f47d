"""Where prompts come from: files and generators, what their fields are called, how a prompt is put to the model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from areal_hpc.config.types import Count, Number, Section, Text, Unit, Whole

GENERATOR = "reasoning-gym:"
"""How the path of a generator begins; its name follows."""

LayoutName = Literal[
    "plain", "maths", "gsm8k", "math", "math500", "deepscaler", "aime", "amc", "humaneval", "mbpp", "livecodebench"
]

REPOSITORIES: dict[str, str] = {
    "gsm8k": "openai/gsm8k",
    "math": "EleutherAI/hendrycks_math",
    "math500": "HuggingFaceH4/MATH-500",
    "deepscaler": "agentica-org/DeepScaleR-Preview-Dataset",
    "aime": "HuggingFaceH4/aime_2024",
    "amc": "AI-MO/aimo-validation-amc",
    "humaneval": "openai/openai_humaneval",
    "mbpp": "google-research-datasets/mbpp",
    "livecodebench": "livecodebench/code_generation_lite",
}
"""Where the data sets of the ready-made layouts are published."""


class ExamplesConfig(Section):
    path: Text
    """JSONL, JSON, Parquet or Arrow file, directory of such files, or `reasoning-gym:NAME` for a generator."""
    split: Text | None = None
    """Which part of a directory: train, test, ..."""
    layout: LayoutName = "plain"
    """What the fields mean; plain: `prompt_field` is the prompt, all other fields go to the reward function."""
    prompt_field: Text | None = None
    """Key of the prompt text; null: that of the layout, in the plain one that of data.prompt_field."""
    answer_field: Text | None = None
    """Key of the right answer; null: that of the layout, in the plain one none."""
    id_field: Text | None = None
    """Key of the prompt's identity; null: that of the layout, in the plain one that of data.id_field."""
    instruction: Text | None = None
    """Text that follows every prompt in a paragraph of its own, such as: Put the final answer into \\boxed{}."""
    size: Annotated[Count, Unit("prompts")] = 1000
    """How many prompts a generator makes."""
    seed: Annotated[Whole, Field(ge=0, lt=2**31)] = 0
    """Seed of a generator; the run's own seed plays no part."""
    options: dict[str, Any] = {}
    """Further settings of a generator, as in `{min_terms: 2, max_terms: 4}`."""

    @property
    def generator(self) -> str | None:
        """Name of the reasoning-gym generator; None for files."""
        return self.path.removeprefix(GENERATOR) if self.path.startswith(GENERATOR) else None


class SourceConfig(ExamplesConfig):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)] | None = None
    """Name in ids, log and reports; null: from the path, as in gsm8k-train of data/gsm8k-train.jsonl.gz."""
    weight: Annotated[Number, Field(gt=0)] = 1.0
    """Share of the prompts drawn, in proportion to the weights of the other sources."""

    @property
    def title(self) -> str:
        """The name, or what the path suggests."""
        if self.name is not None:
            return self.name
        stem = self.generator or Path(self.path).name.partition(".")[0]
        words = [stem, self.split] if self.split and self.split not in stem else [stem]
        return re.sub(r"[^A-Za-z0-9_-]+", "-", "-".join(words)).strip("-_") or "data"


def _not_empty(sources: tuple[SourceConfig, ...]) -> tuple[SourceConfig, ...]:
    if not sources:
        raise ValueError("must name a source")
    return sources


def _kind(value: Any) -> str:
    return "sources" if isinstance(value, (list, tuple)) else "nothing" if value is None else "path"


_Path = Annotated[Text, Tag("path")]
_List = Annotated[tuple[SourceConfig, ...], AfterValidator(_not_empty), Tag("sources")]
Sources = Annotated[_Path | _List, Discriminator(lambda value: "path" if _kind(value) == "nothing" else _kind(value))]
OptionalSources = Annotated[_Path | _List | Annotated[None, Tag("nothing")], Discriminator(_kind)]


class ChatConfig(Section):
    template: Text = "none"
    """none: plain text; model: the chat template of the tokenizer; else the path of a Jinja file."""
    system: str | None = None
    """What the model is told before the prompt."""
    few_shot: Annotated[Whole, Field(ge=0), Unit("examples")] = 0
    """Solved examples before every prompt: so many from the beginning of `examples`."""
    examples: ExamplesConfig | None = None
    """Where the solved examples are."""
    options: dict[str, Any] = {}
    """Further variables of the template, as in `{enable_thinking: false}`."""
