"""Learning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from areal_hpc.config.types import Count, Number, Section, Tokens, Unit, Whole


class ObjectiveConfig(Section):
    kind: Literal["decoupled", "naive"] = "decoupled"
    """Decoupled PPO (paper Eq. 5), or PPO around the behaviour policy, for ablations."""
    clip_low: Annotated[Number, Field(gt=0, lt=1)] = 0.2
    """The ratio u is clipped below at 1 - clip_low."""
    clip_high: Annotated[Number, Field(gt=0)] = 0.2
    """The ratio u is clipped above at 1 + clip_high."""
    dual_clip: Annotated[Number, Field(gt=1)] | None = None
    """Bound on the ratio for negative advantages; null: off."""
    weight_cap: Annotated[Number, Field(ge=1)] | None = None
    """Cap on the behaviour weight w = proximal / behaviour; null: no cap."""
    cap_mode: Literal["mask", "clamp"] = "mask"
    """What happens to a token above the cap: it leaves the sum, or w is set to the cap."""


class AdvantageConfig(Section):
    group_norm: Literal["none", "mean", "mean_std"] = "mean_std"
    """Centre (and scale) rewards inside each prompt group (GRPO)."""
    batch_norm: bool = False
    """Centre and scale over all response tokens of the batch."""


class OptimizerConfig(Section):
    lr: Annotated[Number, Field(gt=0)] = 2e-5
    """Learning rate of AdamW after warm-up."""
    warmup_steps: Annotated[Whole, Field(ge=0), Unit("steps")] = 0
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: Annotated[Number, Field(ge=0)] = 0.05
    """Decoupled weight decay."""
    beta1: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[Number, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    eps: Annotated[Number, Field(gt=0)] = 1e-5
    """Term added to the denominator."""
    max_grad_norm: Annotated[Number, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm over all parameters."""


class TrainerConfig(Section):
    ranks: Annotated[Whole, Field(ge=0), Unit("MPI ranks")] = 1
    """Number of trainer ranks; each holds the whole model, gradients are summed over them. 0: nothing is trained, the
    held-out prompts are answered with the weights in model.path (`areal-hpc evaluate`)."""
    engine: Literal["transformers", "simulated"] = "transformers"
    """Training engine; simulated: a timed model without weights, see simulation."""
    batch_size: Annotated[Count, Unit("prompts")] = 512
    """Prompt groups per training batch (B); the policy version rises by one per batch."""
    group_size: Annotated[Count, Unit("answers per prompt")] = 16
    """Answers sampled for each prompt."""
    minibatches: Annotated[Count, Unit("optimizer steps per batch")] = 1
    """PPO minibatches that a batch is split into."""
    micro_batch_tokens: Tokens = 32768
    """Most tokens in one forward and backward pass."""
    max_skipped: Annotated[Count, Unit("batches in a row")] = 3
    """The run ends as diverged after this many batches without a finite loss and gradient."""
    export_every: Annotated[Whole, Field(ge=0), Unit("versions")] = 0
    """Also save the weights of every n-th version under RUN/weights; 0: only the final model."""
    threads: Annotated[Count, Unit("CPU threads")] = 1
    """Threads of one trainer rank."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """The policy objective."""
    advantage: AdvantageConfig = AdvantageConfig()
    """From rewards to advantages."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
