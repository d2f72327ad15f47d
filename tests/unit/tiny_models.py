"""Random tiny decoders for tests: Qwen2 (no GQA), Qwen3 (GQA, query/key norms, tied), Llama (GQA, tied)."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import PreTrainedModel

from areal_hpc.models import new_model

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
