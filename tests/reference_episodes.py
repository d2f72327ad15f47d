"""The workflow `three_turns` of tests/episodes.py and all learning from it as one plain loop; see reference_loop.py."""

from __future__ import annotations

import numpy as np
import torch

from areal_hpc.sampling import uniforms
from areal_hpc.seeds import sample_seed
from tests.episodes import TRIGGERS, neighbours, scores
from tests.reference_loop import _step

EOS = 1


def episode(model, tokenizer, prompt: list[int], seed: int, budget: int):
    """Response, behaviour log-probs, turn of each token (-1: put in) and reward of each turn."""
    tokens, logprobs, turns, texts = [], [], [], []
    numbers = uniforms(seed, 0, budget)
    for number in range(3):
        start, letter = len(tokens), ""
        while len(tokens) < min(budget, start + 10) and letter not in (*TRIGGERS, "eos"):
            with torch.no_grad():
                logp = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0, -1], -1)
            cumulative = np.cumsum(logp.double().exp().numpy())
            tokens.append(int(np.searchsorted(cumulative, numbers[len(tokens)], side="right")))
            logprobs.append(float(logp[tokens[-1]]))
            turns.append(number)
            letter = "eos" if tokens[-1] == EOS else tokenizer.decode([tokens[-1]], skip_special_tokens=True) or "pad"
        texts.append(tokenizer.decode(tokens[start:], skip_special_tokens=True))
        if letter == "eos" or len(tokens) == budget and letter not in TRIGGERS:
            break
        if letter in TRIGGERS:
            added = tokenizer(neighbours(letter)["text"]).input_ids[: budget - len(tokens)]
            tokens, logprobs, turns = tokens + added, logprobs + [0.0] * len(added), turns + [-1] * len(added)
    return tokens, logprobs, turns, scores(texts)


def advantages_of(group: list[list[float]], discount: float) -> list[list[float]]:
    """Per turn: its discounted return minus the mean of the group, over its std; every episode has the same say."""
    returns = [[sum(discount ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))] for r in group]
    mean = np.mean([np.mean(g) for g in returns])
    std = np.sqrt(np.mean([np.mean((np.array(g) - mean) ** 2) for g in returns]))
    return [[(g - mean) / (std + 1e-5) if std > 0 else 0.0 for g in of_one] for of_one in returns]


def reference_losses(config: dict) -> list[dict[str, float]]:
    """Loss, reward, tokens in the loss and largest gradient norm of every step of a synchronous run."""
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
            prompt = tokenizer(source.next().text).input_ids
            seeds = [sample_seed(config["seed"], "train", group_id, k) for k in range(trainer["group_size"])]
            budget = config["rollout"]["max_new_tokens"]
            group = [episode(model, tokenizer, prompt, seed, budget) for seed in seeds]
            values = advantages_of([rewards for *_, rewards in group], config["workflow"]["discount"])
            for (tokens, behaviour, turns, rewards), of_turns in zip(group, values, strict=True):
                per_token = [of_turns[turn] if turn >= 0 else 1e6 for turn in turns]
                samples.append((prompt, tokens, behaviour, sum(rewards), per_token, [turn >= 0 for turn in turns]))
            group_id += 1
        history.append(_step(model, optimizer, samples, trainer["minibatches"], config["seed"] * 1_000_003 + step))
        history[-1]["response"] = sum(len(sample[1]) for sample in samples)
    return history
