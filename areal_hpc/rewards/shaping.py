"""Ready-made reward functions for `reward.functions`, beside the one that judges the answer."""

from __future__ import annotations

import re
from typing import Any

THINK = r"\s*<think>(?:(?!</?think>).)*</think>\s*\S(?:(?!</?think>).)*"
"""One thought between <think> and </think>, then an answer."""


def overlong_penalty(
    prompt: str, completion: str, metadata: dict[Any, Any], *, num_tokens: int, max_new_tokens: int, cache: int
) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13).

    With |y| = num_tokens, L_max = max_new_tokens and L_cache = cache, all in tokens:

        0                                   if |y| <= L_max - L_cache
        ((L_max - L_cache) - |y|) / L_cache if L_max - L_cache < |y| <= L_max
        -1                                  if |y| > L_max

    Raises:
        ValueError: cache is not between 1 and max_new_tokens.
    """
    if not 1 <= cache <= max_new_tokens:
        raise ValueError(f"cache must be between 1 and max_new_tokens = {max_new_tokens} [tokens], got {cache}")
    return max(-1.0, min(0.0, ((max_new_tokens - cache) - num_tokens) / cache))


def format_reward(prompt: str, completion: str, metadata: dict[Any, Any], *, pattern: str = THINK) -> float:
    """1 if the whole completion matches the regular expression (a dot matches line breaks, too), else 0."""
    return float(re.fullmatch(pattern, completion, re.DOTALL) is not None)
