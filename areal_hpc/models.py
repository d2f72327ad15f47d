"""Policies: load, save, copy their weights, score packed sequences. The only file that imports transformers.

Where AReaL patches model classes or needs flash-attn for packed sequences, this file registers one attention function
with transformers. It hands queries, keys and values to an `Attend` object that travels through the model's keyword
arguments, so the same unpatched model serves the trainer (packed, causal) and the generation engine (its own KV
cache). Nothing here depends on the name of transformers' cache argument, which changed between 5.16 and 5.24.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # compute nodes have no internet; a hub look-up would hang, not fail

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.logging import disable_progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

disable_progress_bar()  # one per rank would tear a batch log apart

KERNELS = ("sdpa", "varlen")
_PREFIX = "areal_hpc_"
_LOGITS_PER_CHUNK = 1 << 25  # 128 MiB of fp32 logits at a time
_UNSUPPORTED = ("final_logit_softcapping", "attn_logit_softcapping", "logits_scaling", "logit_scale")


class Attend(Protocol):
    """Attention of one layer over whatever layout the caller packed.

    query [B, H, T, D], key and value [B, KV, T, D] with rotary positions applied; returns [B, T, H, D].
    """

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor: ...


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """What transformers calls in every layer of a prepared model."""
    attend = kwargs.get("attend")
    if attend is None:
        raise ValueError("this model was prepared for packed sequences: use packed_logprobs or an engine")
    odd = [name for name in ("dropout", "sliding_window", "softcap") if kwargs.get(name)]
    if odd or kwargs.get("s_aux") is not None:
        raise ValueError(f"attention of layer {module.layer_idx} does not support {odd or 'sinks'}")
    return attend(module.layer_idx, query, key, value, kwargs["scaling"]), None


for _kernel in KERNELS:
    AttentionInterface.register(_PREFIX + _kernel, _attention)


class PackedAttention:
    """Causal attention inside each of several sequences laid end to end without padding (an `Attend` with B = 1).

    The "sdpa" kernel runs one torch SDPA call per sequence: on CPUs this beat length buckets, forward and backward,
    and what a sequence gets cannot depend on its neighbours. "varlen" is torch's variable-length flash attention.
    """

    def __init__(self, lengths: Sequence[int], kernel: str, device: torch.device) -> None:
        self.lengths, self.kernel = list(lengths), kernel
        if kernel == "varlen":
            ends = torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            self._cu_seqlens = ends.to(device, non_blocking=True)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if self.kernel == "varlen":
            return self._varlen(query, key, value, scale)
        # split, not slices: the backward of a slice writes a full-size zero tensor per sequence
        parts = zip(query.split(self.lengths, 2), key.split(self.lengths, 2), value.split(self.lengths, 2), strict=True)
        attend = partial(F.scaled_dot_product_attention, is_causal=True, scale=scale, enable_gqa=True)
        return torch.cat([attend(q, k, v) for q, k, v in parts], 2).transpose(1, 2)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        longest = max(self.lengths)
        ends = self._cu_seqlens
        out = varlen_attn(
            q, k, v, ends, ends, longest, longest, scale=scale, window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1]
        )
        return cast(Tensor, out)[None]


def load_model(
    path: str | Path, *, dtype: str = "float32", device: str | torch.device = "cpu", attention: str = "auto"
) -> PreTrainedModel:
    """Load a decoder from a local directory (safetensors, no remote code), in eval mode, ready for packed sequences.

    Args:
        dtype: a torch floating type by name, such as "float32" or "bfloat16".
        attention: "sdpa" (anywhere), "varlen" (CUDA, 16-bit weights), or "auto".

    Raises:
        FileNotFoundError: path is not a directory with a config.json.
        ValueError: unknown dtype or attention, or an architecture `prepare` refuses.
    """
    if not Path(path, "config.json").is_file():
        raise FileNotFoundError(f"no model at {path}: expected a local directory with config.json and *.safetensors")
    if not isinstance(kind := getattr(torch, dtype, None), torch.dtype) or not kind.is_floating_point:
        raise ValueError(f"dtype {dtype!r} is not a torch floating type; use float32, bfloat16 or float16")
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=kind, local_files_only=True, use_safetensors=True, trust_remote_code=False
    )
    model = model.to(device).eval()
    prepare(model, attention)
    return model


def new_model(architecture: str, **settings: Any) -> PreTrainedModel:
    """A float32 decoder with random weights from torch's generator, such as new_model("qwen2", hidden_size=96, ...).

    Args:
        architecture: transformers' model type.
        settings: fields of its config.
    """
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **settings), dtype=torch.float32).eval()


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with transformers' own SDPA attention, so that `generate` and ordinary forwards work on it."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("sdpa")
    return twin


def prepare(model: PreTrainedModel, attention: str = "auto") -> None:
    """Switch a loaded transformers decoder to this module's attention; does nothing if that was done before.

    Raises:
        ValueError: unknown attention, or a model whose attention or logits are not the standard ones, since its
            log-probs would be silently wrong.
    """
    if model.config._attn_implementation.startswith(_PREFIX):
        return
    if attention == "auto":
        is_flash_fit = model.device.type == "cuda" and model.dtype in (torch.float16, torch.bfloat16)
        attention = "varlen" if is_flash_fit else "sdpa"
    if attention not in KERNELS:
        raise ValueError(f"attention {attention!r} is unknown; use auto, {', '.join(KERNELS)}")
    config = model.config
    odd = [name for name in _UNSUPPORTED if getattr(config, name, None) not in (None, 1, 1.0)]
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        odd.append(f"layer types {sorted(set(config.layer_types))}")
    elif getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None):
        odd.append("sliding_window")
    if odd:
        raise ValueError(f"{type(model).__name__} is not supported, its log-probs would be wrong: {', '.join(odd)}")
    model.set_attn_implementation(_PREFIX + attention)
    if not model.config._attn_implementation.startswith(_PREFIX):
        raise ValueError(f"{type(model).__name__} does not let its attention be replaced (AttentionInterface)")


def attention_kernel(model: PreTrainedModel) -> str:
    """The kernel, "sdpa" or "varlen", a prepared model uses for packed sequences."""
    return model.config._attn_implementation.removeprefix(_PREFIX)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a local directory."""
    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def eos_ids(source: PreTrainedModel | str | Path) -> tuple[int, ...]:
    """Token ids that end a response, from the generation config, else from the model config; ascending.

    Raises:
        ValueError: neither names one; a policy without an end would always run into its length budget.
    """
    if isinstance(source, (str, Path)):
        configs = [AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)]
        if Path(source, "generation_config.json").is_file():
            configs.insert(0, GenerationConfig.from_pretrained(source, local_files_only=True))
    else:
        configs = [source.generation_config, source.config]
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(sorted(ids))
    raise ValueError(f"no end-of-sequence token: set eos_token_id in generation_config.json or config.json of {source}")


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: str | Path) -> None:
    """Write a directory that transformers, vLLM and `load_model` read: config, safetensors, tokenizer."""
    model.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter once, in the model's own order (equal on every rank); tied tensors under their first name.

    The tensors share storage with the model and need no gradient.
    """
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def copy_weights(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Overwrite all parameters in place (dtype and device converted), so that tied embeddings stay tied.

    Raises:
        ValueError: as `check_weights`; the model is then unchanged.
    """
    given = list(tensors)
    check_weights(model, given)
    new = dict(given)
    with torch.no_grad():
        for name, target in named_weights(model).items():
            target.copy_(new[name])


def check_weights(model: nn.Module, given: Sequence[tuple[str, Tensor]]) -> None:
    """Raise ValueError when a name of `named_weights` is missing, unknown or given twice, or a shape differs."""
    own = named_weights(model)
    new = dict(given)
    problems = [f"{name} missing" for name in own.keys() - new.keys()]
    problems += [f"{name} unknown" for name in new.keys() - own.keys()]
    problems += [
        f"{name} has shape {list(new[name].shape)}, needs {list(own[name].shape)}"
        for name in own.keys() & new.keys()
        if new[name].shape != own[name].shape
    ]
    if len(new) != len(given):
        problems.append(f"{len(given) - len(new)} given twice")
    if problems:
        raise ValueError(f"weights do not fit {type(model).__name__}: " + "; ".join(sorted(problems)[:8]))


def hidden_states(model: PreTrainedModel, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """Run the decoder without its head. tokens, positions: int64 [B, T]; returns [B, T, hidden]."""
    prepare(model)
    output = model.base_model(input_ids=tokens, position_ids=positions, use_cache=False, attend=attend)
    return output.last_hidden_state


def head(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits [..., vocabulary] in the model's dtype of hidden states [..., hidden]."""
    return model.get_output_embeddings()(hidden)


def packed_logprobs(
    model: PreTrainedModel,
    tokens: Tensor,
    cu_seqlens: Tensor,
    *,
    prompt_lens: Sequence[int] | Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of all response tokens of several sequences laid end to end, in one forward without padding.

    Positions restart at every border and no attention crosses one. The log-prob of token t comes from the logits at
    t - 1, log softmax(logits / temperature) in fp32. The head runs at response positions only, in chunks whose
    logits are recomputed in the backward pass when the vocabulary is large.

    Args:
        tokens: int64 [T] on the model's device.
        cu_seqlens: int [n + 1], 0 first, T last: sequence s is tokens[cu_seqlens[s] : cu_seqlens[s + 1]].
        prompt_lens: [n], each at least 1 and at most the sequence's length.
        with_entropy: also return the entropy (nats, no gradient) of each distribution a response token came from.
        kept: int64 [N], which of all R response tokens are wanted; None: all of them.

    Returns:
        float32 [R] (or [N]) log-probs, sequence after sequence, and float32 [R] entropies or None.

    Raises:
        ValueError: borders or prompt lengths contradict the tokens, or temperature is not positive.
    """
    borders, prompts = cu_seqlens.tolist(), torch.as_tensor(prompt_lens).tolist()  # one copy each, also from a GPU
    lengths = [end - start for start, end in pairwise(borders)]
    if not lengths or borders[0] != 0 or borders[-1] != len(tokens) or len(prompts) != len(lengths):
        raise ValueError(f"cu_seqlens {borders} and {len(prompts)} prompt lengths do not describe {len(tokens)} tokens")
    if not all(1 <= p <= n for p, n in zip(prompts, lengths, strict=True)):
        raise ValueError(f"prompt lengths {prompts} must lie between 1 and the sequence lengths {lengths}")
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0 for log-probs, got {temperature}")
    prepare(model)
    device = tokens.device
    positions = torch.cat([torch.arange(n) for n in lengths])
    responses = [torch.arange(s + p, s + n) for s, p, n in zip(borders[:-1], prompts, lengths, strict=True)]
    targets = (torch.cat(responses) if kept is None else torch.cat(responses)[kept.cpu()]).to(device)
    attend = PackedAttention(lengths, attention_kernel(model), device)
    hidden = hidden_states(model, tokens[None], positions.to(device)[None], attend)[0]
    score = partial(_score, model, temperature=temperature, with_entropy=with_entropy)
    rows = max(1, _LOGITS_PER_CHUNK // model.config.vocab_size)
    return _in_chunks(score, hidden.index_select(0, targets - 1), tokens.index_select(0, targets), rows)


def _score(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, *, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logits = head(model, hidden).float() / temperature
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    if not with_entropy:
        return logprobs, None
    with torch.no_grad():  # H = log Z - E[logit]
        entropy = normaliser - ((logits - normaliser[:, None]).exp() * logits).sum(-1)
    return logprobs, entropy


def _in_chunks(score: Any, hidden: Tensor, targets: Tensor, rows: int) -> tuple[Tensor, Tensor | None]:
    if len(targets) <= rows:
        return score(hidden, targets)
    pairs = zip(hidden.split(rows), targets.split(rows), strict=True)
    results = [checkpoint(score, h, t, use_reentrant=False) for h, t in pairs]
    logprobs, entropies = zip(*results, strict=True)
    return torch.cat(logprobs), None if entropies[0] is None else torch.cat(entropies)
