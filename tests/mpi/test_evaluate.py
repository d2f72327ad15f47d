"""`areal-hpc evaluate` and evaluation beside training, on real ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from areal_hpc import simulation
from areal_hpc.answers import num_on_record
from areal_hpc.rundir import read_json
from areal_hpc.runlog import RunLog
from tests.runs import TESTS, finish, run, start, tiny_config, wait_until

pytestmark = pytest.mark.mpi
SAMPLES = 4
SETTINGS = ["--samples", str(SAMPLES), "--max-new-tokens", "24", "--max-prompt-tokens", "8", "--seed", "5"]
COOLER = ["--temperature", "0.7"]


def evaluate(tiny: Path, out: Path, *more: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal_hpc.cli", "evaluate", str(tiny / "model"), *SETTINGS]
    command += ["--data", str(tiny / "heldout.jsonl"), "--reward", f"{TESTS / 'tiny.py'}:reward_with_answer"]
    return subprocess.run(
        [*command, "--out", str(out), *more], capture_output=True, text=True, timeout=timeout_s, check=False
    )


def answers(out: Path) -> list[dict]:
    """All answers in order, without what may differ: how long they took."""
    lines = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seconds")
    return sorted(lines, key=lambda line: (line["prompt_id"], line["sample"]))


@pytest.fixture(scope="module")
def alone(tiny_dir, tmp_path_factory):
    """One rollout rank with 16 slots."""
    out = tmp_path_factory.mktemp("evaluate") / "alone"
    done = evaluate(tiny_dir, out, *COOLER, "rollout.slots=16")
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done


def test_every_answer_is_on_record_and_the_figures_are_those_of_the_record(alone):
    out, done = alone
    lines = answers(out)
    assert len({(line["prompt_id"], line["sample"]) for line in lines}) == len(lines) == 16 * SAMPLES
    figures = read_json(out / "summary.json")["data"][0]
    right = np.array([line["outcome"] == "correct" for line in lines]).reshape(16, SAMPLES).mean(axis=1)
    assert figures["pass_at_1"] == pytest.approx(right.mean(), abs=1e-6)
    assert figures["pass_at_1_error"] == pytest.approx(right.std(ddof=1) / 4, abs=1e-6)
    assert figures["pass_at"]["4"]["mean"] == pytest.approx((right > 0).mean(), abs=1e-6)
    assert sum(figures["outcomes"].values()) == 64 and figures["tokens"] == sum(line["tokens"] for line in lines)
    assert figures["length"]["truncated"] == np.mean([line["finish"] == "length" for line in lines])
    assert {line["answer"] for line in lines} <= {"first", "second", "tie"} and figures["maj_at"]["4"]["prompts"] == 16
    assert 0 < right.mean() < 1, "figures at the edge prove nothing"
    for word in ("pass@1", "pass@4", "maj@2", "length p90", "truncated", "timeout", f"{right.mean():.1%}"):
        assert word in done.stdout
    assert len(RunLog(out).evaluations) == 64


def test_an_interrupted_evaluation_goes_on_and_no_answer_depends_on_ranks_or_slots(alone, tiny_dir, tmp_path):
    """Half of the record of one rank with 16 slots, and a torn line; two ranks with 3 slots make the rest of it."""
    first, _ = alone
    out = tmp_path / "interrupted"
    out.mkdir()
    lines = (first / "answers.jsonl").read_bytes().splitlines(keepends=True)
    (out / "answers.jsonl").write_bytes(b"".join(lines[:30]) + lines[30][:25])
    (out / "settings.json").write_bytes((first / "settings.json").read_bytes())
    done = evaluate(tiny_dir, out, *COOLER, "--ranks", "2", "rollout.slots=3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / "answers.jsonl").read_bytes().startswith(b"".join(lines[:30]))
    assert answers(out) == answers(first)
    assert read_json(out / "summary.json")["data"] == read_json(first / "summary.json")["data"]
    events = RunLog(out).events
    kept = events[events.kind == "evaluation_resumed"].text.tolist()
    assert kept == ["30 answers kept, 34 to go"] and (events.kind == "answer_torn").sum() == 1
    assert read_json(out / "attempt_1/begin.json")["steps_done"] == 30
    assert read_json(out / "attempt_1/end.json")["steps_done_after"] == 64


def test_a_complete_evaluation_is_shown_again_and_other_settings_are_refused(alone, tiny_dir):
    out, done = alone
    before = (out / "answers.jsonl").read_bytes()
    again = evaluate(tiny_dir, out, *COOLER, "rollout.slots=16")
    assert again.returncode == 0 and "is complete: 64 answers" in again.stdout
    assert done.stdout.partition("prompts")[2] == again.stdout.partition("prompts")[2]
    other = evaluate(tiny_dir, out, "--temperature", "0.5")
    assert other.returncode == 2 and "rollout.temperature was 0.7, is 0.5; name another --out" in other.stderr
    assert (out / "answers.jsonl").read_bytes() == before and not (out / "attempt_2").exists()


@pytest.fixture(scope="module")
def training(tiny_dir, tmp_path_factory):
    """Evaluations of every second version beside training, one held-out answer at a time, at their own temperature."""
    config = tiny_config(
        tiny_dir,
        tmp_path_factory.mktemp("training") / "run",
        seed=5,
        steps=12,
        evaluation={"samples": SAMPLES, "every": 2, "share": 0.01, "temperature": 0.7},
        rollout={"slots": 12},
    )
    config["data"]["heldout"] = str(tiny_dir / "heldout.jsonl")
    finished = run(config)
    finished.assert_done()
    return finished


def test_the_evaluation_at_the_start_of_a_run_is_that_of_the_command(training, alone):
    """Same model, seed and settings: the same random numbers for every prompt and sample, hence the same answers."""
    rows = training.log().evaluations.query("version == 0").sort_values(["prompt_id", "sample"])
    lines = answers(alone[0])
    assert rows.prompt_id.tolist() == [line["prompt_id"] for line in lines]
    assert rows.num_response.tolist() == [line["tokens"] for line in lines]
    assert rows.reward.tolist() == [line["reward"] for line in lines]
    assert rows.finish.tolist() == [line["finish"] for line in lines]
    assert (rows.first_version == 0).all() and (rows.last_version == 0).all()
    figures = read_json(alone[0] / "summary.json")["data"][0]
    assert training.summary["pass1_before"] == pytest.approx(figures["pass_at_1"], abs=1e-6)


def test_training_goes_on_during_an_evaluation(training):
    log = training.log()
    rows = log.evaluations
    versions = sorted(set(rows.version))
    assert versions[0] == 0 and versions[-1] == 12 and len(versions) >= 3
    assert (rows.groupby("version").size() == 16 * SAMPLES).all(), "every evaluation is complete"
    beside = rows[(rows.version > 0) & (rows.version < 12)]
    one = beside[beside.version == versions[1]]
    done = ((log.steps.time_s > one.finish_s.min()) & (log.steps.time_s < one.finish_s.max())).sum()
    assert done >= 2, f"only {done} steps were finished while version {versions[1]} was evaluated"
    assert (beside.first_version >= beside.version).all() and (beside.last_version >= beside.first_version).all()
    assert (beside.last_version > beside.version).any(), "answers that live through updates say so"
    assert len(log.steps) == 12 and training.summary["versions"] == 12
    late = log.events.kind.isin(["evaluation_late", "evaluation_left_out"])
    assert late.any(), "one answer at a time cannot keep up with every second version, and that is told"


def test_lines_and_summary_tell_of_every_evaluation(training):
    log = training.log()
    told = {(e["version"], e["answers"]) for e in training.summary["evaluations"]}
    assert told == {(int(version), 64) for version in set(log.evaluations.version)}
    for version in set(log.evaluations.version):
        assert f"held-out pass@1 at version {version}: " in training.stdout


@pytest.mark.slow
def test_an_evaluation_beside_training_goes_on_after_a_resume(tiny_dir, tmp_path):
    """Killed while version 2 is evaluated: answers of the checkpoint are kept, the others are asked for anew."""
    config = tiny_config(
        tiny_dir,
        tmp_path / "run",
        steps=12,
        evaluation={"samples": SAMPLES, "every": 2, "share": 0.01, "at_start": False, "at_end": False},
        rollout={"slots": 12},
        checkpoint={"every_s": 0.001},
    )
    config["data"]["heldout"] = str(tiny_dir / "heldout.jsonl")
    process = start(config)
    status = Path(config["run_dir"]) / "status.json"
    wait_until(lambda: read_json(status).get("version", 0) >= 5, 90, "version 5")
    os.kill(read_json(status)["controller_pid"], signal.SIGKILL)
    assert finish(process, config).returncode != 0
    run(config).assert_done()
    log = RunLog(config["run_dir"])
    resumed = log.events[log.events.kind == "evaluation_resumed"].text.tolist()
    assert len(resumed) == 1
    version, kept, anew = (int(number) for number in re.findall(r"\d+", resumed[0]))
    assert kept + anew == 64 and kept > 0 and anew > 0
    rows = log.evaluations[log.evaluations.version == version]
    assert len(rows) == len(rows.drop_duplicates(["prompt_id", "sample"])) == 64
    assert rows.finish_s.isna().sum() == kept, "what an earlier attempt got has no time on this one's clock"


@pytest.mark.slow
def test_ctrl_c_leaves_a_record_and_another_number_of_ranks_completes_it(tmp_path):
    """Simulated compute: the same evaluator, messages and record without a model."""
    simulation.prepare(tmp_path / "data")
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "areal_hpc.cli",
        "evaluate",
        "none",
        "--data",
        str(tmp_path / "data/heldout.jsonl"),
    ]
    command += ["--reward", "areal_hpc.simulation:reward", "--out", str(out), "--max-new-tokens", "4096"]
    command += ["rollout.engine=simulated", "trainer.engine=simulated", "rollout.slots=4"]
    first = subprocess.Popen(
        [*command, "simulation.speedup=20"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: num_on_record(out) >= 3, 60, "three answers")
    first.send_signal(signal.SIGINT)
    _, told = first.communicate(timeout=60)
    kept = num_on_record(out)
    assert first.returncode == 130 and f"stopped by SIGINT on rank 0; {kept} answers are on record" in told
    assert 3 <= kept < 64 and not (out / "summary.json").exists()
    second = subprocess.run(
        [*command, "--ranks", "3", "simulation.speedup=500"], capture_output=True, text=True, timeout=60, check=False
    )
    assert second.returncode == 0, second.stdout + second.stderr
    figures = read_json(out / "summary.json")["data"][0]
    assert figures["answers"] == figures["scored"] == 64 and len({line["prompt_id"] for line in answers(out)}) == 64
    assert f"{kept} answers kept, {64 - kept} to go" in set(RunLog(out).events.text)
