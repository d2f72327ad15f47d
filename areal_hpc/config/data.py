"""What is learnt: the model, its prompts, how it is measured."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from areal_hpc.config.types import Count, Number, Section, Text, Unit


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
    train: Text
    """JSONL file of training prompts; each line an object with at least the prompt field."""
    heldout: Text | tuple[Text, ...] | None = None
    """JSONL file of prompts for evaluation, or several, each a set of its own; never trained on."""
    prompt_field: Text = "prompt"
    """Key of the prompt text in a line."""
    id_field: Text = "id"
    """Key of the prompt's identity; a line without it is named by its line number."""
    shuffle: bool = True
    """Draw prompts in an order that depends on the seed and the epoch, instead of file order."""
    epochs: Annotated[Count, Unit("passes over the file")] | None = None
    """End of the run when the file has been read this often; null: repeat until the last step."""

    @property
    def heldout_files(self) -> tuple[str, ...]:
        return (self.heldout,) if isinstance(self.heldout, str) else self.heldout or ()


class EvaluationConfig(Section):
    samples: Annotated[Count, Unit("answers per prompt")] = 1
    """Answers per held-out prompt; pass@1 is their mean."""
    every: Annotated[Count, Unit("policy versions")] | None = None
    """Also evaluate every so many versions, beside training and without stopping it; null: not during training."""
    share: Annotated[Number, Field(gt=0, le=1)] = 0.25
    """Largest share of each rollout rank's slots for held-out answers beside training; they take free places first."""
    at_start: bool = True
    """Evaluate the model before the first step."""
    at_end: bool = True
    """Evaluate the model after the last step."""
