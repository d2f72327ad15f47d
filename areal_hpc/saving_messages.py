"""Messages about checkpoints; part of messages.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from areal_hpc.codec import Message


class SaveTrainer(Message):
    """Controller -> every trainer: leave the step you are in, if any; the first writes the version before it there."""

    step: int
    path: str


class TrainerSaved(Message):
    """First trainer -> controller: weights and optimizer of the version after `step` are in this file."""

    step: int
    name: str
    num_bytes: int
    sha256: str
    copy_s: float
    write_s: float


class SaveFailed(Message):
    """Trainer or rollout -> controller: my part of this checkpoint could not be written."""

    step: int
    reason: str


class SaveGroups(Message):
    """Controller -> rollout: write all groups you hold into this file; generation goes on."""

    step: int
    path: str


class GroupsSaved(Message):
    """Rollout -> controller: they are there. Decoding stood still for `copy_s`."""

    step: int
    name: str
    num_bytes: int
    sha256: str
    num_groups: int
    num_partial_tokens: int
    copy_s: float
    write_s: float


class RestoreGroups(Message):
    """Controller -> rollout: take these groups of an earlier attempt from this file and go on with them."""

    ARRAYS: ClassVar[Mapping[str, str]] = {"group_id": "int64"}
    path: str


class GroupsRestored(Message):
    """Rollout -> controller: they are back."""

    num_groups: int
    num_finished_samples: int
    num_partial_tokens: int
