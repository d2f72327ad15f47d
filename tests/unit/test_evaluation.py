"""pass@1 by hand: unscored answers are not wrong answers."""

from __future__ import annotations

import math

import numpy as np

from areal_hpc.controller_state import Credits
from areal_hpc.data import Prompt
from areal_hpc.evaluation import Evaluation
from areal_hpc.logschema import EVALUATIONS, Outcome

PROMPTS = [Prompt("a", "1+1=", {}), Prompt("b", "2+2=", {})]


def answer(outcome: Outcome, length: int = 4) -> dict:
    reward = math.nan if outcome in (Outcome.TIMEOUT, Outcome.ERROR) else float(outcome == Outcome.CORRECT)
    return {
        "outcome": np.array([outcome], np.uint8),
        "reward": np.array([reward]),
        "num_response": np.array([length], np.int32),
    }


def test_pass_at_1_is_over_scored_answers():
    evaluation = Evaluation(PROMPTS, samples=2, version=7)
    assert [(i, p.prompt_id) for i, p in evaluation.pending] == [(-1, "a"), (-2, "a"), (-3, "b"), (-4, "b")]
    evaluation.finished(-2, answer(Outcome.CORRECT))
    evaluation.finished(-1, answer(Outcome.WRONG, length=8))
    evaluation.finished(-4, answer(Outcome.TIMEOUT))
    assert not evaluation.is_complete and evaluation.waiting_for() == "1 of 4 held-out answers with version 7"
    evaluation.refused(-3)
    assert evaluation.is_complete
    assert evaluation.pass_at_1 == 0.5 and evaluation.num_scored == 2 and evaluation.num_unscored == 2
    rows = EVALUATIONS.encode(evaluation.rows())
    assert rows["prompt_id"].tolist() == [b"a", b"a", b"b"] and rows["sample"].tolist() == [0, 1, 1]
    assert rows["outcome"].tolist() == [Outcome.WRONG, Outcome.CORRECT, Outcome.TIMEOUT]


def test_nothing_scored_is_no_number():
    evaluation = Evaluation(PROMPTS[:1], samples=1, version=0)
    evaluation.finished(-1, answer(Outcome.ERROR))
    assert math.isnan(evaluation.pass_at_1)


def test_it_goes_on_when_there_is_room():
    evaluation, credits = Evaluation(PROMPTS, samples=1, version=0), Credits()
    assert not evaluation.can_go_on(credits)
    credits.grant(3, 1)
    assert evaluation.can_go_on(credits)
    evaluation.pending.clear()
    assert not evaluation.can_go_on(credits)


def test_what_a_lost_rank_owes_is_asked_of_others():
    evaluation = Evaluation(PROMPTS, samples=2, version=7)
    asked = [evaluation.take(rank)[0] for rank in (5, 6, 5)]
    evaluation.finished(asked[0], answer(Outcome.CORRECT))
    assert evaluation.lose(5) == 1  # -3: the answer to -1 is here, -2 is with rank 6
    assert [(i, p.prompt_id) for i, p in evaluation.pending] == [(-4, "b"), (-3, "b")]
    assert evaluation.lose(5) == 0
