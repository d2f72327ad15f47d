"""`areal-hpc bench engine`: our generation engine against transformers' own `generate`, sampled tokens per second.

Two workloads, the same requests on both sides, end-of-sequence switched off so that lengths are given:
- equal: one full batch, all responses of one length. Shows what our bookkeeping costs; goal 0.9.
- long tail: log-normal response lengths, four batches of requests. `generate` runs them in static batches, each until
  its longest row ends; the engine refills slots as they fall free. Goal 1.5, the headline.
Only requested tokens count. Both sides take turns in one process, on equal weights. Our side also keeps log-probs and
version tags, which `generate` is not asked for.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from areal_hpc import models
from areal_hpc.bench.report import report
from areal_hpc.engines.base import Request
from areal_hpc.engines.transformers_engine import TransformersEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEMO_SIZE: dict[str, Any] = dict(
    vocab_size=23, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=3,
    num_key_value_heads=3, max_position_embeddings=1024, initializer_range=0.08, tie_word_embeddings=False,
    bos_token_id=None, eos_token_id=1, pad_token_id=0,
)  # fmt: skip
EQUAL_GOAL, TAIL_GOAL = 0.9, 1.5
TAIL_BATCHES = 4
TAIL_SIGMA = 1.0
"""Of the log of the length: the 95th percentile is about five times the median."""


def equal_requests(rows: int, prompts: np.ndarray, length: int) -> list[Request]:
    return [Request((i, 0), tuple(prompts[i].tolist()), length, seed=i) for i in range(rows)]


def tail_requests(rows: int, prompts: np.ndarray, length: int, longest: int, seed: int) -> list[Request]:
    """Lengths with median `length` / 2, at most `longest`."""
    lengths = np.random.default_rng(seed).lognormal(np.log(length / 2), TAIL_SIGMA, rows * TAIL_BATCHES)
    budgets = np.clip(lengths.round().astype(int), 1, longest)
    return [Request((i, 0), tuple(prompts[i].tolist()), int(n), seed=i) for i, n in enumerate(budgets)]


def run_engine(engine: TransformersEngine, requests: list[Request]) -> int:
    """Returns the number of sampled tokens."""
    engine.submit(requests)
    count = 0
    while engine.num_running or engine.num_waiting:
        count += sum(len(done.tokens) for done in engine.step())
    return count


def run_generate(model: Any, requests: list[Request], rows: int) -> int:
    """Static batches of `rows` requests in order; returns the number of requested tokens, padding not counted."""
    for start in range(0, len(requests), rows):
        batch = requests[start : start + rows]
        ids = torch.tensor([request.prompt for request in batch], device=model.device)
        longest = max(request.max_new_tokens for request in batch)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=longest,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )
    return sum(request.max_new_tokens for request in requests)


def tokens_per_second(side: Callable[[], int], device: torch.device) -> float:
    started = time.perf_counter()
    count = side()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return count / (time.perf_counter() - started)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="areal-hpc bench engine", description="tokens/s against generate")
    parser.add_argument("--model", type=Path, help="model directory (default: a random Qwen2 of the demo's size)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=64, help="samples side by side (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=16, help="prompt tokens (default: %(default)s)")
    parser.add_argument("--length", type=int, default=100, help="tokens of the equal workload (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=500, help="cut of the long tail (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if min(options.rows, options.prompt, options.length, options.longest, options.repeats, options.threads) < 1:
        parser.error("counts must be at least 1")
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    return compare(options, build(options))


def build(options: argparse.Namespace) -> PreTrainedModel:
    if options.model:
        return models.load_model(options.model, dtype=options.dtype, device=options.device)
    model: Any = models.new_model("qwen2", **DEMO_SIZE)
    return model.to(device=options.device, dtype=getattr(torch, options.dtype))


def compare(options: argparse.Namespace, model: PreTrainedModel) -> int:
    plain = models.plain_copy(model)
    rng = np.random.default_rng(options.seed)
    prompts = rng.integers(2, model.config.vocab_size, (options.rows * TAIL_BATCHES, options.prompt))
    workloads = {
        "equal": equal_requests(options.rows, prompts, options.length),
        "long tail": tail_requests(options.rows, prompts, options.length, options.longest, options.seed),
    }
    max_len = options.prompt + max(options.length, options.longest)
    engine = TransformersEngine(model, num_slots=options.rows, max_len=max_len, eos_ids=())
    figures: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in workloads}
    run_engine(engine, workloads["equal"]), run_generate(plain, workloads["equal"], options.rows)  # warm-up
    for _ in range(options.repeats):
        for name, requests in workloads.items():
            ours, reference = figures[name]
            ours.append(tokens_per_second(partial(run_engine, engine, requests), model.device))
            reference.append(tokens_per_second(partial(run_generate, plain, requests, options.rows), model.device))
    rows = [row(name, workloads[name], *figures[name]) for name in workloads]
    return publish(options, figures, rows)


def row(name: str, requests: list[Request], ours: list[float], reference: list[float]) -> dict[str, str]:
    lengths = [request.max_new_tokens for request in requests]
    pairs = [a / b for a, b in zip(ours, reference, strict=True)]
    goal = EQUAL_GOAL if name == "equal" else TAIL_GOAL
    ratio = median(ours) / median(reference)
    return {
        "workload": name,
        "requests": str(len(requests)),
        "tokens median/max": f"{median(lengths):.0f}/{max(lengths)}",
        "engine tok/s": f"{median(ours):.0f}",
        "generate tok/s": f"{median(reference):.0f}",
        "ratio": f"{ratio:.2f}",
        "spread": f"{min(pairs):.2f} .. {max(pairs):.2f}",
        "goal": f">= {goal}: {'met' if ratio >= goal else 'MISSED'}",
    }


def publish(
    options: argparse.Namespace, figures: dict[str, tuple[list[float], list[float]]], rows: list[dict[str, str]]
) -> int:
    """The long tail as headline; the equal workload as extra keys of the same JSON line."""
    ours, reference = figures["equal"]
    pairs = [a / b for a, b in zip(ours, reference, strict=True)]
    equal = {"equal_ratio": median(ours) / median(reference), "equal_spread": [min(pairs), max(pairs)]}
    unit = f"tok/s ({options.rows} rows, long tail)"
    return report("engine", unit, *figures["long tail"], goal=TAIL_GOAL, rows=rows, extra=equal)
