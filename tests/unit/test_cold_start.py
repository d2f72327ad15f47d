"""The demo's starting point, with a recipe of a few steps: complete or absent, and the same every time."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from areal_hpc.demo.cold_start import MANIFEST, Recipe, prepare
from areal_hpc.exits import RunError
from areal_hpc.models import eos_ids, load_model, load_tokenizer

TINY = Recipe(
    num_train=40, num_heldout=10, hidden_size=24, intermediate_size=32, num_layers=1, num_steps=4, tokens_per_step=200
)


def build(directory, **changes) -> list[str]:
    lines: list[str] = []
    prepare(directory, progress=lines.append, recipe=TINY, **changes)
    return lines


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cold") / "demo"
    build(directory)
    return directory


def contents(directory) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_what_is_built_can_be_used(built):
    tokenizer, model = load_tokenizer(built / "model"), load_model(built / "model")
    prompt = json.loads((built / "heldout.jsonl").read_text().splitlines()[0])
    assert set(prompt) == {"id", "prompt", "answer"}
    ids = tokenizer(prompt["prompt"]).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == prompt["prompt"]
    assert len(tokenizer("\\boxed{12}").input_ids) == 4
    assert eos_ids(model) == (tokenizer.eos_token_id,) == (1,)
    assert len((built / "train.jsonl").read_text().splitlines()) == 40


def test_two_builds_are_equal_to_the_byte_and_seeds_differ(built, tmp_path):
    build(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(built)
    build(tmp_path / "other", seed=1)
    assert contents(tmp_path / "other")["model/model.safetensors"] != contents(built)["model/model.safetensors"]


def test_what_is_there_is_used_at_once_and_without_torch(built):
    before = {p: p.stat().st_mtime_ns for p in built.rglob("*")}
    code = (
        "import sys; from pathlib import Path; from areal_hpc.demo.cold_start import prepare, Recipe; "
        f"prepare(Path({str(built)!r}), recipe={TINY!r}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert {p: p.stat().st_mtime_ns for p in built.rglob("*")} == before


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "no manifest", "empty manifest"])
def test_what_is_damaged_is_built_anew(damage, built, tmp_path):
    directory = tmp_path / "demo"
    build(directory)
    weights, manifest = directory / "model" / "model.safetensors", directory / MANIFEST
    data = bytearray(weights.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
        weights.write_bytes(data)
    elif damage == "cut":
        weights.write_bytes(data[:-9])
    elif damage == "missing":
        weights.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text("")
    assert any("building" in line for line in build(directory))
    assert contents(directory) == contents(built)


def test_a_directory_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("ten years of work")
    with pytest.raises(RunError, match="thesis.tex"):
        build(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_two_builders_at_the_same_time_leave_one_whole_result(built, tmp_path):
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=build, args=[tmp_path / "demo"]) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]
    assert contents(tmp_path / "demo") == contents(built)
    assert [p.name for p in tmp_path.iterdir()] == ["demo"]


def test_a_kill_in_mid_build_leaves_nothing_that_counts(tmp_path):
    """A builder with an endless recipe is killed once its staging directory has files."""
    code = (
        "from pathlib import Path; from areal_hpc.demo.cold_start import prepare, Recipe; "
        f"prepare(Path({str(tmp_path / 'demo')!r}), recipe=Recipe(num_steps=10**6))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 60
        while not list(tmp_path.glob(".demo.*/train.jsonl")):
            assert time.monotonic() < deadline_s and process.poll() is None
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / "demo").exists()
    build(tmp_path / "demo")
    assert (tmp_path / "demo" / MANIFEST).exists()
