"""The benchmark report: medians, pairwise spread, and one plain line of JSON at the end."""

from __future__ import annotations

import json

import pytest

from areal_hpc.bench.report import report


def printed(capsys: pytest.CaptureFixture[str], *args, **kwargs) -> tuple[str, dict]:
    assert report("toy", "MB/s", *args, **kwargs) == 0
    text = capsys.readouterr().out
    return text, json.loads(text.splitlines()[-1])


def test_ratio_is_of_medians_and_spread_is_of_pairs(capsys):
    text, record = printed(capsys, [10.0, 30.0, 20.0], [40.0, 20.0, 25.0], goal=0.8)
    assert record == {
        "bench": "toy",
        "ours": 20.0,
        "reference": 25.0,
        "ratio": 0.8,
        "unit": "MB/s",
        "repeats": 3,
        "spread": [0.25, 1.5],  # 10 / 40 and 30 / 20
    }
    assert ">= 0.8: met" in text


@pytest.mark.parametrize(
    ("ours", "higher_is_better", "verdict"),
    [(79.0, True, ">= 0.8: MISSED"), (81.0, True, ">= 0.8: met"), (81.0, False, "<= 0.8: MISSED"), (9.0, False, "met")],
)
def test_the_goal_is_judged_in_the_right_direction(capsys, ours, higher_is_better, verdict):
    text, _ = printed(capsys, [ours], [100.0], goal=0.8, higher_is_better=higher_is_better)
    assert verdict in text


def test_rows_are_aligned_and_missing_columns_stay_empty(capsys):
    rows = [{"size": "1 MiB", "rate": "5"}, {"size": "64 KiB"}, ("library", "MPICH"), ("n", "2")]
    text, _ = printed(capsys, [1.0], [1.0], goal=1.0, rows=rows)
    assert "size    rate\n1 MiB   5\n64 KiB\n" in text
    assert "library  MPICH\nn        2\n" in text


def test_repeats_must_come_in_pairs():
    with pytest.raises(ValueError, match="2 repeats of ours, 1 of the reference"):
        report("toy", "MB/s", [1.0, 2.0], [1.0], goal=1.0)
