"""A model that writes Python blocks: some of its tokens are whole lines, and it knows what often comes after what."""

from __future__ import annotations

import json
from pathlib import Path

LINES = ["```python\n", "print(6 * 7)\n", "1 / 0\n", "```\n", "```output"]
CHARACTERS = "\u010a\u0120abcdefghijklmnopqrstuvwxyzDENZ0123456789:.`'"
"""As byte-level tokenizers spell them: the first two are line break and space."""
FOLLOWS = {
    "": ["```python\n"],
    "```python\n": LINES[1:3],
    LINES[1]: ["```\n"],
    LINES[2]: ["```\n"],
    "```\n": [LINES[4]],
}
"""What most likely comes next; "" stands for every single character."""
LOGIT = 5.0


def make(directory: Path, seed: int = 0) -> Path:
    """Write model/ and train.jsonl; returns the directory."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {"<|pad|>": 0, "<|eos|>": 1} | {letter: 2 + i for i, letter in enumerate(CHARACTERS)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_tokens(LINES)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<|pad|>", eos_token="<|eos|>")
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.02,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).float()
    model.generation_config.eos_token_id = 1
    with torch.no_grad():  # a hidden state is mostly the embedding of the newest token, and that mostly one entry
        model.model.embed_tokens.weight[:, 0] = 1.0
        for entry, (line, followers) in enumerate(FOLLOWS.items(), start=1):
            if line:
                token = tokenizer.convert_tokens_to_ids(line)
                model.model.embed_tokens.weight[token, [0, entry]] = torch.tensor([0.0, 1.0])
            for follower in followers:
                token = tokenizer.convert_tokens_to_ids(follower)
                model.lm_head.weight[token, entry if line else 0] = LOGIT / config.hidden_size**0.5
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    prompts = [{"id": str(i), "prompt": f"what is 6 times 7{':' * (i % 4)}"} for i in range(16)]
    (directory / "train.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return directory


def reward(prompt: str, completion: str, metadata: dict) -> tuple[float, str]:
    """Right if a program has printed it."""
    return (1.0, "correct") if "42" in completion else (0.0, "wrong")
