"""The decoupled PPO objective (paper 5.2, Eq. 4-5), token by token.

Three policies meet in it, each present as the log-prob of the token that was sampled:
    behaviour  sampled the token, possibly several versions ago (one version per token, paper Proposition 1);
    proximal   the trainer's weights just before this step, the centre of the clip;
    current    the weights being optimised, the only one with a gradient.
Naive PPO is the same objective with proximal := behaviour, hence importance weight 1 and a clip around a stale policy.
Unlike AReaL 1.0 the importance weight w is always applied; a cap on it is an option, not the switch that turns it on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Objective = Literal["decoupled", "naive"]
CapMode = Literal["none", "mask", "clamp"]


@dataclass(frozen=True)
class LossConfig:
    """Constants of the objective.

    Attributes:
        objective: "decoupled" (paper Eq. 5) or "naive" (PPO clipped around the behaviour policy).
        clip_low, clip_high: the ratio u is clipped to [1 - clip_low, 1 + clip_high]; the paper has 0.2 and 0.2.
        dual_clip: c > 1, a floor of c * A under the clipped term of tokens with A < 0 (Ye et al. 2020); None: off.
        weight_cap: largest importance weight w, at least 1; None: no cap, as in the paper.
        cap_mode: above the cap, "mask" drops the term (the denominator keeps the token), "clamp" sets w to the cap.
    """

    objective: Objective = "decoupled"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    weight_cap: float | None = None
    cap_mode: CapMode = "none"

    def __post_init__(self) -> None:
        if self.objective not in ("decoupled", "naive"):
            raise ValueError(f"objective is {self.objective!r}; choose decoupled or naive")
        if not (0 < self.clip_low <= 1 and self.clip_high > 0):
            raise ValueError(f"need 0 < clip_low <= 1 and 0 < clip_high, got {self.clip_low} and {self.clip_high}")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip is {self.dual_clip}; it must be above 1, or None")
        if self.cap_mode not in ("none", "mask", "clamp"):
            raise ValueError(f"cap_mode is {self.cap_mode!r}; choose none, mask or clamp")
        if (self.weight_cap is None) != (self.cap_mode == "none"):
            raise ValueError(f"weight_cap {self.weight_cap} with cap_mode {self.cap_mode!r}: set both or neither")
        if self.weight_cap is not None and not self.weight_cap >= 1:
            raise ValueError(f"weight_cap is {self.weight_cap}; below 1 it would cut tokens that are exactly on policy")


SUMS = (
    "tokens", "loss", "u", "w", "clipped", "capped", "dual_clipped", "behaviour_minus_proximal",
    "proximal_minus_current", "advantage", "entropy", "entropy_tokens", "nonfinite",
)  # fmt: skip
"""What each entry of LossStats.sums adds up over tokens, in order."""
MAXIMA = ("u", "w")
"""What each entry of LossStats.maxima is the largest of; ratios, so 0 is the maximum of nothing."""


@dataclass(frozen=True)
class LossStats:
    """Sums and maxima over tokens: of a micro-batch, or merged over micro-batches, ranks and minibatches.

    Over ranks, all-reduce `sums` with SUM and `maxima` with MAX, or gather `to_vector()` and merge. Both stay on the
    device of the loss; only `finish` waits for it. A NaN ratio is inf in the maxima, because MAX may lose a NaN.

    Attributes:
        sums: float64 [len(SUMS)], no gradient.
        maxima: float64 [len(MAXIMA)], no gradient.
    """

    sums: Tensor
    maxima: Tensor

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> LossStats:
        """The statistics of no tokens, to start merging from."""
        return cls.from_vector(torch.zeros(len(SUMS) + len(MAXIMA), dtype=torch.float64, device=device))

    @classmethod
    def from_vector(cls, vector: Tensor) -> LossStats:
        """The inverse of `to_vector`. Raises ValueError on another shape or dtype."""
        if vector.shape != (len(SUMS) + len(MAXIMA),) or vector.dtype != torch.float64:
            raise ValueError(f"need float64 [{len(SUMS) + len(MAXIMA)}], got {vector.dtype} {list(vector.shape)}")
        return cls(vector[: len(SUMS)], vector[len(SUMS) :])

    def to_vector(self) -> Tensor:
        """float64 [len(SUMS) + len(MAXIMA)]: the sums, then the maxima."""
        return torch.cat([self.sums, self.maxima])

    def merge(self, other: LossStats) -> LossStats:
        return LossStats(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def finish(self) -> dict[str, float]:
        """Named figures per token: means over all tokens merged so far, capped and clipped ones included.

        `loss` is the mean loss term: the loss that was optimised, if num_tokens was the number of tokens merged here.
        `w_*` is the weight before the cap. `kl_*` are k1 estimates (mean log ratio, can be negative) over tokens that
        the behaviour policy sampled; the naive objective has no proximal policy, so there the first is 0 and the second
        is behaviour to current. `entropy` is there if it was given. `nonfinite_tokens` counts tokens whose ratio or
        term is NaN or inf: above 0 the gradient is not to be trusted.

        Raises ValueError: no tokens.
        """
        total = dict(zip(SUMS, self.sums.tolist(), strict=True))
        u_max, w_max = self.maxima.tolist()
        tokens = total["tokens"]
        if tokens == 0:
            raise ValueError("loss statistics of no response tokens: merge micro-batches and ranks before finish()")
        figures = {
            "loss": total["loss"] / tokens,
            "u_mean": total["u"] / tokens,
            "u_max": u_max,
            "w_mean": total["w"] / tokens,
            "w_max": w_max,
            "clip_fraction": total["clipped"] / tokens,
            "cap_fraction": total["capped"] / tokens,
            "dual_clip_fraction": total["dual_clipped"] / tokens,
            "kl_behaviour_proximal": total["behaviour_minus_proximal"] / tokens,
            "kl_proximal_current": total["proximal_minus_current"] / tokens,
            "advantage_mean": total["advantage"] / tokens,
            "num_tokens": tokens,
            "nonfinite_tokens": total["nonfinite"],
        }
        if total["entropy_tokens"]:
            figures["entropy"] = total["entropy"] / total["entropy_tokens"]
        return figures


def policy_loss(
    current: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    config: LossConfig,
    num_tokens: float,
    entropy: Tensor | None = None,
) -> tuple[Tensor, LossStats]:
    """Loss of one micro-batch: its share of the token mean over the global minibatch.

        loss = - (1 / num_tokens) * sum_t  w_t * min(u_t A_t, clip(u_t, 1 - clip_low, 1 + clip_high) A_t)

    Losses and gradients are to be ADDED over micro-batches and trainer ranks; a process group that averages gradients
    over R ranks needs the loss times R.

    Args:
        current, proximal, behaviour: float32 [N], natural log-prob of each response token under each policy. Only
            `current` gets a gradient. The naive objective ignores `proximal` (pass behaviour).
        advantages: float32 [N], advantage of the sequence each token belongs to.
        config: the constants.
        num_tokens: response tokens of the global minibatch, all micro-batches and ranks; capped tokens count.
        entropy: float32 [N], entropy of the distribution each token was drawn from under `current`; logged only.

    Returns: loss, a scalar of current's dtype, and the statistics. With N == 0 the loss is 0 and has a graph only if
    `current` has one: a rank with an empty micro-batch skips backward when `loss.requires_grad` is False, and still
    joins the gradient collectives, with zeros where it has no gradient.

    Raises ValueError: shapes or dtypes differ, log-probs are in half precision, num_tokens is not positive and finite.
    """
    _check(current, proximal, behaviour, advantages, entropy, num_tokens)
    proximal, behaviour = proximal.detach(), behaviour.detach()
    if config.objective == "naive":
        proximal = behaviour  # standard PPO: pi_prox = pi_behav = pi_old
    u = torch.exp(current - proximal)  # Eq. 4: u_t = pi_theta / pi_prox
    w = torch.exp(proximal - behaviour)  # Eq. 5: w_t = pi_prox / pi_behav, a constant
    objective, is_clipped, is_dual_clipped = _clipped_objective(u, advantages, config)
    weight, is_capped = _capped(w, config)
    terms = -weight * objective  # Eq. 5: w_t * min(...), to be minimised
    per_token = {
        "tokens": torch.ones_like(w),
        "loss": terms,
        "u": u,
        "w": w,
        "clipped": is_clipped,
        "capped": is_capped,
        "dual_clipped": is_dual_clipped,
        "behaviour_minus_proximal": behaviour - proximal,
        "proximal_minus_current": proximal - current,
        "advantage": advantages,
        "nonfinite": ~(torch.isfinite(terms) & torch.isfinite(u) & torch.isfinite(w)),
    }
    if entropy is not None:
        per_token |= {"entropy": entropy, "entropy_tokens": torch.ones_like(w)}
    return terms.sum() / num_tokens, _stats(per_token)


def _clipped_objective(u: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The clipped term of each token, where the clip took effect, and where the dual clip did."""
    plain = u * advantages
    clipped = u.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    objective = torch.minimum(plain, clipped)  # Eq. 5: min(u_t A_t, clip(u_t, 1 - eps, 1 + eps) A_t)
    is_clipped = clipped < plain
    if config.dual_clip is None:
        return objective, is_clipped, torch.zeros_like(is_clipped)
    floor = config.dual_clip * advantages  # Ye et al. 2020: max(min(...), c A_t) where A_t < 0
    negative = advantages < 0
    return torch.where(negative, torch.maximum(objective, floor), objective), is_clipped, negative & (objective < floor)


def _capped(w: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """The importance weight that is used, and where the cap took effect. A NaN weight stays NaN (NaN > cap: false)."""
    cap = math.inf if config.weight_cap is None else config.weight_cap
    is_capped = w > cap
    if config.cap_mode == "mask":
        return w.masked_fill(is_capped, 0.0), is_capped  # the term goes, the token stays in num_tokens
    return w.clamp(max=cap), is_capped


def _stats(per_token: dict[str, Tensor]) -> LossStats:
    absent = torch.zeros_like(per_token["u"])
    columns = [per_token.get(name, absent).detach().double() for name in SUMS]
    ratios = torch.stack([per_token[name].detach().double() for name in MAXIMA])
    ratios = ratios.nan_to_num(nan=math.inf, posinf=math.inf)
    nothing = ratios.new_zeros(len(MAXIMA), 1)  # so that N == 0 has a maximum
    return LossStats(torch.stack(columns).sum(dim=1), torch.cat([nothing, ratios], dim=1).amax(dim=1))


def _check(
    current: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, entropy: Tensor | None, num_tokens: float
) -> None:
    named = {"current": current, "proximal": proximal, "behaviour": behaviour, "advantages": advantages}
    if entropy is not None:
        named["entropy"] = entropy
    if any(tensor.shape != current.shape or tensor.ndim != 1 for tensor in named.values()):
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named.items())
        raise ValueError(f"log-probs and advantages must all be [N], one entry per response token; got {shapes}")
    if current.dtype not in (torch.float32, torch.float64) or any(t.dtype != current.dtype for t in named.values()):
        dtypes = ", ".join(f"{name} {tensor.dtype}" for name, tensor in named.items())
        raise ValueError(f"need float32 throughout (a ratio of half-precision log-probs is noise); got {dtypes}")
    if not (num_tokens > 0 and math.isfinite(num_tokens)):
        raise ValueError(f"num_tokens is {num_tokens}; it counts the response tokens of the global minibatch")
