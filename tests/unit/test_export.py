"""`areal-hpc export`: a wrong call is a sentence, and writes nothing. With a real run: tests/mpi/test_resume.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areal_hpc import export
from areal_hpc.checkpoint import Checkpoints, read_tensors, write_tensors
from areal_hpc.exits import Exit


def checkpoint(root, step: int, model: str, engine: str = "transformers"):
    checkpoints = Checkpoints(root / "checkpoints")
    path = checkpoints.begin(step, 1)
    state = {"weights/a": torch.full((2,), float(step)), "optimizer/a/exp_avg": torch.zeros(2)}
    records = [write_tensors(path / "trainer.safetensors", state)]
    facts = {"version": step, "config": {"model": {"path": str(model)}, "trainer": {"engine": engine}}}
    return checkpoints.commit(step, path, records, facts)


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model-00001-of-00002.safetensors").write_bytes(b"old weights")
    (directory / "model.safetensors.index.json").write_text("{}")
    return directory


def run(capsys, *arguments) -> tuple[int, str]:
    code = export.main([str(argument) for argument in arguments])
    heard = capsys.readouterr()
    return code, heard.out + heard.err


def test_newest_and_named_step(tmp_path, model, capsys):
    for step in (1, 2):
        checkpoint(tmp_path, step, model)
    code, text = run(capsys, tmp_path, tmp_path / "out")
    assert code == 0 and text.startswith(f"{tmp_path}/out: version 2, from {tmp_path}/checkpoints/step_2")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    weights = read_tensors(tmp_path / "out/model.safetensors")
    assert list(weights) == ["a"] and np.array_equal(weights["a"], [2, 2])
    assert run(capsys, tmp_path, tmp_path / "first", "--step", 1)[0] == 0
    assert read_tensors(tmp_path / "first/model.safetensors")["a"][0] == 1


def test_wrong_calls(tmp_path, model, capsys):
    assert run(capsys, tmp_path, tmp_path / "out") == (
        Exit.CONFIG,
        f"areal-hpc export: {tmp_path}/checkpoints has no checkpoint\n",
    )
    checkpoint(tmp_path, 3, model)
    assert "has step_3, none of step 4" in run(capsys, tmp_path, tmp_path / "out", "--step", 4)[1]
    assert "exists already" in run(capsys, tmp_path, model)[1]
    (model / "config.json").unlink()
    assert "no config.json any more" in run(capsys, tmp_path, tmp_path / "out")[1]
    checkpoint(tmp_path, 4, model, engine="simulated")
    assert "simulated compute and has no weights" in run(capsys, tmp_path, tmp_path / "out")[1]
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_named(tmp_path, model, capsys):
    checkpoint(tmp_path, 1, model)
    newest = checkpoint(tmp_path, 2, model) / "trainer.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"\x7f")
    code, text = run(capsys, tmp_path, tmp_path / "out")
    assert code == 0 and "step_2: trainer.safetensors not as written" in text and "version 1" in text
    code, text = run(capsys, tmp_path, tmp_path / "other", "--step", 2)
    assert code == Exit.DISK and "step_2: trainer.safetensors not as written" in text
