"""Which sequences form a micro-batch and which trainer rank runs it: Algorithm 1 of the paper, and a plan above it.

The controller plans for all trainer ranks at once, so ranks never have to agree on a number of micro-batches among
themselves (AReaL allocates per rank, then repeats until all ranks count the same). numpy and the standard library only.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MicroBatch = list[int]
"""Indices of the sequences that are concatenated, without padding, into one forward pass."""


def lower_bound(lengths: Sequence[int], capacity: int) -> int:
    """ceil(sum(lengths) / capacity): no packing can do with fewer micro-batches of `capacity` tokens."""
    return -(-sum(int(length) for length in lengths) // capacity)


def allocate(lengths: Sequence[int], capacity: int, min_groups: int = 1) -> list[MicroBatch]:
    """Algorithm 1 of the paper (dynamic micro-batch allocation).

    Longest sequence first (equal lengths: lowest index). It opens a new group while fewer than `min_groups` exist or
    when no group has room; otherwise it joins, among all groups with room, the one with the fewest sequences (ties: the
    smallest token sum, then the group opened first).

    Args:
        lengths: tokens of each sequence, prompt and response, at least 1 each.
        capacity: most tokens in one group.
        min_groups: fewest groups to return.

    Returns: the groups in the order they were opened, each a list of indices into `lengths`.

    Raises ValueError: a sequence is empty or longer than `capacity`; there are fewer sequences than `min_groups`.
    """
    tokens = _checked(lengths, capacity)
    if min_groups < 1 or len(tokens) < min_groups:
        raise ValueError(f"{len(tokens)} sequences cannot fill min_groups = {min_groups} micro-batches")
    groups: list[MicroBatch] = []
    # heaps[k] holds (token sum, group) of the groups with k sequences. If the lightest of them has no room, none has.
    heaps: list[list[tuple[int, int]]] = [[], []]
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        total, group, size = 0, len(groups), 0
        if len(groups) >= min_groups:
            room = capacity - tokens[index]
            size = next((k for k, heap in enumerate(heaps) if heap and heap[0][0] <= room), 0)
        if size:
            total, group = heapq.heappop(heaps[size])
        else:
            groups.append([])
        groups[group].append(index)
        if size + 1 == len(heaps):
            heaps.append([])
        heapq.heappush(heaps[size + 1], (total + tokens[index], group))
    return groups


@dataclass(frozen=True)
class Plan:
    """Micro-batches of every trainer rank for one training step.

    Attributes:
        micro_batches: [minibatch][rank] -> the rank's micro-batches in the order it runs them. In a minibatch all ranks
            have equally many; an empty one ([]) has no sequence, but its rank must still join the collectives.
        rank_tokens: [minibatch][rank] -> tokens in them.
        capacity: most tokens in a micro-batch.
    """

    micro_batches: list[list[list[MicroBatch]]]
    rank_tokens: list[list[int]]
    capacity: int

    @property
    def num_micro_batches(self) -> list[int]:
        """Per minibatch: micro-batches of all ranks together, empty ones included."""
        return [sum(len(of_rank) for of_rank in ranks) for ranks in self.micro_batches]

    @property
    def lower_bounds(self) -> list[int]:
        """Per minibatch: ceil(tokens / capacity). Out of reach when it is no multiple of the number of ranks."""
        return [-(-sum(tokens) // self.capacity) for tokens in self.rank_tokens]

    @property
    def waste(self) -> list[float]:
        """Per minibatch: num_micro_batches / lower_bound - 1, so 0.02 means 2 % more micro-batches than the bound."""
        return [count / bound - 1.0 for count, bound in zip(self.num_micro_batches, self.lower_bounds, strict=True)]

    @property
    def imbalance(self) -> list[float]:
        """Per minibatch: tokens of the busiest rank / mean over ranks - 1, the share of time the mean rank waits."""
        return [max(tokens) * len(tokens) / sum(tokens) - 1.0 for tokens in self.rank_tokens]


def plan(lengths: Sequence[int], *, capacity: int, num_ranks: int, num_minibatches: int, rng_seed: int) -> Plan:
    """Split the sequences of one training batch into PPO minibatches, and each of those into micro-batches per rank.

    Minibatches are a random split into parts whose numbers of sequences differ by at most one; the same `rng_seed`
    gives the same split. Every index appears exactly once. Inside a minibatch all ranks get equally many micro-batches,
    with balanced tokens; empty ones appear only when there are fewer sequences than that makes micro-batches.

    Raises ValueError: as `allocate`; also fewer sequences than minibatches, or a count below 1.
    """
    tokens = _checked(lengths, capacity)
    if num_ranks < 1 or not 1 <= num_minibatches <= len(tokens):
        raise ValueError(
            f"cannot plan {len(tokens)} sequences as {num_minibatches} minibatches for {num_ranks} trainer ranks: "
            f"need at least one rank, one minibatch and one sequence per minibatch"
        )
    order = np.random.default_rng(rng_seed).permutation(len(tokens)) if num_minibatches > 1 else np.arange(len(tokens))
    micro_batches, rank_tokens = [], []
    for part in np.array_split(order, num_minibatches):
        members = [int(index) for index in part]
        local = _even_groups([tokens[index] for index in members], capacity, num_ranks)
        groups = [[members[position] for position in group] for group in local]
        sums = [sum(tokens[index] for index in group) for group in groups]
        ranks = _deal(sums, num_ranks)
        micro_batches.append([[groups[number] for number in mine] for mine in ranks])
        rank_tokens.append([sum(sums[number] for number in mine) for mine in ranks])
    return Plan(micro_batches, rank_tokens, capacity)


def _even_groups(tokens: list[int], capacity: int, num_ranks: int) -> list[MicroBatch]:
    """Groups whose number is a multiple of `num_ranks`.

    The multiple is the next one from what Algorithm 1 needs. Asking Algorithm 1 for that many groups balances them
    best, but by spreading long sequences first it may then open still more (8 % on log-normal lengths); only in that
    case are the fullest of the groups it needed cut in two.
    """
    packed = allocate(tokens, capacity)
    wanted = -(-len(packed) // num_ranks) * num_ranks
    filled = min(wanted, len(tokens))
    spread = allocate(tokens, capacity, min_groups=filled)
    groups = spread if len(spread) == filled else _cut(packed, tokens, filled)
    return groups + [[] for _ in range(wanted - filled)]


def _cut(groups: list[MicroBatch], tokens: list[int], count: int) -> list[MicroBatch]:
    """Halve the group with most tokens, every second sequence each way, until there are `count` groups."""
    heap = [(-sum(tokens[index] for index in group), group) for group in groups if len(group) > 1]
    done = [group for group in groups if len(group) == 1]
    heapq.heapify(heap)
    while len(heap) + len(done) < count:
        _, group = heapq.heappop(heap)
        for half in (group[::2], group[1::2]):
            if len(half) > 1:
                heapq.heappush(heap, (-sum(tokens[index] for index in half), half))
            else:
                done.append(half)
    return done + [group for _, group in heap]


def _deal(sums: list[int], num_ranks: int) -> list[list[int]]:
    """Deal groups to ranks, heaviest first, in rounds: in each the rank with fewest tokens takes the heaviest left.

    Equal counts by construction, and the micro-batches that ranks run side by side are of like size.
    """
    order = sorted(range(len(sums)), key=lambda number: (-sums[number], number))
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for start in range(0, len(order), num_ranks):
        lightest_first = sorted(range(num_ranks), key=lambda rank: (tokens[rank], rank))
        for rank, number in zip(lightest_first, order[start : start + num_ranks], strict=True):
            ranks[rank].append(number)
            tokens[rank] += sums[number]
    return ranks


def _checked(lengths: Sequence[int], capacity: int) -> list[int]:
    """The lengths as Python ints; ValueError for one that no micro-batch can hold."""
    tokens = [int(length) for length in lengths]
    for index, length in enumerate(tokens):
        if not 1 <= length <= capacity:
            raise ValueError(f"sequence {index} has {length} tokens; a micro-batch takes 1 to {capacity} (capacity)")
    return tokens
