"""The demo's task: every fact checked against arithmetic, and the ways to cheat closed."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections import Counter

import pytest

from areal_hpc.demo import gcd


def test_a_flawless_response_by_hand():
    steps = "21-14=07;14-07=07;07-07=00;"
    assert gcd.demonstrate(gcd.Problem(14, 21), random.Random(0)) == steps + "\\boxed{7}"


@pytest.mark.parametrize("seed", range(50))
def test_every_written_subtraction_is_right(seed):
    rng = random.Random(seed)
    problem = gcd.split(rng, 1, 1)[0][0]
    text = gcd.demonstrate(problem, rng, give_up=0.3)
    *steps, box = text.split(";")
    for step in steps:
        left, difference = step.split("=")
        larger, smaller = left.split("-")
        assert int(larger) - int(smaller) == int(difference) >= 0 and len(difference) == 2
    assert box.startswith("\\boxed{")


def test_giving_up_shortens_the_chain_and_often_misses():
    rng = random.Random(1)
    problems = gcd.split(rng, 400, 1)[0]
    right = sum(
        gcd.reward(p.prompt, gcd.demonstrate(p, rng, give_up=0.2), {"answer": str(p.answer)})[0] > 0 for p in problems
    )
    assert 0.1 < right / 400 < 0.6
    assert all(
        gcd.reward(p.prompt, gcd.demonstrate(p, rng), {"answer": str(p.answer)})[1] == "correct" for p in problems
    )


@pytest.mark.parametrize(
    ("completion", "outcome"),
    [
        ("12-04=08;\\boxed{4}", "correct"),
        ("\\boxed{04}", "correct"),
        ("\\boxed{3}", "wrong"),
        ("\\boxed{4}\\boxed{3}", "wrong"),
        ("\\boxed{4}1", "unparsed"),
        ("\\boxed{4}\n", "unparsed"),
        ("\\boxed{}", "unparsed"),
        ("\\boxed{4", "unparsed"),
        ("4", "unparsed"),
        ("", "unparsed"),
        ("\\boxed{" + "9" * 5000 + "}", "unparsed"),
    ],
)
def test_reward(completion, outcome):
    assert gcd.reward("gcd(12,04)=", completion, {"answer": "4"}) == (5.0 if outcome == "correct" else -5.0, outcome)


def test_another_data_set_is_an_error_and_not_a_wrong_answer():
    with pytest.raises(ValueError, match="answer"):
        gcd.reward("p", "\\boxed{4}", {"solution": "4"})


def test_held_out_pairs_are_never_trained_on_and_answers_are_balanced_alike():
    train, heldout = gcd.split(random.Random(0), 6000, 512)
    pairs = {frozenset(p) for p in heldout}
    assert len(pairs) == 512 and not pairs & {frozenset(p) for p in train}
    shares = [Counter(p.answer for p in part) for part in (train, heldout)]
    for answer in range(1, 13):
        assert shares[0][answer] / 6000 == pytest.approx(shares[1][answer] / 512, abs=0.03)
    assert max(shares[1].values()) / 512 < 0.3, "one constant answer must not pay"
    for a, b in train + heldout:
        assert 2 <= a <= 99 and 2 <= b <= 99 and a != b
        assert sum(1 for _ in gcd.subtractions(a, b)) in gcd.STEPS
    assert all(p.answer == math.gcd(*p) for p in train)


def test_drills_teach_arithmetic_and_never_an_answer():
    rng = random.Random(3)
    drills = [gcd.drill(rng) for _ in range(200)]
    assert not any("boxed" in response for _, response in drills)
    assert all(response.count(";") <= 2 for _, response in drills)


def test_a_reward_worker_imports_the_standard_library_only():
    code = "import sys, areal_hpc.demo.gcd; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
