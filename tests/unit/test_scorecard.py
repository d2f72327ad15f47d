"""The figures of an evaluation, worked out by hand, and the table made from them."""

from __future__ import annotations

import json
import math

import pytest

from areal_hpc.answers import Answer
from areal_hpc.figuresview import rows
from areal_hpc.scorecard import Scorecard, scorecards


def answer(prompt: str, sample: int, outcome: str, read: str | None = None, tokens: int = 10, **changes) -> Answer:
    values = {
        "data": "d",
        "prompt_id": prompt,
        "sample": sample,
        "text": "",
        "answer": read,
        "num_prompt": 3,
        "num_response": tokens,
        "finish": "eos",
        "reward": math.nan if outcome in ("timeout", "error") else float(outcome == "correct"),
        "outcome": outcome,
        "first_version": 0,
        "last_version": 0,
        "start_s": 1.0,
        "finish_s": 2.5,
    }
    return Answer(**(values | changes))


def three_prompts() -> list[Answer]:
    """a: 2 of 4 right; b: 1 of 2 right, two without a score; c: none of 4."""
    return [
        *(answer("a", s, "correct" if s < 2 else "wrong", "7" if s < 2 else "8", tokens=10) for s in range(4)),
        answer("b", 0, "correct", "1", tokens=20),
        answer("b", 1, "unparsed", None, tokens=40, finish="length"),
        answer("b", 2, "timeout", tokens=20),
        answer("b", 3, "error", tokens=20),
        *(answer("c", s, "wrong", str(s), tokens=100) for s in range(4)),
    ]


def test_figures_by_hand():
    card = Scorecard.over("d", three_prompts())
    assert (card.num_prompts, card.num_answers, card.num_scored, card.num_unscored) == (3, 12, 10, 2)
    assert card.pass_at_1 == pytest.approx((0.5 + 0.5 + 0.0) / 3)
    assert card.pass_at_1_error == pytest.approx(math.sqrt(((1 / 6) ** 2 * 2 + (1 / 3) ** 2) / 2 / 3))
    assert card.pass_at[2] == (pytest.approx((5 / 6 + 1 + 0) / 3), pytest.approx(card.pass_at[2][1]), 3)
    assert card.pass_at[4][0] == 0.5 and card.pass_at[4][2] == 2, "b has no four scored answers"
    assert card.maj_at[2][0] == pytest.approx((0.5 + 1.0 + 0.0) / 3)  # a: 7 7, 8 8, four ties; b: 1 beats silence
    assert card.maj_at[4] == (0.25, pytest.approx(0.25), 2)
    assert card.lengths["mean"] == pytest.approx((40 + 100 + 400) / 12) and card.lengths["max"] == 100
    assert card.lengths["median"] == 20 and card.lengths["p90"] == 100 and card.lengths["truncated"] == 1 / 12
    assert card.outcomes | {} == card.outcomes and card.outcomes["correct"] == 3 and card.outcomes["wrong"] == 6
    assert (card.outcomes["unparsed"], card.outcomes["timeout"], card.outcomes["error"]) == (1, 1, 1)
    assert card.tokens == 540


def test_the_samples_of_a_prompt_are_one_cluster():
    """100 equal answers to each of two prompts are two observations, not 200."""
    answers = [answer(p, s, "correct" if p == "a" else "wrong") for p in "ab" for s in range(100)]
    assert Scorecard.over("d", answers).pass_at_1_error == pytest.approx(0.5)


def test_data_sets_do_not_mix_and_equal_prompt_ids_are_different_prompts():
    both = [answer("1", 0, "correct"), answer("1", 0, "wrong", data="e")]
    cards = scorecards(["d", "e", "f"], both, {"e": 2})
    assert (cards["d"].pass_at_1, cards["e"].pass_at_1) == (1.0, 0.0)
    assert cards["e"].num_missing == 2 and cards["e"].num_unscored == 2
    assert math.isnan(cards["f"].pass_at_1) and cards["f"].pass_at == {}
    assert Scorecard.over("all", both).pass_at_1 == 0.5


def test_no_majority_without_answers_and_json_without_nan():
    card = Scorecard.over("d", [answer("a", 0, "correct"), answer("a", 1, "wrong")])
    assert card.maj_at == {}
    text = json.dumps(card.as_json(), allow_nan=False)
    assert json.loads(text)["pass_at"] == {
        "1": {"mean": 0.5, "error": None, "prompts": 1},
        "2": {"mean": 1.0, "error": None, "prompts": 1},
    }
    assert json.dumps(Scorecard.over("d", []).as_json(), allow_nan=False)


def test_the_table_says_all_of_it():
    sets = [Scorecard.over("d", three_prompts()).as_json(), Scorecard.over("e", []).as_json()]
    table = dict(rows(sets))
    assert table["pass@1"] == ["33.3% +- 16.7%", "-"] and table["pass@4"][0].startswith("50.0% +- ")
    assert table["maj@4"] == ["25.0% +- 25.0%", "-"] and "maj@1" not in table
    assert table["length truncated"] == ["8.3%", "-"] and table["timeout"] == ["8.3%", "0.0%"]
