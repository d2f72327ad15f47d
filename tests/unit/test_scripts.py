"""The scripts in slurm/ are what the launcher writes, word for word, and each says how it was made."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from areal_hpc import submission

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = sorted((REPOSITORY / "slurm").glob("*.sbatch"))
EXPECTED_GPUS = {"64_gpus": (16, 48), "128_gpus": (32, 96), "256_gpus": (64, 192), "512_gpus": (128, 384)}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_launcher_writes_the_same(path, monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    text = path.read_text()
    program, name, *arguments = shlex.split(text.splitlines()[1].removeprefix("# "))
    assert (program, name) == ("areal-hpc", "submit") and "--dry-run" in arguments
    assert submission.main(arguments) == 0
    assert capsys.readouterr().out == text, "`make scripts` writes it anew; look at the difference before you commit it"


@pytest.mark.parametrize("name", EXPECTED_GPUS)
def test_a_quarter_of_the_gpus_trains(name):
    """The paper's split, and one rank per GPU beside the controller; whole nodes of 8."""
    text = (REPOSITORY / f"slurm/{name}.sbatch").read_text()
    trainer, rollout = EXPECTED_GPUS[name]
    assert trainer + rollout == int(name.split("_")[0]) and trainer * 4 == trainer + rollout
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH --n")]
    tasks = [f"--ntasks={trainer + 1}", f"--ntasks={rollout}"]
    assert asked == [f"--nodes={trainer // 8}", tasks[0], f"--nodes={rollout // 8}", tasks[1]]


def test_there_is_one_of_every_shape():
    names = {path.stem for path in SCRIPTS}
    assert names == {*EXPECTED_GPUS, "demo_1_1_nodes", "with_head", "with_reward_ranks", "one_allocation"}
    assert (REPOSITORY / "slurm/with_head.sbatch").read_text().count("#SBATCH hetjob") == 2
    assert (REPOSITORY / "slurm/with_reward_ranks.sbatch").read_text().count("#SBATCH hetjob") == 2
    assert "hetjob" not in (REPOSITORY / "slurm/one_allocation.sbatch").read_text()
