"""The front door: what is started, and how it answers when nothing can be."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from areal_hpc import attempt, cli, launch
from areal_hpc.config import Config
from areal_hpc.exits import Exit, RunError
from areal_hpc.rundir import RunDir

MINIMAL = {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"function": "tests.tiny:reward"}}


def command(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "areal_hpc.cli", *arguments], capture_output=True, text=True, timeout=60, cwd=cwd
    )


def test_one_world_of_two_components(tmp_path):
    config = Config.model_validate(MINIMAL | {"trainer": {"ranks": 2}, "rollout": {"ranks": 5}})
    line = launch.command_line("mpiexec", config, RunDir(tmp_path / "a b", 3))
    split = line.index(":")
    assert line[:3] == ["mpiexec", "-n", "3"] and line[split + 1 : split + 3] == ["-n", "5"]
    assert line[split - 2 : split] == ["--component", "trainer"] and line[-2:] == ["--component", "rollout"]
    assert line.count(str(tmp_path / "a b" / "attempt_3")) == 2


def test_functions_come_from_modules_and_files(tmp_path):
    (tmp_path / "mine.py").write_text("def make(directory):\n    return 'made ' + directory.name\n")
    assert attempt.load_function(f"{tmp_path}/mine.py:make")(Path("x/here")) == "made here"
    assert attempt.load_function("areal_hpc.seeds:sample_seed")(0, "train", 0, 0) >= 0


def test_without_mpi_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match="pip install mpich"):
        launch.find_mpiexec()


def test_a_mistake_in_the_configuration_starts_nothing(tmp_path):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(MINIMAL | {"trainer": {"lr": 1}, "steps": -1}))
    done = command("run", "c.yaml", cwd=tmp_path)
    assert done.returncode == Exit.CONFIG
    assert "Traceback" not in done.stderr and "trainer.optimizer.lr" in done.stderr and "steps" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("arguments", [(), ("run",), ("fly",), ("bench", "nothing")])
def test_usage(arguments):
    done = command(*arguments)
    assert done.returncode == Exit.CONFIG and "usage: areal-hpc" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_preparing(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\ndef make(directory):\n    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    prepare = {"function": f"{tmp_path}/slow.py:make", "directory": str(tmp_path / "made")}
    config = MINIMAL | {
        "prepare": prepare,
        "model": {"path": str(tmp_path / "made/m")},
        "data": {"train": str(tmp_path / "made/d")},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "areal_hpc.cli", "run", str(tmp_path / "c.yaml"), f"run_dir={tmp_path}/run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == Exit.INTERRUPTED and stderr == "areal-hpc: stopped before the run began\n"


def test_every_command_has_a_module_with_a_main():
    import importlib

    for module, _ in cli.COMMANDS.values():
        assert callable(importlib.import_module(module).main)


def test_every_bench_has_a_module_with_a_main():
    import importlib

    from areal_hpc.bench import menu

    for name in menu.BENCHES:
        assert callable(importlib.import_module(f"areal_hpc.bench.{name}").main)
