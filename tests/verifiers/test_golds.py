"""Gold answers of GSM8K, MATH-500, AIME24 and AMC23: right in every usual form, wrong for every other gold."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from pathlib import Path

import pytest

from areal_hpc.verifiers.math import reward

DATA = Path(os.environ.get("AREAL_HPC_DATA") or Path(__file__).parents[3] / "shared" / "data")
SETS = ("gsm8k-test", "math500-test", "aime24-test", "amc23-test")
NUM_OTHERS = 20
FAST_GOLDS = 60

_UNIT = re.compile(r"\\\$|\^\\circ|(?<=[\d\s}])\\(?:text|mbox) ?\{[^{}]*\}(?:\^\d)?$")
"""Dollar, degrees, and words behind a value."""


def golds(name: str) -> list[str]:
    path = DATA / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there; AREAL_HPC_DATA names the directory of the public data sets")
    with gzip.open(path, "rt") as file:
        answers = [str(json.loads(line)["answer"]) for line in file]
    return list(dict.fromkeys(answer.rpartition("####")[2].strip() for answer in answers))


def forms(gold: str) -> list[str]:
    bare = _UNIT.sub("", gold).strip() or gold
    answers = [
        f"Some words. $\\boxed{{{gold}}}$",
        f"\\[\n\\boxed{{{gold}}}\n\\]\nas was to be found.",
        f"<think>\\boxed{{-1}} or so</think>It is \\boxed{{{gold}}}.",
        f"The final answer is ${gold}$. I hope it is correct.",
        f"So the answer is \\({gold}\\).",
        f"step\n#### {gold}",
        f"**Answer:** {gold}",
        f"\\boxed{{{bare}}}",
        f"\\boxed{{ {gold.replace(' ', '')} }}"
        if "\\text" not in gold and "\\mbox" not in gold
        else f"\\boxed{{{gold}}}",
    ]
    if re.fullmatch(r"-?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.0)?", gold):
        number = int(gold.replace(",", "").partition(".")[0])
        answers += [
            f"The answer is {number:,}.",
            f"\\boxed{{{number:,}}}".replace(",", "{,}"),
            f"\\boxed{{{number}.00}}",
        ]
        answers += [f"\\boxed{{\\${number:,}}}", f"So it is {number} apples in all.", f"\\boxed{{x = {number}}}"]
    return answers


def value(gold: str) -> str:
    """What stays of a gold answer where units, brackets and blanks may be left out; the same means no near miss."""
    text = _UNIT.sub("", gold).replace(",\\!", "").replace(" ", "").replace("\\left", "").replace("\\right", "")
    text = re.sub(r"^[a-z]\\in|^[a-z]=", "", text).strip("()")
    text = re.sub(r"\\d?frac\{?(\d+?)\}?\{?(\d+)\}?$", r"\1/\2", text)
    return str(float(text.replace(",", ""))) if re.fullmatch(r"-?[\d,]*\.?\d+", text) else text


@pytest.mark.parametrize("name", SETS)
def test_every_gold_is_right_in_its_usual_forms(name):
    mistakes = []
    for gold in golds(name):
        for form in forms(gold):
            if (outcome := reward("", form, {"answer": gold})[1]) != "correct":
                mistakes.append((gold, form, outcome))
    assert mistakes == []


def mistakes_against_others(name: str, num_golds: int | None, seed: int) -> list[tuple[str, str, str]]:
    everyone, draw = golds(name), random.Random(seed)
    some = everyone if num_golds is None else draw.sample(everyone, min(num_golds, len(everyone)))
    mistakes = []
    for gold in some:
        others = [other for other in everyone if value(other) != value(gold)]
        for other in draw.sample(others, min(NUM_OTHERS, len(others))):
            outcome = reward("", f"\\boxed{{{other}}}", {"answer": gold})[1]
            if outcome != "wrong":
                mistakes.append((gold, other, outcome))
    return mistakes


@pytest.mark.parametrize("name", SETS)
def test_no_gold_is_right_for_another(name):
    assert mistakes_against_others(name, FAST_GOLDS, seed=1) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_no_gold_is_right_for_any_of_twenty_others(name):
    assert mistakes_against_others(name, None, seed=2) == []
