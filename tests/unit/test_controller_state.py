"""The controller's decisions: worked examples by hand, then random schedules with every invariant checked."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.controller_state import (
    Admit,
    Announce,
    BatchTrained,
    Compose,
    ControllerState,
    CreditsGranted,
    EmptyBatch,
    Finish,
    GroupDone,
    GroupRefusedByRank,
    Leave,
    RankLost,
    Readmit,
    Recall,
    Restore,
    Rules,
    SamplesHere,
    Start,
)


def machine(**changes) -> ControllerState:
    settings_ = {"batch_size": 2, "group_size": 4, "steps": 3, "max_staleness": 0} | changes
    return ControllerState(Rules(**settings_), validate=True)


def started(places: dict[int, int], **changes) -> tuple[ControllerState, list]:
    state = machine(**changes)
    for rank, samples in places.items():
        state.handle(CreditsGranted(rank, samples))
    return state, state.handle(Start())


def admitted(instructions: list) -> list[int]:
    return [i.group_id for i in instructions if isinstance(i, Admit)]


def done(state: ControllerState, group_id: int, correct: int = 2) -> list:
    return state.handle(GroupDone(group_id, usable=4, correct=correct))


# ------------------------------------------------------------------------------------------------- by hand
def test_nothing_is_admitted_before_the_start():
    state = machine()
    assert state.handle(CreditsGranted(5, 100)) == []


def test_eta_0_is_synchronous():
    state, out = started({5: 100})
    assert out == [Admit(0, 5, 0), Admit(1, 5, 0)]
    assert done(state, 1) == []
    assert done(state, 0) == [Compose(1, (0, 1))]
    assert state.handle(BatchTrained(skipped=False)) == [Announce(1), Admit(2, 5, 1), Admit(3, 5, 1)]


def test_when_the_time_is_nearly_over_only_new_prompts_wait():
    """What an earlier attempt began is taken up, what is finished is trained."""
    saved = {"step": 1, "version": 1, "next_id": 4, "prompts_used": 4, "left": {}, "group_ids": [2, 3]}
    state = ControllerState.resume(machine(max_staleness=1).rules, saved, validate=True)
    state.closed = True
    state.handle(CreditsGranted(5, 100))
    assert state.handle(Start()) == [Restore(2, 5), Restore(3, 5)]
    done(state, 2)
    assert done(state, 3) == [Compose(2, (2, 3))]
    assert state.handle(BatchTrained(skipped=False)) == [Announce(2)]
    state.closed = False
    assert admitted(state.handle(CreditsGranted(5, 0))) == [4, 5]


@pytest.mark.parametrize("eta, expected", [(0, 2), (1, 4), (4, 10)])
def test_outstanding_is_at_most_eta_plus_1_batches(eta, expected):
    _, out = started({5: 1000}, max_staleness=eta, steps=100)
    assert len(admitted(out)) == expected


def test_without_a_limit_the_last_step_is_the_limit():
    _, out = started({5: 1000}, max_staleness=math.inf, steps=7)
    assert len(admitted(out)) == 14


def test_places_on_the_ranks_are_a_limit_of_their_own():
    state, out = started({5: 4, 6: 8}, max_staleness=4)
    assert [(i.group_id, i.rank) for i in out] == [(0, 6), (1, 5), (2, 6)]
    assert state.handle(CreditsGranted(5, 3)) == []
    assert state.handle(CreditsGranted(5, 1)) == [Admit(3, 5, 0)]


def test_the_cap_on_running_groups_does_not_depend_on_eta():
    state, out = started({5: 1000}, max_staleness=math.inf, max_running_groups=1, batch_size=2)
    assert admitted(out) == [0]
    assert admitted(done(state, 0)) == [1]


def test_a_cap_below_the_batch_size_still_fills_a_batch_at_eta_0():
    state, _ = started({5: 1000}, max_running_groups=1)
    done(state, 0)
    assert done(state, 1) == [Compose(1, (0, 1))]


def test_a_filtered_group_leaves_the_count_and_is_replaced_by_a_new_id():
    state, _ = started({5: 1000}, min_success=0.05, max_success=0.95)
    assert done(state, 0, correct=4) == [Leave(0, 5, "filtered"), Admit(2, 5, 0)]
    assert done(state, 1, correct=0) == [Leave(1, 5, "filtered"), Admit(3, 5, 0)]
    done(state, 2)
    assert done(state, 3) == [Compose(1, (2, 3))]


def test_a_refused_prompt_is_replaced():
    state, _ = started({5: 1000})
    assert state.handle(GroupRefusedByRank(0)) == [Leave(0, 5, "refused"), Admit(2, 5, 0)]


def test_a_group_with_too_few_scored_samples_leaves():
    state, _ = started({5: 1000}, min_usable=2)
    assert state.handle(GroupDone(0, usable=1, correct=1))[0] == Leave(0, 5, "unscored")


def test_a_skipped_batch_leaves_the_count_so_eta_0_goes_on():
    state, _ = started({5: 1000})
    done(state, 0)
    done(state, 1)
    assert state.handle(BatchTrained(skipped=True)) == [
        Leave(0, 5, "skipped"),
        Leave(1, 5, "skipped"),
        Admit(2, 5, 0),
        Admit(3, 5, 0),
    ]
    assert state.version == 0


def test_oldest_first_takes_what_is_ready_by_admission_order():
    state, _ = started({5: 1000}, max_staleness=1)
    done(state, 3)
    assert done(state, 1) == [Compose(1, (1, 3))]


def test_strict_order_waits_for_the_straggler():
    state, _ = started({5: 1000}, max_staleness=1, order="strict")
    done(state, 3)
    done(state, 1)
    assert done(state, 2) == []
    assert done(state, 0) == [Compose(1, (0, 1)), Compose(2, (2, 3))]


def test_strict_order_goes_on_when_the_straggler_is_filtered():
    state, _ = started({5: 1000}, max_staleness=1, order="strict", min_success=0.1)
    done(state, 1)
    done(state, 2)
    assert Compose(1, (1, 2)) in done(state, 0, correct=0)


def test_one_batch_travels_while_one_is_trained_and_no_more():
    state, _ = started({5: 1000}, max_staleness=4)
    composed = [i for g in range(6) for i in done(state, g) if isinstance(i, Compose)]
    assert composed == [Compose(1, (0, 1)), Compose(2, (2, 3))]
    assert Compose(3, (4, 5)) in state.handle(BatchTrained(skipped=False))


def test_the_end_by_steps():
    state, _ = started({5: 1000}, steps=1)
    done(state, 0)
    done(state, 1)
    assert state.handle(BatchTrained(skipped=False)) == [Announce(1), Finish("last step reached")]
    assert state.handle(CreditsGranted(5, 8)) == []


def test_the_end_by_data():
    state, out = started({5: 1000}, max_staleness=4, num_prompts=3)
    assert admitted(out) == [0, 1, 2]
    done(state, 0)
    done(state, 1)
    assert done(state, 2) == []
    assert state.handle(BatchTrained(skipped=False)) == [Announce(1), Finish("data set exhausted")]
    assert state.outstanding() == {2: 5}


def test_resume_counts_what_was_consumed():
    rules = Rules(batch_size=2, group_size=4, steps=100, max_staleness=1)
    saved = {"step": 9, "version": 7, "next_id": 30, "prompts_used": 30, "left": {"skipped": 4}, "group_ids": []}
    state = ControllerState.resume(rules, saved, validate=True)
    state.handle(CreditsGranted(5, 1000))
    out = state.handle(Start())
    assert out == [Admit(30, 5, 7), Admit(31, 5, 7), Admit(32, 5, 7), Admit(33, 5, 7)]
    done(state, 30)
    assert done(state, 31) == [Compose(10, (30, 31))]


def test_resume_goes_on_with_every_group_before_it_admits_another():
    state, _ = started({5: 1000}, max_staleness=1)
    done(state, 0)
    assert done(state, 1) == [Compose(1, (0, 1))]
    done(state, 2)
    assert state.snapshot() == {  # the batch in training is not trained yet
        "step": 0, "version": 0, "next_id": 4, "prompts_used": 4, "left": {}, "group_ids": [0, 1, 2, 3],
        "rejected": [], "empty_batches": 0,
    }  # fmt: skip
    again = ControllerState.resume(state.rules, state.snapshot(), validate=True)
    assert again.handle(CreditsGranted(7, 8)) == []
    assert again.handle(Start()) == [Restore(0, 7), Restore(1, 7)]
    done(again, 1)
    assert again.handle(CreditsGranted(8, 100)) == [Restore(2, 8), Restore(3, 8)]
    assert done(again, 0) == [Compose(1, (0, 1))]
    assert again.handle(BatchTrained(skipped=False)) == [Announce(1), Admit(4, 8, 1), Admit(5, 8, 1)]


def test_waiting_for_names_what_blocks():
    state, _ = started({5: 1000}, min_success=0.5)
    done(state, 0, correct=0)
    assert state.waiting_for() == "version 0: 0 of 2 groups ready, 2 running, 0 batches with the trainers, 1 filtered"


# ------------------------------------------------------------------------------------ smaller batches, no refill
def test_without_refill_a_filtered_group_keeps_its_place_and_the_batch_is_smaller():
    state, _ = started({5: 1000}, refill=False, min_success=0.05, max_success=0.95)
    assert done(state, 0, correct=4) == [Leave(0, 5, "filtered")]  # and no Admit
    assert state.outstanding() == {1: 5} and state.counted == 2
    assert done(state, 1) == [Compose(1, (1,))]
    assert state.handle(BatchTrained(skipped=False)) == [Announce(1), Admit(2, 5, 1), Admit(3, 5, 1)]
    assert state.counted == 4 and state.left == {"filtered": 1} and not state.rejected


def test_without_refill_places_are_taken_in_admission_order():
    state, _ = started({5: 1000}, refill=False, max_staleness=1, min_success=0.1, batch_size=3)
    done(state, 5)
    done(state, 4, correct=0)
    assert done(state, 1) == [Compose(1, (1, 5))]  # 1, 4 and 5 are the first three
    assert done(state, 0, correct=0)[0] == Leave(0, 5, "filtered")
    done(state, 2)
    assert done(state, 3) == [Compose(2, (2, 3))]


def test_a_batch_of_which_nothing_is_left_is_no_step_and_eta_0_goes_on():
    state, _ = started({5: 1000}, refill=False, min_success=0.1)
    done(state, 0, correct=0)
    assert done(state, 1, correct=0) == [Leave(1, 5, "filtered"), EmptyBatch(2), Admit(2, 5, 0), Admit(3, 5, 0)]
    assert (state.version, state.composed, state.counted, state.empty_batches) == (0, 0, 2, 1)
    done(state, 2)
    assert done(state, 3) == [Compose(1, (2, 3))]


def test_a_skipped_batch_gives_up_the_places_of_its_filtered_groups_too():
    state, _ = started({5: 1000}, refill=False, min_success=0.1)
    done(state, 0, correct=0)
    done(state, 1)
    out = state.handle(BatchTrained(skipped=True))
    assert out == [Leave(1, 5, "skipped"), Admit(2, 5, 0), Admit(3, 5, 0)]
    assert state.counted == 2 and state.left == {"filtered": 1, "skipped": 1}


def test_without_refill_the_places_of_filtered_groups_survive_an_attempt():
    state, _ = started({5: 1000}, refill=False, max_staleness=1, min_success=0.1)
    done(state, 0, correct=0)
    assert done(state, 1)[0] == Compose(1, (1,))
    done(state, 2, correct=0)
    saved = json.loads(json.dumps(state.snapshot()))
    assert (saved["group_ids"], saved["rejected"]) == ([1, 3], [0, 2])
    again = ControllerState.resume(state.rules, saved, validate=True)
    assert again.counted == 4
    again.handle(CreditsGranted(7, 1000))
    assert again.handle(Start()) == [EmptyBatch(2), Restore(1, 7), Restore(3, 7), Admit(4, 7, 0), Admit(5, 7, 0)]
    done(again, 1)
    assert done(again, 3) == [Compose(1, (1, 3))]


def test_waiting_for_counts_the_empty_places():
    state, _ = started({5: 1000}, refill=False, min_success=0.5)
    done(state, 0, correct=0)
    assert state.waiting_for().startswith("version 0: 1 of 2 groups ready (1 of them filtered), 1 running")


# --------------------------------------------------------------------------------------------------- lost ranks
def test_running_and_ready_groups_of_a_lost_rank_are_generated_anew_under_their_ids():
    state, out = started({5: 8, 6: 8}, max_staleness=1)
    assert [(i.group_id, i.rank) for i in out] == [(0, 5), (1, 6), (2, 5), (3, 6)]
    done(state, 3)
    assert state.handle(RankLost(6)) == []  # 1 was running, 3 ready; rank 5 has no room
    assert (state.num_lost, state.anew, state.counted) == (2, {1, 3}, 4)
    done(state, 0)
    assert state.handle(CreditsGranted(5, 4)) == [Readmit(1, 5, 0)]
    assert state.handle(CreditsGranted(5, 4)) == [Readmit(3, 5, 0)]
    assert state.handle(CreditsGranted(5, 100)) == []  # the count stands where it stood
    done(state, 2)
    assert state.taken == [{0: 5, 2: 5}]


def test_a_batch_whose_samples_are_lost_is_recalled_and_composed_of_what_is_there():
    state, _ = started({5: 8, 6: 8}, max_staleness=1)
    assert done(state, 1) == [] and done(state, 0) == [Compose(1, (0, 1))]
    assert done(state, 2) == []
    assert state.handle(RankLost(6)) == [Recall(1), Compose(1, (0, 2))]
    assert list(state.backlog) == [1, 3]
    assert state.snapshot()["group_ids"] == [0, 1, 2, 3] and state.snapshot()["step"] == 0


def test_a_batch_that_is_with_the_trainers_goes_on():
    state, _ = started({5: 8, 6: 8}, max_staleness=1)
    done(state, 1)
    done(state, 0)
    assert state.handle(SamplesHere(1)) == []
    assert state.handle(RankLost(6)) == [] and list(state.backlog) == [3]
    assert state.handle(BatchTrained(skipped=False)) == [Announce(1)]
    assert state.handle(CreditsGranted(5, 8)) == [Readmit(3, 5, 1), Admit(4, 5, 1)]


def test_batches_after_a_recalled_one_come_back_too_because_steps_are_trained_in_order():
    state, _ = started({5: 8, 6: 4, 7: 4}, max_staleness=1)
    owner = dict(state.running)
    victim = owner[0]
    for group_id in (0, 1):
        done(state, group_id)
    for group_id in (2, 3):
        done(state, group_id)
    state.handle(SamplesHere(2))
    assert [len(state.taken), state.composed] == [2, 2]
    out = state.handle(RankLost(victim))
    assert out[0] == Recall(1) and 2 not in state.complete
    alive = [g for g, rank in owner.items() if rank != victim]
    assert out[1:] == [Compose(1, tuple(alive[:2]))]


def test_groups_of_an_earlier_attempt_are_restored_and_lost_ones_generated_anew():
    rules = Rules(batch_size=2, group_size=4, steps=100, max_staleness=1)
    saved = {"step": 7, "version": 7, "next_id": 30, "prompts_used": 30, "left": {}, "group_ids": [27, 28, 29]}
    state = ControllerState.resume(rules, saved, validate=True)
    state.handle(CreditsGranted(5, 4))
    assert state.handle(Start()) == [Restore(27, 5)]
    state.handle(RankLost(5))
    assert state.handle(CreditsGranted(6, 12)) == [Readmit(27, 6, 7), Restore(28, 6), Restore(29, 6)]


# --------------------------------------------------------------------------------------------- random schedules
@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    batch_size=st.integers(1, 5),
    eta=st.sampled_from([0, 1, 4, math.inf]),
    order=st.sampled_from(["admission", "strict"]),
    ranks=st.integers(1, 4),
    steps=st.integers(1, 6),
    cap=st.sampled_from([None, 1, 3]),
    refill=st.booleans(),
)
def test_any_schedule_ends_within_the_bound(data, batch_size, eta, order, ranks, steps, cap, refill):
    """Random completion order, rejections, skips, ends of attempts and lost ranks: no deadlock, no group trained twice
    or lost, and the staleness bound holds.

    A group's first token comes from a version of at least its min_version, so lag <= consumption version - min_version.
    """
    rules = Rules(batch_size, 2, steps, eta, order, cap, 0.1, 0.9, refill)
    state = ControllerState(rules, validate=True)
    floor: dict[int, int] = {}
    training: list[Compose] = []
    consumed: list[int] = []
    admissions = skips = attempts = 0

    def take(instructions):
        nonlocal admissions
        for instruction in instructions:
            if isinstance(instruction, Admit):
                admissions += 1
                floor[instruction.group_id] = instruction.min_version
            elif isinstance(instruction, Readmit):
                assert floor[instruction.group_id] <= instruction.min_version  # fresher, and the same prompt
            elif isinstance(instruction, Recall):
                del training[instruction.step - 1 - state.trained_step :]
                assert len(training) <= len(state.taken)
            elif isinstance(instruction, Compose):
                training.append(instruction)

    def begin():
        for rank in range(data.draw(st.integers(1, 3)) if attempts else ranks):
            take(state.handle(CreditsGranted(rank, data.draw(st.integers(2, 9)))))
        take(state.handle(Start()))

    begin()
    while not state.finished:
        if attempts < 3 and data.draw(st.integers(0, 15)) == 0:
            attempts += 1
            unseen, held = {*state.outstanding(), *state.backlog}, state.rejected
            state = ControllerState.resume(rules, json.loads(json.dumps(state.snapshot())), validate=True)
            training.clear()
            assert set(state.backlog) == unseen and state.rejected == held
            begin()
            continue
        alive = sorted(state.credits.free)
        if len(alive) > 1 and data.draw(st.integers(0, 15)) == 0:
            before = {*state.outstanding(), *state.backlog}
            take(state.handle(RankLost(data.draw(st.sampled_from(alive)))))
            assert before <= {*state.outstanding(), *state.backlog}
            continue
        incomplete = [b.step for b in training if b.step not in state.complete]
        if incomplete and data.draw(st.booleans()):
            take(state.handle(SamplesHere(data.draw(st.sampled_from(incomplete)))))
            continue
        choices = sorted(state.running) + (["train"] if training and training[0].step in state.complete else [])
        if not choices and incomplete:
            take(state.handle(SamplesHere(incomplete[0])))
            continue
        assert choices, f"deadlock: {state.waiting_for()}"
        choice = data.draw(st.sampled_from(choices))
        if choice == "train":
            batch = training.pop(0)
            skipped = skips < 2 and data.draw(st.booleans())
            skips += skipped
            if not skipped:
                consumed += batch.group_ids
                if order == "strict":
                    assert max(state.version - floor[g] for g in batch.group_ids) <= eta
            take(state.handle(BatchTrained(skipped)))
        else:
            correct = data.draw(st.sampled_from([1, 1, 1, 0])) if admissions < 60 else 1
            rank = state.running[choice]
            take(state.handle(GroupDone(choice, 2, correct)))
            take(state.handle(CreditsGranted(rank, 2)))
    assert state.version == steps
    assert len(consumed) == len(set(consumed)) <= steps * batch_size
    assert len(consumed) == steps * batch_size or not refill
    if order == "strict":
        assert consumed == sorted(consumed)
