"""The order in which the controller draws prompts, from one source or from several with weights.

One source: the order of an epoch is a sort by a hash of (seed, epoch, prompt id): the same on every machine and with
every version of Python or numpy, and a prompt more or less in the file leaves the order of the others as it was.

Several: source i of weight w_i has the share p_i = w_i / sum(w). After k draws it has given n_i(k) prompts with

    |n_i(k) - k p_i| < 1        for every source and every k,

which is Pfair scheduling on one processor: prompt j of source i (from 1) may be drawn as number k with
(j - 1) / p_i < k <= ceil(j / p_i), and among the sources whose next prompt may be drawn the earliest deadline goes
first, of equal ones the first source (Baruah et al., Algorithmica 15, 1996). Shares are exact fractions. Each source
has epochs of its own, shuffled as above.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any, Protocol

from areal_hpc.data.prompts import Prompt

Cursor = tuple[Any, ...]
"""Where the next prompt stands, as JSON can carry it: (epoch, index) of one source, or such a pair for each source."""


class Source(Protocol):
    """What the controller draws prompts from.

    Attributes:
        num_total: prompts in the whole run, or None when epochs repeat without end.
    """

    num_total: int | None

    @property
    def cursor(self) -> Cursor: ...
    def seek(self, cursor: Sequence[Any]) -> None:
        """Go on from a cursor. Raises ValueError for one that these prompts and settings never have."""

    def next(self) -> Prompt | None:
        """The next prompt, or None when all epochs are over."""

    def named(self, prompt_id: str) -> Prompt:
        """The prompt with this id; KeyError if there is none."""

    def digests(self) -> dict[str, list[Any]]:
        """By name of the source: number of prompts, and a hash of their ids and texts."""


class PromptSource:
    """Draws prompts epoch after epoch; the order depends on seed and epoch only, no prompt comes twice in an epoch.

    Attributes:
        num_total: prompts in the whole run, or None when epochs repeat without end.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool, epochs: int | None, name: str = "train"
    ) -> None:
        if not prompts:
            raise ValueError("a prompt source needs at least one prompt")
        self.name = name
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._by_id: dict[str, Prompt] = {}
        self.num_total: int | None = None if epochs is None else epochs * len(prompts)
        self.seek((0, 0))

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def cursor(self) -> Cursor:
        """(Epoch, index in the order of that epoch), both from 0; (epochs, 0) when the source is exhausted."""
        return self._epoch, self._index

    @property
    def num_drawn(self) -> int:
        return self._epoch * len(self._prompts) + self._index

    def seek(self, cursor: Sequence[Any]) -> None:
        """Go on from a cursor. Raises ValueError for one that these prompts and settings never have."""
        if len(cursor) != 2 or not all(type(number) is int for number in cursor):
            raise ValueError(f"cursor {list(cursor)} is not one of a single source")
        epoch, index = cursor
        end = self._epochs is not None and epoch >= self._epochs
        if epoch < 0 or not 0 <= index < len(self._prompts) or (end and (epoch, index) != (self._epochs, 0)):
            raise ValueError(
                f"cursor (epoch {epoch}, index {index}) does not exist with {len(self._prompts)} prompts "
                f"and epochs = {self._epochs}: not the data set or the settings it was saved with"
            )
        self._epoch, self._index = epoch, index
        self._order = self._order_of(epoch)

    def next(self) -> Prompt | None:
        """The next prompt, or None when all epochs are over."""
        if self._epoch == self._epochs:
            return None
        prompt = self._prompts[self._order[self._index]]
        self._index += 1
        if self._index == len(self._prompts):
            self.seek((self._epoch + 1, 0))
        return prompt

    def named(self, prompt_id: str) -> Prompt:
        """The prompt with this id; KeyError if there is none."""
        self._by_id = self._by_id or {prompt.prompt_id: prompt for prompt in self._prompts}
        return self._by_id[prompt_id]

    def digests(self) -> dict[str, list[Any]]:
        """By name of the source: number of prompts, and a hash of their ids and texts."""
        digest = hashlib.blake2b(digest_size=16)
        for prompt in self._prompts:
            digest.update(f"{prompt.prompt_id}\0{prompt.text}\0".encode())
        return {self.name: [len(self._prompts), digest.hexdigest()]}

    def _order_of(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._prompts))
        key = hashlib.sha256(f"{self._seed}/{epoch}".encode()).digest()
        return sorted(
            range(len(self._prompts)),
            key=lambda i: hashlib.blake2b(self._prompts[i].prompt_id.encode(), key=key, digest_size=16).digest(),
        )


class Mixture:
    """Draws from several sources in proportion to their weights.

    With `epochs` the stream ends when a source is due that has been read so often: shares hold to the end, no prompt
    comes more than `epochs` times, and prompts of the other sources may stay unused.

    Args:
        sources: each without an end of its own.
        weights: one per source, positive.

    Attributes:
        num_total: prompts in the whole run, or None when epochs repeat without end.
    """

    def __init__(self, sources: Sequence[PromptSource], weights: Sequence[float], epochs: int | None) -> None:
        self._sources = sources
        self._shares = shares(weights)
        self._limits = None if epochs is None else [epochs * len(source) for source in sources]
        self._due = self._next_due()
        self.num_total = None if self._limits is None else length(self._shares, self._limits)

    @property
    def cursor(self) -> Cursor:
        """(Epoch, index) for each source, in their order."""
        return tuple(source.cursor for source in self._sources)

    def seek(self, cursor: Sequence[Any]) -> None:
        """Go on from a cursor. Raises ValueError for one that these sources and weights never have."""
        if len(cursor) != len(self._sources) or not all(isinstance(pair, (list, tuple)) for pair in cursor):
            raise ValueError(f"cursor {list(cursor)} is not one of {len(self._sources)} sources")
        before = self.cursor
        try:
            for source, pair in zip(self._sources, cursor, strict=True):
                source.seek(pair)
            self._check(cursor)
        except ValueError:
            for source, pair in zip(self._sources, before, strict=True):
                source.seek(pair)
            raise
        self._due = self._next_due()

    def _check(self, cursor: Sequence[Any]) -> None:
        drawn = [source.num_drawn for source in self._sources]
        over = self._limits is not None and any(n > most for n, most in zip(drawn, self._limits, strict=True))
        lags = [n - sum(drawn) * share for n, share in zip(drawn, self._shares, strict=True)]
        if over or max(map(abs, lags)) >= 1:
            raise ValueError(
                f"cursor {list(cursor)} does not exist with these weights and epochs: "
                "not the data set or the settings it was saved with"
            )

    def next(self) -> Prompt | None:
        """The next prompt, or None when the source that is due has been read `epochs` times."""
        source = self._sources[self._due]
        if self._limits is not None and source.num_drawn == self._limits[self._due]:
            return None
        prompt = source.next()
        self._due = self._next_due()
        return prompt

    def named(self, prompt_id: str) -> Prompt:
        """The prompt with this id, whichever source it is of; KeyError if there is none."""
        for source in self._sources:
            with suppress(KeyError):
                return source.named(prompt_id)
        raise KeyError(prompt_id)

    def digests(self) -> dict[str, list[Any]]:
        """By name of the source: number of prompts, and a hash of their ids and texts."""
        return {name: digest for source in self._sources for name, digest in source.digests().items()}

    def _next_due(self) -> int:
        return due(self._shares, [source.num_drawn for source in self._sources])


def shares(weights: Sequence[float]) -> list[Fraction]:
    """w_i / sum(w), of the weights as they are written in decimals."""
    exact = [Fraction(repr(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def due(shares: Sequence[Fraction], drawn: Sequence[int]) -> int:
    """The source of the next draw, when so many prompts of each are drawn already."""
    begun = sum(drawn)
    first, earliest = -1, math.inf
    for i, (share, n) in enumerate(zip(shares, drawn, strict=True)):
        if n * share.denominator < (begun + 1) * share.numerator:
            deadline = -(-(n + 1) * share.denominator // share.numerator)
            if deadline < earliest:
                first, earliest = i, deadline
    return first


def length(shares: Sequence[Fraction], limits: Sequence[int]) -> int:
    """Draws until a source is due that has given all its `limits[i]` prompts.

    After a period (the common denominator of the shares) every source has given exactly its share, so that whole
    periods need no look.
    """
    period = math.lcm(*(share.denominator for share in shares))
    per_period = [int(share * period) for share in shares]
    periods = min(limit // each for limit, each in zip(limits, per_period, strict=True))
    drawn = [periods * each for each in per_period]
    while drawn[i := due(shares, drawn)] < limits[i]:
        drawn[i] += 1
    return sum(drawn)
