"""When evaluations begin beside training, what they ask of whom, and how one goes on after a resume."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from areal_hpc.config import Config
from areal_hpc.controller_state import Credits
from areal_hpc.examiner import Examiner
from areal_hpc.logcodes import Outcome
from areal_hpc.messages import AdmitGroup, GroupFinished, GroupRefused
from tests.unit.test_evaluation import HELDOUT, figures


@dataclass
class FakeDesk:
    """What the examiner uses of a desk."""

    config: Config
    posted: list[tuple[int, AdmitGroup]] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    flushes: int = 0
    walltime: Any = field(default_factory=lambda: SimpleNamespace(closed=False))

    @property
    def world(self):
        return self

    @property
    def log(self):
        return self

    def post(self, rank: int, message: AdmitGroup) -> None:
        self.posted.append((rank, message))

    def event(self, kind: str, text: str, rank: int = 0) -> None:
        self.events.append((kind, text))

    def evaluations(self, rows: dict[str, Any]) -> None:
        self.rows.append(rows)

    def flush(self) -> None:
        self.flushes += 1


class Hall:
    """An examiner with two rollout ranks (3 and 4) of 8 slots; answers come when `answer` is called."""

    def __init__(self, steps: int = 10, **evaluation) -> None:
        settings = {"model": {"path": "m"}, "data": {"train": "d", "heldout": "h"}, "reward": {"function": "a:b"}}
        settings |= {"steps": steps, "rollout": {"slots": 8}, "evaluation": {"samples": 2, "every": 2} | evaluation}
        self.desk = FakeDesk(Config.model_validate(settings))
        self.credits = Credits()
        for rank in (3, 4):
            self.credits.grant(rank, 10)
        self.done: list[int] = []
        self.received: list[Any] = []
        self.examiner = Examiner(
            self.desk, HELDOUT, self.credits, lambda e: self.done.append(e.version), self.received.append
        )

    def asked(self) -> list[tuple[int, AdmitGroup]]:
        posted, self.desk.posted = self.desk.posted, []
        return posted

    def answer(self, rank: int, message: AdmitGroup, outcome: Outcome = Outcome.CORRECT) -> None:
        self.credits.grant(rank, 1)
        self.examiner.finished(GroupFinished(message.group_id, 3, "evaluate"), figures(outcome))

    def answer_all(self) -> None:
        while asked := self.asked():
            for rank, message in asked:
                self.answer(rank, message)


def test_it_begins_with_every_second_version_but_the_last():
    hall = Hall(steps=4)
    for version in (1, 2, 3, 4):
        hall.examiner.new_version(version)
        hall.answer_all()
    assert hall.done == [2], "the evaluation at the end is that of version 4"
    hall = Hall(steps=4, at_end=False)
    for version in (1, 2, 3, 4):
        hall.examiner.new_version(version)
        hall.answer_all()
    assert hall.done == [2, 4]
    never = Hall(every=None)
    never.examiner.new_version(2)
    assert never.asked() == []


def test_held_out_answers_are_groups_of_one_with_their_sample_number():
    hall = Hall(share=1.0)
    hall.examiner.new_version(2)
    messages = [message for _, message in hall.asked()]
    assert [(m.prompt_id, m.first_sample, m.num_samples) for m in messages] == [
        ("a", 0, 1),
        ("a", 1, 1),
        ("b", 0, 1),
        ("b", 1, 1),
        ("a", 0, 1),
        ("a", 1, 1),
    ]
    assert {(m.min_version, m.purpose) for m in messages} == {(2, "evaluate")}


@pytest.mark.parametrize(("share", "most"), [(0.25, 2), (0.3, 2), (0.01, 1), (1.0, 8)])
def test_beside_training_each_rank_gets_no_more_than_its_share(share, most):
    hall = Hall(share=share, samples=10)
    hall.examiner.new_version(2)
    asked = hall.asked()
    assert [rank for rank, _ in asked].count(3) == [rank for rank, _ in asked].count(4) == most
    assert hall.credits.free == {3: 10 - most, 4: 10 - most}
    hall.answer(*asked[0])
    assert [rank for rank, _ in hall.asked()] == [asked[0][0]], "one came back, one goes out"


def test_alone_it_takes_every_place():
    hall = Hall(samples=10)
    hall.examiner.begin(0)
    assert len(hall.asked()) == 20 and hall.credits.free == {3: 0, 4: 0}


def test_what_became_due_meanwhile_begins_with_the_newest_version_and_is_told():
    hall = Hall()
    hall.examiner.new_version(2)
    first = hall.asked()
    hall.examiner.new_version(4)
    hall.examiner.new_version(6)
    hall.examiner.catch_up(7)
    assert hall.desk.events == [], "not before the first is complete"
    for rank, message in first:
        hall.answer(rank, message)
    hall.answer_all()
    assert hall.done == [2] and hall.desk.flushes == 1 and len(hall.desk.rows[0]["version"]) == 6
    hall.examiner.catch_up(7)
    text = "due with version 4, 6 while another evaluation was under way; begins with version 7"
    assert hall.desk.events == [("evaluation_late", text)]
    again = hall.asked()
    assert {m.min_version for _, m in again} == {7}
    assert not {m.group_id for _, m in again} & {m.group_id for _, m in first}, "late answers of the first do not count"


def test_what_is_late_when_training_is_over_is_told_too():
    hall = Hall()
    hall.examiner.new_version(2)
    hall.examiner.new_version(4)
    hall.answer_all()
    hall.examiner.catch_up(None)
    assert hall.desk.events == [
        ("evaluation_left_out", "due with version 4 while another evaluation was under way; the last step came first")
    ]
    assert hall.asked() == []


def test_a_refused_prompt_does_not_hold_it_up():
    hall = Hall()
    hall.examiner.begin(0)
    for rank, message in hall.asked():
        if message.prompt_id == "b":
            hall.examiner.refused(GroupRefused(message.group_id, "too long", "evaluate"))
        else:
            hall.answer(rank, message)
    assert hall.done == [0] and len(hall.received) == 4


def test_after_a_resume_only_what_was_out_is_asked_anew():
    hall = Hall(share=1.0)
    hall.examiner.new_version(2)
    for rank, message in hall.asked()[:4]:
        hall.answer(rank, message, Outcome.TIMEOUT if message.first_sample else Outcome.CORRECT)
    saved = hall.examiner.snapshot()
    assert saved["version"] == 2 and len(saved["answers"]) == 4
    later = Hall(share=1.0)
    later.examiner.resume(saved)
    assert later.desk.events == [("evaluation_resumed", "version 2: 4 held-out answers kept, 2 asked for anew")]
    asked = later.asked()
    assert [(m.prompt_id, m.first_sample, m.min_version) for _, m in asked] == [("a", 0, 2), ("a", 1, 2)]
    for rank, message in asked:
        later.answer(rank, message)
    assert later.done == [2] and len(later.desk.rows[0]["version"]) == 6
    assert later.examiner.snapshot() == {}
    none = Hall()
    none.examiner.resume({})
    assert none.desk.posted == [] and none.desk.events == []


def test_what_a_lost_rank_was_asked_is_asked_of_the_others():
    hall = Hall(share=0.25)
    hall.examiner.new_version(2)
    asked = hall.asked()
    del hall.credits.free[3]
    hall.examiner.lost(3)
    assert hall.desk.events == [("evaluation_asked_anew", "2 held-out answers that rank 3 had not given")]
    assert hall.asked() == [], "rank 4 has its share already"
    for rank, message in asked:
        if rank == 4:
            hall.answer(rank, message)
    again = hall.asked()
    lost = [message.group_id for rank, message in asked if rank == 3]
    assert [message.group_id for _, message in again] == lost and {rank for rank, _ in again} == {4}


def test_nothing_is_asked_when_the_time_of_the_job_is_nearly_over():
    """A held-out answer that is cut off would be lost."""
    hall = Hall(share=1.0)
    hall.desk.walltime.closed = True
    hall.examiner.new_version(2)
    assert hall.examiner.current is not None and hall.asked() == []
    hall.desk.walltime.closed = False
    hall.examiner.admit()
    hall.answer_all()
    assert hall.done == [2]
