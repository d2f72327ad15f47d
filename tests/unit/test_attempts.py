"""How often a run may try again: not more than so many times without a new step."""

from __future__ import annotations

import json

import pytest

from areal_hpc.attempts import Attempt, Begin, End, may_go_on, read_ends, write_begin, write_end


def end(before, after, code=1, why="boom", job="7"):
    return End("failed" if code else "done", code, why, before, after, "nid1", job)


def run_of(tmp_path, *attempts):
    """(Begin or None, End or None) of attempts 1, 2, ..."""
    for number, (begin, ended) in enumerate(attempts, 1):
        directory = tmp_path / f"attempt_{number}"
        directory.mkdir()
        if begin is not None:
            write_begin(directory, begin)
        if ended is not None:
            write_end(directory, ended)
    return tmp_path


def began(steps=None, job="7"):
    return Begin("nid1", job, steps)


def ended(*steps):
    """Attempts that left an end, from (before, after)."""
    return [(began(before), end(before, after)) for before, after in steps]


def killed(*steps):
    """Attempts that left only a beginning."""
    return [(began(before), None) for before in steps]


def test_what_is_written_is_read(tmp_path):
    run_of(tmp_path, (began(3), end(3, 9)), (began(), None), (None, None))
    assert read_ends(tmp_path) == [
        Attempt(1, began(3), end(3, 9)),
        Attempt(2, began(), None),
        Attempt(3, None, None),
    ]
    (tmp_path / "attempt_10").mkdir()
    (tmp_path / "attempt_x").mkdir()
    assert [one.number for one in read_ends(tmp_path)] == [1, 2, 3, 10]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "null", json.dumps(end(1, 2).__dict__ | {"steps_done_after": "2"})]
)
def test_a_damaged_end_is_none(tmp_path, text):
    run_of(tmp_path, (began(3), end(3, 9)))
    (tmp_path / "attempt_1" / "end.json").write_text(text)
    assert read_ends(tmp_path)[0].end is None


@pytest.mark.parametrize(
    "attempts, reached",
    [
        ([], 0),
        (ended((0, 0), (0, 0)), 0),  # two of three
        (ended((0, 0), (0, 0), (0, 1)), 0),  # the last one made a step
        (ended((0, 0), (0, 5), (5, 5), (5, 5)), 5),
        (ended((0, 10), (10, 20), (20, 30), (30, 40)), 40),
        (killed(0, 10, 20, 30), 40),  # no words, but each got further
        (killed(0, 10, 20, 20), 20),  # two that got no further
        (killed(0, 0, 0), 10),  # the last one did
        ([*ended((0, 40)), *killed(40, 40)], 40),
        # Fell back on an older checkpoint: what was lost counts again.
        (ended((0, 60), (60, 60), (60, 60), (20, 50)), 50),
        # Nothing left to do is no failure.
        ([*ended((0, 0), (0, 0)), (began(0), end(0, 0, code=0))], 0),
    ],
)
def test_it_may_go_on(tmp_path, attempts, reached):
    assert may_go_on(run_of(tmp_path, *attempts), reached) is None


@pytest.mark.parametrize(
    "attempts, reached, beyond",
    [
        (ended((0, 0), (0, 0), (0, 0)), 0, 0),
        (ended((0, 40), (40, 40), (40, 40), (40, 40)), 40, 40),
        # Each does five steps, and none is ever saved: the first was new, the others were not.
        (ended((40, 45), (40, 45), (40, 45), (40, 44)), 40, 45),
        (killed(10, 10, 10), 10, 10),
        ([(None, None)] * 3, 0, 0),
        ([(began(), None)] * 3, 5, 0),  # what is there is not their work: they died before they had loaded it
        ([*killed(0), *[(began(), None)] * 3], 10, 10),  # died before they had loaded it
        ([*ended((0, 20)), *killed(20), *ended((20, 20)), (None, None)], 20, 20),
    ],
)
def test_it_may_not(tmp_path, attempts, reached, beyond):
    said = may_go_on(run_of(tmp_path, *attempts), reached)
    assert said.startswith(f"not started again: the last 3 attempts finished no step beyond {beyond}:\n  attempt ")
    assert len(said.splitlines()) == 4


def test_all_reasons_are_told(tmp_path):
    run_of(
        tmp_path,
        *ended((0, 9)),
        (began(9), end(9, 9, 6, "the disk is full")),
        (began(9), None),
        (None, None),
    )
    assert may_go_on(tmp_path, 9) == (
        "not started again: the last 3 attempts finished no step beyond 9:\n"
        "  attempt 2 (job 7, host nid1): failed, exit code 6: the disk is full\n"
        "  attempt 3 (job 7, host nid1): left no word; it was killed, or its node was lost\n"
        "  attempt 4: left no word; it was killed, or its node was lost"
    )
    assert may_go_on(tmp_path, 9, max_fruitless=4) is None


def test_exactly_as_many_attempts_as_allowed(tmp_path):
    started = 0
    while may_go_on(tmp_path, 0, max_fruitless=2) is None and started < 10:
        started += 1
        directory = tmp_path / f"attempt_{started}"
        directory.mkdir()
        write_begin(directory, began(0))
        write_end(directory, end(0, 0))
    assert started == 2


def test_a_start_by_hand_has_its_own_budget(tmp_path):
    run_of(tmp_path, *ended((0, 0), (0, 0), (0, 0)))
    assert may_go_on(tmp_path, 0) is not None and may_go_on(tmp_path, 0, job_id="7") is not None
    assert may_go_on(tmp_path, 0, job_id="8") is None
