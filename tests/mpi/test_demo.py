"""The first ten minutes of a user: the demo learns, in every mode and from every seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.runs import Finished, run

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]


def demo(tmp_path: Path, **changes) -> Finished:
    """configs/demo.yaml as it is; its cold start is built once and kept where `make run` keeps it."""
    config = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    made = config["prepare"]["directory"]
    text = yaml.safe_dump(config | {"run_dir": str(tmp_path / "run")} | changes).replace(made, str(ROOT / made))
    finished = run(yaml.safe_load(text), timeout_s=800)
    finished.assert_done()
    return finished


def assert_it_learned(finished: Finished) -> None:
    summary = finished.summary
    assert summary["pass1_before"] < 0.50
    assert summary["pass1_after"] >= 0.88
    assert summary["versions"] == 16 and summary["why_ended"] == "last step reached"
    assert summary["consumed_tokens_per_s"] > 0 and summary["wall_s"] <= summary["total_s"]
    assert "held-out pass@1" in finished.stdout and "tok/s" in finished.stdout and "attempt_1.h5" in finished.stdout


def test_the_demo(tmp_path):
    assert_it_learned(demo(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_the_demo_from_other_seeds(seed, tmp_path):
    assert_it_learned(demo(tmp_path, seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "limit"), [("sync", 0), ("overlap", 1)])
def test_the_demo_in_other_modes(mode, limit, tmp_path):
    finished = demo(tmp_path, mode=mode)
    assert_it_learned(finished)
    assert finished.summary["head_staleness_max"] == limit
