"""Generation, and how far it may run ahead of learning."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from areal_hpc.config.types import Count, Fraction, Number, Ranks, Section, Tokens, Unit, Whole


class RolloutConfig(Section):
    ranks: Ranks = 1
    """Number of rollout ranks, one generation engine each."""
    engine: Literal["transformers", "simulated"] = "transformers"
    """Generation engine; simulated: a timed model without weights, see simulation."""
    slots: Annotated[Count, Unit("sequences")] = 64
    """Sequences that one engine decodes side by side."""
    max_prompt_tokens: Tokens = 1024
    """Longest prompt; a longer one is dropped and counted."""
    max_new_tokens: Tokens = 1024
    """Longest response, its end-of-sequence token included."""
    temperature: Annotated[Number, Field(ge=0)] = 1.0
    """Sampling temperature; log-probs are those of the distribution at this temperature. 0, the likeliest token, is for
    evaluations only."""
    interrupt: bool = True
    """Take new weights between two tokens of running sequences; false: running sequences finish first."""
    prefill_tokens: Tokens = 8192
    """Most tokens in one prefill pass."""
    threads: Annotated[Count, Unit("CPU threads")] = 1
    """Threads of one rollout rank for its model."""


class StalenessConfig(Section):
    max_staleness: Annotated[Whole, Field(ge=0), Unit("versions")] | Literal["inf"] = 4
    """eta of the admission rule: 0 is synchronous; "inf" for no limit."""
    order: Literal["admission", "strict"] = "admission"
    """admission: bounded when admitted, finished groups go oldest first; strict: consumed in admission order, so
    that no first token is ever older than max_staleness."""
    max_running_groups: Annotated[Count, Unit("prompt groups")] | None = None
    """Most groups in generation at once over all rollout ranks; null: what fills all slots and one more per rank."""

    @property
    def eta(self) -> float:
        return math.inf if self.max_staleness == "inf" else float(self.max_staleness)


class FilterConfig(Section):
    min_success: Fraction = 0.0
    """A group with a smaller share of correct answers is rejected."""
    max_success: Fraction = 1.0
    """A group with a larger share of correct answers is rejected."""
    refill: bool = True
    """Another prompt takes the place of a rejected group; false: the place stays empty and the batch is smaller."""
