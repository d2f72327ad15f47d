"""Runs that end in the middle and go on: same losses, no prompt lost or trained twice, other numbers of ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from areal_hpc import export
from areal_hpc.exits import Exit
from areal_hpc.models import load_model, named_weights
from areal_hpc.runlog import RunLog
from tests import runs
from tests.runs import SYNCHRONOUS, tiny_config, wait_until

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]
OFTEN = {"checkpoint": {"every_s": 0.001}, "evaluation": {"at_start": False, "at_end": False}}


def stop_at(config: dict, version: int, number: signal.Signals, rank: int = 0) -> runs.Finished:
    """Start the run and send a signal to one rank's process once the controller has seen this version."""
    status = Path(config["run_dir"]) / "status.json"
    return stop_when(
        config, lambda: runs.read_json(status).get("version", 0) >= version, f"version {version}", number, rank
    )


def stop_when(
    config: dict, ready: Callable[[], bool], what: str, number: signal.Signals, rank: int = 0, **environment: str
) -> runs.Finished:
    """Start the run and send a signal to one rank's process once `ready`."""
    process = runs.start(config, environment)
    wait_until(ready, 90, what)
    pids = RunLog(config["run_dir"]).ranks.set_index("rank").pid
    os.kill(int(pids[rank]), number)
    return runs.finish(process, config)


def attempts(config: dict, *numbers: int) -> list[RunLog]:
    return [RunLog(config["run_dir"], number) for number in numbers]


def assert_nothing_lost(logs: list[RunLog], steps: int, batch: int, group: int) -> None:
    """Every step is trained once, every trained group once and whole, and ids have no holes but for dropped groups."""
    kept = pd.concat([log.steps for log in logs]).drop_duplicates("step", keep="last")
    assert kept.version_after.tolist() == list(range(1, steps + 1))
    rows = pd.concat([log.trajectories.assign(attempt=n) for n, log in enumerate(logs)])
    trained = rows[rows.fate == "consumed"].sort_values("attempt").drop_duplicates(["group_id", "sample"], keep="last")
    assert len(trained) == steps * batch * group
    assert (trained.groupby("group_id")["sample"].nunique() == group).all()
    prompts = trained.drop_duplicates("group_id").prompt_id
    assert prompts.is_unique  # fewer groups than prompts in the file: within an epoch none comes twice


@pytest.mark.fault("damaged checkpoint, whole run", row=14)
def test_after_a_kill_the_newest_whole_checkpoint_counts_and_losses_are_as_if_never_stopped(
    synchronous, tiny_dir, tmp_path
):
    """Staleness 0. The controller is killed without warning, and the checkpoint it wrote last is damaged."""
    config = tiny_config(tiny_dir, tmp_path / "run", **OFTEN | SYNCHRONOUS)
    assert stop_at(config, 4, signal.SIGKILL).returncode != 0
    saved = sorted((tmp_path / "run/checkpoints").glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
    before, newest = saved[-2:]
    with (newest / "trainer.safetensors").open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\xff")
    done = runs.run(config)
    done.assert_done()
    assert f"{newest.name}: trainer.safetensors" in done.stderr
    logs = attempts(config, 1, 2)
    assert any(newest.name in text for text in logs[1].events.text)
    assert logs[1].steps.step.iloc[0] == int(before.name.split("_")[1]) + 1 > 1
    assert_nothing_lost(logs, steps=8, batch=4, group=4)
    expected = synchronous[1].log().steps
    got = pd.concat([log.steps for log in logs]).drop_duplicates("step", keep="last")
    assert got.step.tolist() == expected.step.tolist()
    np.testing.assert_allclose(got.loss, expected.loss, rtol=0, atol=2e-6)
    np.testing.assert_allclose(got.grad_norm, expected.grad_norm, rtol=1e-4)
    assert got.response_tokens.tolist() == expected.response_tokens.tolist()
    assert export.main([str(tmp_path / "run"), str(tmp_path / "exported"), "--step", "8"]) == 0
    trained, exported = (named_weights(load_model(tmp_path / name)) for name in ("run/model", "exported"))
    assert trained.keys() == exported.keys() and all(trained[name].equal(exported[name]) for name in trained)


@pytest.mark.fault("walltime or preemption signal to one rank", row=8)
@pytest.mark.parametrize(
    ("number", "rank"),
    [
        pytest.param(signal.SIGUSR2, 0, marks=pytest.mark.slow),
        (signal.SIGUSR2, 2),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.slow),
    ],
)
def test_a_warning_to_any_rank_saves_and_another_number_of_ranks_goes_on(tiny_dir, tmp_path, number, rank):
    sections = OFTEN | {"steps": 8, "checkpoint": {"every_s": None}}
    first = tiny_config(tiny_dir, tmp_path / "run", rollout={"ranks": 1}, **sections)
    ended = stop_at(first, 2, number, rank)
    assert ended.returncode == (Exit.REQUEUE if number == signal.SIGUSR2 else Exit.INTERRUPTED), ended.stderr
    assert f"{number.name} on rank {rank}" in ended.stderr and "is saved" in ended.stderr
    second = tiny_config(tiny_dir, tmp_path / "run", rollout={"ranks": 2}, trainer={"ranks": 2}, **sections)
    runs.run(second).assert_done()
    logs = attempts(second, 1, 2)
    assert logs[1].steps.step.iloc[0] == logs[0].steps.step.iloc[-1] + 1
    assert "groups_restored" in set(logs[1].events.kind)
    assert_nothing_lost(logs, steps=8, batch=4, group=4)
    assert runs.processes_of(second) == []


@pytest.mark.fault("two starts in one run directory", row=23)
@pytest.mark.slow
def test_only_one_at_a_time_and_a_finished_run_is_not_repeated(tiny_dir, tmp_path):
    config = tiny_config(tiny_dir, tmp_path / "run", **OFTEN | {"steps": 6})
    process = runs.start(config)
    wait_until(lambda: (tmp_path / "run/status.json").exists(), 60, "the start")
    other = runs.run(config)
    assert other.returncode == Exit.CONFIG and "belongs to attempt 1" in other.stderr
    runs.finish(process, config).assert_done()
    again = runs.run(config)
    assert again.returncode == 0 and "is finished: version 6" in again.stdout
    other_seed = runs.run(config | {"seed": 5, "steps": 7})
    assert other_seed.returncode == Exit.CONFIG and "seed was 0, is 5" in other_seed.stderr
    further = runs.run(config | {"steps": 8})
    further.assert_done()
    assert sorted(path.name for path in (tmp_path / "run").glob("attempt_*")) == ["attempt_1", "attempt_2"]
    assert_nothing_lost(attempts(config, 1, 2), steps=8, batch=4, group=4)


@pytest.mark.fault("rank stopped, real model", row=3)
@pytest.mark.slow
def test_a_silent_rank_is_noticed_and_the_next_attempt_goes_on(tiny_dir, tmp_path):
    """SIGSTOP: alive for the operating system, dead for the run."""
    deadlines = {"heartbeat_s": 4.0, "exit_s": 10.0}
    config = tiny_config(tiny_dir, tmp_path / "run", **OFTEN | {"steps": 40, "deadlines": deadlines})
    ended = stop_at(config, 3, signal.SIGSTOP, rank=2)
    assert ended.returncode == Exit.DEADLINE and "rank 2 (rollout) has not been heard for" in ended.stderr
    assert ended.seconds < 40 and runs.processes_of(config) == []
    for rank in (0, 1):  # the ranks that live say where they are
        assert "most recent call first" in (tmp_path / f"run/attempt_1/rank_{rank:04d}.log").read_text()
    runs.run(config | {"steps": 8}).assert_done()
    assert_nothing_lost(attempts(config, 1, 2), steps=8, batch=4, group=4)
