"""Scoring on real ranks: it never holds up decoding, and it makes no difference where it happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import run, tiny_config

pytestmark = pytest.mark.mpi
TINY = Path(__file__).parents[1] / "tiny.py"
SLOW_S = 2.0


def test_decoding_never_waits_for_a_reward_and_a_backlog_stops_admission(tiny_dir, tmp_path):
    """Both reward processes take SLOW_S for their first answer; meanwhile others end, until too many wait."""
    config = tiny_config(
        tiny_dir,
        tmp_path / "run",
        steps=16,
        staleness={"max_staleness": "inf"},
        rollout={"slots": 4, "max_new_tokens": 100},
        trainer={"batch_size": 2, "group_size": 2},
        reward={
            "function": f"{TINY}:slow_at_first",
            "kwargs": {"seconds": SLOW_S},
            "workers": 2,
            "max_pending": 20,
        },
    )
    finished = run(config)
    finished.assert_done()
    log = finished.log()
    begin = log.trajectories.finish_s.min()
    early = log.trajectories[log.trajectories.finish_s < begin + SLOW_S]  # no reward is there before
    meanwhile = early[early.start_s > begin]
    assert len(meanwhile) > 8, "sequences begin and end while the first answers are being scored"
    generating = log.activity.query("rank == 2 and kind == 'generate'")
    last = meanwhile.finish_s.max()
    busy_s = (generating.stop_s.clip(begin, last) - generating.start_s.clip(begin, last)).sum()
    assert busy_s > 0.8 * (last - begin), "decoding stood still"

    said = log.events.query("kind == 'reward_backlog'").text.tolist()
    assert said[0] == "21 answers wait, reward.max_pending is 20: no new prompts for now"
    assert said[1].startswith("new prompts again after ")
    # What was admitted by then still ends: 4 slots, and one group of 2 more.
    assert 21 <= len(early) <= 21 + 6
    assert finished.summary["versions"] == 16
