"""Batches laid out by hand: who trains what, what is left out, and the rows of the log."""

from __future__ import annotations

import numpy as np
import pytest

from areal_hpc.bookkeeping import BatchRecord, GroupRecord, group_rows
from areal_hpc.logschema import TRAJECTORIES, Fate, Outcome
from areal_hpc.logschema import Finish as Ended

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


def test_packing_waste_is_the_empty_share_of_capacity():
    """Two sequences of 2 + 8 and 2 + 18 tokens, capacity 20: two micro-batches of 20, of which 30 tokens are used."""
    columns = compose([group(1, [8, 18], [RIGHT, WRONG])]).step_columns()
    assert columns["num_micro_batches"] == 2 and columns["packing_bound"] == 2
    assert columns["packing_waste"] == pytest.approx(10 / 40)


def test_rows_of_a_group_that_is_not_consumed():
    rows = group_rows(group(4, [3, 4], [RIGHT, LATE]), Fate.LEFTOVER)
    encoded = TRAJECTORIES.encode(rows)
    assert encoded["consumed_step"].tolist() == [-1, -1] and np.isnan(encoded["consume_s"]).all()
    assert encoded["prompt_id"].tolist() == [b"p4", b"p4"]
