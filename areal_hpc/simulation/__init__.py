"""Simulated compute: decoding, training, moving weights and scoring are timed models; all else is the real thing.

`rollout.engine: simulated` and `trainer.engine: simulated` let two cores rehearse a run of hundreds of GPUs, one rank
per node: messages, admission, packing, shipping of trajectories, log and evaluation are those of any run. The settings
under `simulation` are its parameters. Token ids and log-probs mean nothing, there is no loss and no model.

Simulated seconds pass `simulation.speedup` times faster than real ones. Messages, controller and log do not, so at a
high speedup they look that much slower than they will be. All seconds in the log are real ones.

This file holds what a configuration names: `prepare` for its prompts, `reward` to fill in `reward.function`.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHARS_PER_TOKEN = 4
"""The simulated tokenizer: so many characters are a token."""

PROMPTS = {"train": 8192, "heldout": 64}
PROMPT_TOKENS = (40, 400)


def prepare(directory: Path) -> None:
    """Write train.jsonl and heldout.jsonl: prompts of 40 to 400 simulated tokens, the same ones every time."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, count in PROMPTS.items():
        path = directory / f"{name}.jsonl"
        if path.exists():
            continue
        unfinished = path.with_suffix(f".{os.getpid()}.part")
        unfinished.write_text("".join(_lines(name, count)), encoding="utf-8")
        unfinished.replace(path)


def _lines(name: str, count: int) -> Iterator[str]:
    lengths = random.Random(f"areal_hpc {name}")
    for i in range(count):
        prompt = "abc " * lengths.randint(*PROMPT_TOKENS)
        yield json.dumps({"id": f"{name}-{i}", "prompt": prompt}) + "\n"


def reward(prompt: str, completion: str, metadata: dict[str, Any]) -> float:
    """Stands in reward.function of a simulated run, where `simulation.success` decides and nobody calls it."""
    raise RuntimeError("areal_hpc.simulation:reward scores nothing; name the reward function of your task")
