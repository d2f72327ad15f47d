"""Several sources with weights: the order, what an epoch is, and that a cursor goes on exactly."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from areal_hpc.data import Mixture, Prompt, PromptSource
from areal_hpc.data.order import due, length, shares

WEIGHTS = st.lists(st.one_of(st.integers(1, 9), st.floats(0.01, 50.0)), min_size=1, max_size=6)


def source(name: str, count: int, **changes: Any) -> PromptSource:
    prompts = [Prompt(f"{name}/{i}", f"text {name} {i}", {}) for i in range(count)]
    return PromptSource(prompts, **{"seed": 1, "shuffle": True, "epochs": None, "name": name, **changes})


def mixture(sizes: list[int], weights: list[float], epochs: int | None = None, **changes: Any) -> Mixture:
    return Mixture([source("abcdef"[i], n, **changes) for i, n in enumerate(sizes)], weights, epochs)


def drawn(mixed: Mixture, limit: int = 5000) -> list[str]:
    ids: list[str] = []
    while len(ids) < limit and (prompt := mixed.next()) is not None:
        ids.append(prompt.prompt_id)
    return ids


def names(ids: list[str]) -> str:
    return "".join(prompt_id[0] for prompt_id in ids)


# -------------------------------------------------------------------------------------------------------- the order
def test_the_order_of_sources_is_this_one() -> None:
    """By hand for 2 : 1. Deadlines of a: 2, 3, 5, 6; of b: 3, 6; b may give its second from draw 4 on."""
    assert names(drawn(mixture([9, 9], [2, 1]), 6)) == "aabaab"
    assert names(drawn(mixture([9, 9], [1, 1]), 6)) == "ababab"
    assert names(drawn(mixture([9, 9, 9], [1, 1, 1]), 6)) == "abcabc"
    assert names(drawn(mixture([9, 9], [1, 3]), 8)) == "bbabbbab"


def test_weights_are_decimals_not_binary_fractions() -> None:
    assert shares([0.7, 0.2, 0.1]) == [Fraction(7, 10), Fraction(2, 10), Fraction(1, 10)]
    assert shares([1e-05, 3]) == [Fraction(1, 300_001), Fraction(300_000, 300_001)]
    assert names(drawn(mixture([99, 99, 99], [0.7, 0.2, 0.1]), 10)).count("a") == 7


@settings(deadline=None, max_examples=60)
@given(WEIGHTS, st.integers(1, 150))
def test_every_prefix_has_each_source_within_one_of_its_share(weights: list[float], count: int) -> None:
    exact = [Fraction(repr(w)) for w in weights]
    given_so_far = [0] * len(weights)
    for k in range(1, count + 1):
        i = due(shares(weights), given_so_far)
        assert i >= 0, "some source is always due"
        given_so_far[i] += 1
        for n, weight in zip(given_so_far, exact, strict=True):
            assert abs(n - k * weight / sum(exact)) < 1


def test_a_large_source_never_starves_small_ones_nor_they_it() -> None:
    """Where the smallest n / p goes first, each small source comes once at the start: the large one is 4.4 behind."""
    stream = names(drawn(mixture([999] * 6, [90, 2, 2, 2, 2, 2]), 2000))
    for k in range(1, 2001):
        assert abs(stream[:k].count("a") - 0.9 * k) < 1
        assert abs(stream[:k].count("f") - 0.02 * k) < 1


def test_each_source_keeps_its_own_order_and_epochs() -> None:
    ids = drawn(mixture([3, 5], [1, 2]), 24)
    for name, count in (("a", 3), ("b", 5)):
        alone = source(name, count)
        mine = [prompt_id for prompt_id in ids if prompt_id[0] == name]
        assert mine == [alone.next().prompt_id for _ in mine]  # type: ignore[union-attr]
        assert sorted(mine[:count]) == [f"{name}/{i}" for i in range(count)], "an epoch has every prompt once"


# ---------------------------------------------------------------------------------------------------------- its end
def test_the_stream_ends_when_a_source_is_due_that_is_used_up() -> None:
    """2 : 1 is aab aab ...: after six draws a has given its four prompts, and would be due."""
    mixed = mixture([4, 9], [2, 1], epochs=1)
    assert (names(drawn(mixed)), mixed.num_total) == ("aabaab", 6)
    assert mixed.next() is None and mixed.next() is None
    mixed = mixture([9, 1], [2, 1], epochs=2)
    assert (names(drawn(mixed)), mixed.num_total) == ("aabaabaa", 8)


@settings(deadline=None, max_examples=100)
@given(st.data(), WEIGHTS, st.integers(1, 3))
def test_the_length_is_known_before(data: st.DataObject, weights: list[float], epochs: int) -> None:
    sizes = [data.draw(st.integers(1, 8)) for _ in weights]
    mixed = mixture(sizes, weights, epochs)
    ids = drawn(mixed)
    assert len(ids) == mixed.num_total
    for name in set(names(ids)):
        mine = [prompt_id for prompt_id in ids if prompt_id[0] == name]
        assert all(mine.count(prompt_id) <= epochs for prompt_id in mine)
    assert any(names(ids).count(name) == epochs * size for name, size in zip("abcdef", sizes, strict=False))


def test_the_length_of_a_very_long_run_takes_no_time() -> None:
    assert length(shares([3, 1]), [3 * 10**12, 10**12]) == 4 * 10**12
    assert length(shares([3, 1]), [3 * 10**12 + 1, 10**13]) == 4 * 10**12 + 1


def test_the_warning_of_the_configuration_is_an_upper_bound() -> None:
    """datarules.enough_prompts uses the deadline of the first draw that cannot be."""
    for sizes, weights in (([4, 9], [2, 1]), ([7, 7], [1, 1]), ([50, 3], [0.9, 0.1]), ([5, 6, 7], [0.3, 0.3, 0.4])):
        total = mixture(sizes, list(weights), epochs=2).num_total
        exact = shares(list(weights))
        bound = min(-(-(2 * n + 1) // p) - 1 for n, p in zip(sizes, exact, strict=True))
        assert total is not None and bound - len(sizes) <= total <= bound


# ------------------------------------------------------------------------------------------------------- the cursor
def test_a_cursor_goes_on_exactly_at_every_position_of_a_small_mixture() -> None:
    whole = drawn(mixture([3, 2, 4], [3, 1, 2], epochs=3))
    assert len(whole) > 12
    walking = mixture([3, 2, 4], [3, 1, 2], epochs=3)
    for position in range(len(whole) + 1):
        cursor = json.loads(json.dumps(walking.cursor))
        resumed = mixture([3, 2, 4], [3, 1, 2], epochs=3)
        resumed.seek(cursor)
        assert drawn(resumed) == whole[position:], f"resumed at {cursor}"
        walking.next()


@settings(deadline=None, max_examples=60)
@given(st.data(), WEIGHTS, st.booleans(), st.integers(0, 2**31 - 1))
def test_a_cursor_goes_on_exactly(data: st.DataObject, weights: list[float], shuffle: bool, seed: int) -> None:
    sizes = [data.draw(st.integers(1, 7)) for _ in weights]
    changes: dict[str, Any] = {"shuffle": shuffle, "seed": seed}
    stop = data.draw(st.integers(0, 80))
    first = mixture(sizes, weights, **changes)
    whole = drawn(mixture(sizes, weights, **changes), 100)
    assert drawn(first, stop) == whole[:stop]
    second = mixture(sizes, weights, **changes)
    drawn(second, data.draw(st.integers(0, 20)))
    second.seek(json.loads(json.dumps(first.cursor)))
    assert drawn(second, 100 - stop) == whole[stop:]


@pytest.mark.parametrize(
    "cursor",
    [[0, 0], [[0, 0]], [[0, 0], [0, 0], [0, 0]], [[0, 0], 3], [[0, 0], [0]], [[0, 0], [0, "1"]], [[0, 0], [0, 9]],
     [[0, 3], [0, 0]], [[0, 0], [0, 2]], [[-1, 0], [0, 0]], [[0, True], [0, 0]]],
)  # fmt: skip
def test_a_cursor_of_another_mixture_is_refused_and_changes_nothing(cursor: list[Any]) -> None:
    mixed = mixture([4, 4], [1, 1], epochs=2)
    ids = drawn(mixed, 3)
    with pytest.raises(ValueError, match="cursor"):
        mixed.seek(cursor)
    assert mixed.cursor == ((0, 2), (0, 1))
    assert ids + drawn(mixed) == drawn(mixture([4, 4], [1, 1], epochs=2))


def test_a_cursor_behind_the_end_is_refused() -> None:
    mixed = mixture([4, 4], [1, 1], epochs=1)
    drawn(mixed)
    assert mixed.cursor == ((1, 0), (1, 0))
    with pytest.raises(ValueError, match="does not exist with these weights and epochs"):
        mixed.seek([[1, 1], [1, 0]])


def test_a_single_source_takes_its_cursor_from_json_and_no_other() -> None:
    alone = source("a", 4)
    alone.seek([1, 2])
    assert alone.cursor == (1, 2)
    with pytest.raises(ValueError, match="not one of a single source"):
        alone.seek([[0, 1], [0, 2]])


# -------------------------------------------------------------------------------------------------------- the digest
def test_a_digest_changes_with_ids_texts_and_their_order() -> None:
    def digest(*pairs: tuple[str, str]) -> list[Any]:
        prompts = [Prompt(prompt_id, text, {}) for prompt_id, text in pairs]
        return PromptSource(prompts, seed=0, shuffle=False, epochs=None, name="x").digests()["x"]

    base = digest(("1", "a"), ("2", "b"))
    assert base == digest(("1", "a"), ("2", "b")) and base[0] == 2
    others = [digest(("1", "a"), ("2", "c")), digest(("1", "a"), ("3", "b")), digest(("2", "b"), ("1", "a"))]
    assert all(base != other for other in others)
    assert list(mixture([2, 3], [1, 1]).digests()) == ["a", "b"]


@settings(deadline=None, max_examples=50)
@given(WEIGHTS)
def test_shares_add_up(weights: list[float]) -> None:
    assume(all(weights))
    assert sum(shares(weights)) == 1
