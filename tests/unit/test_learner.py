"""One training step on one rank: the shortcut is exact, a bad batch leaves no trace, the optimizer is what it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_hpc.config import TrainerConfig
from areal_hpc.learner import Batch, Learner, flat_gradient, pack
from areal_hpc.models import load_model
from areal_hpc.trajectory import Trajectory


def settings(**changes) -> TrainerConfig:
    optimizer = {"lr": 1e-2, "weight_decay": 0.0} | changes.pop("optimizer", {})
    return TrainerConfig.model_validate({"optimizer": optimizer} | changes)


def learner(tiny_dir, **changes) -> Learner:
    return Learner(load_model(tiny_dir / "model"), settings(**changes), temperature=1.0)


def trajectories(count: int = 6, seed: int = 0) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        tokens = rng.integers(2, 10, 3 + 2 + i).astype(np.int32)
        response = len(tokens) - 3
        out.append(
            Trajectory(
                i // 2, i % 2, tokens, 3, rng.uniform(-3, -1, response).astype(np.float32), np.zeros(response, np.int32)
            )
        )
    return out


def batch(minibatches: list[list[list[int]]], samples: list[Trajectory] | None = None) -> Batch:
    samples = samples or trajectories()
    tokens = [sum(samples[i].num_response for micro in minibatch for i in micro) for minibatch in minibatches]
    return Batch(samples, np.array([1.0, -1.0, 0.5, -0.5, 2.0, -2.0]), minibatches, tokens)


def weights(model: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters]).clone()


WHOLE = [[[0, 1, 2], [3, 4, 5]]]
HALVES = [[[0, 1, 2]], [[3, 4, 5]]]


def test_with_one_minibatch_the_left_out_forward_pass_changes_nothing(tiny_dir):
    """The same micro-batches with the proximal pass really made: bit for bit the same weights, and u is exactly 1."""
    short, full, ready = learner(tiny_dir), learner(tiny_dir), batch(WHOLE)
    result = short.train(ready)
    packed = [pack(ready, micro) for micro in WHOLE[0]]
    proximal = full._proximal([packed])
    full._accumulate(packed, proximal[0], ready.minibatch_tokens[0])
    full._update(full._reduce_gradient())
    assert torch.equal(weights(short), weights(full))
    assert result.stats["u_max"] == 1.0 and result.stats["clip_fraction"] == 0.0


def test_the_second_minibatch_moves_away_from_the_proximal_policy(tiny_dir):
    result = learner(tiny_dir).train(batch(HALVES))
    assert result.stats["u_max"] > 1.001
    assert result.phases["proximal_s"] > 0


def test_splitting_into_micro_batches_does_not_change_the_update(tiny_dir):
    one, many = learner(tiny_dir), learner(tiny_dir)
    one.train(batch([[[0, 1, 2, 3, 4, 5]]]))
    many.train(batch([[[0], [1, 5], [], [2, 3, 4]]]))
    torch.testing.assert_close(weights(one), weights(many), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("layout", [WHOLE, HALVES])
def test_a_batch_that_is_not_finite_leaves_no_trace(layout, tiny_dir):
    """The NaN sits in the second minibatch; the first one's update, moments included, is taken back."""
    clean, hurt = learner(tiny_dir), learner(tiny_dir)
    for each in (clean, hurt):
        each.train(batch(HALVES))
    before = weights(hurt)
    samples = trajectories()
    samples[5].logprobs[1] = np.nan
    result = hurt.train(batch(layout, samples))
    assert result.skipped and torch.equal(weights(hurt), before)
    clean.train(batch(HALVES))
    hurt.train(batch(HALVES))
    assert torch.equal(weights(hurt), weights(clean))


def test_gradients_are_scaled_to_the_norm_and_the_rate_warms_up(tiny_dir):
    free = learner(tiny_dir, optimizer={"warmup_steps": 4, "max_grad_norm": 1e-3})
    rates = [free.train(batch(WHOLE)).stats["lr"] for _ in range(6)]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])
    assert float(torch.linalg.vector_norm(free.gradient)) == pytest.approx(1e-3, rel=1e-3)


def test_a_sample_that_did_not_arrive_is_an_error_and_not_a_gap(tiny_dir):
    samples: list = trajectories()
    ready = batch(WHOLE)
    samples[4] = None
    with pytest.raises(KeyError, match="sample 4"):
        learner(tiny_dir).train(Batch(samples, ready.advantages, ready.micro_batches, ready.minibatch_tokens))


def test_gradients_are_views_of_one_buffer():
    parameters = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4))]
    flat = flat_gradient(parameters)
    (2 * parameters[0].sum() + 3 * parameters[1].sum()).backward()
    assert flat.tolist() == [2.0] * 6 + [3.0] * 4


def episode(turns: list[int], seed: int) -> Trajectory:
    """Prompt of 3 tokens, the response falls into these turns; what is not sampled has absurd log-probs."""
    rng = np.random.default_rng(seed)
    logprobs = np.where(np.array(turns) < 0, -50.0, rng.uniform(-3, -1, len(turns))).astype(np.float32)
    tokens = rng.integers(2, 10, 3 + len(turns)).astype(np.int32)
    return Trajectory(seed, 0, tokens, 3, logprobs, np.zeros(len(turns), np.int32), np.array(turns, np.int16))


def test_tokens_of_the_environment_have_no_part_in_loss_and_figures_and_turns_have_their_own_advantage(tiny_dir):
    """One minibatch: u is 1, so the loss is -mean of w A over sampled tokens, worked out from plain forward passes."""
    samples = [episode([0, 0, -1, -1, 1], 0), trajectories()[1], episode([-1, 0, -1, 2, 2, -1], 1)]
    advantages, first_turn = np.array([2.0, -1.0, 0.5, 3.0, 9.0, -4.0]), np.array([0, 2, 3])
    of_tokens = [[2.0, 2.0, -1.0], [0.5] * samples[1].num_response, [3.0, -4.0, -4.0]]
    num_tokens = 3 + samples[1].num_response + 3
    ready = Batch(samples, advantages, [[[0, 1], [2]]], [num_tokens], first_turn)
    plain = AutoModelForCausalLM.from_pretrained(tiny_dir / "model")
    terms, weights_w, entropies = [], [], []
    for sample, values in zip(samples, of_tokens, strict=True):
        with torch.no_grad():
            logits = plain(torch.from_numpy(sample.tokens.astype(np.int64))[None]).logits[0, 2:-1]
        logp = torch.log_softmax(logits, -1).numpy()
        now = logp[np.arange(sample.num_response), sample.tokens[3:]]
        keep = np.ones(sample.num_response, bool) if sample.turns is None else sample.turns >= 0
        w = np.exp(now - sample.logprobs)[keep]
        terms += (-w * np.array(values)).tolist()
        weights_w += w.tolist()
        entropies += (-(np.exp(logp) * logp).sum(-1)[keep]).tolist()
    stats = learner(tiny_dir).train(ready).stats
    assert stats["num_tokens"] == num_tokens == len(terms)
    assert stats["loss"] == pytest.approx(sum(terms) / num_tokens, rel=1e-5)
    assert stats["w_max"] == pytest.approx(max(weights_w), rel=1e-5)
    assert stats["entropy"] == pytest.approx(np.mean(entropies), rel=1e-5)
    assert stats["advantage_mean"] == pytest.approx(sum(sum(of_tokens, [])) / num_tokens, rel=1e-6)


def test_an_environment_token_changes_what_follows_but_gives_no_gradient_itself(tiny_dir):
    """The gradient of a batch equals that of the same sequences cut into prompt and last turn, where both are one."""
    whole = episode([-1, -1, 0, 0], 0)
    as_prompt = Trajectory(0, 0, whole.tokens, 5, whole.logprobs[2:], whole.versions[2:])
    one, other = learner(tiny_dir), learner(tiny_dir)
    for trained, sample in ((one, whole), (other, as_prompt)):
        trained.train(Batch([sample], np.array([1.5]), [[[0]]], [2]))
    assert torch.equal(weights(one), weights(other))
