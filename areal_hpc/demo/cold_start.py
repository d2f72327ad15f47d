"""The demo's starting point, made on this machine: a data set, a tokenizer and a tiny Qwen2 model, able but sloppy.

    DIR/model/            Hugging Face layout: config, safetensors, tokenizer (one token per character)
    DIR/train.jsonl       {"id": "train-0", "prompt": "gcd(63,96)=", "answer": "3"}, one per line
    DIR/heldout.jsonl     the same with other pairs of numbers
    DIR/prepared.json     sizes and hashes of all of them, written last; without it nothing here counts

The model learns from a demonstrator who makes no mistake but often gives up and guesses. So it can solve nearly every
problem (greedy), and solves less than half of them when sampled at temperature 1.
The forward pass is the trainer's own (`models.packed_logprobs`). One thread is the default: at this size two are hardly
faster, and far slower when something else wants the second core.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from areal_hpc.demo import gcd
from areal_hpc.exits import Exit, RunError

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MANIFEST = "prepared.json"
_OURS = {"model", "train.jsonl", "heldout.jsonl", MANIFEST}
_PAD, _EOS = "<|pad|>", "<|eos|>"
_PROGRESS_S = 4.0


@dataclass(frozen=True)
class Recipe:
    """What is built. Chosen so that 0.34 M parameters learn the task in about a minute of one core.

    Attributes:
        tokens_per_step: lower bound of the tokens of one optimizer step, prompts included.
        matrix_lr: learning rate of the decoder's matrices (Muon).
        other_lr: learning rate of embeddings, head, biases and norms (AdamW).
        warmup_steps: linear warm-up; both rates fall to 0 along a half cosine.
        drill_share: share of examples that are drills (`gcd.drill`), the others are whole demonstrations.
        give_up: probability per step with which the demonstrator gives up and guesses.
    """

    num_train: int = 6000
    num_heldout: int = 512
    hidden_size: int = 96
    intermediate_size: int = 256
    num_layers: int = 3
    num_heads: int = 3
    initializer_range: float = 0.04
    num_steps: int = 700
    tokens_per_step: int = 1000
    matrix_lr: float = 0.01
    other_lr: float = 6e-3
    warmup_steps: int = 50
    drill_share: float = 0.55
    give_up: float = 0.11


class Example(NamedTuple):
    """Token ids; only those of the response are learned."""

    prompt: list[int]
    response: list[int]


def prepare(
    directory: Path,
    *,
    seed: int = 0,
    threads: int | None = None,
    progress: Callable[[str], None] = print,
    recipe: Recipe = Recipe(),
) -> None:
    """Make `directory` hold the demo's data and model; returns at once if it does already.

    Everything is built beside it and renamed into place, so a build that was killed leaves nothing that looks complete
    and of several builders at the same time one wins. Equal recipe, seed and threads give equal bytes on one machine.

    Args:
        threads: torch's threads during the build; 1 if None.
        progress: gets a line of text every few seconds and one at the end.

    Raises:
        RunError: `directory` holds files that are not the demo's (they are left alone), or the training diverged.
    """
    directory = directory.resolve()
    fingerprint = _fingerprint(recipe, seed)
    if _is_prepared(directory, fingerprint):
        return
    _refuse_other_files(directory)
    began_s = time.monotonic()
    staging = directory.with_name(f".{directory.name}.{uuid.uuid4().hex[:12]}")
    staging.mkdir(parents=True)
    try:
        progress(f"cold start: building the demo in {directory}")
        _build(staging, recipe, seed, threads or 1, progress)
        _write_manifest(staging, fingerprint)
        _put_in_place(staging, directory, fingerprint)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    prompts = f"{recipe.num_train} training and {recipe.num_heldout} held-out prompts"
    progress(f"cold start: done in {time.monotonic() - began_s:.0f} s: a model and {prompts} in {directory}")


def _fingerprint(recipe: Recipe, seed: int) -> str:
    """Hash of all that decides what is built: the recipe, the seed, and the code of the task and of this file."""
    sha = hashlib.sha256(json.dumps([asdict(recipe), seed]).encode())
    for source in (gcd.__file__, __file__):
        sha.update(Path(source).read_bytes())
    return sha.hexdigest()


def _file_facts(path: Path) -> dict[str, int | str]:
    content = path.read_bytes()
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _write_manifest(directory: Path, fingerprint: str) -> None:
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    files = {path.relative_to(directory).as_posix(): _file_facts(path) for path in paths}
    (directory / MANIFEST).write_text(json.dumps({"recipe": fingerprint, "files": files}, indent=2) + "\n")


def _is_prepared(directory: Path, fingerprint: str) -> bool:
    """The manifest is there, for this recipe, and every file is as it says."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        files = manifest["files"] if manifest["recipe"] == fingerprint else {}
        return bool(files) and all(_file_facts(directory / name) == facts for name, facts in files.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False  # missing or damaged in any way


def _refuse_other_files(directory: Path) -> None:
    if not directory.exists():
        return
    there = {path.name for path in directory.iterdir()} if directory.is_dir() else {"a file of that name"}
    others = sorted(there - _OURS)
    if others:
        raise RunError(
            Exit.CONFIG,
            f"{directory} is in use for something else ({', '.join(others[:5])}): the demo needs a directory "
            "of its own; name another one",
        )


def _put_in_place(staging: Path, directory: Path, fingerprint: str) -> None:
    """Rename; what is there and not valid is moved away first. Of two builders the second one keeps the first one's."""
    retired = staging.with_name(staging.name + ".old")
    for _ in range(10):
        try:
            staging.rename(directory)  # succeeds if there is nothing, or an empty directory
            return
        except OSError:
            if _is_prepared(directory, fingerprint):
                return
        try:
            directory.rename(retired)
        except FileNotFoundError:
            continue  # the other builder has just moved it away
        shutil.rmtree(retired)
    raise RunError(Exit.DISK, f"{directory} cannot be replaced: other processes keep writing there")


def _build(directory: Path, recipe: Recipe, seed: int, threads: int, progress: Callable[[str], None]) -> None:
    """Write data, model and tokenizer below `directory`."""
    train, heldout = gcd.split(random.Random(seed), recipe.num_train, recipe.num_heldout)
    for name, problems in (("train", train), ("heldout", heldout)):
        lines = [
            json.dumps({"id": f"{name}-{i}", "prompt": problem.prompt, "answer": str(problem.answer)}) + "\n"
            for i, problem in enumerate(problems)
        ]
        (directory / f"{name}.jsonl").write_text("".join(lines))

    from transformers.utils import logging

    from areal_hpc import models

    tokenizer = build_tokenizer()
    with _torch_settings(seed, threads):
        model = build_model(tokenizer, recipe)
        imitate(model, tokenizer, train, recipe, random.Random(f"{seed}/demonstrations"), progress)
    logging.disable_progress_bar()
    models.save_model(model, tokenizer, directory / "model")


@contextmanager
def _torch_settings(seed: int, threads: int) -> Iterator[None]:
    """Seed and thread count for a while; the caller's come back."""
    import torch

    threads_before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads_before)


def build_tokenizer() -> PreTrainedTokenizerBase:
    r"""One token per character of the task, one for `\boxed{`, padding 0, end of sequence 1."""
    from tokenizers import Tokenizer, decoders
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((_PAD, _EOS, gcd.BOX, *gcd.CHARACTERS))}
    tokenizer = Tokenizer(kinds.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([gcd.BOX])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_EOS, padding_side="left")


def build_model(tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> PreTrainedModel:
    """A random float32 Qwen2 decoder without grouped heads and tied embeddings; draws from torch's global stream."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_heads,
        max_position_embeddings=1024,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=False,
        **special,
    )
    return Qwen2ForCausalLM(config).float()


def imitate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[gcd.Problem],
    recipe: Recipe,
    rng: random.Random,
    progress: Callable[[str], None],
) -> None:
    """Supervised training on demonstrations, in place: mean negative log-prob of the response tokens."""
    import torch

    from areal_hpc.models import packed_logprobs

    optimizers = build_optimizers(model, recipe)
    report = _Report(recipe.num_steps, progress)
    for step in range(recipe.num_steps):
        examples = draw_examples(tokenizer, problems, recipe, rng)
        lengths = [len(example.prompt) + len(example.response) for example in examples]
        logprobs, _ = packed_logprobs(
            model,
            torch.tensor([token for example in examples for token in (*example.prompt, *example.response)]),
            torch.tensor([0, *accumulate(lengths)]),
            prompt_lens=[len(example.prompt) for example in examples],
        )
        loss = -logprobs.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak_lr in optimizers:
            optimizer.param_groups[0]["lr"] = peak_lr * lr_factor(recipe, step)
            optimizer.step()
            optimizer.zero_grad()
        report.step(float(loss.detach()), sum(lengths))


def build_optimizers(model: PreTrainedModel, recipe: Recipe) -> list[tuple[Optimizer, float]]:
    """Each with its peak learning rate. Muon needs a third fewer steps here than AdamW alone."""
    import torch

    matrices: list[Parameter] = []
    others: list[Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and ".layers." in name else others).append(parameter)
    muon = torch.optim.Muon(matrices, lr=0.0, weight_decay=0.01, momentum=0.95, ns_steps=3)
    adamw = torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [(muon, recipe.matrix_lr), (adamw, recipe.other_lr)]


def lr_factor(recipe: Recipe, step: int) -> float:
    """Share of the peak learning rate in step 0, 1, ...: linear warm-up times half a cosine."""
    return min(1.0, (step + 1) / recipe.warmup_steps) * 0.5 * (1 + math.cos(math.pi * step / recipe.num_steps))


def draw_examples(
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[gcd.Problem],
    recipe: Recipe,
    rng: random.Random,
) -> list[Example]:
    """The examples of one optimizer step: drills and demonstrations, short and long, mixed."""
    encode = tokenizer.backend_tokenizer.encode
    examples: list[Example] = []
    num_tokens = 0
    while num_tokens < recipe.tokens_per_step:
        if rng.random() < recipe.drill_share:
            prompt, response = gcd.drill(rng)
        else:
            problem = rng.choice(problems)
            prompt, response = problem.prompt, gcd.demonstrate(problem, rng, give_up=recipe.give_up) + _EOS
        examples.append(Example(encode(prompt).ids, encode(response).ids))
        num_tokens += len(examples[-1].prompt) + len(examples[-1].response)
    return examples


class _Report:
    """Says every few seconds how far the training is; stops it when the loss is no number."""

    def __init__(self, num_steps: int, progress: Callable[[str], None]) -> None:
        self.num_steps, self.progress = num_steps, progress
        self.began_s = self.said_s = time.monotonic()
        self.steps = self.tokens = 0

    def step(self, loss: float, num_tokens: int) -> None:
        self.steps += 1
        self.tokens += num_tokens
        if not math.isfinite(loss):
            raise RunError(Exit.DIVERGED, f"cold start: the loss of step {self.steps} is {loss}; try another seed")
        now_s = time.monotonic()
        if now_s - self.said_s < _PROGRESS_S:
            return
        self.said_s = now_s
        elapsed_s = now_s - self.began_s
        left_s = elapsed_s / self.steps * (self.num_steps - self.steps)
        self.progress(
            f"cold start: step {self.steps} of {self.num_steps}, loss {loss:.3f}, "
            f"{self.tokens / elapsed_s:.0f} tokens/s, about {left_s:.0f} s left"
        )
