"""The whole algorithm as one plain loop: no ranks, no cache, no packing, one sequence at a time.

It shares with the product only the names of the random streams (seeds.py, sampling.uniforms) and the order of samples
in minibatches (packing.plan's documented permutation).
"""

from __future__ import annotations

import numpy as np
import torch

from areal_hpc.sampling import uniforms
from areal_hpc.seeds import sample_seed
from tests.tiny import reward

CLIP = 0.2


def draw(model, prompt: list[int], seed: int, budget: int) -> tuple[list[int], list[float]]:
    """One answer by inverting the cumulative distribution, from a full forward pass per token."""
    tokens, logprobs = list(prompt), []
    for u in uniforms(seed, 0, budget):
        with torch.no_grad():
            logp = torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1], -1)
        token = int(np.searchsorted(np.cumsum(logp.double().exp().numpy()), u, side="right"))
        tokens.append(token)
        logprobs.append(float(logp[token]))
        if token == 1:
            break
    return tokens[len(prompt) :], logprobs


def token_logprobs(model, prompt: list[int], response: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def reference_losses(config: dict) -> list[dict[str, float]]:
    """Loss, reward, response tokens and largest gradient norm of every step of a synchronous run."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from areal_hpc.config import DataConfig
    from areal_hpc.data import PromptSource
    from areal_hpc.data.reading import read_prompts

    trainer, path = config["trainer"], config["model"]["path"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=trainer["optimizer"]["lr"], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    data = DataConfig.model_validate(config["data"])
    prompts = read_prompts(data.train_sources[0], data).prompts
    source = PromptSource(prompts, seed=config["seed"], shuffle=True, epochs=None)
    history, group_id = [], 0
    for step in range(1, config["steps"] + 1):
        samples = []
        for _ in range(trainer["batch_size"]):
            text = source.next().text
            prompt = tokenizer(text).input_ids
            group = []
            for k in range(trainer["group_size"]):
                seed = sample_seed(config["seed"], "train", group_id, k)
                response, behaviour = draw(model, prompt, seed, config["rollout"]["max_new_tokens"])
                value, _ = reward(text, tokenizer.decode(response, skip_special_tokens=True), {})
                group.append((prompt, response, behaviour, value))
            values = np.array([g[3] for g in group])
            centred = values - values.mean()
            advantages = centred / (values.std() + 1e-5) if values.std() > 0 else centred
            samples += [(*g, a) for g, a in zip(group, advantages, strict=True)]
            group_id += 1
        history.append(_step(model, optimizer, samples, trainer["minibatches"], config["seed"] * 1_000_003 + step))
    return history


def _step(model, optimizer, samples, minibatches: int, seed: int) -> dict[str, float]:
    with torch.no_grad():
        proximal = [token_logprobs(model, p, r) for p, r, *_ in samples]
    order = np.random.default_rng(seed).permutation(len(samples))
    total, tokens, norms = 0.0, 0, []
    for part in np.array_split(order, minibatches):
        count = sum(len(samples[i][1]) for i in part)
        optimizer.zero_grad()
        for i in part:
            prompt, response, behaviour, _, advantage = samples[i]
            current = token_logprobs(model, prompt, response)
            u = torch.exp(current - proximal[i])
            w = torch.exp(proximal[i] - torch.tensor(behaviour))
            term = w * torch.minimum(u * advantage, u.clamp(1 - CLIP, 1 + CLIP) * advantage)
            loss = -term.sum() / count
            loss.backward()
            total += float(loss.detach()) * count
        tokens += count
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return {
        "loss": total / tokens,
        "tokens": tokens,
        "grad_norm": max(norms),
        "reward": float(np.mean([s[3] for s in samples])),
    }
