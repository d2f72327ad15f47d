"""Which answers are asked for, of whom, and what becomes of them."""

from __future__ import annotations

import math

import numpy as np

from areal_hpc.controller_state import Credits
from areal_hpc.data import Prompt
from areal_hpc.evaluation import Evaluation
from areal_hpc.logcodes import Finish, Outcome
from areal_hpc.logschema import EVALUATIONS
from areal_hpc.messages import GroupFinished

HELDOUT = {"sums": [Prompt("a", "1+1=", {}), Prompt("b", "2+2=", {})], "more": [Prompt("a", "3+3=", {})]}


def figures(outcome: Outcome, length: int = 4, first_version: int = 7, last_version: int = 7) -> dict:
    reward = math.nan if outcome in (Outcome.TIMEOUT, Outcome.ERROR) else float(outcome == Outcome.CORRECT)
    return {
        "outcome": np.array([outcome], np.uint8),
        "reward": np.array([reward]),
        "finish": np.array([Finish.EOS], np.uint8),
        "num_response": np.array([length], np.int32),
        "first_version": np.array([first_version], np.int32),
        "last_version": np.array([last_version], np.int32),
        "start_s": np.array([1.0]),
        "finish_s": np.array([2.0]),
    }


def finish(evaluation: Evaluation, group_id: int, outcome: Outcome = Outcome.CORRECT, **changes):
    return evaluation.finished(GroupFinished(group_id, 3, "evaluate"), figures(outcome, **changes))


def credits_of(**free: int) -> Credits:
    credits = Credits()
    for rank, places in free.items():
        credits.grant(int(rank[1:]), places)
    return credits


def test_every_prompt_of_every_set_is_asked_samples_times():
    evaluation = Evaluation(HELDOUT, samples=2, version=7, first_id=-11)
    wanted = {i: (name, p.prompt_id, s) for i, (name, p, s) in evaluation.wanted.items()}
    assert wanted == {
        -11: ("sums", "a", 0),
        -12: ("sums", "a", 1),
        -13: ("sums", "b", 0),
        -14: ("sums", "b", 1),
        -15: ("more", "a", 0),
        -16: ("more", "a", 1),
    }
    assert evaluation.next_id == -17, "the next evaluation uses other ids"


def test_pass_at_1_is_over_scored_answers():
    evaluation = Evaluation({"sums": HELDOUT["sums"]}, samples=2, version=7)
    finish(evaluation, -2)
    finish(evaluation, -1, Outcome.WRONG, length=8)
    finish(evaluation, -4, Outcome.TIMEOUT)
    assert not evaluation.is_complete and evaluation.waiting_for() == "1 of 4 held-out answers with version 7"
    evaluation.refused(-3)
    assert evaluation.is_complete
    card = evaluation.cards()["sums"]
    assert evaluation.pass_at_1 == card.pass_at_1 == 0.5 and card.num_scored == 2 and card.num_unscored == 2
    rows = EVALUATIONS.encode(evaluation.rows())
    assert rows["prompt_id"].tolist() == [b"a", b"a", b"b"] and rows["sample"].tolist() == [0, 1, 1]
    assert rows["outcome"].tolist() == [Outcome.WRONG, Outcome.CORRECT, Outcome.TIMEOUT]
    assert rows["version"].tolist() == [7, 7, 7] and rows["data"].tolist() == [b"sums"] * 3


def test_rows_tell_the_versions_of_an_answer():
    evaluation = Evaluation({"more": HELDOUT["more"]}, samples=1, version=7)
    finish(evaluation, -1, first_version=8, last_version=10)
    rows = EVALUATIONS.encode(evaluation.rows())
    assert (rows["version"][0], rows["first_version"][0], rows["last_version"][0]) == (7, 8, 10)


def test_nothing_scored_is_no_number():
    evaluation = Evaluation({"more": HELDOUT["more"]}, samples=1, version=0)
    finish(evaluation, -1, Outcome.ERROR)
    assert math.isnan(evaluation.pass_at_1)


def test_what_nobody_waits_for_is_ignored():
    evaluation = Evaluation({"more": HELDOUT["more"]}, samples=1, version=0)
    assert finish(evaluation, -5) is None and finish(evaluation, -1) is not None
    assert finish(evaluation, -1, Outcome.WRONG) is None and evaluation.pass_at_1 == 1.0
    evaluation.refused(-1)
    assert evaluation.cards()["more"].num_missing == 0


def test_alone_it_takes_every_place_and_beside_training_only_its_share():
    credits = credits_of(r3=4, r4=1)
    alone = Evaluation(HELDOUT, samples=2, version=0)
    asked = [alone.admit(credits) for _ in range(6)]
    assert asked == [(-1, 3), (-2, 3), (-3, 3), (-4, 3), (-5, 4), None], "the rank with most room first"
    credits = credits_of(r3=4, r4=4)
    beside = Evaluation(HELDOUT, samples=2, version=0)
    assert [beside.admit(credits, 1) for _ in range(3)] == [(-1, 3), (-2, 4), None]
    assert credits.free == {3: 3, 4: 3}
    finish(beside, -2)
    assert beside.admit(credits, 1) == (-3, 4), "an answer that came makes room"
    assert beside.admit(credits_of(), 1) is None


def test_a_lost_rank_is_replaced_by_asking_anew_in_the_same_order():
    credits = credits_of(r3=3, r4=1)
    evaluation = Evaluation(HELDOUT, samples=2, version=0)
    assert [evaluation.admit(credits) for _ in range(4)] == [(-1, 3), (-2, 3), (-3, 3), (-4, 4)]
    finish(evaluation, -2)
    assert evaluation.lost(3) == 2 and list(evaluation.pending) == [-1, -3, -5, -6]
    assert evaluation.lost(5) == 0
    assert finish(evaluation, -1) is not None, "an answer that was on its way all the same"
    assert evaluation.missing == {-3, -4, -5, -6}


def test_what_was_answered_already_is_not_asked_again():
    first = Evaluation(HELDOUT, samples=2, version=5)
    kept = [finish(first, -2), finish(first, -5, Outcome.WRONG)]
    again = Evaluation(HELDOUT, samples=2, version=5, answered=[*kept, *kept])
    assert list(again.pending) == [-1, -3, -4, -6] and len(again.answers) == 2
    for group_id in (-6, -4, -3, -1):
        finish(again, group_id)
    assert again.is_complete and again.pass_at_1 == (1 + 1 + 0.5) / 3
    assert [a.key for a in again.in_order()] == [(n, p.prompt_id, s) for n, p, s in again.wanted.values()]
    fewer = Evaluation({"sums": HELDOUT["sums"]}, samples=1, version=5, answered=kept)
    assert fewer.answers == {} and len(fewer.missing) == 2, "answers to what is not wanted do not count"
