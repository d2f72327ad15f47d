"""Ranks that die, hang or run out of disk at named points, in runs that go on afterwards and lose nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from areal_hpc.exits import Exit
from areal_hpc.rundir import read_json
from areal_hpc.runlog import RunLog
from areal_hpc.simulation import prepare
from tests import runs
from tests.faults import assert_bound, assert_nothing_lost, fault, survive

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]
STEPS, BATCH, GROUP, ETA = 10, 4, 4, 2
CONTROLLER, TRAINER, ROLLOUT, REWARD = 0, 1, 2, 3


def learning(tiny: Path, place: Path, **sections) -> dict:
    """A real model; 1 trainer and 1 rollout rank; a checkpoint after every step that has time for one."""
    settings = {
        "steps": STEPS,
        "checkpoint": {"every_s": 0.001},
        "staleness": {"max_staleness": ETA},
        "evaluation": {"at_start": False, "at_end": False},
    }
    return runs.tiny_config(tiny, place / "run", **settings | sections)


def timed(place: Path, **sections) -> dict:
    """The same protocol with simulated compute: ranks start in a second, and no group is ever filtered."""
    prepare(place / "data")
    config = {
        "name": "faults",
        "run_dir": str(place / "run"),
        "steps": STEPS,
        "model": {"path": "none"},
        "data": {"train": str(place / "data/train.jsonl")},
        "reward": {"function": "areal_hpc.simulation:reward"},
        "rollout": {"engine": "simulated", "ranks": 1, "slots": 16, "max_new_tokens": 2000},
        "trainer": {"engine": "simulated", "batch_size": BATCH, "group_size": GROUP, "micro_batch_tokens": 8192},
        "staleness": {"max_staleness": ETA},
        "simulation": {"speedup": 20, "gpus_per_rank": 1, "response_median": 300, "model_bytes": 1000},
        "checkpoint": {"every_s": 0.001},
        "deadlines": {"exit_s": 10.0, "startup_s": 60.0, "heartbeat_s": 5.0},
    }
    for name, value in sections.items():
        config[name] = config.get(name, {}) | value if isinstance(value, dict) else value
    return config


def check(config: dict, recovered, what: str, steps: int = STEPS) -> runs.Finished:
    """The run survives `what`, and the logs of both attempts prove that it lost nothing; returns the first end."""
    first, _, cost = survive(config, what)
    logs = [RunLog(config["run_dir"], 1), RunLog(config["run_dir"], 2)]
    assert_nothing_lost(logs, steps=steps, batch=BATCH, group=GROUP, eta=ETA)
    assert_bound(logs, batch=BATCH, eta=ETA)
    recovered(cost)
    return first


def slow(*values, **how):
    return pytest.param(*values, **how, marks=pytest.mark.slow)


# ------------------------------------------------------------------------------------------------------- SIGKILL
@pytest.mark.fault("rollout rank killed", row=1)
@pytest.mark.parametrize(
    "moment",
    ["rollout.receive*3", slow("rollout.decode~1"), slow("rollout.decode~2"), slow("rollout.decode~3")],
)
def test_a_rollout_rank_is_killed(moment, tiny_dir, tmp_path, recovered):
    """In mid-generation at passes drawn by a seed, and while a weight update is arriving."""
    check(learning(tiny_dir, tmp_path), recovered, fault("kill", ROLLOUT, moment))


@pytest.mark.fault("rollout rank killed, simulated compute", row=1)
@pytest.mark.parametrize("moment", ["rollout.ship*2", slow("rollout.idle*3")])
def test_a_rollout_rank_is_killed_in_mid_send_or_idle(moment, tmp_path, recovered):
    check(timed(tmp_path), recovered, fault("kill", ROLLOUT, moment))


@pytest.mark.fault("trainer rank killed", row=2)
@pytest.mark.parametrize("moment", ["trainer.publish*3", slow("trainer.batch*4"), slow("trainer.updated*4")])
def test_a_trainer_rank_is_killed(moment, tiny_dir, tmp_path, recovered):
    """In the middle of a broadcast (row 29: nobody samples with a mix), before and after the optimizer's step."""
    check(learning(tiny_dir, tmp_path), recovered, fault("kill", TRAINER, moment))


@pytest.mark.fault("trainer or controller killed in a checkpoint", row=2)
@pytest.mark.parametrize(
    ("rank", "moment"), [(TRAINER, "trainer.saved*3"), (CONTROLLER, "controller.commit*3")], ids=["data", "manifest"]
)
def test_killed_between_data_and_manifest(rank, moment, tmp_path, recovered):
    """Half a checkpoint does not exist: the one before is taken, and the half one is removed."""
    config = timed(tmp_path)
    check(config, recovered, fault("kill", rank, moment))
    left = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    assert len(left) == 2 and not any(name.startswith(".") for name in left)


@pytest.mark.fault("controller killed", row=1)
def test_the_controller_is_killed(tmp_path, recovered):
    check(timed(tmp_path), recovered, fault("kill", CONTROLLER, "controller.compose*6"))


# --------------------------------------------------------------------------------------------------------- silence
@pytest.mark.fault("rank stopped or stuck with the interpreter's lock", row=3)
@pytest.mark.parametrize(
    ("kind", "rank", "moment"),
    [
        ("hold", ROLLOUT, "rollout.decode*30"),
        slow("stop", TRAINER, "trainer.batch*4"),
        slow("hold", TRAINER, "trainer.batch*4"),
        slow("stop", REWARD, "reward.score*40"),
    ],
)
def test_a_silent_rank(kind, rank, moment, tmp_path, recovered):
    config = timed(tmp_path, reward={"ranks": 1} if rank == REWARD else {})
    first = check(config, recovered, fault(kind, rank, moment))
    assert first.returncode == Exit.DEADLINE
    role = {TRAINER: "trainer", ROLLOUT: "rollout", REWARD: "reward"}[rank]
    assert f"rank {rank} ({role}) has not been heard for" in first.stderr
    assert "most recent call first" in (tmp_path / "run/attempt_1/rank_0000.log").read_text()


@pytest.mark.fault("reward rank killed", row=1)
@pytest.mark.slow
def test_a_reward_rank_is_killed(tmp_path, recovered):
    check(timed(tmp_path, reward={"ranks": 1}), recovered, fault("kill", REWARD, "reward.score*40"))


@pytest.mark.fault("exception on one rank", row=4)
@pytest.mark.slow
def test_an_exception(tmp_path, recovered):
    first = check(timed(tmp_path), recovered, fault("exception", ROLLOUT, "rollout.decode~5"))
    assert first.returncode == Exit.FAILED and "rank 2 (rollout)" in first.stderr and "InjectedFault" in first.stderr


@pytest.mark.fault("one rollout rank 20 times slower", row=32)
@pytest.mark.slow
def test_a_slow_rollout_rank_is_still_trained_on(tiny_dir, tmp_path):
    """Staleness is bounded by admission, not by dropping what is late. A decoding step takes 50 ms longer there; the
    simulated engine, which follows the clock, would make that up."""
    config = learning(tiny_dir, tmp_path, rollout={"ranks": 2}, steps=12)
    done = runs.run(config, environment={"AREAL_HPC_FAULT": fault("slow", 3, "rollout.decode*1")})
    done.assert_done()
    log = done.log()
    assert_nothing_lost([log], steps=12, batch=BATCH, group=GROUP, eta=ETA)
    assert_bound([log], batch=BATCH, eta=ETA)
    trained = log.trajectories.query("fate == 'consumed'")
    per_token_s = (trained.finish_s - trained.start_s) / trained.num_response
    fast, slow = per_token_s.groupby(trained.rollout_rank).median()
    assert slow > max(0.05, 3 * fast), f"{slow:.3f} s a token there, {fast:.3f} s on the other: nothing was slow"
    share = trained.groupby("rollout_rank").size()
    assert 0 < share[3] < share[2] / 2


# ------------------------------------------------------------------------------------------------------------ disks
@pytest.fixture
def small_disk(tmp_path):
    """A function that makes a directory a file system of its own, of so many KiB; only root can."""
    mounted: list[Path] = []

    def mount(place: Path, kib: int) -> Path:
        place.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(place)]
        if os.geteuid() or subprocess.run(command, capture_output=True, timeout=30).returncode:
            pytest.skip("a file system can be mounted only by root")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "--lazy", place], timeout=30, check=True)


def enlarge(place: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=256m", place], timeout=30, check=True)


@pytest.mark.fault("disk full under the log", row=12)
def test_a_full_disk_under_the_log(small_disk, tmp_path):
    """The run ends and says so; what was flushed is readable; with room again the next attempt goes on."""
    config = timed(tmp_path, steps=60, log={"tokens": True})
    place = small_disk(tmp_path / "run/log", 32_000)
    process = runs.start(config)
    runs.wait_until(lambda: read_json(tmp_path / "run/status.json").get("version", 0) >= 3, 60, "version 3")
    with contextlib.suppress(OSError), (place / "of somebody else").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    ended = runs.finish(process, config)
    assert ended.returncode == Exit.DISK and "attempt_1.h5" in ended.stderr, ended.stderr
    assert len(RunLog(config["run_dir"], 1).steps) >= 3
    (place / "of somebody else").unlink()
    runs.run(config).assert_done()
    logs = [RunLog(config["run_dir"], number) for number in (1, 2)]
    assert_nothing_lost(logs, steps=60, batch=BATCH, group=GROUP, eta=ETA)


@pytest.mark.fault("disk full under a checkpoint", row=13)
@pytest.mark.slow
def test_a_full_disk_under_a_checkpoint(small_disk, tiny_dir, tmp_path):
    """Room for one checkpoint and a half: the first stands, the run ends at the second failure in a row."""
    config = learning(tiny_dir, tmp_path, steps=14)
    place = small_disk(tmp_path / "run/checkpoints", 512)
    ended = runs.run(config)
    assert ended.returncode == Exit.DISK and "2 checkpoints in a row could not be written" in ended.stderr
    (kept,) = [int(path.name.removeprefix("step_")) for path in place.iterdir()]
    kinds = RunLog(config["run_dir"], 1).events.kind.tolist()
    assert kinds.count("checkpoint_failed") == 2
    enlarge(place)
    runs.run(config).assert_done()
    logs = [RunLog(config["run_dir"], number) for number in (1, 2)]
    assert_nothing_lost(logs, steps=14, batch=BATCH, group=GROUP, eta=ETA)
    assert logs[1].steps.step.iloc[0] == kept + 1


# ------------------------------------------------------------------------------------------------------------ clocks
WRONG_CLOCK = """
import runpy, sys, time
real, began = time.time, time.time()
time.time = lambda: began + {offset} + {rate} * (real() - began)
time.time_ns = lambda: int(time.time() * 1e9)
sys.argv = ["areal_hpc.rank", sys.argv[1]]
runpy.run_module("areal_hpc.rank", run_name="__main__")
"""


@pytest.mark.fault("clock of one rank wrong or drifting", row=24)
@pytest.mark.slow
@pytest.mark.parametrize(("offset", "rate"), [(3600, 1), (-3600, 1), (0, 1.5)])
def test_a_wrong_clock(offset, rate, tmp_path):
    """Times in the log come from one clock, order and deadlines from none across hosts. Python's clock only: with
    libfaketime even time.sleep fails."""
    config = timed(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    environment = os.environ | {"AREAL_HPC_TEST_RUN": config["run_dir"]}
    begin = [sys.executable, "-m", "areal_hpc.attempt", str(path)]
    begun = subprocess.run(begin, capture_output=True, text=True, timeout=60, env=environment, check=True)
    rank = [sys.executable, "-m", "areal_hpc.rank"]
    skewed = [sys.executable, "-c", WRONG_CLOCK.format(offset=offset, rate=rate)]
    attempt = begun.stdout.strip()
    world = [str(Path(sys.executable).parent / "mpiexec"), "-n", "2", *rank, attempt, ":", "-n", "1", *skewed, attempt]
    done = subprocess.run(world, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    log = RunLog(config["run_dir"])
    assert_nothing_lost([log], steps=STEPS, batch=BATCH, group=GROUP, eta=ETA)
    assert_bound([log], batch=BATCH, eta=ETA)
    rows = log.trajectories
    assert (rows.start_s >= rows.admit_s - 0.05).all() and (rows.finish_s >= rows.start_s).all()
    assert rows.finish_s.max() < 120
