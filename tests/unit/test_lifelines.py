"""A rank's death is seen at once, whatever kills it, and nobody else can pretend to be a rank."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time

import pytest

from areal_hpc import lifelines as module
from areal_hpc.lifelines import GREETING, Lifelines, hold_lifeline

CHILD = """
import sys, time
from areal_hpc.lifelines import hold_lifeline
hold_lifeline("127.0.0.1", int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), 5.0)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def lines():
    return Lifelines()


def child(lines: Lifelines, rank: int, program: str = CHILD) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", program, str(lines.port), lines.token, str(rank)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def ended(lines: Lifelines, timeout_s: float = 5.0) -> list[int]:
    deadline_s = time.monotonic() + timeout_s
    while not (found := lines.look()) and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return found


def until_open(lines: Lifelines, count: int) -> None:
    deadline_s = time.monotonic() + 5
    while lines.num_ranks < count and time.monotonic() < deadline_s:
        assert lines.look() == []
    assert lines.num_ranks == count


def test_a_killed_process_is_seen_once_and_the_others_stay(lines):
    processes = {rank: child(lines, rank) for rank in (3, 4)}
    try:
        until_open(lines, 2)
        processes[3].send_signal(signal.SIGKILL)
        began_s = time.monotonic()
        assert ended(lines) == [3] and time.monotonic() - began_s < 1.0
        assert lines.look() == [] and lines.num_ranks == 1
        processes[4].send_signal(signal.SIGSTOP)  # a stopped one is not dead
        assert ended(lines, 0.2) == []
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def test_the_line_ends_before_everything_that_was_opened_after_it(lines):
    """MPI opens connections when they are needed; none of them may end while the line still says that all is well."""
    with socket.create_server(("127.0.0.1", 0), backlog=200) as server:
        others = CHILD.replace(
            "print(",
            f"import socket\nrest = [socket.create_connection({server.getsockname()}) for _ in range(150)]\nprint(",
        )
        for rank in range(5):
            process = child(lines, rank, others)
            until_open(lines, 1)
            accepted = [server.accept()[0] for _ in range(150)]
            process.kill()
            assert any(select.select(accepted, [], [], 5.0))  # one of them has ended
            assert lines.look() == [rank]
            process.wait()
            for connection in accepted:
                connection.close()


@pytest.mark.parametrize(
    "greeting", [GREETING.pack(b"x" * 32, 3), b"GET / HTTP/1.1\r\n\r\nHost: somebody with a long name", b""]
)
def test_strangers_are_refused_and_never_taken_for_a_rank(lines, greeting):
    with socket.create_connection(("127.0.0.1", lines.port)) as stranger:
        stranger.sendall(greeting)
        if not greeting:
            stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(5)
        deadline_s = time.monotonic() + 1
        while time.monotonic() < deadline_s:
            assert lines.look() == []
        assert lines.num_ranks == 0
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""  # closed by the controller


def test_whoever_says_nothing_is_closed_after_a_while(lines, monkeypatch):
    monkeypatch.setattr(module, "GREETING_S", 0.0)
    silent = socket.create_connection(("127.0.0.1", lines.port))
    ended(lines, 0.1)
    with socket.create_connection(("127.0.0.1", lines.port)):
        ended(lines, 0.2)
    silent.settimeout(5)
    assert silent.recv(1) == b""


def test_a_greeting_may_come_in_pieces(lines):
    greeting = GREETING.pack(lines.token.encode(), 7)
    with socket.create_connection(("127.0.0.1", lines.port)) as rank:
        rank.sendall(greeting[:10])
        assert ended(lines, 0.1) == [] and lines.num_ranks == 0
        rank.sendall(greeting[10:])
        until_open(lines, 1)
    assert ended(lines) == [7]


def test_without_a_controller_it_says_so():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(OSError):
        hold_lifeline("127.0.0.1", port, "t" * 32, 3, 1.0)


def test_the_line_is_not_inherited_by_programs_a_rank_starts(lines):
    """A reward program that outlives its rank must not hide its death."""
    hold_lifeline("127.0.0.1", lines.port, lines.token, 9, 5.0)
    until_open(lines, 1)
    held = module._held.pop()
    assert not os.get_inheritable(held.fileno())
    held.close()
    assert ended(lines) == [9]
