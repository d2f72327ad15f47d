"""sampling: one stream position per token, exact inversion, edges of the unit interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.sampling import sample, uniforms

LARGEST = 1 - 2.0**-53
INF = float("inf")


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**63 - 1), start=st.integers(0, 40), count=st.integers(0, 40))
def test_a_position_has_the_same_number_however_it_is_reached(seed: int, start: int, count: int) -> None:
    assert np.array_equal(uniforms(seed, start, count), uniforms(seed, 0, 80)[start : start + count])


def test_streams_are_uniform_distinct_and_never_one() -> None:
    numbers = np.stack([uniforms(seed, 0, 1000) for seed in range(200)])
    assert numbers.dtype == np.float64 and len(np.unique(numbers)) == numbers.size
    assert numbers.min() >= 0 and numbers.max() < 1
    for view in (numbers.ravel(), numbers[:, 0]):  # along streams, and the first number across neighbouring seeds
        expected = len(view) / 10
        chi2 = ((np.histogram(view, 10, (0, 1))[0] - expected) ** 2 / expected).sum()
        assert chi2 < 27.9  # 0.1 % point of chi-square with 9 degrees of freedom


@pytest.mark.parametrize(("seed", "start", "count"), [(-1, 0, 1), (2**63, 0, 1), (0, -1, 1), (0, 0, -1)])
def test_impossible_streams_are_refused(seed: int, start: int, count: int) -> None:
    with pytest.raises(ValueError):
        uniforms(seed, start, count)


def draw(logits: list[float], numbers: list[float], temperature: float = 1.0) -> tuple[list[int], list[float]]:
    rows = torch.tensor(logits).expand(len(numbers), -1)
    tokens, logprobs = sample(
        rows, torch.tensor(numbers, dtype=torch.float64), torch.full((len(numbers),), temperature)
    )
    assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32
    return tokens.tolist(), logprobs.tolist()


def test_inversion_by_hand() -> None:
    logits = [math.log(p) for p in (0.5, 0.25, 0.25)]
    tokens, logprobs = draw(logits, [0.0, 0.49, 0.51, 0.74, 0.76, LARGEST])
    assert tokens == [0, 0, 1, 1, 2, 2]
    assert logprobs == pytest.approx([math.log(p) for p in (0.5, 0.5, 0.25, 0.25, 0.25, 0.25)], abs=1e-6)


def test_temperature_shapes_both_the_draw_and_the_logprob() -> None:
    # p^2 renormalised of (0.8, 0.2): 0.64 / 0.68 = 0.941...
    tokens, logprobs = draw([math.log(0.8), math.log(0.2)], [0.94, 0.942], temperature=0.5)
    assert tokens == [0, 1]
    assert logprobs == pytest.approx([math.log(0.64 / 0.68), math.log(0.04 / 0.68)], abs=1e-6)


def test_rare_tokens_below_fp32_resolution_can_be_drawn() -> None:
    # P(1) = exp(-18) = 1.5e-8 is lost when 1 + P(1) is rounded to fp32
    assert draw([0.0, -18.0], [1 - 1e-7, 1 - 1e-9, LARGEST])[0] == [0, 1, 1]


def test_zero_probability_is_never_drawn() -> None:
    assert draw([-INF, 0.0, -INF, 0.0, -INF], [0.0, 0.49, 0.51, LARGEST])[0] == [1, 1, 3, 3]
    tokens, logprobs = draw([-INF, -INF, 3.0, -INF], [0.0, 0.5, LARGEST])
    assert tokens == [2, 2, 2] and logprobs == [0.0, 0.0, 0.0]
    # exp(-200) underflows to probability 0 in fp32, first and last token of the row alike
    assert draw([-200.0, 0.0, -200.0], [0.0, LARGEST])[0] == [1, 1]


@settings(deadline=None, max_examples=100)
@given(
    logits=st.lists(st.one_of(st.just(-INF), st.floats(-300, 300, width=32)), min_size=1, max_size=40),
    number=st.one_of(st.sampled_from([0.0, 2.0**-53, LARGEST]), st.floats(0, LARGEST)),
)
def test_every_draw_is_a_token_with_a_finite_logprob(logits: list[float], number: float) -> None:
    if all(x == -INF for x in logits):
        logits = [*logits, 0.0]
    tokens, logprobs = draw(logits, [number])
    assert logits[tokens[0]] > -INF and -104 < logprobs[0] <= 0


def test_frequencies_follow_the_distribution() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(17, generator=generator) * 2
    n = 60000
    numbers = torch.from_numpy(uniforms(11, 0, n))
    tokens, _ = sample(logits.expand(n, -1), numbers, torch.ones(n))
    expected = logits.double().softmax(-1) * n
    chi2 = ((tokens.bincount(minlength=17) - expected) ** 2 / expected).sum()
    assert expected.min() > 5 and chi2 < 39.25  # 0.1 % point, 16 degrees of freedom


def test_rows_do_not_depend_on_their_neighbours() -> None:
    logits, numbers = torch.randn(300, 151), torch.rand(300, dtype=torch.float64)
    temperatures = torch.linspace(0.0, 2.0, 300)
    tokens, logprobs = sample(logits, numbers, temperatures)
    for part in (slice(0, 1), slice(5, 12), slice(290, 300)):
        some_tokens, some_logprobs = sample(logits[part], numbers[part], temperatures[part])
        assert torch.equal(some_tokens, tokens[part]) and torch.equal(some_logprobs, logprobs[part])


def test_temperature_zero_takes_the_top_token() -> None:
    assert draw([1.0, 3.0, 2.0], [0.0, LARGEST], temperature=0) == ([1, 1], [0.0, 0.0])


def test_each_row_has_its_own_temperature() -> None:
    # Of (0.8, 0.2): 0.64 / 0.68 at 0.5, the likeliest at 0, 0.8 at 1.
    rows = torch.tensor([0.8, 0.2]).log().expand(4, -1)
    numbers = torch.tensor([0.9, 0.999, 0.9, 0.7], dtype=torch.float64)
    tokens, logprobs = sample(rows, numbers, torch.tensor([0.5, 0.0, 1.0, 1.0]))
    assert tokens.tolist() == [0, 0, 1, 0]
    assert logprobs.tolist() == pytest.approx([math.log(0.64 / 0.68), 0.0, math.log(0.2), math.log(0.8)], abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[math.nan, 0.0], [-INF, -INF]])
def test_broken_logits_show_in_the_logprob(row: list[float], temperature: float) -> None:
    assert math.isnan(draw(row, [0.5], temperature)[1][0])


def test_half_precision_logits_are_scored_in_fp32() -> None:
    logits = torch.randn(1, 1000).bfloat16()
    tokens, logprobs = sample(logits, torch.tensor([0.3], dtype=torch.float64), torch.ones(1))
    assert torch.equal(logprobs, torch.log_softmax(logits.float(), -1)[0, tokens])
