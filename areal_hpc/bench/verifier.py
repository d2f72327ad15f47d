"""`areal-hpc bench verifier`: maths answers per second on one core, against math-verify alone on the same answers.

ours = answers/s of `areal_hpc.verifiers.math:reward`, reference = answers/s of math-verify's `parse` and `verify`;
higher is better, the goal is to be no slower. The JSON line is about grade-school answers: a few lines of reckoning,
then an integer or a decimal, one in three of them wrong. The table adds competition answers, where both sides compute
with formulas, and tells how often each side is right. Required of ours, warm, for grade-school answers: at least 300
answers/s, and 99 % of them within 50 ms.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

from areal_hpc.bench.report import report

GOAL = 1.0
REQUIRED_PER_S, REQUIRED_P99_S = 300, 0.050

Case = tuple[str, str, bool]
"""Gold answer, completion, whether it is right."""
Score = Callable[[str, str], bool]

_ENDINGS = (
    "The answer is {}.",
    "So the result is $\\boxed{{{}}}$.",
    "#### {}",
    "**Answer:** {}",
    "That makes {} in all.",
)
_COMPETITION: list[Case] = [
    ("\\frac{3}{4}", "\\boxed{0.75}", True),
    ("3\\sqrt{13}", "\\boxed{\\sqrt{117}}", True),
    ("3\\sqrt{13}", "\\boxed{13\\sqrt{3}}", False),
    ("(a+5)(b+2)", "\\boxed{ab+2a+5b+10}", True),
    ("(a+5)(b+2)", "\\boxed{ab+2a+5b+7}", False),
    ("\\left(3, \\frac{\\pi}{2}\\right)", "\\boxed{(3, \\pi/2)}", True),
    ("(3,4]", "\\boxed{3 < x \\le 4}", True),
    ("(3,4]", "\\boxed{[3,4]}", False),
    ("52_8", "\\boxed{52_{8}}", True),
    ("52_8", "\\boxed{52_7}", False),
    ("6-5i", "\\boxed{6-5\\mathrm{i}}", True),
    ("\\frac{1}{3}", "\\boxed{0.\\overline{3}}", True),
    ("0.00000001", "\\boxed{0.00000002}", False),
    ("15\\mbox{ cm}^2", "\\boxed{15 \\text{ square centimeters}}", True),
    ("15\\mbox{ cm}^2", "\\boxed{15 \\text{ m}^2}", False),
    ("1\\pm\\sqrt{19}", "\\boxed{1-\\sqrt{19}, 1+\\sqrt{19}}", True),
    ("\\begin{pmatrix} 1/5 \\\\ -18/5 \\end{pmatrix}", "\\boxed{\\begin{bmatrix} 0.2 \\\\ -3.6 \\end{bmatrix}}", True),
    ("y = 2x + 3", "\\boxed{y - 2x = 3}", True),
    ("\\sin 2x", "\\boxed{2 \\sin x \\cos x}", True),
    ("5", "\\boxed{6 = 5}", False),
]


@dataclass
class Side:
    """One way to score, and what it took."""

    score: Score
    per_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    num_right: int = 0
    num_scored: int = 0

    def run(self, cases: Sequence[Case]) -> None:
        started = time.perf_counter()
        for gold, completion, is_right in cases:
            begin = time.perf_counter()
            verdict = self.score(gold, completion)
            self.seconds.append(time.perf_counter() - begin)
            self.num_right += verdict == is_right
        self.num_scored += len(cases)
        self.per_s.append(len(cases) / (time.perf_counter() - started))

    @property
    def p99_s(self) -> float:
        return quantiles(self.seconds, n=100)[98]


def grade_school(num: int, seed: int) -> list[Case]:
    """Answers to sums about things, of the length and in the forms that small models write."""
    rng = random.Random(seed)
    cases = []
    for _ in range(num):
        a, b, c = rng.randint(2, 60), rng.randint(2, 40), rng.randint(100, 90_000)
        gold = rng.choice([a * b, c, c * 12, c / 4])
        said = gold if (is_right := rng.random() < 2 / 3) else gold + rng.choice([-1, 1, 10])
        places = 2 if isinstance(gold, float) else 0
        shown = rng.choice(["{:,.%df}", "{:.%df}", "${:.%df}", "{:.%df} apples"]) % places
        steps = [f"There are {a} boxes with {b} pieces, that is {a} * {b} = {a * b}."] * rng.randint(2, 6)
        end = rng.choice(_ENDINGS).format(shown.format(said))
        cases.append((f"{gold:.{places}f}", "\n".join([*steps, end]), is_right))
    return cases


def ours(gold: str, completion: str) -> bool:
    from areal_hpc.verifiers.math import reward

    return reward("", completion, {"answer": gold})[1] == "correct"


def forget() -> None:
    """Empty the caches of answers that were read before; what was compiled and imported stays warm."""
    from areal_hpc.verifiers import shapes, symbolic

    shapes.read.cache_clear()
    symbolic.forget()


def bare(gold: str, completion: str) -> bool:
    from math_verify import parse, verify

    return bool(verify(parse(f"${gold}$"), parse(completion)))


def measure(cases: Sequence[Case], repeats: int) -> tuple[Side, Side]:
    """Ours and bare math-verify in turn, after one round each that fills caches and is not counted."""
    for score in (ours, bare):
        Side(score).run(cases[: max(40, len(cases) // 5)])
    sides = Side(ours), Side(bare)
    for _ in range(repeats):
        for side in sides:
            forget()
            side.run(cases)
    return sides


def row(name: str, mine: Side, other: Side) -> dict[str, str]:
    return {
        "answers": name,
        "ours /s": f"{median(mine.per_s):.0f}",
        "math-verify /s": f"{median(other.per_s):.0f}",
        "ours p99 ms": f"{mine.p99_s * 1e3:.1f}",
        "math-verify p99 ms": f"{other.p99_s * 1e3:.1f}",
        "ours right": f"{mine.num_right / mine.num_scored:.1%}",
        "math-verify right": f"{other.num_right / other.num_scored:.1%}",
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="areal-hpc bench verifier", description="maths answers/s against math-verify")
    parser.add_argument(
        "--answers", type=int, default=500, help="grade-school answers per repeat (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    school = measure(grade_school(options.answers, options.seed), options.repeats)
    competition = measure(_COMPETITION, options.repeats)
    mine, other = school
    met = median(mine.per_s) >= REQUIRED_PER_S and mine.p99_s <= REQUIRED_P99_S
    required = f">= {REQUIRED_PER_S} answers/s, p99 <= {REQUIRED_P99_S * 1e3:g} ms: {'met' if met else 'MISSED'}"
    return report(
        "verifier",
        "answers/s (grade school)",
        mine.per_s,
        other.per_s,
        goal=GOAL,
        rows=[row("grade school", *school), row("competition", *competition), ("required", required)],
        extra={"p99_ms": mine.p99_s * 1e3, "reference_p99_ms": other.p99_s * 1e3, "requirement_met": met},
    )
