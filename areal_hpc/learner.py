"""One training batch of decoupled PPO on one trainer rank: the science of a step, without messages or files.

The collectives over trainer ranks come in as a `Reducer`; with one rank they do nothing. Gradients live in one flat
buffer, so that a rank whose micro-batch is empty joins the same all-reduce as the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from areal_hpc.compute import Batch, StepResult
from areal_hpc.config import TrainerConfig
from areal_hpc.losses import LossConfig, LossStats, policy_loss
from areal_hpc.models import packed_logprobs
from areal_hpc.trajectory import Trajectory
from areal_hpc.waiting import Stopwatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Reducer(Protocol):
    """In-place reductions over the trainer ranks."""

    def all_reduce_sum(self, tensor: Tensor) -> None: ...
    def all_reduce_max(self, tensor: Tensor) -> None: ...
    def all_reduce_min(self, tensor: Tensor) -> None: ...


class OneRank:
    """The Reducer of a single trainer rank."""

    def all_reduce_sum(self, tensor: Tensor) -> None: ...
    def all_reduce_max(self, tensor: Tensor) -> None: ...
    def all_reduce_min(self, tensor: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Packed:
    """One micro-batch as the model takes it: sequences laid end to end, sampled tokens in the same order."""

    tokens: Tensor  # int64 [T]
    cu_seqlens: Tensor  # int32 [n + 1]
    prompt_lens: list[int]
    behaviour: Tensor  # float32 [N] sampled tokens
    advantages: Tensor  # float32 [N]
    kept: Tensor | None = None  # int64 [N], their places among all response tokens; None: they are all of them


class Learner:
    """The policy with its optimizer.

    Args:
        model: float32 parameters; kept in eval mode (no dropout), so that proximal and current policy agree exactly.
        config: the trainer's settings.
        temperature: that of sampling; log-probs are of the distribution at this temperature (w is wrong otherwise).
        reducer: collectives over the trainer ranks.
        between: called between micro-batches, so that messages move on while the batch is being trained.
        activity: entered with "train_proximal" and "train_update" around these two parts of a step.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        temperature: float,
        reducer: Reducer | None = None,
        between: Callable[[], None] = lambda: None,
        activity: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.model = model.eval()
        self.config = config
        self.temperature = temperature
        self.reducer = reducer or OneRank()
        self.between = between
        self.activity = activity
        self.loss_config = loss_config(config)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.gradient = flat_gradient(self.parameters)
        settings = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.num_updates = 0

    def train(self, batch: Batch) -> StepResult:
        """Proximal log-probs once, then one optimizer step per minibatch.

        With a single minibatch the proximal policy is the current one at its only update, bit for bit, so the extra
        forward pass is left out. With several, a minibatch that is not finite takes the whole batch back.
        """
        watch = Stopwatch()
        packed = [[pack(batch, micro) for micro in minibatch] for minibatch in batch.micro_batches]
        proximal, before = None, None
        if len(packed) > 1:
            before = self._snapshot()
            if self.config.objective.kind == "decoupled":
                with self.activity("train_proximal"):
                    proximal = self._proximal(packed)
        watch.lap("proximal_s")
        with self.activity("train_update"):
            try:
                figures = self._minibatches(packed, proximal, batch.minibatch_tokens)
            except BaseException:  # `between` may leave the step: then it never was
                self._restore(before)
                raise
        skipped = "loss" not in figures
        if skipped:
            self._restore(before)
        watch.lap("update_s")
        return StepResult(skipped, figures, watch.finish())

    def _minibatches(
        self, packed: list[list[Packed | None]], proximal: list[list[Tensor | None]] | None, num_tokens: Sequence[int]
    ) -> dict[str, float]:
        """One optimizer step each; stops without a `loss` at the first that is not finite."""
        stats, grad_norms, lr = LossStats.empty(), [], 0.0
        for number, minibatch in enumerate(packed):
            part = self._accumulate(minibatch, proximal[number] if proximal else None, num_tokens[number])
            grad_norm = self._reduce_gradient()
            grad_norms.append(float(grad_norm))
            if not self._all_finite(part, grad_norm):
                return {"grad_norm": grad_norms[-1]}
            stats = stats.merge(part)
            lr = self._update(grad_norm)
        return stats.finish() | {"grad_norm": max(grad_norms), "lr": lr}

    def _proximal(self, packed: list[list[Packed | None]]) -> list[list[Tensor | None]]:
        with torch.no_grad():
            return [[self._forward(micro)[0] if micro else None for micro in minibatch] for minibatch in packed]

    def _forward(self, micro: Packed, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        self.between()
        return packed_logprobs(
            self.model,
            micro.tokens,
            micro.cu_seqlens,
            temperature=self.temperature,
            prompt_lens=micro.prompt_lens,
            with_entropy=with_entropy,
            kept=micro.kept,
        )

    def _accumulate(
        self, minibatch: list[Packed | None], proximal: list[Tensor | None] | None, num_tokens: int
    ) -> LossStats:
        """Sum the gradient of this rank's micro-batches into the flat buffer; statistics are of all ranks."""
        self.gradient.zero_()
        stats = LossStats.empty()
        for index, micro in enumerate(minibatch):
            if micro is None:
                continue
            current, entropy = self._forward(micro, with_entropy=True)
            centre = proximal[index] if proximal else None
            loss, part = policy_loss(
                current,
                current.detach() if centre is None else centre,
                micro.behaviour,
                micro.advantages,
                config=self.loss_config,
                num_tokens=num_tokens,
                entropy=entropy,
            )
            loss.backward()
            stats = stats.merge(part)
        sums, maxima = stats.sums.clone(), stats.maxima.clone()
        self.reducer.all_reduce_sum(sums)
        self.reducer.all_reduce_max(maxima)
        return LossStats(sums, maxima)

    def _reduce_gradient(self) -> Tensor:
        self.reducer.all_reduce_sum(self.gradient)
        return torch.linalg.vector_norm(self.gradient)

    def _all_finite(self, stats: LossStats, grad_norm: Tensor) -> bool:
        """Agreed by all trainer ranks before anything is updated."""
        finite = torch.isfinite(stats.sums).all() & torch.isfinite(stats.maxima).all() & torch.isfinite(grad_norm)
        agreed = finite.float().reshape(1)
        self.reducer.all_reduce_min(agreed)
        return bool(agreed.item())

    def _update(self, grad_norm: Tensor) -> float:
        settings = self.config.optimizer
        self.gradient.mul_(torch.clamp(settings.max_grad_norm / (grad_norm + 1e-6), max=1.0))
        self.num_updates += 1
        lr = settings.lr * min(1.0, self.num_updates / max(1, settings.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return lr

    def state(self) -> dict[str, Tensor]:
        """Weights and optimizer of this moment, as copies on the CPU; `load_state` takes them."""
        tensors = {"num_updates": torch.tensor(self.num_updates)}
        for name, parameter in self._named_parameters():
            tensors[f"weights/{name}"] = parameter.detach().to("cpu", copy=True)
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"optimizer/{name}/{key}"] = value.detach().to("cpu", copy=True)
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises KeyError or RuntimeError when the tensors are not those of this model."""
        self.num_updates = int(tensors["num_updates"])
        for name, parameter in self._named_parameters():
            parameter.copy_(tensors[f"weights/{name}"])
            start = f"optimizer/{name}/"
            state = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
            self.optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in state.items()}

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def _snapshot(self) -> tuple[list[Tensor], list[dict[str, Tensor]], int]:
        state = [{k: v.clone() for k, v in self.optimizer.state[p].items()} for p in self.parameters]
        return [p.detach().clone() for p in self.parameters], state, self.num_updates

    @torch.no_grad()
    def _restore(self, before: tuple[list[Tensor], list[dict[str, Tensor]], int] | None) -> None:
        if before is None:
            return
        values, state, self.num_updates = before
        for parameter, value, entries in zip(self.parameters, values, state, strict=True):
            parameter.copy_(value)
            self.optimizer.state[parameter].clear()
            self.optimizer.state[parameter].update(entries)


def loss_config(config: TrainerConfig) -> LossConfig:
    objective = config.objective
    return LossConfig(
        objective=objective.kind,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        dual_clip=objective.dual_clip,
        weight_cap=objective.weight_cap,
        cap_mode="none" if objective.weight_cap is None else objective.cap_mode,
    )


def flat_gradient(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One zeroed buffer [sum of sizes] that every parameter's .grad is a view of."""
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter)
    return flat


def pack(batch: Batch, micro_batch: Sequence[int]) -> Packed | None:
    """Lay the sequences of one micro-batch end to end, without padding; None for an empty micro-batch."""
    if not micro_batch:
        return None
    chosen = []
    for index in micro_batch:
        trajectory = batch.trajectories[index]
        if trajectory is None:
            raise KeyError(f"sample {index} of the batch is planned for this rank but was not received")
        chosen.append(trajectory)
    lengths = np.cumsum([0] + [len(t.tokens) for t in chosen])
    per_token = [_token_advantages(batch, i, t) for t, i in zip(chosen, micro_batch, strict=True)]
    sampled = np.concatenate([t.sampled for t in chosen])
    behaviour = np.concatenate([t.logprobs for t in chosen])[sampled]
    return Packed(
        tokens=torch.from_numpy(np.concatenate([t.tokens for t in chosen]).astype(np.int64)),
        cu_seqlens=torch.from_numpy(lengths.astype(np.int32)),
        prompt_lens=[t.num_prompt for t in chosen],
        behaviour=torch.from_numpy(behaviour.astype(np.float32)),
        advantages=torch.from_numpy(np.concatenate(per_token).astype(np.float32)),
        kept=None if sampled.all() else torch.from_numpy(np.flatnonzero(sampled)),
    )


def _token_advantages(batch: Batch, index: int, trajectory: Trajectory) -> NDArray[np.float64]:
    """The advantage of its turn for each sampled token."""
    first = index if batch.first_turn is None else int(batch.first_turn[index])
    if trajectory.turns is None:
        return np.full(trajectory.num_response, batch.advantages[first])
    return batch.advantages[first + trajectory.turns[trajectory.sampled]]
