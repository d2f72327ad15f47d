"""Exact sampling from a categorical distribution with one uniform number per token.

Position t of a sample always uses number t of the sample's own counter-based stream, so its tokens depend on seed,
prompt and weights only: not on batch neighbours, slot, rank, schedule, or on how often decoding was interrupted.
AReaL draws from the engine's shared generator, which makes no such promise. No top-k and no top-p: the stored
log-prob would not be that of the distribution sampled from.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_PER_BLOCK = 4  # numbers per Philox counter value


def uniforms(seed: int, start: int, count: int) -> NDArray[np.float64]:
    """Numbers start .. start + count - 1 of stream `seed`: float64 [count] in [0, 1), multiples of 2^-53.

    Raises:
        ValueError: seed outside 0 .. 2^63 - 1, or a negative start or count.
    """
    if not 0 <= seed < 1 << 63 or start < 0 or count < 0:
        raise ValueError(f"need 0 <= seed < 2^63, start >= 0, count >= 0; got {seed}, {start}, {count}")
    skip = start % _PER_BLOCK
    stream = np.random.Generator(np.random.Philox(key=seed, counter=start // _PER_BLOCK))
    return stream.random(skip + count)[skip:]


def sample(logits: Tensor, uniforms: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution at the row's uniform number.

    The token is the first whose cumulative probability (float64) exceeds u; one of probability 0 is never drawn.
    Temperature 0 means greedy: the most likely token with log-prob 0 (that of a certain event, of no use to PPO).

    Args:
        logits: [n, V], any floating type, -inf allowed, at least one finite per row.
        uniforms: float64 [n] in [0, 1).
        temperatures: float32 [n], none negative.

    Returns:
        int64 [n] tokens and float32 [n] log-probs, log softmax(logits / temperature) in fp32. A row with NaN, or
        without any finite logit, gets a NaN log-prob: check before use.
    """
    greedy = temperatures == 0
    logprobs = torch.log_softmax(logits.float() / temperatures.masked_fill(greedy, 1.0)[:, None], -1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    target = uniforms * cumulative[:, -1]  # u <= 1 - 2^-53, so this rounds to less than the last entry
    tokens = torch.searchsorted(cumulative, target[:, None], right=True).clamp_(max=logits.shape[-1] - 1)
    tokens, chosen = tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]
    if greedy.any():
        top, likeliest = logits.float().max(-1)
        tokens, chosen = torch.where(greedy, likeliest, tokens), torch.where(greedy, top - top, chosen)
    return tokens, chosen
