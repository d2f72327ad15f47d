"""The objective against numbers worked out by hand and against a token-by-token transcription of Eq. 4-5."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal_hpc.losses import MAXIMA, SUMS, LossConfig, LossStats, policy_loss

torch.set_num_threads(1)

Rows = list[tuple[float, float, float, float]]
"""One token each: log-prob under the current, proximal and behaviour policy, advantage."""


def columns(rows: Rows, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    matrix = torch.tensor(rows, dtype=dtype).reshape(-1, 4)
    current, proximal, behaviour, advantages = (matrix[:, i].clone() for i in range(4))
    return current.requires_grad_(), proximal, behaviour, advantages


def evaluate(rows: Rows, config: LossConfig, num_tokens: float | None = None, dtype: torch.dtype = torch.float64):
    """Loss, gradient with respect to the current log-probs, figures."""
    tensors = columns(rows, dtype)
    loss, stats = policy_loss(*tensors, config=config, num_tokens=num_tokens or len(rows))
    loss.backward()
    assert tensors[0].grad is not None
    return loss.item(), tensors[0].grad.tolist(), stats


# ------------------------------------------------------------------------------------------------- worked by hand
# clip to [0.8, 1.2], six tokens, natural logs of simple ratios; behaviour log-prob b = -1 throughout.
#
#   token    u     w     A    u A   clip(u) A   min    w * min   clipped   d(w * min) / d current
#   0       1      1     2    2       2          2       2         no        w u A = 2
#   1       1.5    2     1    1.5     1.2        1.2     2.4       yes       0        (A > 0, u too high)
#   2       0.5    2     1    0.5     0.8        0.5     1         no        w u A = 1   (A > 0, u low: free)
#   3       1.5    4    -1   -1.5    -1.2       -1.5    -6         no        w u A = -6  (A < 0, u high: free)
#   4       0.5    3    -1   -0.5    -0.8       -0.8    -2.4       yes       0        (A < 0, u too low)
#   5       4      0.5  -2   -8      -2.4       -8      -4         no        w u A = -4
#
# sum of w * min = 2 + 2.4 + 1 - 6 - 2.4 - 4 = -7
RATIOS = [(1.0, 1.0), (1.5, 2.0), (0.5, 2.0), (1.5, 4.0), (0.5, 3.0), (4.0, 0.5)]
ADVANTAGES = [2.0, 1.0, 1.0, -1.0, -1.0, -2.0]
HAND: Rows = [
    (-1 + math.log(w) + math.log(u), -1 + math.log(w), -1.0, a) for (u, w), a in zip(RATIOS, ADVANTAGES, strict=True)
]


def test_by_hand_decoupled() -> None:
    loss, gradient, stats = evaluate(HAND, LossConfig())
    assert loss == pytest.approx(7 / 6)
    assert gradient == pytest.approx([-2 / 6, 0, -1 / 6, 6 / 6, 0, 4 / 6])
    figures = stats.finish()
    assert figures == pytest.approx(
        {
            "loss": 7 / 6,
            "u_mean": 9 / 6,  # 1 + 1.5 + 0.5 + 1.5 + 0.5 + 4
            "u_max": 4.0,
            "w_mean": 12.5 / 6,  # 1 + 2 + 2 + 4 + 3 + 0.5
            "w_max": 4.0,
            "clip_fraction": 2 / 6,
            "cap_fraction": 0.0,
            "dual_clip_fraction": 0.0,
            "kl_behaviour_proximal": -math.log(1 * 2 * 2 * 4 * 3 * 0.5) / 6,  # mean of -log w
            "kl_proximal_current": -math.log(1 * 1.5 * 0.5 * 1.5 * 0.5 * 4) / 6,  # mean of -log u
            "advantage_mean": 0.0,
            "num_tokens": 6.0,
            "nonfinite_tokens": 0.0,
        }
    )


def test_by_hand_the_denominator_is_the_global_count() -> None:
    loss, gradient, stats = evaluate(HAND, LossConfig(), num_tokens=100)
    assert loss == pytest.approx(0.07)
    assert gradient == pytest.approx([-0.02, 0, -0.01, 0.06, 0, 0.04])
    assert stats.finish()["loss"] == pytest.approx(7 / 6)  # a figure per token of what was merged


def test_by_hand_cap_masks() -> None:
    # w > 2.5: tokens 3 and 4 go, the denominator stays 6: sum = 2 + 2.4 + 1 - 4 = 1.4.
    loss, gradient, stats = evaluate(HAND, LossConfig(weight_cap=2.5, cap_mode="mask"))
    assert loss == pytest.approx(-1.4 / 6)
    assert gradient == pytest.approx([-2 / 6, 0, -1 / 6, 0, 0, 4 / 6])
    figures = stats.finish()
    assert (figures["cap_fraction"], figures["w_max"]) == pytest.approx((2 / 6, 4.0))  # w is logged before the cap


def test_by_hand_cap_clamps() -> None:
    # w of tokens 3 and 4 becomes 2.5: sum = 2 + 2.4 + 1 - 2.5 * 1.5 - 2.5 * 0.8 - 4 = -4.35.
    loss, gradient, stats = evaluate(HAND, LossConfig(weight_cap=2.5, cap_mode="clamp"))
    assert loss == pytest.approx(4.35 / 6)
    assert gradient == pytest.approx([-2 / 6, 0, -1 / 6, 3.75 / 6, 0, 4 / 6])
    assert stats.finish()["cap_fraction"] == pytest.approx(2 / 6)


def test_by_hand_dual_clip() -> None:
    # c = 3. Token 5: floor -6 above -8, so the term is 0.5 * -6 = -3 and its gradient vanishes. Token 3: floor -3 is
    # below -1.5, nothing happens. Tokens with A > 0 are never touched. sum = -7 + 4 - 3 = -6.
    loss, gradient, stats = evaluate(HAND, LossConfig(dual_clip=3.0))
    assert loss == pytest.approx(6 / 6)
    assert gradient == pytest.approx([-2 / 6, 0, -1 / 6, 6 / 6, 0, 0])
    assert stats.finish()["dual_clip_fraction"] == pytest.approx(1 / 6)


def test_by_hand_asymmetric_clip() -> None:
    # clip to [0.6, 1.4]: token 1 -> 1.4 * 2 = 2.8, token 4 -> -0.6 * 3 = -1.8. sum = 2 + 2.8 + 1 - 6 - 1.8 - 4 = -6.
    assert evaluate(HAND, LossConfig(clip_low=0.4, clip_high=0.4))[0] == pytest.approx(6 / 6)
    # [0.8, 1.6] frees token 1 (1.5 * 2 = 3): sum = 2 + 3 + 1 - 6 - 2.4 - 4 = -6.4; [0.4, 1.2] frees token 4 (-0.5 * 3):
    # sum = 2 + 2.4 + 1 - 6 - 1.5 - 4 = -6.1.
    assert evaluate(HAND, LossConfig(clip_low=0.2, clip_high=0.6))[0] == pytest.approx(6.4 / 6)
    assert evaluate(HAND, LossConfig(clip_low=0.6, clip_high=0.2))[0] == pytest.approx(6.1 / 6)


def test_by_hand_naive() -> None:
    # u is now current / behaviour = u w of the table: 1, 3, 1, 6, 1.5, 2. Terms min(u A, clip(u) A):
    # 2, 1.2 (clipped), 1, -6, -1.5, -4. sum = -7.3.
    loss, gradient, stats = evaluate(HAND, LossConfig(objective="naive"))
    assert loss == pytest.approx(7.3 / 6)
    assert gradient == pytest.approx([-2 / 6, 0, -1 / 6, 6 / 6, 1.5 / 6, 4 / 6])
    figures = stats.finish()
    assert (figures["w_mean"], figures["w_max"], figures["kl_behaviour_proximal"]) == (1.0, 1.0, 0.0)
    assert figures["clip_fraction"] == pytest.approx(1 / 6)


# ------------------------------------------------------------------------------------------------- transcription
def literal(rows: Rows, config: LossConfig, num_tokens: float) -> tuple[float, list[float]]:
    """Eq. 5 and its derivative with respect to the current log-prob, one token at a time, Python floats."""
    loss, gradient = 0.0, []
    for current, proximal, behaviour, advantage in rows:
        if config.objective == "naive":
            u, w = math.exp(current - behaviour), 1.0
        else:
            u, w = math.exp(current - proximal), math.exp(proximal - behaviour)
        if config.weight_cap is not None and w > config.weight_cap:
            w = 0.0 if config.cap_mode == "mask" else config.weight_cap
        term, slope = u * advantage, u * advantage  # d exp(x - p) / dx = exp(x - p)
        edge = 1 + config.clip_high if advantage > 0 else 1 - config.clip_low
        if edge * advantage < term:
            term, slope = edge * advantage, 0.0
        if config.dual_clip is not None and advantage < 0 and term < config.dual_clip * advantage:
            term, slope = config.dual_clip * advantage, 0.0
        loss -= w * term / num_tokens
        gradient.append(-w * slope / num_tokens)
    return loss, gradient


logprob = st.floats(-6, -0.01)
advantage = st.integers(-50, 50).map(lambda tenths: tenths / 10)
tokens = st.lists(st.tuples(logprob, logprob, logprob, advantage), min_size=1, max_size=12)
configs = st.builds(
    lambda objective, low, high, dual, cap: LossConfig(objective, low, high, dual, *cap),
    st.sampled_from(["decoupled", "naive"]),
    st.floats(0.05, 0.9),
    st.floats(0.05, 2.0),
    st.one_of(st.none(), st.floats(1.5, 5)),
    st.sampled_from([(None, "none"), (1.0, "mask"), (5.0, "mask"), (1.0, "clamp"), (5.0, "clamp")]),
)


@given(tokens, configs, st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_loss_and_gradient_are_eq_5(rows: Rows, config: LossConfig, num_tokens: int) -> None:
    expected_loss, expected_gradient = literal(rows, config, num_tokens)
    loss, gradient, stats = evaluate(rows, config, num_tokens)
    assert loss == pytest.approx(expected_loss, rel=1e-9, abs=1e-9)
    assert gradient == pytest.approx(expected_gradient, rel=1e-9, abs=1e-9)
    assert stats.finish()["loss"] == pytest.approx(expected_loss * num_tokens / len(rows), rel=1e-9, abs=1e-9)


@given(tokens)
@settings(max_examples=50, deadline=None)
def test_float32_is_enough(rows: Rows) -> None:
    config = LossConfig(clip_low=1.0, clip_high=500.0)  # so wide that no token sits on the edge where rounding decides
    expected_loss, expected_gradient = literal(rows, config, len(rows))
    loss, gradient, _ = evaluate(rows, config, dtype=torch.float32)
    scale = max(map(abs, expected_gradient))
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-5 * scale)
    assert gradient == pytest.approx(expected_gradient, rel=1e-5, abs=1e-5 * scale)


# ---------------------------------------------------------------------------------------------------- properties
@given(tokens, configs)
@settings(max_examples=100, deadline=None)
def test_first_minibatch_is_on_the_proximal_policy(rows: Rows, config: LossConfig) -> None:
    rows = [(proximal, proximal, behaviour, a) for _, proximal, behaviour, a in rows]
    if config.objective == "naive":
        rows = [(proximal, proximal, proximal, a) for _, proximal, _, a in rows]
    figures = evaluate(rows, config)[2].finish()
    assert (figures["u_mean"], figures["u_max"], figures["clip_fraction"]) == (1.0, 1.0, 0.0)
    assert (figures["dual_clip_fraction"], figures["kl_proximal_current"]) == (0.0, 0.0)


@given(tokens, configs)
@settings(max_examples=100, deadline=None)
def test_decoupled_is_naive_when_proximal_is_behaviour(rows: Rows, config: LossConfig) -> None:
    rows = [(current, behaviour, behaviour, a) for current, _, behaviour, a in rows]
    constants = (config.clip_low, config.clip_high, config.dual_clip, config.weight_cap, config.cap_mode)
    decoupled = evaluate(rows, LossConfig("decoupled", *constants))
    naive = evaluate(rows, LossConfig("naive", *constants))
    assert decoupled[:2] == naive[:2]
    assert torch.equal(decoupled[2].to_vector(), naive[2].to_vector())


@given(tokens, configs, st.data())
@settings(max_examples=100, deadline=None)
def test_any_split_over_micro_batches_gives_the_same(rows: Rows, config: LossConfig, data: st.DataObject) -> None:
    whole_loss, whole_gradient, whole = evaluate(rows, config)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))  # equal cuts leave an empty micro-batch
    current, proximal, behaviour, advantages = columns(rows)
    losses, stats = [], LossStats.empty()
    for start, stop in itertools.pairwise([0, *cuts, len(rows)]):
        part = slice(start, stop)
        loss, part_stats = policy_loss(
            current[part], proximal[part], behaviour[part], advantages[part], config=config, num_tokens=len(rows)
        )
        loss.backward()  # gradients accumulate
        losses.append(loss.item())
        stats = stats.merge(LossStats.from_vector(part_stats.to_vector()))
    assert current.grad is not None
    assert sum(losses) == pytest.approx(whole_loss, rel=1e-12, abs=1e-12)
    assert current.grad.tolist() == pytest.approx(whole_gradient, rel=1e-12, abs=1e-12)
    assert stats.finish() == pytest.approx(whole.finish(), rel=1e-12, abs=1e-12)


def test_sequences_are_not_reweighted_by_length() -> None:
    """The trap: means per micro-batch, averaged, would give (-1 + 1) / 2 = 0; the token mean is (-1 + 3) / 4."""
    short, long = [(-1.0, -1.0, -1.0, 1.0)], [(-1.0, -1.0, -1.0, -1.0)] * 3
    total = evaluate(short, LossConfig(), num_tokens=4)[0] + evaluate(long, LossConfig(), num_tokens=4)[0]
    assert total == pytest.approx(0.5)


def test_only_current_gets_a_gradient() -> None:
    parameter = torch.tensor([-1.0, -2.0], requires_grad=True)
    behaviour = torch.tensor([-1.2, -1.9], requires_grad=True)
    loss, stats = policy_loss(parameter, parameter * 1.0, behaviour, torch.ones(2), config=LossConfig(), num_tokens=2)
    loss.backward()
    # proximal computed from the same parameter is a constant: d loss = -w u A / 2 with u = 1, w = e^0.2 and e^-0.1.
    assert parameter.grad is not None
    assert parameter.grad.tolist() == pytest.approx([-math.exp(0.2) / 2, -math.exp(-0.1) / 2], rel=1e-6)
    assert behaviour.grad is None
    assert not stats.to_vector().requires_grad


# ------------------------------------------------------------------------------------------------------ statistics
def test_vector_order_is_fixed_and_survives_the_wire() -> None:
    vector = torch.arange(len(SUMS) + len(MAXIMA), dtype=torch.float64)
    stats = LossStats.from_vector(vector)
    assert torch.equal(stats.to_vector(), vector)
    assert stats.sums[SUMS.index("tokens")] == 0 and stats.maxima.tolist() == [len(SUMS), len(SUMS) + 1]
    assert SUMS[0] == "tokens" and MAXIMA == ("u", "w")


@pytest.mark.parametrize("vector", [torch.zeros(3, dtype=torch.float64), torch.zeros(len(SUMS) + len(MAXIMA))])
def test_a_vector_of_another_layout_is_refused(vector: Tensor) -> None:
    with pytest.raises(ValueError, match="need float64"):
        LossStats.from_vector(vector)


def test_entropy_is_a_mean_over_the_tokens_that_had_one() -> None:
    tensors = columns(HAND)
    _, with_it = policy_loss(*tensors, config=LossConfig(), num_tokens=6, entropy=torch.arange(6, dtype=torch.float64))
    _, without = policy_loss(*tensors, config=LossConfig(), num_tokens=6)
    assert with_it.merge(without).finish()["entropy"] == pytest.approx(2.5)
    assert "entropy" not in without.finish()


def test_an_empty_micro_batch() -> None:
    current = torch.empty(0, requires_grad=True)
    constants = [torch.empty(0)] * 3
    loss, stats = policy_loss(current, *constants, config=LossConfig(dual_clip=3.0), num_tokens=10)
    loss.backward()
    assert loss.item() == 0.0 and current.grad is not None and current.grad.shape == (0,)
    detached, _ = policy_loss(torch.empty(0), *constants, config=LossConfig(), num_tokens=10)
    assert detached.item() == 0.0 and not detached.requires_grad
    assert torch.equal(stats.to_vector(), LossStats.empty().to_vector())
    with pytest.raises(ValueError, match="no response tokens"):
        stats.finish()


@pytest.mark.parametrize("objective", ["decoupled", "naive"])
@pytest.mark.parametrize("column", [0, 1, 2, 3])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("cap", [(None, "none"), (2.0, "mask"), (2.0, "clamp")])
def test_a_nan_does_not_vanish(objective, column: int, order: int, cap) -> None:
    broken: Rows = [tuple(math.nan if i == column else value for i, value in enumerate(HAND[0]))]  # type: ignore[list-item]
    config = LossConfig(objective, 0.2, 0.2, None, *cap)
    stats = LossStats.empty()
    for rows in [HAND[:3], broken, HAND[3:]][::order]:
        stats = stats.merge(policy_loss(*columns(rows), config=config, num_tokens=7)[1])
    figures = stats.finish()
    if objective == "naive" and column == 1:  # ignored
        assert figures["nonfinite_tokens"] == 0 and math.isfinite(figures["loss"])
        return
    assert figures["nonfinite_tokens"] == 1
    assert math.isnan(figures["loss"])
    if column == 0:
        assert figures["u_max"] == math.inf and math.isnan(figures["u_mean"])
    if column == 1:
        assert figures["w_max"] == math.inf and math.isnan(figures["w_mean"])


def test_an_overflowing_ratio_shows_up_even_where_the_clip_or_the_mask_hides_it() -> None:
    # u = e^200 is inf in float32; with A > 0 the clipped term is finite, yet the gradient is 0 * inf = NaN.
    stats = evaluate([(-1.0, -201.0, -201.0, 1.0)], LossConfig(), dtype=torch.float32)[2].finish()
    assert math.isfinite(stats["loss"]) and stats["u_max"] == math.inf and stats["nonfinite_tokens"] == 1
    masked = evaluate([(-1.0, -1.0, -201.0, 1.0)], LossConfig(weight_cap=5.0, cap_mode="mask"), dtype=torch.float32)
    assert masked[0] == 0.0 and masked[1] == [0.0]
    assert masked[2].finish()["w_max"] == math.inf and masked[2].finish()["nonfinite_tokens"] == 1


# --------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"objective": "ppo"}, "objective is 'ppo'"),
        ({"clip_low": 0.0}, "clip_low"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": -0.2}, "clip_high"),
        ({"clip_high": math.nan}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0"),
        ({"cap_mode": "drop", "weight_cap": 5.0}, "cap_mode is 'drop'"),
        ({"weight_cap": 5.0}, "set both or neither"),
        ({"cap_mode": "mask"}, "set both or neither"),
        ({"weight_cap": 0.5, "cap_mode": "mask"}, "weight_cap is 0.5"),
    ],
)
def test_settings_that_contradict_themselves(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig(**fields)


@pytest.mark.parametrize("num_tokens", [0, -1, math.nan, math.inf])
def test_a_denominator_that_is_no_count(num_tokens: float) -> None:
    with pytest.raises(ValueError, match="num_tokens is"):
        policy_loss(*columns(HAND), config=LossConfig(), num_tokens=num_tokens)


def test_shapes_and_dtypes_must_agree() -> None:
    current, proximal, behaviour, advantages = columns(HAND, torch.float32)
    with pytest.raises(ValueError, match=r"must all be \[N\].*behaviour \[5\]"):
        policy_loss(current, proximal, behaviour[1:], advantages, config=LossConfig(), num_tokens=6)
    with pytest.raises(ValueError, match=r"must all be \[N\].*entropy \[1\]"):
        policy_loss(current, proximal, behaviour, advantages, config=LossConfig(), num_tokens=6, entropy=torch.ones(1))
    with pytest.raises(ValueError, match=r"need float32.*advantages torch.float64"):
        policy_loss(current, proximal, behaviour, advantages.double(), config=LossConfig(), num_tokens=6)
    halves = [tensor.bfloat16() for tensor in (current, proximal, behaviour, advantages)]
    with pytest.raises(ValueError, match="half-precision"):
        policy_loss(*halves, config=LossConfig(), num_tokens=6)
