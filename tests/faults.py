"""The fault driver: break a run at a named point, have it go on as a job that requeues itself would, and measure.

A test says what it breaks with `@pytest.mark.fault("rollout rank killed", row=1)`; the table of all of them is printed
at the end of a test run (tests/conftest.py), `make faults` runs nothing else.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from areal_hpc.faults import MARK, VARIABLE, parse
from areal_hpc.rundir import read_json
from areal_hpc.runlog import RunLog
from tests import runs

LONGEST_S = 150


def fault(kind: str, target: int, when: str) -> str:
    """What AREAL_HPC_FAULT has to say for a fault of a rank.

    Args:
        kind: see areal_hpc/faults.py.
        target: world rank.
        when: "point*count", the count-th pass of a named point, or "point~seed": a pass from 2 to 40 drawn by the seed.
    """
    point, drawn, seed = when.partition("~")
    if drawn:
        when = f"{point}*{random.Random(int(seed)).randint(2, 40)}"
    text = f"{kind}@{when.replace('*', f'#{target}*')}"
    parse(text)
    return text


@dataclass(frozen=True)
class Recovery:
    """What a fault cost.

    seconds: from the fault to the end of the first step that no attempt before had finished.
    steps, tokens: trained and lost, since the checkpoint was older; they were trained once more.
    """

    seconds: float
    steps: int
    tokens: int


def survive(config: dict, what: str) -> tuple[runs.Finished, runs.Finished, Recovery]:
    """Run under the fault until it ends, start again without it, run to the end; returns both ends and the cost."""
    run_dir = Path(config["run_dir"])
    mark = run_dir.parent / "fault.mark"
    first = runs.run(config, LONGEST_S, {VARIABLE: what, MARK: str(mark)})
    assert mark.exists(), f"{what} never happened\n{first.stdout}\n{first.stderr}"
    assert first.returncode != 0, f"{what} did not end the run\n{first.stderr}"
    assert runs.processes_of(config) == []
    reached = read_json(run_dir / "status.json").get("version", 0)
    process = runs.start(config)
    seconds = seconds_until(run_dir, reached, mark)
    second = runs.finish(process, config, LONGEST_S)
    second.assert_done()
    assert runs.processes_of(config) == []
    return first, second, Recovery(seconds, *lost(RunLog(run_dir, 1), RunLog(run_dir, 2)))


def seconds_until(run_dir: Path, reached: int, mark: Path) -> float:
    """Wait for a version above `reached`; returns the seconds since the fault wrote its mark."""
    newer = lambda: read_json(run_dir / "status.json").get("version", 0) > reached  # noqa: E731
    runs.wait_until(newer, LONGEST_S, f"a version above {reached}")
    return time.time() - mark.stat().st_mtime


def lost(before: RunLog, after: RunLog) -> tuple[int, int]:
    """(steps, response tokens) that `before` has trained on and `after` had to train on again."""
    again = before.steps[before.steps.step >= after.steps.step.min()] if len(after.steps) else before.steps[:0]
    return len(again), int(again.response_tokens.sum())


def assert_nothing_lost(logs: list[RunLog], *, steps: int, batch: int, group: int, eta: float = float("inf")) -> None:
    """Replay: every version once, every trained group once and whole, no prompt twice in an epoch, the bound kept."""
    kept = pd.concat([log.steps for log in logs]).drop_duplicates("step", keep="last").sort_values("step")
    assert kept.version_after.tolist() == list(range(1, steps + 1))
    rows = pd.concat([log.trajectories.assign(attempt=n) for n, log in enumerate(logs)])
    trained = rows[rows.fate == "consumed"].sort_values("attempt").drop_duplicates(["group_id", "sample"], keep="last")
    assert len(trained) == steps * batch * group
    assert (trained.groupby("group_id")["sample"].nunique() == group).all()
    assert (trained.groupby("group_id").consumed_step.nunique() == 1).all()
    assert trained.drop_duplicates("group_id").prompt_id.is_unique  # fewer groups than prompts in the file
    ids = sorted(trained.group_id.unique())
    left = set(rows[rows.fate.isin(["filtered", "dropped", "leftover"])].group_id)
    holes = set(range(ids[-1] + 1)) - set(ids) - left
    assert len(holes) <= (eta + 1) * batch, f"groups {sorted(holes)[:10]} were admitted and never heard of again"


def assert_bound(logs: list[RunLog], *, batch: int, eta: int) -> None:
    """Replay of the admission rule in every attempt, for runs in which no group left the count (Eq. 3 of the paper)."""
    for log in logs:
        if not len(log.steps):
            continue
        first = int(log.steps.version_after.iloc[0]) - 1
        for row in log.trajectories.drop_duplicates("group_id").itertuples():
            version = first + int((log.steps.time_s <= row.admit_s).sum())
            assert row.group_id // batch <= version + eta, f"group {row.group_id} admitted at version {version}"
