"""Random tiny decoders for tests, engines on them, and the check of an engine's log-probs.

Families: Qwen2 (no GQA), Qwen3 (GQA, query/key norms, tied), Llama (GQA, tied).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from transformers import PreTrainedModel

from areal_hpc.engines.base import Completion, Request, Swap
from areal_hpc.engines.transformers_engine import TransformersEngine
from areal_hpc.models import named_weights, new_model
from areal_hpc.trajectory import Key

VOCAB = 29
FAMILIES = ("qwen2", "qwen3", "llama")
_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=256, initializer_range=0.3, bos_token_id=None, eos_token_id=1, pad_token_id=0,
)  # fmt: skip


def tiny_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A float32 model whose next-token distributions are far from uniform; equal seeds give equal weights."""
    torch.manual_seed(seed)
    if family == "qwen2":
        return new_model(family, **_COMMON, num_key_value_heads=4, tie_word_embeddings=False)
    if family == "qwen3":
        return new_model(family, **_COMMON, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
    return new_model(family, **_COMMON, num_key_value_heads=2, tie_word_embeddings=True)


def plain_logprobs(model: Any, tokens: list[int], num_prompt: int, temperature: float = 1.0) -> torch.Tensor:
    """Response log-probs by one ordinary transformers forward of one sequence, nothing of ours involved."""
    ids = torch.tensor(tokens)
    logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / temperature
    return torch.log_softmax(logits, -1)[num_prompt - 1 : -1].gather(-1, ids[num_prompt:, None])[:, 0]


def engine_of(family: str = "qwen2", seed: int = 0, **options: Any) -> TransformersEngine:
    defaults: dict[str, Any] = dict(num_slots=4, max_len=128, eos_ids=(), prefill_tokens=64)
    return TransformersEngine(tiny_model(family, seed), **(defaults | options))


def request(group: int, sample: int = 0, *, prompt_len: int = 7, budget: int = 20, min_version: int = 0) -> Request:
    """Samples of one group share a prompt; every sample has its own stream."""
    prompt = tuple(np.random.default_rng(group).integers(2, VOCAB, prompt_len).tolist())
    return Request((group, sample), prompt, budget, seed=1000 * group + sample, min_version=min_version)


def mixed_requests(num_groups: int = 6, group_size: int = 3) -> list[Request]:
    budgets = np.random.default_rng(0).integers(1, 40, (num_groups, group_size))
    return [
        request(g, s, prompt_len=1 + 5 * (g % 4), budget=int(budgets[g, s]))
        for g in range(num_groups)
        for s in range(group_size)
    ]


def weights_of(family: str, seed: int) -> list[tuple[str, torch.Tensor]]:
    return list(named_weights(tiny_model(family, seed)).items())


def run(engine: TransformersEngine, steps: int | None = None) -> list[Completion]:
    """Step until idle, or `steps` times."""
    completions: list[Completion] = []
    while engine.num_running or engine.num_waiting if steps is None else steps:
        completions += engine.step()
        steps = None if steps is None else steps - 1
    return completions


def certain(swap: Swap | None) -> Swap:
    assert swap is not None
    return swap


def by_key(completions: Sequence[Completion]) -> dict[Key, Completion]:
    assert len({c.key for c in completions}) == len(completions)
    return {c.key: c for c in completions}


def largest_error(
    completions: Sequence[Completion],
    requests: Sequence[Request],
    policies: dict[int, PreTrainedModel],
    temperature: float = 1.0,
) -> float:
    """Largest difference between stored log-probs and those of the version each token names."""
    prompts, worst = {r.key: r.prompt for r in requests}, 0.0
    for done in completions:
        prompt = prompts[done.key]
        for version in set(done.versions.tolist()):
            with torch.no_grad():
                fresh = plain_logprobs(policies[version], [*prompt, *done.tokens.tolist()], len(prompt), temperature)
            its_own = done.versions == version
            worst = max(worst, float(np.abs(fresh.numpy() - done.logprobs)[its_own].max()))
    return worst
