"""What is learnt: the model, its prompts, how it is measured."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from areal_hpc.config.sources import ChatConfig, OptionalSources, SourceConfig, Sources
from areal_hpc.config.types import Count, Number, Section, Text, Unit, Whole


class ModelConfig(Section):
    path: Text
    """Directory of the model in Hugging Face layout (config, safetensors, tokenizer)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter type on trainer and rollout ranks; log-softmax is float32 in any case."""


class PrepareConfig(Section):
    function: Text
    """`package.module:function`, called once with the directory before any rank starts; makes model and data."""
    directory: Text
    """Where it writes; what is already complete there is used as it is."""


class DataConfig(Section):
    train: Sources
    """Training prompts: path of a file whose rows have at least the prompt field, or a list of sources with weights."""
    heldout: OptionalSources = None
    """Prompts for evaluation, never trained on: a path, or a list of named sets that are measured one by one."""
    prompt_field: Text = "prompt"
    """Key of the prompt text in a line."""
    id_field: Text = "id"
    """Key of the prompt's identity; a line without it is named by its line number."""
    shuffle: bool = True
    """Draw prompts in an order that depends on the seed and the epoch, instead of file order."""
    epochs: Annotated[Count, Unit("passes over the file")] | None = None
    """End of the run when a source is due that has been read this often; null: repeat until the last step."""
    max_bad_lines: Annotated[Whole, Field(ge=0), Unit("lines of a source")] = 0
    """Lines that may be unusable: they are logged, counted and left out; one more ends the run."""
    max_line_bytes: Annotated[Count, Unit("bytes")] = 32 * 1024 * 1024
    """Longest line of a JSONL file; a longer one is unusable."""
    chat: ChatConfig = ChatConfig()
    """How a prompt is put to the model; the reward function sees the prompt without all that."""

    @property
    def train_sources(self) -> tuple[SourceConfig, ...]:
        return _sources(self.train, "train")

    @property
    def heldout_sources(self) -> tuple[SourceConfig, ...]:
        return _sources(self.heldout, "heldout")


def _sources(value: str | tuple[SourceConfig, ...] | None, name: str) -> tuple[SourceConfig, ...]:
    """A path alone is one source of the plain layout."""
    if isinstance(value, str):
        return (SourceConfig(path=value, name=name),)
    return value or ()


class EvaluationConfig(Section):
    samples: Annotated[Count, Unit("answers per prompt")] = 1
    """Answers per held-out prompt; pass@1 is their mean."""
    temperature: Annotated[Number, Field(ge=0)] | None = None
    """Sampling temperature of held-out answers, 0 for the likeliest token; null: that of training."""
    every: Annotated[Count, Unit("policy versions")] | None = None
    """Also evaluate every so many versions, beside training and without stopping it; null: not during training."""
    share: Annotated[Number, Field(gt=0, le=1)] = 0.25
    """Largest share of each rollout rank's slots for held-out answers beside training; they take free places first."""
    at_start: bool = True
    """Evaluate the model before the first step."""
    at_end: bool = True
    """Evaluate the model after the last step."""
