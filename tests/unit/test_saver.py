"""The controller's checkpoints: who is told what and when, what makes one complete, and what if one is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_hpc.checkpoint import Checkpoints, read_json, write_arrays
from areal_hpc.config import Config
from areal_hpc.exits import Exit, RunError
from areal_hpc.group_files import read_groups
from areal_hpc.messages import AdmitGroup
from areal_hpc.saver import Saver, groups_file
from areal_hpc.saving_messages import GroupsSaved, SaveFailed, SaveGroups, SaveTrainer, TrainerSaved

STATE = {"version": 3, "groups": [(7, "p7", "groups_0002.safetensors")], "waiting": []}
FACTS = {"step": 3, "version": 3, "config": {}}


class World:
    rank, attempt = 0, 2

    def __init__(self) -> None:
        self.sent: list[tuple[int, object]] = []

    def post(self, rank: int, message: object) -> None:
        self.sent.append((rank, message))


class Bench:
    """A saver with one trainer (rank 1), two rollouts (2, 3), a clock of its own and a real directory."""

    def __init__(self, root: Path, **settings) -> None:
        data = {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"function": "tests.tiny:reward"}}
        config = data | {"rollout": {"ranks": 2}, "checkpoint": {"every_s": 10.0}, "deadlines": {"checkpoint_s": 60.0}}
        self.clock, self.events, self.world, self.ours = 100.0, [], World(), True
        self.checkpoints = Checkpoints(root)
        self.saver = Saver(
            Config.model_validate(config),
            self.world,  # type: ignore[arg-type]
            self.checkpoints,
            lambda kind, text: self.events.append((kind, text)),
            is_ours=lambda: self.ours,
            now=lambda: self.clock,
        )

    def trainer_writes(self, step: int) -> None:
        record = write_arrays(self.saver.pending.path / "trainer.safetensors", {})
        message = TrainerSaved(step, record.name, record.num_bytes, record.sha256, 0.1, 0.2)
        self.saver.part(1, message)

    def rollouts_write(self, step: int) -> None:
        for rank in (2, 3):
            record = write_arrays(self.saver.pending.path / groups_file(rank), {})
            file = (record.name, record.num_bytes, record.sha256)
            self.saver.part(rank, GroupsSaved(step, *file, 4, 50, 0.01, 0.5))


@pytest.fixture
def bench(tmp_path) -> Bench:
    return Bench(tmp_path / "checkpoints")


def test_a_checkpoint_is_due_after_its_time_and_complete_with_all_parts(bench):
    assert bench.saver.order(1) == ""
    bench.clock += 10
    path = bench.saver.order(3)
    assert path == str(bench.saver.pending.path) and bench.saver.order(4) == ""  # one at a time
    bench.saver.cut(2, STATE, FACTS)
    assert bench.world.sent == []  # the step before is not the one
    bench.trainer_writes(3)
    bench.saver.cut(3, STATE, FACTS)
    assert [(rank, type(m), m.path) for rank, m in bench.world.sent] == [
        (rank, SaveGroups, f"{path}/{groups_file(rank)}") for rank in (2, 3)
    ]
    assert bench.checkpoints.newest() is None
    bench.rollouts_write(3)
    found = bench.checkpoints.newest()
    assert found.step == 3 and found.attempt == 2 and found.facts == FACTS
    assert read_json(found.path / "controller.json") == {"version": 3, "groups": [[7, "p7", "groups_0002.safetensors"]]}
    assert bench.saver.saved_step == 3 and bench.events[-1][0] == "checkpoint"
    assert bench.saver.part_s == pytest.approx(0.6)  # of the rollout ranks' write and the trainer's copy
    assert bench.saver.order(4) == ""
    bench.clock += 10
    assert bench.saver.order(5)


def test_the_parts_may_come_in_any_order(bench):
    bench.clock += 10
    bench.saver.order(3)
    bench.saver.cut(3, STATE, FACTS)
    bench.rollouts_write(3)
    assert bench.checkpoints.newest() is None
    bench.trainer_writes(3)
    assert bench.checkpoints.newest().step == 3


def test_at_the_end_the_trainer_says_which_step_it_has(bench):
    """It may have finished the step that the controller thought was under way."""
    bench.saver.order_now(3)
    ((rank, message),) = bench.world.sent
    assert rank == 1 and isinstance(message, SaveTrainer) and bench.saver.awaits_cut is None
    bench.trainer_writes(4)
    assert bench.saver.awaits_cut == 4
    bench.saver.cut(4, STATE, FACTS | {"step": 4})
    assert bench.saver.awaits_cut is None
    bench.rollouts_write(4)
    assert bench.checkpoints.newest().step == 4


def test_the_end_takes_the_checkpoint_that_is_of_this_moment_and_drops_that_of_a_later_step(bench):
    bench.clock += 10
    bench.saver.order(3)
    bench.saver.cut(3, STATE, FACTS)
    first = bench.saver.pending
    bench.saver.order_now(3)
    assert bench.saver.pending is first
    bench.trainer_writes(3)
    bench.rollouts_write(3)
    bench.clock += 10
    bench.saver.order(4)  # with the batch of step 4, which will not be finished
    bench.saver.order_now(3)
    assert bench.saver.num_failed == 0 and bench.saver.pending.path.is_dir()
    assert [type(message) for _, message in bench.world.sent[-1:]] == [SaveTrainer]


def test_a_part_that_fails_or_is_late_leaves_the_checkpoint_before(bench):
    bench.clock += 10
    bench.saver.order(3)
    bench.trainer_writes(3)
    bench.saver.cut(3, STATE, FACTS)
    bench.rollouts_write(3)
    bench.clock += 10
    path = bench.saver.order(5)
    bench.saver.part_failed(2, SaveFailed(5, "no space left"))
    assert bench.saver.pending is None and not Path(path).exists()
    assert bench.events[-1] == ("checkpoint_failed", "step 5: rank 2: no space left; the one before stands")
    assert bench.checkpoints.newest().step == 3
    assert bench.saver.order(6) == ""
    bench.clock += 10
    bench.saver.order(7)
    bench.clock += 61
    with pytest.raises(RunError, match=r"2 checkpoints in a row.*ranks \[1, 2, 3\] wrote nothing in time") as caught:
        bench.saver.poll()
    assert caught.value.code == Exit.DISK


def test_what_an_earlier_attempt_left_unfinished_is_removed_and_told(bench):
    (bench.checkpoints.root / ".step_2.attempt_1").mkdir(parents=True)
    bench.saver.order_now(3)
    assert bench.events == [("checkpoint_leftovers", "1 unfinished checkpoints of earlier attempts removed")]


def test_parts_of_another_checkpoint_are_ignored(bench):
    bench.clock += 10
    bench.saver.order(3)
    bench.saver.part(2, GroupsSaved(2, "x", 1, "0", 0, 0, 0.0, 0.0))
    assert 2 in bench.saver.pending.waiting
    bench.saver.part_failed(2, SaveFailed(2, "old"))
    assert bench.saver.pending is not None


def test_an_attempt_that_was_replaced_does_not_publish(bench):
    bench.clock += 10
    bench.saver.order(3)
    bench.trainer_writes(3)
    bench.saver.cut(3, STATE, FACTS)
    bench.ours = False
    with pytest.raises(RunError, match="another attempt has taken over"):
        bench.rollouts_write(3)
    assert bench.checkpoints.newest() is None


# --------------------------------------------------------------------------------------------------- lost ranks
def header(group_id: int) -> AdmitGroup:
    return AdmitGroup(group_id, f"p{group_id}", "1+1=", {"answer": "2"}, 4, 3)


def test_groups_that_are_lost_are_in_the_checkpoint_with_what_they_are_generated_from(bench):
    bench.clock += 10
    path = bench.saver.order(3)
    bench.saver.lose(3)
    bench.trainer_writes(3)
    bench.saver.cut(3, STATE | {"anew": [header(8), header(9)]}, FACTS)
    assert [rank for rank, _ in bench.world.sent] == [2]  # nobody waits for rank 3
    record = write_arrays(Path(path) / groups_file(2), {})
    bench.saver.part(2, GroupsSaved(3, record.name, record.num_bytes, record.sha256, 1, 0, 0.0, 0.0))
    found = bench.checkpoints.newest()
    groups = read_json(found.path / "controller.json")["groups"]
    assert groups == [[7, "p7", groups_file(2)], [8, "p8", groups_file(0)], [9, "p9", groups_file(0)]]
    restored = read_groups(found.path / groups_file(0), [8, 9])
    assert [group.header for group in restored] == [header(8), header(9)]
    assert all(group.state(sample) == 0 for group in restored for sample in range(4))  # not begun


def test_a_checkpoint_that_waits_for_a_lost_rank_is_none_and_the_next_one_is_due_at_once(bench):
    bench.clock += 10
    path = bench.saver.order(3)
    bench.trainer_writes(3)
    bench.saver.cut(3, STATE, FACTS)
    bench.saver.lose(2)
    assert bench.saver.pending is None and not Path(path).exists() and bench.saver.num_failed == 0
    assert bench.events[-1] == ("checkpoint_given_up", "step 3: rank 2 is lost, and its groups with it")
    assert bench.saver.order(4)


def test_a_checkpoint_that_has_the_part_of_a_lost_rank_is_whole(bench):
    bench.clock += 10
    bench.saver.order(3)
    bench.saver.cut(3, STATE, FACTS)
    bench.rollouts_write(3)
    bench.saver.lose(2)
    bench.trainer_writes(3)
    assert bench.checkpoints.newest().step == 3


def test_a_recalled_step_keeps_its_checkpoint(bench):
    bench.clock += 10
    path = bench.saver.order(3)
    assert bench.saver.order(3) == path and bench.saver.order(4) == ""
