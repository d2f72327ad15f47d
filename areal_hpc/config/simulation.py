"""The timed models of `engine: simulated`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from areal_hpc.config.types import Count, Fraction, Number, Seconds, Section, Unit


class SimulationConfig(Section):
    speedup: Annotated[Number, Field(gt=0), Unit("simulated seconds per second")] = 1.0
    """All simulated times are divided by it; messages, controller and log are real and take what they take."""
    gpus_per_rank: Annotated[Count, Unit("GPUs")] = 8
    """GPUs that one rank stands for, each with a copy of the model; sequences and tokens are shared out evenly."""
    response_median: Annotated[Number, Field(gt=0), Unit("tokens")] = 6000.0
    """Median length of a response; lengths are log-normal, cut at rollout.max_new_tokens."""
    response_sigma: Annotated[Number, Field(ge=0), Unit("1")] = 0.9
    """Standard deviation of the logarithm of the length: how long the tail is."""
    success: Fraction = 0.5
    """Probability that an answer is right."""
    reward_s: Annotated[Number, Field(ge=0), Unit("s")] = 0.5
    """From the end of a response to its reward."""
    decode_s: Seconds = 0.008
    """One decoding step, before anything that grows with the batch."""
    decode_sequence_s: Annotated[Number, Field(ge=0), Unit("s")] = 4.0e-5
    """What each running sequence of a GPU adds to a decoding step."""
    decode_context_s: Annotated[Number, Field(ge=0), Unit("s")] = 1.2e-8
    """What each token in the KV cache of a GPU adds to a decoding step."""
    prefill_tokens_per_s: Annotated[Number, Field(gt=0), Unit("tokens/s of a GPU")] = 60000.0
    """Prefill of prompts and, after an interruption, of everything generated so far; decoding stands still."""
    load_s: Annotated[Number, Field(ge=0), Unit("s")] = 1.0
    """Swapping new weights in, before the prefill."""
    model_bytes: Annotated[Count, Unit("bytes")] = 3_100_000_000
    """Size of the weights that are broadcast."""
    broadcast_bytes_per_s: Annotated[Number, Field(gt=0), Unit("bytes/s")] = 1.0e10
    """Rate at which new weights reach all rollout ranks."""
    publish_s: Annotated[Number, Field(ge=0), Unit("s")] = 0.5
    """Training stands still while the first trainer rank copies its weights for the broadcast."""
    train_tokens_per_s: Annotated[Number, Field(gt=0), Unit("tokens/s of a GPU")] = 20000.0
    """Forward, backward and recomputed log-probs; the rank with most tokens decides."""
    train_step_s: Annotated[Number, Field(ge=0), Unit("s")] = 5.0
    """What a training step takes besides."""
