"""The command: what it writes, what it refuses, what its job looks like, what its answers depend on."""

from __future__ import annotations

import gzip
import json

import pytest
import yaml

from areal_hpc import evaluate
from areal_hpc.config.check import ConfigErrors, check_config
from areal_hpc.exits import RunError
from areal_hpc.heldout import read_sets
from areal_hpc.heldout import settings_of as settings_of_sets
from areal_hpc.jobspec import components_of
from areal_hpc.launch import command_line
from areal_hpc.placement import own_gpu
from areal_hpc.rundir import RunDir

REWARD = "def reward(prompt, completion, metadata):\n    return 1.0\n"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A directory with a model, two data sets and a reward function."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    for name, content in (("config.json", "{}"), ("model.safetensors", "weights"), ("tokenizer.json", "{}")):
        (tmp_path / "m" / name).write_text(content)
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1=", "id": "x"}\n')
    (tmp_path / "sub").mkdir()
    with gzip.open(tmp_path / "sub" / "a.jsonl.gz", "wb") as file:
        file.write(b'{"prompt": "2+2=", "id": "x"}\n{"prompt": "3+3="}\n')
    (tmp_path / "r.py").write_text(REWARD)
    return tmp_path


def options(*argv: str):
    return evaluate._parser().parse_intermixed_args(["m", "--data", "a.jsonl", "--reward", "r.py:reward", *argv])


def settings_of(config):
    return settings_of_sets(config, read_sets(config)[0])


def config_of(*argv: str):
    path = evaluate.prepare(options(*argv))
    return check_config(path, options(*argv).overrides).config


def test_it_writes_an_ordinary_configuration(capsys):
    argv = ["--samples", "8", "--temperature", "0.6", "--max-new-tokens", "64", "--seed", "3", "--ranks", "2"]
    config = config_of(*argv, "--data", "sub/a.jsonl.gz", "rollout.slots=5")
    assert config.is_evaluation and config.world_size == 3 and config.run_dir == "runs/evaluate/m"
    assert (config.seed, config.evaluation.samples, config.rollout.ranks, config.rollout.slots) == (3, 8, 2, 5)
    assert (config.rollout.temperature, config.rollout.max_new_tokens) == (0.6, 64)
    sets, bad_lines = read_sets(config)
    assert {name: [(p.prompt_id, p.text) for p in prompts] for name, prompts in sets.items()} == {
        "a": [("x", "1+1=")],
        "a-2": [("x", "2+2="), ("2", "3+3=")],
    }
    assert bad_lines == []
    assert config_of("--chat", "none").data.chat.template == "none"
    assert config_of("--temperature", "0").rollout.temperature == 0.0


def test_sets_of_one_name_are_numbered():
    config = config_of("--data", "sub/a.jsonl.gz", "--data", "./a.jsonl")
    assert list(read_sets(config)[0]) == ["a", "a-2", "a-3"]


def test_a_mistake_is_told_as_one_of_the_command(capsys):
    with pytest.raises(ConfigErrors) as caught:
        evaluate.prepare(options("--data", "b.jsonl", "rollout.slot=3", "--out", "o"))
    lines = str(caught.value).splitlines()
    assert lines[0] == "areal-hpc evaluate: 2 problems"
    assert (
        lines[1].startswith("  data.heldout[1]: no such file: b.jsonl") and "rollout.slot: unknown setting" in lines[2]
    )
    assert evaluate.main(["m", "--data", "a.jsonl"]) == 2
    assert "--reward is missing and no --layout says how answers are judged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layouts", "reward"),
    [
        (["gsm8k"], "areal_hpc.verifiers.math:reward"),
        (["aime", "math500"], "areal_hpc.verifiers.math:reward"),
        (["mbpp"], "areal_hpc.verifiers.code:reward"),
        (["mbpp", "gsm8k"], "these layouts need different ones"),
        (["plain"], "no --layout says how"),
        (["gsm8k", "gsm8k", "gsm8k"], "--layout was given 3 times for 2 files"),
    ],
)
def test_the_layout_tells_the_reward_function(layouts, reward):
    argv = ["m", "--data", "a.jsonl", "--data", "b.jsonl", *(word for name in layouts for word in ("--layout", name))]
    given = evaluate._parser().parse_args(argv)
    if not reward.startswith("areal"):
        with pytest.raises(RunError, match=reward):
            evaluate.settings(given, evaluate.Path("o"))
        return
    settings = evaluate.settings(given, evaluate.Path("o"))
    assert settings["reward"].pop("timeout_s", None) == (75 if "code" in reward else None)
    assert settings["reward"] == {"function": reward}
    both = [*layouts, layouts[0]][:2]
    assert settings["data"]["heldout"] == [
        {"name": "a", "path": "a.jsonl", "layout": both[0]},
        {"name": "b", "path": "b.jsonl", "layout": both[1]},
    ]


def test_another_evaluation_in_the_directory_is_not_touched(place):
    path = evaluate.prepare(options("--out", "o"))
    (place / "o" / "settings.json").write_text(json.dumps(settings_of(check_config(path).config)))
    before = path.read_text()
    evaluate.prepare(options("--out", "o", "--ranks", "4"))
    assert path.read_text() != before, "the number of ranks is free"
    before = path.read_text()
    with pytest.raises(RunError, match=r"o holds an evaluation with other settings: seed was 0, is 1; name another"):
        evaluate.prepare(options("--out", "o", "--seed", "1"))
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        (["--seed", "1"], True),
        (["--samples", "2"], True),
        (["rollout.temperature=0.5"], True),
        (["model.dtype=bfloat16"], True),
        (["reward.timeout_s=3"], True),
        (["--data", "sub/a.jsonl.gz"], True),
        (["--ranks", "3"], False),
        (["rollout.slots=3", "rollout.prefill_tokens=7", "reward.workers=2"], False),
    ],
)
def test_what_the_answers_depend_on(change, counts):
    assert (settings_of(config_of(*change)) != settings_of(config_of())) is counts


def test_files_count_by_their_content(place):
    config = config_of()
    before = settings_of(config)
    (place / "a.jsonl").write_text('{"prompt": "1+2=", "id": "x"}\n')
    assert settings_of(config)["data"] != before["data"]
    (place / "m" / "model.safetensors").write_bytes(bytes(3 << 20))
    zeros = settings_of(config)["model"]
    (place / "m" / "model.safetensors").write_bytes(bytes((3 << 20) - 1) + b"x")
    assert zeros != before["model"] and settings_of(config)["model"] != zeros


def test_ranks_on_this_machine_and_in_a_job(place, capsys):
    config = config_of("--ranks", "3", "slurm.common.gpus_per_node=2")
    run_dir = RunDir(place / "o", 1)
    command = command_line("mpiexec", config, run_dir)
    assert command[:3] == ["mpiexec", "-n", "4"] and command[-2:] == ["--component", "rollout"] and ":" not in command
    assert [(c.name, c.nodes, c.tasks, c.holds) for c in components_of(config)] == [
        ("rollout", 2, 4, "1 controller + 3 rollout")
    ]
    headed = config_of("--ranks", "3", "slurm.common.gpus_per_node=2", "slurm.head={partition: cpu}")
    assert [(c.name, c.nodes, c.tasks) for c in components_of(headed)] == [("head", 1, 1), ("rollout", 2, 3)]
    argv = ["m", "--data", "a.jsonl", "--reward", "r.py:reward", "--out", "o", "--submit", "--dry-run"]
    assert evaluate.main([*argv, "slurm.mpi=pmi2"]) == 0
    script = capsys.readouterr().out
    assert "-m areal_hpc.attempt o/evaluate.yaml slurm.mpi=pmi2)" in script and "hetjob" not in script
    assert "--nodes=1 --ntasks=2" in script and "--het-group" not in script
    assert yaml.safe_load((place / "o" / "evaluate.yaml").read_text())["trainer"] == {"ranks": 0}


def test_gpus_beside_the_controller():
    task = {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_NODEID": "0", "SLURM_GPUS_ON_NODE": "2"}
    assert own_gpu(task | {"SLURM_LOCALID": "1"}, "rollout", "rollout") == "0"
    assert own_gpu(task | {"SLURM_LOCALID": "1"}, "rollout") == "1"
    assert own_gpu(task | {"SLURM_LOCALID": "1", "SLURM_NODEID": "1"}, "rollout", "rollout") == "1"


def test_rules_about_evaluations(place):
    (place / "run.yaml").write_text(
        "model: {path: m}\ndata: {train: a.jsonl}\nreward: {function: 'r.py:reward'}\nrollout: {temperature: 0}\n"
    )
    for overrides, problem in (
        (["trainer.ranks=0"], "data.heldout: is missing: without trainer ranks the run is an evaluation"),
        ([], "rollout.temperature: must be above 0 for training"),
    ):
        with pytest.raises(ConfigErrors, match=problem):
            check_config(place / "run.yaml", overrides)
    fine = ["rollout.temperature=1", "evaluation.every=3"]
    assert [str(w) for w in check_config(place / "run.yaml", fine).warnings] == [
        "evaluation.every: has no effect without data.heldout"
    ]
    assert check_config(place / "run.yaml", ["trainer.ranks=0", "data.heldout=a.jsonl"]).warnings == []
