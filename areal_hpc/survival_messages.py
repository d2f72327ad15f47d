"""Messages of a run that goes on without a lost rollout rank; part of messages.py.

note of its death, or silence
controller --PeerLost-----------------> trainers, reward ranks    nothing of it, nothing for it
controller --RecallBatches------------> trainers          samples of lost groups are not waited for
controller --AdmitGroup---------------> other rollouts    the same groups again
controller --Regroup------------------> first trainer, other rollouts    weights go around the dead
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from areal_hpc.codec import Message


class Pulse(Message):
    """Controller -> every other rank, now and then: I am alive. Only where the death of a rank ends nobody else."""


class PeerLost(Message):
    """Controller -> every trainer and reward rank: this rollout rank is lost; forget it and what it sent in part."""

    rank: int


class RecallBatches(Message):
    """Controller -> every trainer: forget the batches of this step and later, and their samples."""

    step: int


class WeightsTorn(Message):
    """First trainer or rollout -> controller: this generation of the weights group does not work any more."""

    generation: int
    reason: str


class Regroup(Message):
    """Controller -> first trainer and rollouts: leave the weights group and build the next one of these ranks.

    Then the sender sends the newest version anew. Arrays: rank [n], world ranks, the sender first.
    """

    ARRAYS: ClassVar[Mapping[str, str]] = {"rank": "int64"}
    generation: int
