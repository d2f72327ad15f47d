"""Start `areal-hpc run` as a user does, and look at what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from areal_hpc.rundir import read_json
from areal_hpc.runlog import RunLog

TESTS = Path(__file__).parent
SYNCHRONOUS = {"mode": "sync", "steps": 8, "seed": 3, "trainer": {"minibatches": 2}}
"""Sections of a run whose losses are the same every time (fixture `synchronous` of tests/mpi)."""


def tiny_config(tiny: Path, run_dir: Path, **sections) -> dict:
    """A configuration for the model of tests/tiny.py; `sections` are merged into it, one level deep."""
    config = {
        "name": "tiny",
        "run_dir": str(run_dir),
        "steps": 3,
        "model": {"path": str(tiny / "model")},
        "data": {"train": str(tiny / "train.jsonl")},
        "reward": {"function": f"{TESTS / 'tiny.py'}:reward"},
        "rollout": {"ranks": 1, "slots": 16, "max_prompt_tokens": 8, "max_new_tokens": 24},
        "trainer": {
            "batch_size": 4,
            "group_size": 4,
            "micro_batch_tokens": 256,
            "optimizer": {"lr": 1.0e-3, "weight_decay": 0.0, "eps": 1.0e-8},
        },
        "deadlines": {"exit_s": 20.0, "startup_s": 120.0},
    }
    for name, value in sections.items():
        if isinstance(value, dict) and isinstance(config.get(name), dict):
            config[name] = config[name] | value
        else:
            config[name] = value
    return config


@dataclass
class Finished:
    """A run that has ended."""

    run_dir: Path
    returncode: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def status(self) -> dict:
        return read_json(self.run_dir / "status.json")

    @property
    def summary(self) -> dict:
        return read_json(self.run_dir / "summary.json")

    def log(self) -> RunLog:
        return RunLog(self.run_dir)

    def assert_done(self) -> None:
        assert self.returncode == 0, f"{self.stdout}\n{self.stderr}\n{self.rank_logs()}"

    def rank_logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.run_dir.glob("attempt_*/*.log"))
        )


def start(config: dict, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start the run in a session of its own; its processes carry a mark in their environment."""
    run_dir = Path(config["run_dir"])
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    path = run_dir.parent / f"{run_dir.name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return subprocess.Popen(
        [sys.executable, "-m", "areal_hpc.cli", "run", str(path)],
        env=os.environ | {"AREAL_HPC_TEST_RUN": str(run_dir)} | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], config: dict, timeout_s: float = 150) -> Finished:
    began_s = time.monotonic()
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return Finished(Path(config["run_dir"]), process.returncode, stdout, stderr, time.monotonic() - began_s)


def run(config: dict, timeout_s: float = 150, environment: dict[str, str] | None = None) -> Finished:
    """Run to the end."""
    return finish(start(config, environment), config, timeout_s)


def processes_of(config: dict) -> list[str]:
    """Command lines of all living processes of a run, found by the mark in their environment."""
    mark = f"AREAL_HPC_TEST_RUN={config['run_dir']}".encode()
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (directory / "environ").read_bytes().split(b"\0"):
                command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if command:
                    found.append(f"{directory.name}: {command}")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def wait_until(condition, timeout_s: float, what: str | Callable[[], str]) -> None:
    """Args: what: for the message when it does not come true; asked only then, where it is a function."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        in_time = time.monotonic() < deadline_s
        assert in_time, f"waited {timeout_s} s for {what() if callable(what) else what}"
        time.sleep(0.1)
