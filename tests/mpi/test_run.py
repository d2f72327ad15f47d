"""Whole runs on real ranks: learning equals a plain loop, log-probs are those of their versions, the bound holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.reference_loop import reference_losses
from tests.runs import SYNCHRONOUS, processes_of, run, tiny_config

pytestmark = pytest.mark.mpi


def weights_of(directory):
    return load_file(directory / "model.safetensors")


def test_staleness_0_equals_a_plain_single_process_loop(synchronous):
    config, finished = synchronous
    steps = finished.log().steps
    reference = reference_losses(config)
    assert steps.reward_mean.tolist() == pytest.approx([r["reward"] for r in reference])
    assert steps.response_tokens.tolist() == [r["tokens"] for r in reference]
    assert steps.loss.tolist() == pytest.approx([r["loss"] for r in reference], abs=2e-6)
    assert steps.grad_norm.tolist() == pytest.approx([r["grad_norm"] for r in reference], rel=1e-4)
    assert np.ptp(steps.loss) > 1e-3, "losses that do not vary prove nothing"


def test_staleness_0_trains_only_on_the_newest_version(synchronous):
    trajectories = synchronous[1].log().trajectories
    assert (trajectories.head_lag == 0).all() and (trajectories.tail_lag == 0).all()
    assert (trajectories.first_version == trajectories.consumed_step - 1).all()


def test_two_trainer_and_two_rollout_ranks_make_the_same_update(synchronous, tiny_dir, tmp_path):
    _, finished = synchronous
    ranks = {"trainer": SYNCHRONOUS["trainer"] | {"ranks": 2}, "rollout": {"ranks": 2}}
    more = tiny_config(tiny_dir, tmp_path / "run", **SYNCHRONOUS | ranks)
    twice = run(more)
    twice.assert_done()
    for name, tensor in weights_of(finished.run_dir / "model").items():
        torch.testing.assert_close(weights_of(twice.run_dir / "model")[name], tensor, atol=1e-5, rtol=1e-5)
    assert twice.log().steps.loss.tolist() == pytest.approx(finished.log().steps.loss.tolist(), abs=2e-6)
    assert set(twice.log().trajectories.trainer_rank) == {1, 2}


@pytest.fixture(scope="module")
def asynchronous(tiny_dir, tmp_path_factory):
    """Two rollout ranks, long answers, every version exported and every token logged."""
    config = tiny_config(
        tiny_dir,
        tmp_path_factory.mktemp("async") / "run",
        steps=8,
        staleness={"max_staleness": 3},
        rollout={"ranks": 2, "slots": 8, "max_new_tokens": 100},
        trainer={"export_every": 1, "micro_batch_tokens": 512},
        log={"tokens": True},
    )
    finished = run(config)
    finished.assert_done()
    return config, finished


def test_every_token_has_the_log_prob_of_the_version_it_is_tagged_with(asynchronous, tiny_dir):
    """Recomputed with transformers alone from the saved weights of each version, to 1e-5."""
    from transformers import AutoModelForCausalLM

    _, finished = asynchronous
    log = finished.log()
    models = {0: AutoModelForCausalLM.from_pretrained(tiny_dir / "model")}
    mixed = worst = 0
    for row in log.trajectories.query("fate == 'consumed'").itertuples():
        kept = log.tokens(row.group_id, row.sample)
        tokens = torch.from_numpy(kept["tokens"].astype(np.int64))
        num_prompt = len(tokens) - len(kept["logprobs"])
        mixed += len(set(kept["versions"].tolist())) > 1
        for version in sorted(set(kept["versions"].tolist())):
            if version not in models:
                models[version] = AutoModelForCausalLM.from_pretrained(
                    finished.run_dir / "weights" / f"version_{version}"
                )
            with torch.no_grad():
                logits = models[version](tokens[None]).logits[0].float()
            logprobs = torch.log_softmax(logits, -1)[num_prompt - 1 : -1].gather(-1, tokens[num_prompt:, None])[:, 0]
            here = kept["versions"] == version
            worst = max(worst, float(np.abs(logprobs.numpy()[here] - kept["logprobs"][here]).max()))
    assert mixed >= 10, f"only {mixed} trajectories lived through a weight update"
    assert worst < 1e-5


def test_replay_of_the_log_proves_the_staleness_bound(asynchronous):
    """Outstanding groups never exceed (eta + 1) B, and nobody is admitted ahead of the rule."""
    config, finished = asynchronous
    log = finished.log()
    batch, eta = config["trainer"]["batch_size"], config["staleness"]["max_staleness"]
    groups = log.trajectories.drop_duplicates("group_id").sort_values("admit_s")
    done = log.steps.sort_values("time_s")
    for number, row in enumerate(groups.sort_values("group_id").itertuples(), start=1):
        version = int((done.time_s <= row.admit_s).sum())
        assert (number - 1) // batch <= version + eta
    consumed = groups[groups.consumed_step > 0]
    assert (consumed.groupby("consumed_step").size() == batch).all()
    assert (consumed.head_lag >= 0).all()
    assert consumed.head_lag.max() >= 1, "an asynchronous run that is never stale proves nothing"
    assert consumed.group_id.is_unique
    assert processes_of(config) == [], "the last step came in the middle of everything"


def test_the_log_tells_what_every_rank_did(asynchronous):
    log = asynchronous[1].log()
    assert set(log.activity["rank"]) == {0, 1, 2, 3}
    for _, intervals in log.activity.groupby("rank"):
        assert (intervals.stop_s.to_numpy()[:-1] <= intervals.start_s.to_numpy()[1:] + 1e-9).all()
    (ended_s,) = log.events.query("kind == 'ended'").time_s
    assert log.activity.groupby("rank").stop_s.max().min() > ended_s - 0.05, "up to Stop, not to a second before"
    assert sorted(log.weight_updates.version) == list(range(9))
    loads = log.weight_loads
    assert (loads.pause_s > 0).all() and loads.interrupted.sum() > 0
    assert (log.trajectories.start_s >= log.trajectories.admit_s - 1e-3).all()
    assert (log.trajectories.finish_s >= log.trajectories.start_s).all()


@pytest.mark.slow  # with simulated compute: test_simulated.py
@pytest.mark.parametrize("mode, limit", [("sync", 0), ("overlap", 1)])
def test_the_other_modes(mode, limit, tiny_dir, tmp_path):
    config = tiny_config(tiny_dir, tmp_path / "run", mode=mode, rollout={"ranks": 2, "temperature": 0.7}, steps=4)
    config["data"]["heldout"] = str(tiny_dir / "heldout.jsonl")
    finished = run(config)
    finished.assert_done()
    assert finished.summary["versions"] == 4
    assert finished.summary["head_staleness_max"] <= limit
    assert set(finished.log().weight_loads.query("version == 4")["rank"]) == {2, 3}
    if limit == 0:  # sampler and trainer agree on the distribution, temperature included
        assert finished.log().steps.w_max.max() == pytest.approx(1.0, abs=1e-4)
    assert (finished.log().weight_loads.interrupted == 0).all()
    assert 0 <= finished.summary["pass1_before"] <= 1 and 0 <= finished.summary["pass1_after"] <= 1


@pytest.mark.slow
def test_the_widest_world(tiny_dir, tmp_path):
    """1 controller, 2 trainers, 4 rollouts on two cores; naive PPO, filter, clamp, dual clip and batch advantages."""
    config = tiny_config(
        tiny_dir,
        tmp_path / "run",
        steps=4,
        rollout={"ranks": 4},
        filter={"min_success": 0.05, "max_success": 0.95},
        trainer={
            "ranks": 2,
            "minibatches": 2,
            "advantage": {"group_norm": "mean", "batch_norm": True},
            "objective": {"weight_cap": 2.0, "cap_mode": "clamp", "dual_clip": 3.0, "clip_high": 0.28},
        },
    )
    finished = run(config)
    finished.assert_done()
    log = finished.log()
    assert set(log.trajectories.rollout_rank) == {3, 4, 5, 6}
    correct = (
        log.trajectories.query("fate == 'consumed'")
        .groupby("group_id")
        .outcome.apply(lambda o: (o == "correct").mean())
    )
    assert correct.between(0.05, 0.95).all()
    assert (log.trajectories.fate == "filtered").any()
