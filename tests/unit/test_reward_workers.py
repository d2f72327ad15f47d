"""Life and death of reward workers: time-outs, crashes, failed starts, close, the end of the rank. All are real."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.rewards import Recipe, RewardError, RewardResult, RewardService, Term, service

WAIT_S = 60.0
FUNCTION = f"{Path(__file__).with_name('reward_functions.py')}:reward"


def one(service: RewardService, completion: str = "", prompt: str = "", **metadata: Any) -> RewardResult:
    service.submit((1, 2), prompt, completion, metadata)
    (result,) = service.wait(WAIT_S)
    assert result.key == (1, 2)
    return result


def state(pid: int) -> str | None:
    """One letter as in ps; None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def children(parent: int) -> set[int]:
    return set(map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()))


def until(condition: Any) -> Any:
    """Value of `condition()` as soon as it is true."""
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return value


def end(pids: Iterable[int]) -> None:
    """Wait until the processes are gone; a zombie counts when it is waiting for init only."""
    for pid in pids:
        until(lambda pid=pid: state(pid) in (None, "Z"))


def lines(path: Path) -> list[str]:
    """Whole lines of a file; none as long as there is no file."""
    return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []


def test_time_out_costs_one_answer_and_the_others_go_on(tmp_path: Path) -> None:
    with RewardService(FUNCTION, num_workers=2, timeout_s=1.0) as service:
        service.submit((0, 0), "", "", {"do": "spin", "file": str(tmp_path / "pid")})
        for sample in range(1, 40):
            service.submit((0, sample), "", "", {"do": "literal", "value": str(sample)})
        results = service.wait(WAIT_S)
        (pid,) = map(int, lines(tmp_path / "pid"))  # one line: a time-out is not tried again
        until(lambda: service.poll() == [] and state(pid) is None)  # reaped, too
        assert one(service, do="literal", value="1").outcome == "correct"
    assert results[-1].key == (0, 0)  # all others came while it was still at it
    assert results[-1].outcome == "timeout" and math.isnan(results[-1].reward) and results[-1].seconds >= 1.0
    assert [result.reward for result in results[:-1]] == list(range(1, 40))
    assert (service.num_scored, service.num_timeouts, service.num_errors, service.num_restarts) == (40, 1, 0, 1)


def test_time_out_holds_when_nobody_polls(tmp_path: Path) -> None:
    with RewardService(FUNCTION, num_workers=1, timeout_s=0.1) as service:
        service.submit((0, 0), "", "", {"do": "nap", "s": 0.3, "file": str(tmp_path / "awake")})
        until(lambda: lines(tmp_path / "awake"))  # its answer is in the pipe, or as good as
        time.sleep(0.1)
        (result,) = service.wait(WAIT_S)
    assert result.outcome == "timeout" and math.isnan(result.reward)


def test_time_out_takes_the_whole_process_group(tmp_path: Path) -> None:
    with RewardService(FUNCTION, num_workers=1, timeout_s=2.0) as service:
        assert one(service, do="stubborn", file=str(tmp_path / "pids")).outcome == "timeout"
        (line,) = lines(tmp_path / "pids")
        end(map(int, line.split()))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("exit", "exited with status 3"),
        ("segfault", "killed by signal 11 (Segmentation fault)"),
        ("kill", "killed by signal 9 (Killed)"),
        ("exit with a child", "exited with status 4"),
        ("closed pipe", "its process died 2 times"),
    ],
)
def test_death_is_tried_twice_then_an_error(tmp_path: Path, how: str, reason: str) -> None:
    with RewardService(FUNCTION, num_workers=1, timeout_s=WAIT_S) as service:
        result = one(service, do="dies", how=how, file=str(tmp_path / "tries"))
        assert result.outcome == "error" and math.isnan(result.reward) and reason in result.detail
        assert lines(tmp_path / "tries") == ["try", "try"]
        assert one(service, do="literal", value="1").outcome == "correct"
        assert (service.num_errors, service.num_restarts) == (1, 2)


@pytest.mark.parametrize("do", ["dies_once", "garbage_once"])
def test_second_try_may_succeed(tmp_path: Path, do: str) -> None:
    with RewardService(FUNCTION, num_workers=1, timeout_s=WAIT_S) as service:
        assert one(service, do=do, file=str(tmp_path / "file")).outcome == "correct"
        assert service.num_restarts == 1


def test_fork_that_comes_back_answers_once() -> None:
    with RewardService(FUNCTION, num_workers=1, timeout_s=WAIT_S) as service:
        for _ in range(5):
            assert one(service, do="forks").reward == 7.0
        assert one(service, do="literal", value="1").reward == 1.0
        assert service.num_restarts == 0


def test_close_in_the_middle_of_work(tmp_path: Path) -> None:
    before = children(os.getpid())
    service = RewardService(FUNCTION, num_workers=2, timeout_s=WAIT_S)
    for sample in range(5):
        service.submit((0, sample), "", "", {"do": "stubborn", "file": str(tmp_path / "pids")})
    until(lambda: len(lines(tmp_path / "pids")) == 2)
    pids = [int(pid) for line in lines(tmp_path / "pids") for pid in line.split()]
    assert len(pids) == 6 and len(children(os.getpid()) - before) == 2
    service.close()
    service.close()
    assert children(os.getpid()) == before
    end(pids)
    assert service.num_pending == 5
    for call in (service.poll, lambda: service.submit((9, 9), "", "", {}), lambda: service.wait(1)):
        with pytest.raises(RewardError, match="closed"):
            call()


def test_poll_makes_a_handful_of_calls_that_cannot_block(tmp_path: Path) -> None:
    kernel, timeouts = [], []

    def record(frame: Any, event: str, function: Any) -> None:
        is_epoll = isinstance(getattr(function, "__self__", None), select.epoll)
        if event == "c_call" and (is_epoll or function.__module__ in ("posix", "time", "_posixsubprocess")):
            kernel.append(function.__name__)
        elif event == "call" and frame.f_code.co_name == "select":
            timeouts.append(frame.f_locals["timeout"])

    with RewardService(FUNCTION, num_workers=3, timeout_s=WAIT_S) as service:
        for sample in range(8):
            service.submit((0, sample), "", "", {"do": "spin", "file": str(tmp_path / f"pid{sample}")})
        until(lambda: all(lines(tmp_path / f"pid{sample}") for sample in range(3)))
        sys.setprofile(record)
        try:
            results = service.poll()
        finally:
            sys.setprofile(None)
    assert results == []
    assert timeouts == [0.0]
    assert kernel == ["poll", "monotonic", "waitid", "waitid", "waitid"]


def test_worker_that_does_not_read_blocks_nobody() -> None:
    before = children(os.getpid())
    with RewardService(FUNCTION, num_workers=1, timeout_s=WAIT_S) as service:
        (pid,) = children(os.getpid()) - before
        os.kill(pid, signal.SIGSTOP)
        until(lambda: state(pid) == "T")
        text = "x" * 10_000_000  # the pipe takes 64 KiB
        service.submit((0, 0), text, "", {"do": "same_text", "ascii": ascii(text + "|")})
        for _ in range(100):
            assert service.poll() == []
        os.kill(pid, signal.SIGCONT)
        (result,) = service.wait(WAIT_S)
        assert result.outcome == "correct"
    with RewardService(FUNCTION, num_workers=1, timeout_s=1.0) as service:
        (pid,) = children(os.getpid()) - before
        os.kill(pid, signal.SIGSTOP)
        assert one(service, completion=text, do="literal", value="1").outcome == "timeout"
        assert one(service, do="literal", value="1").outcome == "correct"


def test_restarts_that_fail_come_to_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_RESTART_DELAY_S", 0.05)
    path = tmp_path / "once.py"
    path.write_text(
        f"import os\nwith open({str(tmp_path / 'starts')!r}, 'a') as file: file.write('start\\n')\n"
        f"if os.path.exists({str(tmp_path / 'gone')!r}): raise OSError('data gone')\n"
        f"def f(p, c, m):\n    open({str(tmp_path / 'gone')!r}, 'w').close()\n    os._exit(1)\n"
    )
    with RewardService(f"{path}:f", num_workers=1, timeout_s=WAIT_S) as dying:
        dying.submit((0, 0), "", "", {})
        with pytest.raises(RewardError, match=r"once\.py:3: OSError: data gone"):
            dying.wait(WAIT_S)
        assert dying.num_pending == 1
    assert len(lines(tmp_path / "starts")) == 1 + service.MAX_FAILED_STARTS


PARENT = """
import sys, time
from areal_hpc.rewards import RewardService
service = RewardService(sys.argv[1], num_workers=2, timeout_s=1000)
service.submit((0, 0), "", "", {"do": "spin", "file": sys.argv[2]})
while True:
    service.poll()
    time.sleep(0.01)
"""


def test_no_worker_outlives_a_killed_rank(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, FUNCTION, str(tmp_path / "pid")]) as rank:
        try:
            (spinning,) = map(int, until(lambda: lines(tmp_path / "pid")))
            pids = children(rank.pid)
            assert len(pids) == 2 and spinning in pids
        finally:
            rank.kill()
    end(pids)


def test_worker_whose_rank_is_gone_already_leaves_before_any_user_code(tmp_path: Path) -> None:
    path = tmp_path / "f.py"
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f(p, c, m): return 1\n")
    command = [sys.executable, "-m", "areal_hpc.rewards.process", Recipe([Term(f"{path}:f")]).to_text()]
    for parent, ready in ((os.getpid(), True), (os.getpid() + 1, False)):
        run = subprocess.run([*command, str(parent)], input=b"", capture_output=True, timeout=WAIT_S, check=False)
        assert (b"ready" in run.stdout) == (tmp_path / "ran").exists() == ready
        assert run.returncode == (0 if ready else 1)
        (tmp_path / "ran").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module\n", r"ModuleNotFoundError: No module named 'no_such_module'"),
        ("\n\n1 / 0\n", r"broken\.py:3: ZeroDivisionError: division by zero"),
        ("def f(:\n", r"broken\.py:1: SyntaxError"),
        ("def other(): pass\n", r"AttributeError: .* has no attribute 'f'"),
        ("f = 3\n", r"f is int, not a function"),
        ("import os\nos._exit(5)\n", r"exited with status 5"),
        ("import sys\nsys.exit('stop')\n", r"broken\.py:2: SystemExit: stop"),
        ("while True: pass\n", r"not ready after 0\.5 s"),
    ],
)
def test_function_that_cannot_be_loaded_fails_at_once(tmp_path: Path, source: str, reason: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    before = children(os.getpid())
    start_timeout_s = 0.5 if "while" in source else WAIT_S
    with pytest.raises(RewardError, match=reason):
        RewardService(f"{path}:f", num_workers=2, timeout_s=1, start_timeout_s=start_timeout_s)
    assert children(os.getpid()) == before
