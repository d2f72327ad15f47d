"""RUN/owner: one attempt writes, a second one is refused at once, the stale one is followed by exactly one."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from areal_hpc import ownership
from areal_hpc.exits import Exit, RunError
from areal_hpc.ownership import Owner, alive, claim, held_by, process_lives, process_start, release, still_ours

FORK = multiprocessing.get_context("fork")
ELSEWHERE = Owner(3, "nid0001", 4711, "boot:17", "2026-01-02T03:04:05+00:00")
IN_JOB = replace(ELSEWHERE, job_id="123", cluster="alps")
ME = Owner.here(4, environ={})


def no_slurm(job_ids):
    return {}


def judge(owner):
    return alive(owner, no_slurm, ME)


def forbidden(owner):
    raise AssertionError("need not be asked")


def dead_owner(attempt=1) -> Owner:
    """A process of this host that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner.here(attempt, process.pid, {})
    process.communicate(b"\n", timeout=60)
    assert owner.process_start is not None
    return owner


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(params=["links", "no links"])
def links(request, monkeypatch):
    """Both kinds of file systems: with hard links and without."""
    if request.param == "no links":

        def refuse(*_):
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(ownership.os, "link", refuse)


def test_a_fresh_directory_is_claimed_made_and_released(tmp_path, links):
    mine = claim(tmp_path / "new" / "run", ME, forbidden)
    assert mine.owner == ME and mine.note is None and still_ours(mine)
    content = json.loads(mine.path.read_text())
    assert mine.path == tmp_path / "new" / "run" / "owner"
    assert content["pid"] == os.getpid() and content["host"] == socket.gethostname() and content["attempt"] == 4
    assert names(mine.path.parent) == ["owner"]
    assert held_by(mine.path.parent, 4) == mine and held_by(mine.path.parent, 3) is None
    assert release(mine)
    assert names(mine.path.parent) == [] and not still_ours(mine) and not release(mine)


def test_a_second_one_is_refused_at_once_with_the_name_of_the_owner(tmp_path, links):
    claim(tmp_path, IN_JOB, forbidden)
    began_s = time.monotonic()
    with pytest.raises(RunError) as caught:
        claim(tmp_path, ME, lambda owner: alive(owner, lambda ids: {"123": {"0": "RUNNING", "1": "PENDING"}}, ME))
    assert time.monotonic() - began_s < 1
    assert caught.value.code == Exit.CONFIG
    assert caught.value.reason == (
        f"areal-hpc: {tmp_path} belongs to attempt 3 (job 123, host nid0001, pid 4711, "
        "since 2026-01-02T03:04:05+00:00); end it first (scancel 123), or choose another run_dir"
    )
    assert names(tmp_path) == ["owner"]


def test_without_slurm_a_living_process_of_this_host_is_respected(tmp_path):
    claim(tmp_path, ME, forbidden)
    with pytest.raises(RunError, match=rf"end it first \(pid {os.getpid()} on {socket.gethostname()}\)"):
        claim(tmp_path, ME, judge)


def test_who_cannot_be_judged_is_respected_with_a_hint(tmp_path):
    first = claim(tmp_path, ELSEWHERE, forbidden)
    with pytest.raises(RunError) as caught:
        claim(tmp_path, ME, judge)
    assert caught.value.reason.endswith(
        f"cannot be told from {ME.host}; if it does not, remove {tmp_path / 'owner'} and start again"
    )
    assert still_ours(first)
    first.path.unlink()
    assert claim(tmp_path, ME, judge).note is None


def test_the_process_that_is_gone_is_followed_with_a_sentence(tmp_path, links):
    gone = dead_owner()
    first = claim(tmp_path, gone, forbidden)
    mine = claim(tmp_path, ME, judge)
    assert mine.note == f"took over {tmp_path / 'owner'} from {gone.in_words}: its process is gone"
    assert names(tmp_path) == ["owner"] and still_ours(mine) and not still_ours(first)
    assert not release(first) and still_ours(mine), "only what is still ours is removed"


def test_a_reused_pid_is_another_process(tmp_path):
    claim(tmp_path, replace(ME, process_start="another boot:1"), forbidden)
    assert "its process is gone" in claim(tmp_path, ME, judge).note


def test_the_job_that_has_ended_is_followed(tmp_path):
    claim(tmp_path, IN_JOB, forbidden)
    ended = {"123": {"0": "COMPLETED", "1": "NODE_FAIL"}}
    mine = claim(tmp_path, ME, lambda owner: alive(owner, lambda ids: ended, ME))
    assert mine.note.endswith("since 2026-01-02T03:04:05+00:00): its job has ended")


def test_the_requeue_of_the_owner_passes_without_asking(tmp_path, links):
    claim(tmp_path, IN_JOB, forbidden)
    mine = claim(tmp_path, replace(ME, job_id="123", cluster="alps", attempt=4), forbidden)
    assert mine.owner.attempt == 4 and mine.note.endswith("an earlier attempt of this job")
    # On the same host, once the process of the attempt before is gone:
    claim_of_dead = replace(dead_owner(5), job_id="123", cluster="alps")
    assert claim(tmp_path / "other", claim_of_dead, forbidden)
    assert claim(tmp_path / "other", replace(ME, job_id="123", cluster="alps"), forbidden).note


def test_two_starts_inside_one_allocation_are_no_requeue(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        claim(tmp_path, Owner.here(1, other.pid, {"SLURM_JOB_ID": "123"}), forbidden)
        with pytest.raises(RunError, match=f"end it first \\(pid {other.pid}\\)"):
            claim(tmp_path, replace(ME, job_id="123"), forbidden)
        other.communicate(b"\n", timeout=60)


def test_the_same_job_id_on_another_cluster_is_no_requeue(tmp_path):
    claim(tmp_path, IN_JOB, forbidden)
    with pytest.raises(RunError, match="cannot be told"):
        claim(tmp_path, replace(ME, job_id="123", cluster="daint"), lambda owner: None)


@pytest.mark.parametrize(
    "owner, states, me, expected",
    [
        (IN_JOB, {"123": {"0": "RUNNING", "1": "FAILED"}}, ME, True),
        (IN_JOB, {"123": {"": "PENDING"}}, ME, True),
        (IN_JOB, {"123": {"": "CANCELLED"}}, ME, False),
        (IN_JOB, {}, ME, None),
        # Slurm answers, for it knows our job, and has forgotten the other one:
        (IN_JOB, {"200": {"": "RUNNING"}}, replace(ME, job_id="200", cluster="alps"), False),
        (IN_JOB, {}, replace(ME, job_id="200", cluster="alps"), None),
        (IN_JOB, {"123": {"": "FAILED"}}, replace(ME, job_id="200", cluster="daint"), None),
        (IN_JOB, {"200": {"": "RUNNING"}}, replace(ME, job_id="200"), None),
        (ELSEWHERE, {}, ME, None),
        (ME, {}, ME, True),
        (replace(ME, process_start="boot:1"), {}, ME, False),
    ],
)
def test_who_is_alive(owner, states, me, expected):
    def job_states(job_ids):
        assert set(job_ids) <= {"123", "200"} and job_ids[0] == "123"
        return states

    assert alive(owner, job_states, me) is expected


def test_processes_are_told_apart():
    assert process_lives(os.getpid(), process_start(os.getpid()))
    assert process_lives(1, process_start(1))
    assert not process_lives(2**22 + 5, None) and process_start(2**22 + 5) is None
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    deadline_s = time.monotonic() + 60
    while process_start(process.pid) is not None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not process_lives(process.pid, None), "a zombie"
    process.wait(timeout=60)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"token": "x"}', "\udcff"])
def test_a_file_that_says_nothing_is_respected_with_a_hint(tmp_path, text):
    (tmp_path / "owner").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(RunError, match="owner cannot be understood; if no run is writing here, remove it") as caught:
        claim(tmp_path, ME, forbidden)
    assert caught.value.code == Exit.CONFIG and names(tmp_path) == ["owner"]
    assert held_by(tmp_path, 4) is None


def test_a_token_cannot_name_another_file(tmp_path):
    claim(tmp_path, dead_owner(), forbidden)
    content = json.loads((tmp_path / "owner").read_text()) | {"token": "/../../../etc"}
    (tmp_path / "owner").write_text(json.dumps(content))
    with pytest.raises(RunError, match="cannot be understood"):
        claim(tmp_path, ME, judge)


def test_a_directory_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write .*owner: Not a directory") as caught:
        claim(tmp_path / "file" / "run", ME, forbidden)
    assert caught.value.code == Exit.DISK


def test_a_slow_judge_cannot_throw_out_the_successor(tmp_path, links):
    """While one asks Slurm about the dead owner, another one takes over and cleans up."""
    gone = dead_owner()
    claim(tmp_path, gone, forbidden)
    quick = []

    def slow(owner):
        if owner == gone:
            quick.append(claim(tmp_path, replace(ME, attempt=2), judge))
            return False
        return judge(owner)

    with pytest.raises(RunError, match="belongs to attempt 2"):
        claim(tmp_path, replace(ME, attempt=3), slow)
    assert still_ours(quick[0]) and names(tmp_path) == ["owner"]


def test_a_slow_judge_starts_anew_when_the_successor_has_come_and_gone(tmp_path, links):
    gone = dead_owner()
    claim(tmp_path, gone, forbidden)

    def slow(owner):
        assert release(claim(tmp_path, replace(ME, attempt=2), judge))
        return False

    mine = claim(tmp_path, replace(ME, attempt=3), slow)
    assert mine.note is None and still_ours(mine) and names(tmp_path) == ["owner"]


def test_who_dies_in_the_middle_of_taking_over_is_followed_too(tmp_path, monkeypatch, links):
    first = claim(tmp_path, dead_owner(1), forbidden)

    def die(*_):
        raise KeyboardInterrupt

    second = dead_owner(2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ownership.os, "replace", die)
        claim(tmp_path, second, judge)
    assert still_ours(first) and len(names(tmp_path)) == 2, "the follower has its place, the file still names the first"
    mine = claim(tmp_path, ME, judge)
    assert second.in_words in mine.note
    assert names(tmp_path) == ["owner"] and still_ours(mine)


def test_who_is_in_the_middle_of_taking_over_is_respected(tmp_path, monkeypatch):
    claim(tmp_path, dead_owner(1), forbidden)
    refused = []

    def meanwhile(*arguments):
        with pytest.raises(RunError, match="belongs to attempt 7") as caught:
            claim(tmp_path, replace(ME, attempt=8), judge)
        refused.append(caught.value)
        return real(*arguments)

    real = os.replace
    monkeypatch.setattr(ownership.os, "replace", meanwhile)
    mine = claim(tmp_path, replace(ME, attempt=7), judge)
    assert len(refused) == 1 and still_ours(mine)


def test_nobody_can_follow_while_the_owner_lets_go(tmp_path, monkeypatch):
    mine = claim(tmp_path, ME, forbidden)

    def meanwhile(claimed):
        with pytest.raises(RunError, match="belongs to"):
            claim(tmp_path, replace(ME, attempt=9), lambda owner: owner.pid == ME.pid)
        return True

    monkeypatch.setattr(ownership, "still_ours", meanwhile)
    assert release(mine)
    assert names(tmp_path) == []


def test_who_comes_second_by_a_hair_is_refused(tmp_path, monkeypatch):
    """Somebody else creates the file between the look and the creation."""
    real, others = os.link, []

    def link(source, target):
        if not others:
            others.append(None)
            others.append(claim(tmp_path, replace(ME, attempt=2), forbidden))
        real(source, target)

    monkeypatch.setattr(ownership.os, "link", link)
    with pytest.raises(RunError, match="belongs to attempt 2"):
        claim(tmp_path, replace(ME, attempt=3), judge)
    assert still_ours(others[1])


def test_a_file_that_is_being_written_is_read_again(tmp_path):
    text = claim(tmp_path, ME, forbidden).path.read_text()
    (tmp_path / "owner").write_text(text[:20])
    timer = threading.Timer(0.1, (tmp_path / "owner").write_text, [text])
    timer.start()
    with pytest.raises(RunError, match="belongs to attempt 4"):
        claim(tmp_path, replace(ME, attempt=5), judge)
    timer.join()


def test_an_answer_that_nfs_lost_is_not_believed(tmp_path, monkeypatch):
    """The server made the link, the client asked again and was told that it exists."""
    real = os.link

    def twice(source, target):
        real(source, target)
        real(source, target)

    monkeypatch.setattr(ownership.os, "link", twice)
    assert still_ours(claim(tmp_path, ME, forbidden))


def test_a_file_that_nfs_calls_stale_is_read_again(tmp_path, monkeypatch):
    mine = claim(tmp_path, ME, forbidden)
    real, failures = Path.read_text, [errno.ESTALE, errno.ESTALE]

    def read_text(path, **how):
        if path.name == "owner" and failures:
            raise OSError(failures.pop(), "Stale file handle")
        return real(path, **how)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert still_ours(mine) and not failures


def contender(run_dirs, attempt, no_links, barrier, results):
    if no_links:

        def refuse(*_):
            raise OSError(errno.ENOTSUP, "Operation not supported")

        ownership.os.link = refuse
    me = Owner.here(attempt, environ={})
    for run_dir in run_dirs:
        barrier.wait(60)
        try:
            claim(run_dir, me, lambda owner: alive(owner, no_slurm, me))
            results.put((run_dir, attempt, "won"))
        except RunError as error:
            results.put((run_dir, attempt, error.reason))
    barrier.wait(60)  # a process that is gone may be followed, so all stay


@pytest.mark.fault("twenty starts in the same moment", row=23)
@pytest.mark.parametrize("no_links", [False, True], ids=["links", "no links"])
def test_of_twenty_claimers_in_the_same_moment_exactly_one_wins(tmp_path, no_links):
    """Ten times, every other time after somebody who died."""
    run_dirs = [tmp_path / str(turn) for turn in range(10)]
    for run_dir in run_dirs[1::2]:
        claim(run_dir, dead_owner(99), forbidden)
    barrier, results = FORK.Barrier(20), FORK.Queue()
    processes = [
        FORK.Process(target=contender, args=(run_dirs, number, no_links, barrier, results)) for number in range(20)
    ]
    for process in processes:
        process.start()
    outcomes = {run_dir: {} for run_dir in run_dirs}
    for _ in range(20 * len(run_dirs)):
        run_dir, attempt, outcome = results.get(timeout=60)
        outcomes[run_dir][attempt] = outcome
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    for run_dir, told in outcomes.items():
        (winner,) = (attempt for attempt, outcome in told.items() if outcome == "won")
        assert len(told) == 20 and held_by(run_dir, winner) is not None
        losers = [outcome for outcome in told.values() if outcome != "won"]
        assert all("belongs to attempt" in outcome and "end it first" in outcome for outcome in losers), losers
        assert names(run_dir) == ["owner"]


@pytest.mark.fault("stale owner file", row=22)
def test_a_killed_owner_leaves_nothing_that_stops_the_next(tmp_path):
    """SIGKILL while it claims and releases in a loop, at ten moments."""

    def loop():
        me = Owner.here(1, environ={})
        while True:
            release(claim(tmp_path, me, lambda owner: alive(owner, no_slurm, me)))

    for moment in range(10):
        process = FORK.Process(target=loop)
        process.start()
        time.sleep(0.02 + 0.007 * moment)
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        assert release(claim(tmp_path, ME, judge))
        assert "owner" not in names(tmp_path)
