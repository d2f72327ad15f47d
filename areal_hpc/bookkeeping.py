"""What the controller remembers about every group and batch, and the rows of the run log made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_hpc.logschema import LOSS_TERMS, Fate, Outcome
from areal_hpc.messages import Hello, StepFinished
from areal_hpc.packing import Plan, plan
from areal_hpc.staleness import lag

UNSCORED = (Outcome.TIMEOUT, Outcome.ERROR, Outcome.TRUNCATED)
NOT_CONSUMED = -1
STATS = [*(column.name for column in LOSS_TERMS), "grad_norm", "lr"]


@dataclass(slots=True)
class GroupRecord:
    """One admitted prompt; `figures` are the arrays of its GroupFinished message once that has come."""

    group_id: int
    prompt_id: str
    rank: int
    admit_s: float
    num_prompt: int = 0
    figures: dict[str, NDArray] = field(default_factory=dict)

    @property
    def usable(self) -> NDArray[np.bool_]:
        """[num_samples]: which samples have a reward; a time-out is not a wrong answer and is not trained on."""
        return ~np.isin(self.figures["outcome"], UNSCORED)

    @property
    def num_correct(self) -> int:
        return int((self.figures["outcome"] == Outcome.CORRECT).sum())


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A composed batch: its usable samples in order, and where each is trained.

    Attributes:
        group_id, sample, num_prompt, num_response, reward, trainer: [n], one entry per usable sample.
    """

    step: int
    groups: Sequence[GroupRecord]
    composed_s: float
    plan: Plan
    group_id: NDArray[np.int64]
    sample: NDArray[np.int32]
    num_prompt: NDArray[np.int32]
    num_response: NDArray[np.int32]
    reward: NDArray[np.float64]
    trainer: NDArray[np.int32]

    @classmethod
    def compose(
        cls,
        step: int,
        groups: Sequence[GroupRecord],
        now_s: float,
        *,
        capacity: int,
        trainers: Sequence[int],
        minibatches: int,
        seed: int,
    ) -> BatchRecord:
        """Lay out the usable samples of `groups` and plan their micro-batches over the trainer ranks."""
        usable = [np.flatnonzero(g.usable) for g in groups]
        counts = [len(u) for u in usable]
        num_prompt = np.repeat([g.num_prompt for g in groups], counts).astype(np.int32)
        num_response = np.concatenate([g.figures["num_response"][u] for g, u in zip(groups, usable, strict=True)])
        lengths = num_prompt + num_response
        layout = plan(
            lengths.tolist(),
            capacity=capacity,
            num_ranks=len(trainers),
            num_minibatches=min(minibatches, len(lengths)),
            rng_seed=seed * 1_000_003 + step,
        )
        trainer = np.zeros(len(lengths), np.int32)
        for minibatch in layout.micro_batches:
            for rank, micro_batches in zip(trainers, minibatch, strict=True):
                trainer[[i for micro in micro_batches for i in micro]] = rank
        return cls(
            step,
            groups,
            now_s,
            layout,
            np.repeat([g.group_id for g in groups], counts).astype(np.int64),
            np.concatenate(usable).astype(np.int32),
            num_prompt,
            num_response.astype(np.int32),
            np.concatenate([g.figures["reward"][u] for g, u in zip(groups, usable, strict=True)]),
            trainer,
        )

    def minibatch_tokens(self) -> list[int]:
        """Response tokens of each minibatch over all trainer ranks."""
        return [
            int(sum(self.num_response[i] for rank in minibatch for micro in rank for i in micro))
            for minibatch in self.plan.micro_batches
        ]

    def micro_batches_of(self, position: int) -> list[list[list[int]]]:
        """The micro-batches of one trainer rank, by minibatch."""
        return [minibatch[position] for minibatch in self.plan.micro_batches]

    def rows(self, version_before: int, fate: Fate) -> dict[str, NDArray]:
        """Rows of the trajectory table for all samples of the batch; unusable samples are `excluded`."""
        trainer_of = dict(
            zip(zip(self.group_id.tolist(), self.sample.tolist(), strict=True), self.trainer.tolist(), strict=True)
        )
        parts = []
        for group in self.groups:
            rows = group_rows(group, fate)
            rows["fate"] = np.where(group.usable, fate, Fate.EXCLUDED).astype(np.uint8)
            rows["head_lag"] = lag(version_before, rows["first_version"])
            rows["tail_lag"] = lag(version_before, rows["last_version"])
            rows["consume_s"] = np.full(len(rows["sample"]), self.composed_s)
            rows["consumed_step"] = np.full(len(rows["sample"]), self.step, np.int32)
            rows["trainer_rank"] = np.array(
                [trainer_of.get((group.group_id, s), NOT_CONSUMED) for s in rows["sample"]], np.int32
            )
            parts.append(rows)
        return {name: np.concatenate([rows[name] for rows in parts]) for name in parts[0]}


def group_rows(group: GroupRecord, fate: Fate) -> dict[str, NDArray]:
    """Rows of the trajectory table for a finished group, as if not consumed; `BatchRecord.rows` fills in the rest."""
    figures = group.figures
    n = len(figures["reward"])
    same = {
        "group_id": group.group_id,
        "prompt_id": group.prompt_id,
        "num_prompt": group.num_prompt,
        "fate": fate,
        "admit_s": group.admit_s,
        "consume_s": np.nan,
        "rollout_rank": group.rank,
        "head_lag": NOT_CONSUMED,
        "tail_lag": NOT_CONSUMED,
        "consumed_step": NOT_CONSUMED,
        "trainer_rank": NOT_CONSUMED,
    }
    return (
        dict(figures)
        | {"sample": np.arange(n, dtype=np.int32)}
        | {name: np.full(n, value) for name, value in same.items()}
    )


def step_row(
    report: StepFinished, batch: BatchRecord, rows: Mapping[str, NDArray], version_before: int
) -> dict[str, Any]:
    """What the step table says about one step, counters of the controller apart; `rows` are those of `batch.rows`."""
    stats = {name: report.stats.get(name, float("nan")) for name in STATS}
    prompt_tokens, response_tokens = int(batch.num_prompt.sum()), int(batch.num_response.sum())
    num_micro_batches = sum(batch.plan.num_micro_batches)
    columns = {
        "step": report.step,
        "version_before": version_before,
        "version_after": report.version,
        "skipped": report.skipped,
        "reward_mean": float(batch.reward.mean()),
        "prompt_tokens": prompt_tokens,
        "response_tokens": response_tokens,
        "consumed_tokens": 0 if report.skipped else prompt_tokens + response_tokens,
        "num_groups": len(batch.groups),
        "num_sequences": len(batch.sample),
        "num_micro_batches": num_micro_batches,
        "packing_bound": sum(batch.plan.lower_bounds),
        "packing_waste": 1.0 - (prompt_tokens + response_tokens) / (num_micro_batches * batch.plan.capacity),
        "head_lag_max": int(rows["head_lag"].max()),
        "head_lag_mean": float(rows["head_lag"].mean()),
        "tail_lag_max": int(rows["tail_lag"].max()),
    }
    return stats | report.phases | columns


def rank_rows(hellos: Sequence[Hello]) -> dict[str, Any]:
    """Rows of the table `ranks`, from what every rank said, in rank order."""
    names = ("role", "host", "pid", "gpu")
    return {"rank": range(len(hellos))} | {name: [getattr(hello, name) for hello in hellos] for name in names}
