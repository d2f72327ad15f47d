"""A model of a few thousand random weights, its data and its rewards: real ranks can run it in seconds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

LETTERS = "abcdefgh"


def make(directory: Path, num_prompts: int = 64, seed: int = 0) -> Path:
    """Write model/, train.jsonl and heldout.jsonl; returns the directory."""
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {"<|pad|>": 0, "<|eos|>": 1} | {letter: 2 + i for i, letter in enumerate(LETTERS)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<|pad|>", eos_token="<|eos|>")
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).float()
    model.generation_config.eos_token_id = 1
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    for name, count in (("train", num_prompts), ("heldout", 16)):
        prompts = [
            {"id": f"{name}{i}", "prompt": "".join(LETTERS[(i >> (3 * k)) % 8] for k in range(3))} for i in range(count)
        ]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    return directory


def reward(prompt: str, completion: str, metadata: dict) -> tuple[float, str]:
    """Right if the answer has more letters of the first half of the alphabet than of the second."""
    first = sum(letter in LETTERS[:4] for letter in completion)
    return (5.0, "correct") if 2 * first > len(completion) else (-5.0, "wrong")


def reward_with_answer(prompt: str, completion: str, metadata: dict) -> tuple[float, str, str]:
    """The same, and which half it has more letters of."""
    first = sum(letter in LETTERS[:4] for letter in completion)
    more = "first" if 2 * first > len(completion) else "tie" if 2 * first == len(completion) else "second"
    return (*reward(prompt, completion, metadata), more)


def waits_for_others(prompt: str, completion: str, metadata: dict, *, directory: str, others: int) -> tuple[float, str]:
    """The same, but the very first answer takes until so many others have been scored."""
    first, scored = Path(directory) / "first", Path(directory) / "others"
    try:
        first.touch(exist_ok=False)
    except FileExistsError:
        with scored.open("a") as file:
            file.write("x")
    else:
        deadline_s = time.monotonic() + 90
        while not scored.exists() or scored.stat().st_size < others:
            if time.monotonic() > deadline_s:
                raise TimeoutError("the others wait for this one")
            time.sleep(0.05)
    return reward(prompt, completion, metadata)


def killed_once(prompt: str, completion: str, metadata: dict, *, mark: str) -> tuple[float, str]:
    """The same, but the first process that comes here is killed, as by the kernel when memory ends."""
    with contextlib.suppress(FileExistsError), open(mark, "x"):
        os.kill(os.getpid(), signal.SIGKILL)
    return reward(prompt, completion, metadata)
