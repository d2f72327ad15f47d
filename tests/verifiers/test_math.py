"""The maths verifier: a table of cases, its limits, its place in a reward worker."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from areal_hpc.rewards import RewardService
from areal_hpc.verifiers import symbolic, units
from areal_hpc.verifiers.extract import final_answer
from areal_hpc.verifiers.limits import OutOfTime, limited
from areal_hpc.verifiers.math import LIMIT_S, reward
from areal_hpc.verifiers.numerals import number, terminates
from areal_hpc.verifiers.tidy import tidy
from tests.verifiers.math_cases import BOXED, COMPLETIONS
from tests.verifiers.math_cases_formulas import BOXED_FORMULAS
from tests.verifiers.math_cases_numbers import BOXED_NUMBERS
from tests.verifiers.math_cases_prose import MORE_COMPLETIONS

TABLES = [
    (BOXED, "Therefore it is $\\boxed{%s}$."),
    (BOXED_NUMBERS, "We find $\\boxed{%s}$."),
    (BOXED_FORMULAS, "This is\n\\[\\boxed{%s}\\]"),
    (COMPLETIONS, "%s"),
    (MORE_COMPLETIONS, "%s"),
]
"""Cases by kind, and the completion around each answer."""
FUNCTION = "areal_hpc.verifiers.math:reward"
HANGS = [
    "\\boxed{9^{9^{9^9}}}",
    "\\boxed{2^{10^{10}}}",
    "\\boxed{(7^{4000})^{4000}}",
    "\\boxed{10^{9}!}",
    "\\boxed{" + "(" * 5000 + "7" + ")" * 5000 + "}",
    "\\boxed{" * 10_000,
    "\\boxed{8} " * 10_000,
    "\\boxed{" + "7" * 1_000_000 + "}",
    "\\boxed{" + "7+" * 500_000 + "7}",
    "7 " * 500_000,
    "The answer is " + "is " * 300_000,
    "the answer is " * 70_000,
    "\\boxed{7} is wrong. " * 10_000,
    "minus " * 100_000 + "7",
    "I can't find a " * 50_000,
    "\\boxed{" + "(x+1)^{99}" * 90 + "}",
    "\\boxed{\\sum_{k=1}^{10^{15}} \\frac{1}{k}}",
    "\\boxed{\\int_0^{1} e^{e^{e^{x}}} \\sin(x^x) dx}",
]


class Verdict(NamedTuple):
    gold: str
    completion: str
    expected: str
    outcome: str
    seconds: float


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list[Verdict]]:
    """The whole table, scored once."""
    found: dict[str, list[Verdict]] = {}
    for table, form in TABLES:
        for kind, cases in table.items():
            for gold, answer, expected in cases:
                started = time.monotonic()
                outcome = reward("", form % answer, {"answer": gold})[1]
                seconds = time.monotonic() - started
                found.setdefault(kind, []).append(Verdict(gold, answer, expected, outcome, seconds))
    return found


def test_the_table_is_large_and_free_of_false_positives(verdicts):
    cases = [verdict for kind in verdicts.values() for verdict in kind]
    mistakes = [verdict for verdict in cases if verdict.outcome != verdict.expected]
    assert len(cases) >= 300
    assert [v for v in mistakes if v.outcome == "correct"] == []
    assert len(mistakes) <= 0.01 * len(cases), [(v.gold[:60], v.completion[:60], v.outcome) for v in mistakes]


@pytest.mark.parametrize("kind", sorted({kind for table, _ in TABLES for kind in table}))
def test_every_kind_is_right(verdicts, kind):
    assert [(v.gold[:60], v.completion[:60], v.outcome) for v in verdicts[kind] if v.outcome != v.expected] == []


def test_no_case_takes_long(verdicts):
    slow = [(v.completion[:60], v.seconds) for kind in verdicts.values() for v in kind if v.seconds > 3 * LIMIT_S]
    assert slow == []


@pytest.mark.parametrize("completion", HANGS, ids=lambda text: text[:24])
def test_what_usually_hangs_ends_soon(completion, monkeypatch):
    monkeypatch.setattr("areal_hpc.verifiers.math.LIMIT_S", 1.0)
    started, started_cpu = time.monotonic(), time.process_time()
    assert reward("", completion, {"answer": "42"})[1] != "correct"
    assert time.process_time() - started_cpu < 2
    assert time.monotonic() - started < 20  # the machine may be busy


def test_reward_and_outcome():
    assert reward("q", "\\boxed{7}", {"answer": "7"}) == (1.0, "correct", "7")
    assert reward("q", "\\boxed{8}", {"answer": "7"}) == (0.0, "wrong", "8")
    assert reward("q", "I do not know it.", {"answer": "7"}) == (0.0, "unparsed", None)
    assert reward("q", "\\boxed{7}", {"answer": 7, "more": 1}) == (1.0, "correct", "7")
    assert reward("q", "It is $7.0$.", {"answer": "7"})[1:] == ("correct", "7"), "votes for 7 and 7.0 are one"


@pytest.mark.parametrize("metadata", [{}, {"answer": ""}, {"answer": None}, {"answer": ["7"]}, {"solution": "7"}])
def test_a_data_set_without_answers_is_told(metadata):
    with pytest.raises(ValueError, match='needs a text "answer"'):
        reward("q", "\\boxed{7}", metadata)


def test_a_prompt_that_opened_the_thought_leaves_it_open():
    assert final_answer("so \\boxed{7}", "question <think>\n") is None
    found = final_answer("so \\boxed{7}</think> \\boxed{8}", "question <think>\n")
    assert found is not None and found.text == "8"


def test_it_works_outside_the_main_thread():
    outcomes: list[str] = []
    cases = [("\\boxed{\\sqrt{117}}", "3\\sqrt{13}"), ("\\boxed{7}", "7"), ("\\boxed{x^2}", "2x")]
    thread = threading.Thread(target=lambda: outcomes.extend(reward("", a, {"answer": g})[1] for a, g in cases))
    thread.start()
    thread.join(30)
    assert outcomes == ["correct", "correct", "wrong"]


def test_hangs_cost_a_reward_service_no_process():
    with RewardService(FUNCTION, num_workers=1, timeout_s=60) as service:
        for i, completion in enumerate([*HANGS[:-1], "\\boxed{42}"]):
            service.submit((0, i), "", completion, {"answer": "42"})
        results = {result.key[1]: result.outcome for result in service.wait(100)}
        assert results.pop(len(HANGS) - 1) == "correct"
        assert len(results) == len(HANGS) - 1 and set(results.values()) <= {"wrong", "unparsed"}
        assert (service.num_restarts, service.num_timeouts, service.num_errors) == (0, 0, 0)


def test_cpu_time_is_limited_even_if_the_exception_is_swallowed_once():
    handler, caught = signal.getsignal(signal.SIGPROF), 0
    with pytest.raises(OutOfTime), limited(0.05, 1 << 28):
        while True:
            try:
                while True:
                    pass
            except Exception:
                raise AssertionError("a library would have swallowed it") from None
            except OutOfTime:
                caught += 1
                if caught == 2:
                    raise
    assert signal.getsignal(signal.SIGPROF) == handler
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0


def test_memory_is_limited_and_the_limit_taken_back():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with limited(10, 64 << 20):
        bytearray(16 << 20)
        with pytest.raises(MemoryError):
            bytearray(256 << 20)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    bytearray(256 << 20)


def test_a_missing_library_is_told_in_one_sentence():
    code = "import sys; sys.modules['math_verify'] = None; import areal_hpc.verifiers.math"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "needs math-verify" in done.stderr.splitlines()[-1]
    assert "pip install 'areal-hpc[maths]'" in done.stderr.splitlines()[-1]


def test_it_brings_neither_torch_nor_mpi():
    code = "import sys, areal_hpc.verifiers.math; print(sorted({'torch', 'mpi4py', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def value(text: str) -> Fraction | None:
    found = number(tidy(text))
    return None if found is None else found.value


@given(st.integers(-(10**12), 10**12))
@settings(deadline=None)
def test_integers_are_read_with_every_separator(n):
    for mark in (",", " ", "'", "_", "{,}", "\\,", ",\\!", "\u202f", "\u2009"):
        assert value(f"{n:,}".replace(",", mark)) == n
    assert value(f"{n:,}.50") == n + (Fraction(1, 2) if n > 0 else -Fraction(1, 2)) or n == 0
    if abs(n) >= 10**6:
        assert value(f"{n:,}".replace(",", ".")) == n
    assert value(f"{n:e}".replace("e", " \\times 10^{") + "}") == Fraction(f"{n:e}")


@given(st.integers(0, 9999), st.integers(1, 199))
@example(1725, 163)  # ...5828220858...: the period has a repetition inside
@settings(deadline=None)
def test_decimals_of_fractions_are_read_exactly(top, bottom):
    """Long division gives the digits; the remainder that comes again starts the period."""
    whole, rest = divmod(top, bottom)
    digits, seen = "", {}
    while rest and rest not in seen:
        seen[rest] = len(digits)
        digit, rest = divmod(10 * rest, bottom)
        digits += str(digit)
    assert terminates(Fraction(top, bottom)) == (not rest)
    if not rest:
        assert value(f"{whole}.{digits or '0'}") == Fraction(top, bottom)
        return
    head, period = digits[: seen[rest]], digits[seen[rest] :]
    for form in (f"\\overline{{{period}}}", f"({period})", f"{period * 3}..."):
        assert value(f"{whole}.{head}{form}") == Fraction(top, bottom)
    assert value(f"{whole}.{head}{period}") != Fraction(top, bottom)


@pytest.mark.parametrize(
    "text", ["1,23", "1,2345", "12,34,567,8", "1.2.3", "1 23", "0,123", "1e", "e5", "--5", "5-", "1e99999", ""]
)
def test_what_is_no_number(text):
    assert number(text) is None


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        ("cm", "centimetres", True),
        ("cm", "", True),
        ("", "cm", True),
        ("cm^2", "\\text{square cm}", True),
        ("cm^2", "cm", False),
        ("km/h", "kilometers per hour", True),
        ("km/h", "km", False),
        ("\\$", "\\text{dollars per week}", True),
        ("\\$", "€", False),
        ("\\text{eggs}", "\\text{duck eggs}", True),
        ("\\text{eggs}", "\\text{ducks}", False),
        ("\\text{eggs}", "cm", False),
    ],
)
def test_units(gold, answer, expected):
    assert units.agree(units.unit_of(tidy(gold))[0], units.unit_of(tidy(answer))[0]) is expected


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ("\\sqrt{2} \\cdot 10^{-30}", "\\sqrt{3} \\cdot 10^{-30}", False),
        ("e^{\\pi\\sqrt{163}}", "262537412640768744", False),  # equal to 30 digits
        ("\\sin(2x)", "2 \\sin x \\cos x", True),
        ("\\sqrt{x^2}", "x", False),
        ("\\ln(x^2)", "2 \\ln x", True),  # where both are real
        ("(x+1)^{50}", "(1+x)^{50}", True),
        ("2^{1000}", "2^{1000}+1", False),
        ("2 (3)", "6", True),
        ("2 (3)", "5", False),  # latex2sympy adds them
    ],
)
def test_formulas_are_compared_by_value(one, two, expected):
    assert symbolic.equal(one, two) is expected


@pytest.mark.parametrize(
    "text", ["9^{9^{9^{9}}}", "(7^{4000})^{4000}", "10^{9}!", "e^{e^{e^{9}}}", "\\prod_{k=1}^{10^{9}} k"]
)
def test_too_much_to_compute_is_refused_before(text):
    with pytest.raises(symbolic.Unreadable):
        symbolic.equal(text, "1")


def test_bench(capsys):
    from areal_hpc.bench.verifier import main

    assert main(["--answers", "60", "--repeats", "1"]) == 0
    text = capsys.readouterr().out
    record = json.loads(text.splitlines()[-1])
    assert record["bench"] == "verifier" and record["ours"] > 0 and record["p99_ms"] > 0
    assert "100.0%" in text and "answers/s, p99" in text
