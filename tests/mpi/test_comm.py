"""Messages between real ranks: all arrive, in order; what goes wrong ends within its deadline and names the peer."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from tests.mpi.mpirun import Result, run_ranks

pytestmark = pytest.mark.mpi

RANKS = str(Path(__file__).with_name("comm_ranks.py"))
TIMEOUT_S = 120.0


def run(n: int, *program: str, timeout_s: float = TIMEOUT_S) -> Result:
    return run_ranks(n, [RANKS, *program], timeout_s)


@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_ring(n):
    run(n, "ring").check()


@pytest.mark.parametrize(("n", "num_messages"), [(2, 40), (4, 15), (7, 6)])
def test_everybody_to_everybody_in_order_with_arrays_of_all_kinds(n, num_messages):
    run(n, "all_to_all", str(num_messages)).check()


def test_a_wait_that_is_too_long_says_who_was_heard_last():
    out = run(2, "deadline").check().stdout
    assert re.match(r"rank 1 waited \d+\.\d s for a message; last heard: Note from rank 0, \d+\.\d s ago\n", out), out


def test_send_does_not_wait_and_flush_has_a_deadline():
    out = run(2, "nobody_takes").check().stdout
    assert re.match(r"rank 0 waited \d+\.\d s for its messages to leave; last heard: nothing since the start", out), out
    assert "unsent: Block to rank 1, posted " in out


def test_a_receiver_holds_no_more_than_its_limit():
    run(2, "held").check()


@pytest.mark.fault("doubled and stale messages", row=28)
def test_doubled_and_stale_messages_are_ignored_and_counted():
    assert run(2, "ignored").check().stdout.split("\n")[0] == "[0, 1, 2] 1 5"


@pytest.mark.fault("damaged message", row=28)
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("noise", r"CodecError: rank 1: message from rank 0: bad magic b'\xab\xab\xab\xab', expected b'AHPC'"),
        ("wrong source", "CodecError: rank 1: message from rank 0: the envelope names rank 5 as its source"),
        ("gap", "CodecError: rank 1: message from rank 0: sequence gap: expected message 0, got 3; 3 lost"),
        ("flipped bit", "CodecError: rank 1: message from rank 0: CRC of payload chunk 1 of 3 differs: sent "),
        ("short part", "CodecError: rank 1: message from rank 0: payload part 1 has 4095 bytes, expected 4096"),
        ("long part", "CodecError: rank 1: message from rank 0: more bytes than announced"),
        ("missing part", "DeadlineExceeded: rank 1: nothing more came for 0.3 s: Block from rank 0, 1 of 4 payload"),
    ],
)
def test_a_bad_message_is_refused_naming_the_peer(how, text):
    result = run(2, "damage", how)
    assert text in result.stdout
    assert result.returncode == 7


@pytest.mark.parametrize(("how", "code"), [("exception", 1), ("run error", 6), ("exit", 5), ("abort", 42)])
def test_a_failing_rank_takes_the_world_with_it_and_its_exit_code_is_kept(how, code):
    result = run(4, "fail", how, timeout_s=50)  # the others would wait for 60 s
    assert result.returncode == code, result.stderr
    assert how not in ("exception", "run error") or "reason to be read" in result.stderr


def test_leaving_with_exit_code_zero_is_a_healthy_end():
    result = run(3, "leave").check()
    assert result.stdout == "finished\n" * 2


def test_closing_does_not_wait_for_a_rank_that_never_closes():
    result = run(2, "hang_at_end", timeout_s=50)
    assert result.returncode == 9
    assert re.search(r"leaving without MPI_Finalize: rank 0 waited \d+\.\d s for all ranks to close", result.stderr)


def test_waiting_ranks_leave_the_cores_to_others():
    out = run(12, "idle", "5", timeout_s=200).check().stdout
    used = [float(line.split()[1]) for line in out.splitlines() if line.startswith("cpu")]
    assert len(used) == 11
    assert sum(used) < 11 * 5 * 0.02, f"a waiting rank used {sum(used) / 11 / 5:.1%} of a core"


@pytest.mark.slow
def test_a_payload_above_two_gib():
    run(2, "large", "2.2", timeout_s=280).check()


def test_the_runner_leaves_no_process_behind(tmp_path):
    result = run(2, "detached_child", str(tmp_path / "pid"), timeout_s=8)
    assert result.timed_out
    pids = [int(part) for file in tmp_path.iterdir() for part in (file.suffix[1:], file.read_text())]
    assert len(pids) == 4
    until = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z" and os.kill(pid, 0) is None
    except OSError:
        return False
