"""Advantages without a critic: one number per turn, from rewards that are already complete.

With one turn per sequence the reward is terminal and gamma = lambda = 1, so every token of a response has the same
advantage (paper 5, no value model). An episode of T turns has rewards r_0 .. r_(T-1), and the tokens of turn t learn
from what came after them:

    G_t = sum_(k >= t) gamma^(k - t) r_k                                              (discounted_returns)

Centring and scaling then take turns for sequences, where in a group every *episode* has the same say: turn t of an
episode has weight 1 / T in mean and std. So with gamma = 1 and a terminal reward all turns get what GRPO gives the
episode as a whole, however many turns there are; and with T = 1 nothing is different from the plain case.

Everything needed is metadata of the global batch, so this runs in float64 numpy at one place instead of as
partial sums all-reduced over trainer ranks, and the result cannot depend on the number of ranks.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

GroupNorm = Literal["none", "mean", "mean_std"]
Floats = NDArray[np.float64]


def advantages(
    rewards: ArrayLike,
    groups: ArrayLike,
    lengths: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    group_norm: GroupNorm,
    batch_norm: bool,
    eps: float = 1e-5,
) -> Floats:
    """Advantage of each sequence, or turn, of one global batch.

    Group step (GRPO, optional): a = r - mean, or (r - mean) / (std + eps), over the sequences with the same group id,
    weighted by `weights`.
    Batch step (paper, optional): a = (a - mean) / (std + eps) over all sampled tokens: sequences weighted by length.

    std is the population one (divide by n): it exists for a group of one, and it is what sums over tokens give. A group
    or batch without spread, so also a group of one, gets exactly 0 and is never divided by eps.

    Args:
        rewards: [n], finite.
        groups: int [n], the group id of each sequence; any order, groups may differ in size.
        lengths: int [n], sampled tokens. A sequence of length 0 has no say in the batch step and leaves it with 0.
        weights: [n], above 0, say of each in the group step; None: the same.
        group_norm: "none", "mean" or "mean_std".
        batch_norm: whether to apply the batch step.
        eps: added to every std.

    Returns: float64 [n].

    Raises ValueError: a reward is NaN or infinite, a length is negative, shapes disagree, or the batch has no tokens.
    """
    values = np.asarray(rewards, dtype=np.float64)
    group_ids, tokens = np.asarray(groups), np.asarray(lengths)
    _check(values, group_ids, tokens, group_norm)
    if group_norm != "none":
        say = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
        values = _per_group(values, group_ids, say, group_norm == "mean_std", eps)
    if batch_norm:
        values = np.where(tokens > 0, _normalise(values, tokens, True, eps), 0.0)
    return values.copy()


def discounted_returns(rewards: ArrayLike, num_turns: ArrayLike, discount: float) -> Floats:
    """G_t = r_t + discount * G_(t+1) for every turn.

    Args:
        rewards: [sum of num_turns], turn after turn, episode after episode.
        num_turns: int [n], turns of each episode.
        discount: gamma, from 0 (a turn answers for itself alone) to 1.

    Raises ValueError: the numbers of turns do not add up to the number of rewards.
    """
    values, counts = np.array(rewards, np.float64), np.asarray(num_turns)
    if counts.sum() != len(values):
        raise ValueError(f"{len(values)} rewards for {counts.sum()} turns")
    ends = np.cumsum(counts) - 1
    for back in range(1, int(counts.max(initial=0))):  # all episodes at once, one turn further from the end each time
        later = ends[counts > back] - back + 1
        values[later - 1] += discount * values[later]
    return values


def _per_group(values: Floats, group_ids: NDArray[np.integer], weights: Floats, divide: bool, eps: float) -> Floats:
    result = np.empty_like(values)
    _, member_of = np.unique(group_ids, return_inverse=True)
    by_group = np.argsort(member_of, kind="stable")
    for members in np.split(by_group, np.cumsum(np.bincount(member_of))[:-1]):
        result[members] = _normalise(values[members], weights[members], divide, eps)
    return result


def _normalise(values: Floats, weights: NDArray[np.number], divide: bool, eps: float) -> Floats:
    """values - mean, over (std + eps) if `divide`; mean and population std are weighted. No spread: exact zeros."""
    weighted = values[weights > 0]
    if weighted.min() == weighted.max():  # rounding in the mean would otherwise leave 1e-17 / 1e-5 instead of 0
        return np.zeros_like(values)
    centred = values - np.average(values, weights=weights)
    if not divide:
        return centred
    return centred / (np.sqrt(np.average(centred**2, weights=weights)) + eps)


def _check(rewards: Floats, groups: NDArray[np.integer], lengths: NDArray[np.integer], group_norm: str) -> None:
    if rewards.ndim != 1 or not rewards.shape == groups.shape == lengths.shape:
        raise ValueError(f"all must be [n]: rewards {rewards.shape}, groups {groups.shape}, lengths {lengths.shape}")
    for name, ids in (("group ids", groups), ("lengths", lengths)):
        if ids.size and not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"{name} must be integers, got {ids.dtype}")
    for index in np.flatnonzero(~np.isfinite(rewards))[:1]:
        raise ValueError(f"sequence {index} (group {groups[index]}) has reward {rewards[index]}; it must be finite")
    for index in np.flatnonzero(lengths < 0)[:1]:
        raise ValueError(f"sequence {index} (group {groups[index]}) has {lengths[index]} response tokens")
    if not lengths.any():
        raise ValueError(f"the batch of {len(rewards)} sequences has no response tokens")
    if group_norm not in ("none", "mean", "mean_std"):
        raise ValueError(f"group_norm is {group_norm!r}; choose none, mean or mean_std")
