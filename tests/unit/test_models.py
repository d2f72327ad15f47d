"""models: packed scoring against ordinary forwards and hand-derived values; weights by name; load, save, refuse."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from areal_hpc import models
from tests.unit.tiny_models import FAMILIES, VOCAB, plain_logprobs, tiny_model

LENGTHS, PROMPTS = [7, 23, 2, 40, 12], [3, 10, 1, 39, 1]


def sequences(seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def packed(model: PreTrainedModel, parts: list[list[int]], prompts: list[int], **options: Any) -> tuple:
    borders = torch.tensor([0, *[len(part) for part in parts]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    tokens = torch.tensor([token for part in parts for token in part])
    return models.packed_logprobs(model, tokens, borders, prompt_lens=prompts, **options)


def bigram_model(table: list[list[float]]) -> PreTrainedModel:
    """A Qwen2 with P(next | token) = table[token][next]: blocks add nothing, embeddings are one-hot."""
    n = len(table)
    model = models.new_model(
        "qwen2", vocab_size=n, hidden_size=n, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, rms_norm_eps=1e-12, tie_word_embeddings=False,
    )  # fmt: skip
    weights = {name: torch.zeros_like(tensor) for name, tensor in models.named_weights(model).items()}
    weights["model.embed_tokens.weight"] = torch.eye(n)  # the final norm turns a one-hot vector into sqrt(n) times it
    weights["model.norm.weight"] = torch.full((n,), n**-0.5)
    weights["lm_head.weight"] = torch.tensor(table).log().T
    models.copy_weights(model, weights.items())
    return model


TABLE = [[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1], [0.2, 0.2, 0.3, 0.3]]


def test_bigram_values_by_hand() -> None:
    logprobs, entropy = packed(bigram_model(TABLE), [[0, 1, 2], [3, 2, 0, 0]], [1, 2], with_entropy=True)
    assert logprobs.dtype == torch.float32
    # 0 -> 1, 1 -> 2 | prompt 3 2, then 2 -> 0, 0 -> 0
    assert logprobs.tolist() == pytest.approx([math.log(p) for p in (0.25, 0.25, 0.7, 0.5)], abs=1e-6)
    of_0 = 1.75 * math.log(2)  # half of 1 bit, a quarter of 2, twice an eighth of 3
    of_2 = -0.7 * math.log(0.7) - 0.3 * math.log(0.1)
    assert entropy.tolist() == pytest.approx([of_0, math.log(4), of_2, of_0], abs=1e-6)


def test_temperature_divides_the_logits_by_hand() -> None:
    logprobs, _ = packed(bigram_model(TABLE), [[0, 0, 1]], [1], temperature=2.0)
    total = math.sqrt(0.5) + math.sqrt(0.25) + 2 * math.sqrt(0.125)  # p^(1/2), renormalised
    assert logprobs.tolist() == pytest.approx([math.log(math.sqrt(0.5) / total), math.log(0.5 / total)], abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_one_sequence_at_a_time(family: str) -> None:
    plain, model, parts = tiny_model(family), tiny_model(family), sequences()
    expected = torch.cat([plain_logprobs(plain, part, p, 0.8) for part, p in zip(parts, PROMPTS, strict=True)])
    logprobs, entropy = packed(model, parts, PROMPTS, temperature=0.8)
    assert entropy is None
    torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=1e-6)
    weights = torch.linspace(-1, 1, len(expected))
    (expected * weights).sum().backward()
    (logprobs * weights).sum().backward()
    for (name, parameter), (_, reference) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_sequence_sees_another(family: str) -> None:
    model, parts = tiny_model(family), sequences()
    with torch.no_grad():
        before, _ = packed(model, parts, PROMPTS)
        parts[1] = [(token + 1) % VOCAB for token in parts[1]]
        after, _ = packed(model, parts, PROMPTS)
    ends = torch.tensor([n - p for n, p in zip(LENGTHS, PROMPTS, strict=True)]).cumsum(0).tolist()
    changed = slice(ends[0], ends[1])
    assert not torch.isclose(before[changed], after[changed]).any()
    assert torch.equal(before[: ends[0]], after[: ends[0]]) and torch.equal(before[ends[1] :], after[ends[1] :])


def test_large_vocabularies_go_in_chunks_with_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, chunked, parts = tiny_model("llama"), tiny_model("llama"), sequences()
    expected, entropy = packed(whole, parts, PROMPTS, with_entropy=True)
    monkeypatch.setattr(models, "_LOGITS_PER_CHUNK", 5 * VOCAB)
    scored: list[int] = []
    real = models._score

    def score(*args: Any, **options: Any) -> Any:
        scored.append(len(args[1]))
        return real(*args, **options)

    monkeypatch.setattr(models, "_score", score)
    logprobs, entropy_of_chunks = packed(chunked, parts, PROMPTS, with_entropy=True)
    assert max(scored) == 5 and sum(scored) == len(expected)
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropy_of_chunks, entropy, atol=1e-6, rtol=1e-6)
    expected.sum().backward()
    logprobs.sum().backward()
    for parameter, reference in zip(chunked.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("prompts", "borders", "temperature"),
    [([0], [0, 4], 1.0), ([5], [0, 4], 1.0), ([1], [0, 3], 1.0), ([1, 1], [0, 4], 1.0), ([1], [0, 4], 0.0)],
)
def test_contradicting_arguments_are_refused(prompts: list[int], borders: list[int], temperature: float) -> None:
    with pytest.raises(ValueError):
        models.packed_logprobs(
            tiny_model("qwen2"), torch.arange(4), torch.tensor(borders), prompt_lens=prompts, temperature=temperature
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_named_weights_copy_everything_once(family: str) -> None:
    source, target, parts = tiny_model(family, 1), tiny_model(family, 2), sequences()
    names = list(models.named_weights(source))
    tied = source.config.tie_word_embeddings
    assert ("lm_head.weight" in names) is not tied and "model.embed_tokens.weight" in names
    models.copy_weights(target, reversed(models.named_weights(source).items()))
    assert torch.equal(packed(target, parts, PROMPTS)[0], packed(source, parts, PROMPTS)[0])
    shared = target.get_input_embeddings().weight is target.get_output_embeddings().weight
    assert shared is tied


def test_copy_weights_converts_the_dtype() -> None:
    source, target = tiny_model("qwen2", 1), tiny_model("qwen2", 2).bfloat16()
    models.copy_weights(target, models.named_weights(source).items())
    assert torch.equal(target.lm_head.weight, source.lm_head.weight.bfloat16())


def _wrong_shape(weights: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return list((weights | {"model.norm.weight": torch.zeros(3)}).items())


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda w: list(w.items())[1:], "model.embed_tokens.weight missing"),
        (lambda w: [*w.items(), ("extra", torch.zeros(1))], "extra unknown"),
        (lambda w: [*w.items(), *list(w.items())[:1]], "given twice"),
        (_wrong_shape, r"model.norm.weight has shape \[3\], needs \[32\]"),
    ],
)
def test_an_unfit_set_of_weights_changes_nothing(spoil: Any, complaint: str) -> None:
    model = tiny_model("qwen2", 2)
    before = {name: tensor.clone() for name, tensor in models.named_weights(model).items()}
    with pytest.raises(ValueError, match=complaint):
        models.copy_weights(model, spoil(models.named_weights(tiny_model("qwen2", 1))))
    assert all(torch.equal(before[name], tensor) for name, tensor in models.named_weights(model).items())


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    vocab = {token: index for index, token in enumerate(["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz"])}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocab, [])), pad_token="<pad>", eos_token="<eos>")


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_models_load_equal(family: str, tmp_path: Path) -> None:
    model, parts = tiny_model(family), sequences()
    models.save_model(model, tiny_tokenizer(), tmp_path)
    loaded = models.load_model(tmp_path, attention="sdpa")
    assert not loaded.training and list(models.named_weights(loaded)) == list(models.named_weights(model))
    assert torch.equal(packed(loaded, parts, PROMPTS)[0], packed(model, parts, PROMPTS)[0])
    assert models.load_model(tmp_path, dtype="bfloat16").dtype == torch.bfloat16
    assert models.load_tokenizer(tmp_path)("cab").input_ids == [4, 2, 3]


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    assert models.eos_ids(model) == (1,)
    model.generation_config.eos_token_id = [7, 5]
    models.save_model(model, None, tmp_path)
    assert models.eos_ids(model) == models.eos_ids(tmp_path) == (5, 7)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        models.eos_ids(model)


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no model at"):
        models.load_model(tmp_path / "Qwen/Qwen3-0.6B")
    model = tiny_model("qwen2")
    models.save_model(model, None, tmp_path)
    with pytest.raises(ValueError, match="dtype 'float31'"):
        models.load_model(tmp_path, dtype="float31")
    with pytest.raises(ValueError, match="attention 'flash'"):
        models.load_model(tmp_path, attention="flash")
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")  # a pickle: must not be read
    with pytest.raises(OSError):
        models.load_model(tmp_path)


def test_models_with_other_attention_are_refused() -> None:
    sizes = dict(num_hidden_layers=1, hidden_size=8, num_attention_heads=1, num_key_value_heads=1, intermediate_size=8)
    window = dict(use_sliding_window=True, sliding_window=4, max_window_layers=0)
    with pytest.raises(ValueError, match="sliding"):
        models.prepare(models.new_model("qwen2", vocab_size=9, **sizes, **window))
    with pytest.raises(ValueError, match="sliding_window"):
        models.prepare(models.new_model("mistral", vocab_size=9, **sizes))
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        models.prepare(models.new_model("gemma2", vocab_size=9, head_dim=8, layer_types=["full_attention"], **sizes))


def test_a_prepared_model_cannot_be_run_unpacked_by_mistake() -> None:
    model = tiny_model("qwen2")
    models.prepare(model)
    with pytest.raises(ValueError, match="packed"):
        model(input_ids=torch.arange(4)[None])


def test_attention_dropout_is_refused() -> None:
    model = tiny_model("qwen2").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match="dropout"):
        packed(model, sequences(), PROMPTS)
