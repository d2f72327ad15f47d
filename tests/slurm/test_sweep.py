"""`areal-hpc sweep` on a real Slurm: simulated compute on 64 to 512 GPUs, one rank per node of 8, on five hosts."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import yaml

from areal_hpc.sweep.table import results

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
SLOW_MACHINE = {
    # Few tokens that take long: two cores carry 65 ranks, and their messages should not be what is measured.
    "trainer.batch_size": 64,
    "trainer.group_size": 8,
    "rollout.max_new_tokens": 1024,
    "simulation.speedup": 12,
    "simulation.response_median": 100,
    "simulation.decode_s": 0.004,
    "simulation.decode_sequence_s": 0.01,
    "simulation.train_tokens_per_s": 300,
    "simulation.train_step_s": 0.2,
    "simulation.publish_s": 0.1,
    "simulation.load_s": 0.1,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "slurm.mpi": "pmi2",
    "slurm.minutes": 6,
    # At most 1 host of trainers and 2 of rollouts.
    "slurm.common.ranks_per_node": 24,
    "slurm.common.exclusive": False,
}


@pytest.fixture
def place(cluster):
    """A directory that all hosts see."""
    directory = cluster.shared / f"sweep_{time.time_ns()}"
    directory.mkdir()
    return directory


def write_spec(place: Path, vary: dict, **other) -> Path:
    spec = {"base": "configs/simulated.yaml", "directory": str(place / "runs"), "vary": vary, **other}
    path = place / "sweep.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return path


def sweep(spec: Path, *flags: str, code: int = 0, timeout_s: float = 60) -> str:
    command = [sys.executable, "-m", "areal_hpc.cli", "sweep", str(spec), *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=timeout_s)
    assert done.returncode == code, f"{done.stdout}{done.stderr}"
    return done.stdout


def periods(cluster, job_ids) -> list[tuple[pd.Timestamp, pd.Timestamp]]:
    """Start and end of each job, over both of its components."""
    ends = []
    for job_id in job_ids:
        words = ["sacct", "-X", "-P", "-n", f"--jobs={job_id}", "--format=Start,End"]
        rows = [[pd.Timestamp(time) for time in line.split("|")] for line in cluster.run(words).split()]
        ends.append((min(row[0] for row in rows), max(row[1] for row in rows)))
    return ends


@pytest.mark.parametrize("gpus", [[64, 128], pytest.param([64, 128, 256, 512], marks=pytest.mark.slow)])
def test_scaling(cluster, place, gpus):
    overrides = SLOW_MACHINE | {"steps": 4}
    spec = write_spec(place, {"gpus": gpus}, gpus_per_rank=8, max_jobs=1, overrides=overrides)
    jobs = re.findall(r"^gpus-\d+: submitted job (\d+)(?:, afterany:(\d+))?$", sweep(spec), re.MULTILINE)
    assert [after for _, after in jobs] == ["", *(job for job, _ in jobs[:-1])]
    assert "0 of" in sweep(spec)
    table = sweep(spec, "--wait", "--deadline", "300", "--results", str(place / "table.csv"), timeout_s=330)
    print(table)
    ends = [line.split()[2:4] for line in re.findall(r"^gpus-\d+ .*", table, re.MULTILINE)]
    assert ends == [["COMPLETED", "4/4"]] * len(gpus)

    periods_s = periods(cluster, [job for job, _ in jobs])
    assert all(end <= start for (_, end), (start, _) in zip(periods_s, periods_s[1:], strict=False))
    frame = results(place / "runs")
    print(frame.T.to_string())
    pd.testing.assert_frame_equal(pd.read_csv(place / "table.csv"), frame, check_dtype=False)
    assert frame["gpus"].tolist() == gpus
    assert frame["world_size"].tolist() == [1 + g // 8 for g in gpus]
    assert frame["consumed_tokens"].nunique() == 1  # lengths depend on the seed alone
    assert frame["tokens_per_s"].is_monotonic_increasing
    # 16 trainer GPUs at 300 tokens/s: 64 GPUs cannot be faster, and are not held up by anything else.
    assert 0.6 * 4800 < frame["tokens_per_s"][0] < 4800
    assert (frame["staleness_max"] <= 4).all()
    assert frame["rollout_idle"].between(0, 1).all() and frame["trainer_idle"].between(0, 1).all()
    assert frame["controller_busy"].between(0, 0.5).all()
    assert "0 of" in sweep(spec, "--retry-failed")


def test_a_failed_point_stays_in_the_table_and_comes_back_only_when_asked(cluster, place):
    few = SLOW_MACHINE | {"steps": 1, "trainer.batch_size": 4, "rollout.ranks": 1, "trainer.ranks": 1}
    spec = write_spec(place, {"deadlines.startup_s": [60, 0.001]}, overrides=few)
    first = dict(re.findall(r"^(\S+): submitted job (\d+)$", sweep(spec), re.MULTILINE))
    assert list(first) == ["startup_s-60", "startup_s-0.001"]
    lines = sweep(spec, "--wait", "--deadline", "120", code=1, timeout_s=150).splitlines()
    good, bad = [next(line for line in lines if re.match(rf"{name} .* [01]/1 ", line)) for name in first]
    assert good.split()[1:4] == [first["startup_s-60"], "COMPLETED", "1/1"]
    assert bad.split()[1:4] == [first["startup_s-0.001"], "FAILED", "0/1"]
    assert all(len(line) <= 120 for line in lines)

    assert "0 of 2 points submitted" in sweep(spec)
    again = re.findall(r"^(\S+): submitted job (\d+)$", sweep(spec, "--retry-failed"), re.MULTILINE)
    assert [name for name, _ in again] == ["startup_s-0.001"]
    assert again[0][1] != first["startup_s-0.001"]
    assert f"cancelled job {again[0][1]}" in sweep(spec, "--cancel")
    table = sweep(spec, "--wait", "--deadline", "60", code=1, timeout_s=90)
    assert re.search(rf"^startup_s-0.001 +{again[0][1]} +(CANCELLED|FAILED) ", table, re.MULTILINE)
    frame = results(place / "runs").set_index("deadlines.startup_s")
    assert frame["state"][60] == "COMPLETED" and frame["steps_done"][60] == 1
    assert frame["state"][0.001] != "COMPLETED" and pd.isna(frame["steps_done"][0.001])
