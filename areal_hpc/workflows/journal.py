"""What an episode has come to, in the form in which it survives the end of a job.

A coroutine cannot be stored. Stored is what it was given; in the next attempt it runs again from its beginning and
gets that again, as long as it asks for the same things. The tokens are with the sample (rollout_state.py); a journal
says how they fall into turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from areal_hpc.trajectory import ENVIRONMENT


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """One thing that a workflow asked for and got.

    Attributes:
        kind: turn: the model wrote; append: the workflow did; run: a tool.
        asked: digest of what exactly was asked for.
        num_tokens: of a turn or of what was appended.
        note: finish of a turn; what became of a run: done, error, timeout.
        value: what a run returned, as msgpack, or why it failed, as UTF-8.
    """

    kind: Literal["turn", "append", "run"]
    asked: bytes
    num_tokens: int = 0
    note: str = ""
    value: bytes = b""


class Journal(msgspec.Struct, array_like=True):
    """All entries so far; `rewards`: one per turn, of an episode that has ended and was not left to a function."""

    entries: list[Entry] = []
    rewards: list[float] | None = None

    @property
    def turn_tokens(self) -> list[int]:
        """Sampled tokens of each turn."""
        return [entry.num_tokens for entry in self.entries if entry.kind == "turn"]

    def turn_rewards(self, reward: float) -> list[float]:
        """One per turn; `reward` is that of the whole, and falls to the last turn if nothing else is known."""
        num_turns = len(self.turn_tokens)
        if self.rewards is not None and len(self.rewards) == num_turns:
            return self.rewards
        return [0.0] * (num_turns - 1) + [reward] if num_turns else []


def turns_of(entries: Sequence[Entry]) -> NDArray[np.int16]:
    """int16 [tokens of all entries]: the turn of each, ENVIRONMENT for what was appended."""
    parts, turn = [np.zeros(0, np.int16)], 0
    for entry in entries:
        if entry.kind == "turn":
            parts.append(np.full(entry.num_tokens, turn, np.int16))
            turn += 1
        else:
            parts.append(np.full(entry.num_tokens, ENVIRONMENT, np.int16))
    return np.concatenate(parts)


def digest(*what: Any) -> bytes:
    """Eight bytes that tell requests apart."""
    return blake2b(msgspec.msgpack.encode(what), digest_size=8).digest()
