"""The beginning of an attempt: what it says about space, and what a refused one leaves behind."""

from __future__ import annotations

import json

import pytest

from areal_hpc import attempt, checkpoint
from areal_hpc.config import Config
from areal_hpc.exits import Exit, RunError
from areal_hpc.rundir import RunDir, read_json, write_json


@pytest.fixture
def config(tmp_path) -> Config:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(bytes(1000))
    (model / "config.json").write_text(json.dumps({"dtype": "float32"}))
    return Config.model_validate(
        {
            "run_dir": str(tmp_path / "run"),
            "model": {"path": str(model)},
            "data": {"train": "t.jsonl"},
            "reward": {"function": "a:b"},
        }
    )


@pytest.mark.parametrize(("stored", "needed"), [("float32", 9000), ("bfloat16", 18000)])
def test_space_for_three_checkpoints(tmp_path, config, monkeypatch, stored, needed):
    """Weights and two moments in 32 bits, `keep` checkpoints and the one that is being written: 3 * 3 * 1000 bytes."""
    (tmp_path / "model/config.json").write_text(json.dumps({"dtype": stored}))
    run_dir = RunDir(tmp_path / "run", 1)
    free = {"free": needed}
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: type("Usage", (), free))
    assert attempt.about_space(run_dir, config) == []
    free["free"] = needed - 1
    (sentence,) = attempt.about_space(run_dir, config)
    assert f"need {needed:,}" in sentence


def test_a_refused_attempt_says_why_but_a_finished_run_stays_finished(tmp_path, config):
    run_dir = RunDir(tmp_path, 2)
    write_json(run_dir.status, {"state": "training", "version": 4})
    attempt.refused(run_dir, config, RunError(Exit.CONFIG, "of another run"))
    status = read_json(run_dir.status)
    assert (status["state"], status["why_ended"], status["exit_code"]) == ("failed", "of another run", Exit.CONFIG)
    assert status["version"] == 4
    write_json(run_dir.status, {"state": "done"})
    attempt.refused(run_dir, config, RunError(Exit.CONFIG, "of another run"))
    assert read_json(run_dir.status) == {"state": "done"}
