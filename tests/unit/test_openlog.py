"""What ranks have done up to the end, and say after it, is in the log; one that says nothing holds up no longer."""

import time
from collections import deque

import numpy as np

from areal_hpc.comm import Received
from areal_hpc.config import Config
from areal_hpc.desk import Desk
from areal_hpc.logcodes import Activity
from areal_hpc.messages import ActivityReport, Event, Farewell, RankFailed, Stop
from areal_hpc.openlog import OpenLog
from areal_hpc.preflight import RunClock
from areal_hpc.rank import say_farewell, to_the_end
from areal_hpc.runlog import RunLog, RunLogError

CONFIG = {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"function": "tests.tiny:reward"}}


class World:
    """Four ranks, and what three of them say after Stop."""

    rank, size, lost = 0, 4, {}

    def __init__(self, *inbox: Received) -> None:
        self.inbox, self.stopped = deque(inbox), []

    def post(self, rank: int, message: object) -> None:
        self.stopped += [rank] if isinstance(message, Stop) else []

    def poll(self) -> Received | None:
        return self.inbox.popleft() if self.inbox and self.stopped == [1, 2, 3] else None


def report(rank: int, start_s: float, stop_s: float) -> Received:
    kind = np.array([Activity.GENERATE], np.uint8)
    return Received(
        rank, ActivityReport(), {"kind": kind, "start_s": np.array([start_s]), "stop_s": np.array([stop_s])}
    )


def opened(path, world) -> tuple[OpenLog, Config]:
    config, open_log = Config.model_validate(CONFIG), OpenLog()
    world.check = type("Check", (), {"duplicates": 0, "stale": 0})
    open_log.desk = Desk(config, world, RunClock(time.monotonic()), open_log.create(path, {}))
    return open_log, config


def test_the_last_reports_are_in_the_log_though_the_run_is_over(tmp_path):
    path = tmp_path / "log.h5"
    world = World(
        report(1, 2.0, 2.25),
        Received(2, Event("note", "at last"), {}),
        Received(2, RankFailed(1, "too late to matter"), {}),
        Received(1, Farewell(), {}),
        report(2, 2.0, 2.5),
        Received(2, Farewell(), {}),
        report(3, 2.0, 2.75),
    )
    open_log, config = opened(path, world)
    assert to_the_end(lambda: "last step reached", open_log.desk, (), config) == "last step reached"
    with RunLog(path) as log:
        assert log.events.text.tolist() == ["last step reached"], "how it ended is readable before anybody answers"
    began_s = time.monotonic()
    with open_log:
        assert say_farewell(world, Stop(""), 0.3, open_log.take) == [3]
    assert 0.3 <= time.monotonic() - began_s < 3.0
    with RunLog(path) as log:
        told = log.activity.query("kind == 'generate'")
        assert told[["rank", "start_s", "stop_s"]].to_numpy().tolist() == [[1, 2, 2.25], [2, 2, 2.5], [3, 2, 2.75]]
        assert log.events[["rank", "kind"]].to_numpy().tolist() == [[0, "ended"], [2, "note"]]
        assert log.activity["rank"].iloc[0] == 0, "the controller's own, up to the end"


def test_a_log_that_cannot_be_closed_is_said_and_changes_no_end(tmp_path, monkeypatch, capsys):
    open_log, _ = opened(tmp_path / "log.h5", World())
    close = open_log.writer.close

    def refused() -> None:
        close()
        raise RunLogError("no space")

    monkeypatch.setattr(open_log.writer, "close", refused)
    with open_log:
        pass
    assert capsys.readouterr().err == "areal-hpc: no space\n"


def test_a_run_that_ended_before_there_was_a_log(capsys):
    with OpenLog() as open_log:
        open_log.take(report(1, 2.0, 2.25))
    assert capsys.readouterr().err == ""


def test_a_last_report_that_the_log_does_not_take_is_told_and_the_others_are_waited_for(tmp_path, capsys):
    uneven = report(1, 2.0, 2.25)
    uneven.arrays["stop_s"] = np.array([2.25, 3.0])
    world = World(uneven, *(Received(rank, Farewell(), {}) for rank in (1, 2, 3)))
    open_log, _ = opened(tmp_path / "log.h5", world)
    with open_log:
        assert say_farewell(world, Stop("done", True, True), 5.0, open_log.take) == []
    assert "areal-hpc: rank 1: its last ActivityReport is not in the log: table activity" in capsys.readouterr().err
