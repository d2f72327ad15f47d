"""Answers in, rewards out: every kind of value, exception and text. The worker processes are real."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.rewards import RewardError, RewardResult, RewardService

WAIT_S = 60.0
FILE = Path(__file__).with_name("reward_functions.py")
FUNCTION = f"{FILE}:reward"


@pytest.fixture(scope="module")
def shared() -> Iterator[RewardService]:
    """For functions that do no lasting harm."""
    with RewardService(FUNCTION, num_workers=1, timeout_s=WAIT_S) as service:
        yield service
        assert service.num_restarts == 0  # nothing of this may cost a process


def one(service: RewardService, completion: str = "", prompt: str = "", **metadata: Any) -> RewardResult:
    service.submit((1, 2), prompt, completion, metadata)
    (result,) = service.wait(WAIT_S)
    assert result.key == (1, 2)
    return result


@pytest.mark.parametrize(
    ("value", "reward", "outcome"),
    [
        ("0.25", 0.25, "correct"),
        ("3", 3.0, "correct"),
        ("0", 0.0, "wrong"),
        ("-1.5", -1.5, "wrong"),
        ("True", 1.0, "correct"),
        ("fractions.Fraction(1, 4)", 0.25, "correct"),
        ("(0.5, 'wrong')", 0.5, "wrong"),
        ("(0, 'correct')", 0.0, "correct"),
        ("(-1, 'unparsed')", -1.0, "unparsed"),
    ],
)
def test_value_becomes_reward(shared: RewardService, value: str, reward: float, outcome: str) -> None:
    result = one(shared, do="literal", value=value)
    assert (result.reward, result.outcome, result.detail) == (reward, outcome, "")
    assert type(result.reward) is float and 0 <= result.seconds < WAIT_S and result.answer is None


def test_answer_that_the_function_read_comes_along(shared: RewardService) -> None:
    result = one(shared, do="literal", value="(0.5, 'wrong', '\u221a2')")
    assert (result.reward, result.outcome, result.answer) == (0.5, "wrong", "\u221a2")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("None", "got NoneType"),
        ("'1.0'", "got str"),
        ("[1.0, 'correct']", "got list"),
        ("float('nan')", "finite"),
        ("-1e400", "finite"),
        ("10 ** 4000", "finite"),
        ("(1.0, 'great')", "'great'"),
        ("(None, 'correct')", "NoneType"),
        ("(float('nan'), 'wrong')", "finite"),
        ("(1.0, 'correct', 1)", "expected the answer as text or None, got int"),
        ("(1.0, 'correct', 'x', 1)", "expected (reward"),
        ("'x' * 50_000_000", "got str"),
        ("(1.0, 'x' * 50_000_000)", "expected (reward"),
        ("(1.0, ['correct'])", "expected (reward"),
    ],
)
def test_value_that_is_no_reward_is_an_error(shared: RewardService, value: str, reason: str) -> None:
    result = one(shared, do="literal", value=value)
    assert result.outcome == "error" and math.isnan(result.reward)
    assert reason in result.detail and len(result.detail) <= 500


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        ("fails", "ValueError: first line second xxx"),
        ("unprintable", "Unprintable: (message unreadable)"),
        ("surrogate", "ValueError: bad \\udc80"),
        ("leaves", "SystemExit: 0"),
        ("recursion", "RecursionError: maximum recursion depth"),
        ("memory", "MemoryError"),
    ],
)
def test_exception_is_an_error_with_its_place(shared: RewardService, do: str, reason: str) -> None:
    result = one(shared, do=do)
    assert result.outcome == "error" and math.isnan(result.reward)
    assert reason in result.detail and "\n" not in result.detail and len(result.detail) <= 500
    place, line, _ = result.detail.split(":", 2)
    start = next(n for n, text in enumerate(FILE.read_text().splitlines(), 1) if text.startswith(f"def {do}("))
    assert place == str(FILE) and start < int(line) <= start + 4


def test_output_floods_stdin_and_signals_do_not_matter(shared: RewardService) -> None:
    assert one(shared, do="floods").outcome == "correct"
    assert one(shared, do="warned").outcome == "correct"


@pytest.mark.parametrize(
    "text", ["caf\u00e9 \u6f22 \U0001f600 \x00", "half \ud83d and \udc80", "\ud83d\ude00 as two", "\r\n"]
)
def test_text_arrives_unchanged(shared: RewardService, text: str) -> None:
    wanted = ascii(text + "|" + text[::-1])
    result = one(shared, prompt=text, completion=text[::-1], do="same_text", ascii=wanted)
    assert (result.outcome, result.detail) == ("correct", "")


@pytest.mark.parametrize("value", ["lone \ud800", object(), 10**30, {"deep": {"\ud800": 1}}])
def test_metadata_that_cannot_be_sent_is_an_error_of_that_answer(shared: RewardService, value: object) -> None:
    result = one(shared, do="literal", value=value)
    assert result.outcome == "error" and math.isnan(result.reward) and "cannot be sent to a" in result.detail
    assert one(shared, do="literal", value="1").outcome == "correct"


def test_surroundings_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPIR_X", "HYDRA_X", "SLURM_PROCID", "RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("KEPT", "yes")
    leak = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(leak, True)
    try:
        with RewardService(FUNCTION, num_workers=2, timeout_s=WAIT_S) as service:
            assert one(service, do="surroundings").detail == ""
    finally:
        os.close(leak)


def test_module_on_the_path_and_relative_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("lib", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "lib" / "my_rewards.py").write_text("def half(prompt, completion, metadata): return 0.5\n")
    (tmp_path / "other" / "beside.py").write_text("THIRD = 1 / 3\n")
    (tmp_path / "other" / "own.py").write_text("import beside\ndef third(p, c, m): return beside.THIRD\n")
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.chdir(tmp_path)
    for name, reward in (("my_rewards:half", 0.5), ("other/own.py:third", 1 / 3)):
        with RewardService(name, num_workers=1, timeout_s=WAIT_S) as service:
            assert one(service).reward == reward


def test_time_in_the_queue_does_not_count() -> None:
    with RewardService(FUNCTION, num_workers=1, timeout_s=1.0) as service:
        for sample in range(8):
            service.submit((0, sample), "", "", {"do": "nap", "s": 0.15})  # 1.2 s in all
        assert [result.outcome for result in service.wait(WAIT_S)] == ["correct"] * 8


def test_every_answer_comes_back_once(tmp_path: Path) -> None:
    outcomes = ("correct", "wrong", "unparsed")
    with RewardService(FUNCTION, num_workers=2, timeout_s=WAIT_S) as service:
        for n in range(200):
            metadata = {"do": "pair", "reward": n / 4, "outcome": outcomes[n % 3]}
            if n % 100 == 31:
                metadata = {"do": "dies_once", "file": str(tmp_path / str(n))}
            service.submit((n // 4, n % 4), "prompt", "x" * 100_000, metadata)
        assert service.num_pending == 200
        results = service.wait(WAIT_S)
        assert service.num_pending == 0 and service.poll() == []
    assert len(results) == len({result.key for result in results}) == service.num_scored == 200
    assert service.num_restarts == 2
    for result in results:
        n = 4 * result.key[0] + result.key[1]
        if n % 100 != 31:
            assert (result.reward, result.outcome) == (n / 4, outcomes[n % 3])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_package.rewards:f", "No module named"),
        ("/no/such/file.py:f", "No such file"),
        *[(name, "write package.module:name") for name in ("math", ":f", "math:", "math:a-b", "")],
    ],
)
def test_function_that_is_not_there(name: str, reason: str) -> None:
    with pytest.raises(RewardError, match=reason):
        RewardService(name, num_workers=1, timeout_s=1)


@pytest.mark.parametrize("wrong", [{"num_workers": 0}, {"timeout_s": math.nan}, {"timeout_s": 0}])
def test_numbers_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        RewardService("math:sqrt", **{"num_workers": 1, "timeout_s": 1, **wrong})


def test_doubled_key() -> None:
    with RewardService(FUNCTION, num_workers=1, timeout_s=WAIT_S) as service:
        for sample in (0, 1):
            service.submit((0, sample), "", "", {"do": "literal", "value": "1"})
            with pytest.raises(RewardError, match="unique"):
                service.submit((0, sample), "", "", {"do": "literal", "value": "1"})
        assert [result.key for result in service.wait(WAIT_S)] == [(0, 0), (0, 1)]
        assert one(service, do="literal", value="1").outcome == "correct"
