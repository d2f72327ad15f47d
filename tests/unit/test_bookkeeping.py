"""Batches laid out by hand: who trains what, what is left out, and the rows of the log."""

from __future__ import annotations

import numpy as np
import pytest

from areal_hpc.bookkeeping import BatchRecord, GroupRecord, group_rows, step_row
from areal_hpc.logschema import PHASES, STEPS, TRAJECTORIES, Fate, Outcome
from areal_hpc.logschema import Finish as Ended
from areal_hpc.messages import StepFinished

RIGHT, WRONG, LATE = Outcome.CORRECT, Outcome.WRONG, Outcome.TIMEOUT


def group(group_id, lengths, outcomes, rank=3, first=2) -> GroupRecord:
    n = len(lengths)
    record = GroupRecord(group_id, f"p{group_id}", rank, admit_s=1.0, num_prompt=2)
    record.figures = {
        "reward": np.array([np.nan if o == LATE else 5.0 if o == RIGHT else -5.0 for o in outcomes]),
        "outcome": np.array(outcomes, np.uint8),
        "finish": np.full(n, Ended.EOS, np.uint8),
        "num_response": np.array(lengths, np.int32),
        "first_version": np.full(n, first, np.int32),
        "last_version": np.full(n, first + 1, np.int32),
        "mean_version": np.full(n, first + 0.5, np.float32),
        "interruptions": np.ones(n, np.int32),
        "start_s": np.full(n, 1.5),
        "finish_s": np.full(n, 2.5),
    }
    return record


def compose(groups, trainers=(1,), minibatches=1, capacity=20) -> BatchRecord:
    return BatchRecord.compose(
        5, groups, 9.0, capacity=capacity, trainers=list(trainers), minibatches=minibatches, seed=0
    )


def test_a_timed_out_sample_is_left_out_of_training_but_not_of_the_log():
    """Groups of 3 and 2 usable samples; the sample that timed out is `excluded`, never consumed."""
    batch = compose([group(4, [3, 4, 5], [RIGHT, WRONG, RIGHT]), group(6, [6, 7, 8], [WRONG, LATE, RIGHT])])
    assert batch.group_id.tolist() == [4, 4, 4, 6, 6]
    assert batch.sample.tolist() == [0, 1, 2, 0, 2]
    assert batch.reward.tolist() == [5, -5, 5, -5, 5]
    assert batch.minibatch_tokens() == [3 + 4 + 5 + 6 + 8]
    rows = batch.rows(version_before=4, fate=Fate.CONSUMED)
    assert rows["fate"].tolist() == [Fate.CONSUMED] * 4 + [Fate.EXCLUDED, Fate.CONSUMED]
    assert rows["trainer_rank"].tolist() == [1, 1, 1, 1, -1, 1]
    assert rows["head_lag"].tolist() == [2] * 6 and rows["tail_lag"].tolist() == [1] * 6
    assert rows["consumed_step"].tolist() == [5] * 6
    TRAJECTORIES.encode(rows)


def test_every_sample_has_one_trainer_and_ranks_have_equal_counts():
    groups = [group(g, [5, 9, 2, 7], [RIGHT, WRONG, RIGHT, WRONG]) for g in range(6)]
    batch = compose(groups, trainers=(1, 2, 3), minibatches=2)
    for minibatch, tokens in zip(batch.plan.micro_batches, batch.minibatch_tokens(), strict=True):
        assert len({len(rank) for rank in minibatch}) == 1
        assert tokens == sum(batch.num_response[i] for rank in minibatch for micro in rank for i in micro)
    for position, trainer in enumerate((1, 2, 3)):
        planned = [i for minibatch in batch.micro_batches_of(position) for micro in minibatch for i in micro]
        assert sorted(planned) == np.flatnonzero(batch.trainer == trainer).tolist()


def report(**changes) -> StepFinished:
    phases = dict.fromkeys((column.name for column in PHASES), 0.5)
    return StepFinished(
        **({"step": 5, "version": 5, "skipped": False, "stats": {"loss": -0.25}, "phases": phases} | changes)
    )


def test_the_row_of_a_step():
    """Two sequences of 2 + 8 and 2 + 18 tokens, capacity 20: two micro-batches of 20, of which 30 tokens are used."""
    batch = compose([group(1, [8, 18], [RIGHT, WRONG], first=1)])
    row = step_row(report(), batch, batch.rows(4, Fate.CONSUMED), version_before=4)
    assert row["num_micro_batches"] == 2 and row["packing_bound"] == 2
    assert row["packing_waste"] == pytest.approx(10 / 40)
    assert (row["prompt_tokens"], row["response_tokens"], row["consumed_tokens"]) == (4, 26, 30)
    assert (row["head_lag_max"], row["head_lag_mean"], row["tail_lag_max"], row["reward_mean"]) == (3, 3.0, 2, 0.0)
    assert row["loss"] == -0.25 and np.isnan(row["entropy"])
    counters = dict.fromkeys(
        ("time_s", "num_admitted", "num_consumed", "num_filtered", "num_empty_batches", "log_s"), 0
    )
    STEPS.encode({name: [value] for name, value in (row | counters).items()})


def test_a_skipped_step_consumes_nothing():
    batch = compose([group(1, [8, 18], [RIGHT, WRONG])])
    row = step_row(report(skipped=True, version=4), batch, batch.rows(4, Fate.DROPPED), version_before=4)
    assert row["skipped"] and row["consumed_tokens"] == 0 and row["response_tokens"] == 26


def test_rows_of_a_group_that_is_not_consumed():
    rows = group_rows(group(4, [3, 4], [RIGHT, LATE]), Fate.LEFTOVER)
    encoded = TRAJECTORIES.encode(rows)
    assert encoded["consumed_step"].tolist() == [-1, -1] and np.isnan(encoded["consume_s"]).all()
    assert encoded["prompt_id"].tolist() == [b"p4", b"p4"]
