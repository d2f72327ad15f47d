"""Whole runs on real ranks with simulated compute: the protocol, and the time that its overlap saves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from areal_hpc.config import SimulationConfig
from areal_hpc.runlog import RunLog
from areal_hpc.seeds import sample_seed
from areal_hpc.simulation import prepare
from areal_hpc.simulation.engine import response_length
from tests.runs import Finished, run

pytestmark = pytest.mark.mpi

BATCH, GROUP, ETA, CAP = 4, 4, 4, 1000
STEPS = 8
SPEEDUP = 5.0
DECODE_S, TRAIN_TOKENS_PER_S = 0.01, 2500.0
SIMULATION = {
    "speedup": SPEEDUP,
    "gpus_per_rank": 1,
    "response_median": 100.0,
    "response_sigma": 1.0,
    "decode_s": DECODE_S,
    "decode_sequence_s": 0.0,
    "decode_context_s": 0.0,
    "prefill_tokens_per_s": 1.0e6,
    "load_s": 0.1,
    "model_bytes": 1000,
    "broadcast_bytes_per_s": 10000.0,
    "publish_s": 0.1,
    "train_tokens_per_s": TRAIN_TOKENS_PER_S,
    "train_step_s": 0.0,
    "reward_s": 0.1,
}


def simulated(directory: Path, environment: dict[str, str] | None = None, **sections) -> Finished:
    """Run in a world where importing torch or transformers fails, so no rank can have done it."""
    prepare(directory / "data")
    (directory / "forbidden").mkdir()
    for name in ("torch", "transformers"):
        (directory / "forbidden" / f"{name}.py").write_text("raise ImportError('not in a simulated run')")
    config = {
        "run_dir": str(directory / "run"),
        "steps": STEPS,
        "model": {"path": "none"},
        "data": {"train": str(directory / "data" / "train.jsonl")},
        "reward": {"function": "areal_hpc.simulation:reward"},
        "rollout": {"engine": "simulated", "ranks": 2, "slots": 8, "max_new_tokens": CAP},
        "trainer": {"engine": "simulated", "batch_size": BATCH, "group_size": GROUP, "micro_batch_tokens": 4096},
        "staleness": {"max_staleness": ETA},
        "simulation": SIMULATION,
        "deadlines": {"exit_s": 20.0, "startup_s": 120.0},
    }
    for name, value in sections.items():
        config[name] = config[name] | value if isinstance(value, dict) and name in config else value
    finished = run(config, environment={"PYTHONPATH": str(directory / "forbidden")} | (environment or {}))
    finished.assert_done()
    return finished


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory) -> Finished:
    return simulated(tmp_path_factory.mktemp("async"))


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory) -> Finished:
    return simulated(tmp_path_factory.mktemp("sync"), mode="sync")


def consumed(log: RunLog):
    return log.trajectories.query("fate == 'consumed'")


def lockstep_s(log: RunLog) -> float:
    """Real seconds of all steps but the first, had each waited for its longest answer and then trained on it."""
    steps = consumed(log).groupby("consumed_step")
    longest = steps.num_response.max() * DECODE_S
    training = (steps.num_response.sum() + steps.num_prompt.sum()) / TRAIN_TOKENS_PER_S
    return float((longest + training).loc[2:].sum()) / SPEEDUP


def measured_s(log: RunLog) -> float:
    done = log.steps.sort_values("step").time_s.to_numpy()
    return float(done[-1] - done[0])


def share_generated_while_training(log: RunLog) -> float:
    """Share of the training time in which a rollout rank generated."""
    activity = log.activity
    training = activity.query("kind == 'train_update'")[["start_s", "stop_s"]].to_numpy()
    shares = []
    for _, intervals in activity.query("kind == 'generate'").groupby("rank"):
        generating = intervals[["start_s", "stop_s"]].to_numpy()
        common = np.minimum(training[:, None, 1], generating[None, :, 1]) - np.maximum(
            training[:, None, 0], generating[None, :, 0]
        )
        shares.append(np.clip(common, 0, None).sum() / (training[:, 1] - training[:, 0]).sum())
    return float(np.mean(shares))


def test_both_end_well_and_say_what_they_are(asynchronous, synchronous):
    for finished in (asynchronous, synchronous):
        assert finished.summary["versions"] == STEPS
        assert finished.summary["why_ended"].startswith("simulated: ")
        assert "compute  simulated at speedup 5" in finished.stdout
        assert "BAD TERMINATION" not in finished.stdout + finished.stderr
        assert (finished.run_dir / "model" / "SIMULATED").read_text().endswith("no model.\n")
        log = finished.log()
        assert log.attributes["compute"].startswith("simulated at speedup 5")
        assert sorted(log.weight_updates.version) == list(range(STEPS + 1))
        loads = log.weight_loads.groupby("rank").version.apply(sorted).to_dict()
        assert loads == {rank: list(range(STEPS + 1)) for rank in (2, 3)}
        assert (consumed(log).groupby("consumed_step").size() == BATCH * GROUP).all()
        assert consumed(log).consumed_step.nunique() == STEPS and not log.steps.skipped.any()


def test_lengths_in_the_log_are_those_of_the_seeds(asynchronous):
    trajectories = asynchronous.log().trajectories
    values = SimulationConfig(**SIMULATION)
    for row in trajectories.itertuples():
        length, ends_itself = response_length(values, sample_seed(0, "train", row.group_id, row.sample), CAP)
        assert (row.num_response, row.finish) == (length, "eos" if ends_itself else "length")
    assert trajectories.num_prompt.between(40, 400).all()
    # nobody is faster than the model says, and all are late by less than their interruptions
    took_s = (trajectories.finish_s - trajectories.start_s) * SPEEDUP
    assert (took_s >= trajectories.num_response * DECODE_S - 1e-6).all()


def test_the_staleness_bound_holds(asynchronous, synchronous):
    """Replay: group N (from 0) is admitted only when N // B <= finished steps + eta.

    The controller admits on a finished step first and writes its time down afterwards, some milliseconds later.
    """
    log = asynchronous.log()
    for row in log.trajectories.drop_duplicates("group_id").itertuples():
        assert row.group_id // BATCH <= int((log.steps.time_s <= row.admit_s + 0.1).sum()) + ETA
    assert consumed(log).head_lag.max() >= 1
    assert (consumed(synchronous.log()).head_lag == 0).all()


def test_new_versions_come_in_the_middle_of_answers(asynchronous, synchronous):
    """A step takes about 0.5 s and one answer in three takes longer, so of the 8 updates most meet running ones."""
    log = asynchronous.log()
    assert log.weight_loads.query("version > 0").interrupted.sum() >= STEPS
    mixed = consumed(log).query("first_version < last_version")
    assert len(mixed) >= STEPS and (mixed.interruptions >= 1).all()
    assert (synchronous.log().weight_loads.interrupted == 0).all()
    assert (consumed(synchronous.log()).interruptions == 0).all()


def test_generation_goes_on_during_training_unless_it_is_synchronous(asynchronous, synchronous):
    assert share_generated_while_training(asynchronous.log()) > 0.6
    assert share_generated_while_training(synchronous.log()) < 0.1


def test_overlap_saves_time(asynchronous, synchronous):
    """A synchronous step cannot be faster than its longest answer and its training; an asynchronous one can.

    Lengths are log-normal with sigma 1: of 16 answers the longest has about exp(1.77) = 5.9 medians, 5.9 s, the mean
    exp(0.5) = 1.6 s, so 16 slots deliver a batch in 1.6 s while the trainer takes (2600 + 3500) / 2500 = 2.4 s. In
    lockstep that is 5.9 + 2.4 s, overlapped 2.4 s: 3.4 times as fast. Half of that gain is asked for.
    """
    assert measured_s(synchronous.log()) >= lockstep_s(synchronous.log())
    assert measured_s(asynchronous.log()) < lockstep_s(asynchronous.log()) / 1.7


def test_overlap_is_one_version_late_in_strict_order_and_interrupts_nobody(tmp_path):
    finished = simulated(tmp_path, mode="overlap", simulation={"speedup": 20.0})
    log, rows = finished.log(), consumed(finished.log())
    assert rows.head_lag.max() == finished.summary["head_staleness_max"] == 1
    groups = rows.groupby("group_id").agg({"consumed_step": "max", "finish_s": "max"})
    assert groups.index.tolist() == list(range(STEPS * BATCH)) and groups.consumed_step.is_monotonic_increasing
    assert not groups.finish_s.is_monotonic_increasing, "groups that end in order prove nothing"
    assert set(log.weight_loads.query("version == 8")["rank"]) == {2, 3}
    assert (log.weight_loads.interrupted == 0).all() and (rows.first_version == rows.last_version).all()


def test_two_trainers_agree_about_a_bad_batch_and_evaluate(tmp_path):
    """Rank 2 finds a log-prob that is not finite in its second batch: the step is skipped by rank 1 as well."""
    heldout = str(tmp_path / "data" / "heldout.jsonl")
    finished = simulated(
        tmp_path,
        mode="overlap",
        steps=3,
        trainer={"ranks": 2},
        data={"heldout": heldout},
        simulation={"speedup": 100.0, "success": 1.0},
        environment={"AREAL_HPC_FAULT": "nan@trainer.batch#2*2"},
    )
    log = finished.log()
    assert log.steps.sort_values("step").skipped.tolist() == [False, True, False, False]
    assert set(consumed(log).trainer_rank) == {1, 2}
    assert finished.summary["versions"] == 3
    assert finished.summary["pass1_before"] == finished.summary["pass1_after"] == 1.0
    assert len(list(finished.run_dir.glob("attempt_1/skipped_step_*.npz"))) == 2


def test_reward_ranks_score_as_the_rollout_ranks_would(tmp_path):
    finished = simulated(tmp_path, steps=3, reward={"ranks": 2, "sandbox": "rlimits"})
    log = finished.log()
    assert log.ranks.role.tolist() == ["controller", "trainer", "rollout", "rollout", "reward", "reward"]
    for row in log.trajectories.itertuples():
        right = sample_seed(0, "reward", row.group_id, row.sample) < SimulationConfig().success * 2**63
        assert row.reward == (5.0 if right else -5.0)
    busy = log.activity[log.activity.kind == "score"]
    assert set(busy["rank"]) == {4, 5}, "both take their part"
    assert "sandbox" in set(log.events.kind), "less isolation is never silent"
