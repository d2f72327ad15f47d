"""What people read: lines, status and summary, from figures worked out by hand."""

from __future__ import annotations

import json
import math

import pytest

from areal_hpc import progress as module
from areal_hpc.config import Config
from areal_hpc.data import Prompt
from areal_hpc.evaluation import Evaluation
from areal_hpc.liveview import LiveView, sparkline
from areal_hpc.logschema import Outcome
from areal_hpc.progress import Progress
from areal_hpc.rundir import RunDir, read_json
from tests.unit.test_evaluation import finish


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def row(step: int, **changes) -> dict:
    return {
        "step": step,
        "version_after": step,
        "reward_mean": 1.25,
        "loss": -0.5,
        "entropy": 0.125,
        "grad_norm": 2.0,
        "head_lag_mean": 1.5,
        "head_lag_max": step,
        "num_filtered": 0,
        "total_s": 2.0,
        "wait_s": 0.5,
        "response_tokens": 900,
        "num_sequences": 10,
        "consumed_tokens": 1000,
        "skipped": False,
    } | changes


def evaluation(version: int, outcomes: list[Outcome]) -> Evaluation:
    done = Evaluation({"heldout": [Prompt(str(i), "", {}) for i in range(len(outcomes))]}, 1, version)
    for i, outcome in enumerate(outcomes):
        finish(done, -1 - i, outcome, length=10)
    return done


def test_a_run_from_start_to_summary(tmp_path, clock):
    lines: list[str] = []
    run_dir = RunDir.next_attempt(tmp_path)
    progress = Progress(run_dir, "r", 3, pid=1, host="h", say=lines.append)
    progress.evaluated(evaluation(0, [Outcome.CORRECT, Outcome.WRONG, Outcome.WRONG, Outcome.TIMEOUT]))
    clock.now_s = 110.0
    progress.training_begins()
    for step, skipped in ((1, False), (2, True), (3, False)):
        clock.now_s += 5.0
        progress.step(row(step, skipped=skipped, consumed_tokens=0 if skipped else 1000))
    clock.now_s = 130.0
    progress.evaluated(evaluation(3, [Outcome.CORRECT] * 3 + [Outcome.WRONG]))
    progress.ended("done", "last step reached", 0)
    summary = read_json(run_dir.summary)
    evaluations = [(e["version"], e["data"], e["pass_at_1"]) for e in summary.pop("evaluations")]
    assert evaluations == [(0, "heldout", pytest.approx(1 / 3, abs=1e-6)), (3, "heldout", 0.75)]
    assert summary == {
        "pass1_before": pytest.approx(1 / 3),
        "pass1_after": 0.75,
        "wall_s": 30.0,
        "train_s": 15.0,
        "consumed_tokens": 2000,
        "consumed_tokens_per_s": pytest.approx(133.3),
        "head_staleness_max": 3,
        "versions": 3,
        "why_ended": "last step reached",
        "prompts_refused": 0,
        "heldout_refused": 0,
        "bad_lines": 0,
    }
    assert lines[0] == "held-out pass@1 at version 0: 33.3% +- 33.3% (3 answers, mean length 10, 1 without a score)"
    assert lines[1] == (
        "step 1/3  reward +1.25  loss -0.5000  entropy 0.125  length 90  lag mean 1.5 max 1  2.0 s  200 tok/s"
    )
    assert "SKIPPED, not finite" in lines[2]
    assert read_json(run_dir.status)["exit_code"] == 0


def test_a_failed_run_has_no_summary_and_status_is_always_json(tmp_path, clock):
    run_dir = RunDir.next_attempt(tmp_path)
    progress = Progress(run_dir, "r", 3, pid=1, host="h", say=lambda line: None)
    progress.training_begins()
    clock.now_s += 1
    progress.step(row(1, loss=math.nan, reward_mean=math.inf))
    progress.ended("failed", "rank 2 broke", 1)
    status = json.loads(run_dir.status.read_text(), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    assert status["loss"] is None and status["why_ended"] == "rank 2 broke"
    assert not run_dir.summary.exists()


def test_attempts_never_share_a_directory(tmp_path):
    assert [RunDir.next_attempt(tmp_path / "run").attempt for _ in range(3)] == [1, 2, 3]


def test_sparkline_spans_its_own_range():
    assert sparkline([1.0, None, 2.0, 3.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▄▄" and sparkline([1.0]) == ""


def test_the_live_view_draws_before_there_is_anything_to_draw(tmp_path):
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    config = Config.model_validate(
        {"steps": 9, "model": {"path": "m"}, "data": {"train": "d"}, "reward": {"function": "a:b"}}
    )
    console.print(LiveView(RunDir.next_attempt(tmp_path), config).render())
    text = console.export_text()
    assert "starting ranks" in text and "0/9" in text


@pytest.mark.parametrize(("order", "note"), [("admission", "at admission"), ("strict", "(max_staleness 2)")])
def test_the_summary_says_what_bounds_the_staleness(order, note, tmp_path, capsys):
    staleness = {"max_staleness": 2, "order": order}
    config = Config.model_validate(
        {"staleness": staleness, "model": {"path": "m"}, "data": {"train": "d"}, "reward": {"function": "a:b"}}
    )
    figures = {"consumed_tokens": 10, "consumed_tokens_per_s": 2.0, "head_staleness_max": 1, "versions": 9}
    times = {"wall_s": 5.0, "total_s": 6.0, "why_ended": "last step reached", "pass1_before": 0.25, "pass1_after": None}
    LiveView(RunDir.next_attempt(tmp_path), config).show_summary(figures | times)
    text = capsys.readouterr().out
    assert note in text and "25.0% before, not measured after" in text
