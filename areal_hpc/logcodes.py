"""Names that travel and are stored as small integers; the order of their members is part of the file format."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """A name that travels and is stored as a small integer; its label is the lower-case member name."""

    @property
    def label(self) -> str:
        return self.name.lower()

    @classmethod
    def of(cls, label: str) -> Code:
        """The member with this label; KeyError if there is none."""
        return cls[label.upper()]

    @classmethod
    def labels(cls) -> tuple[str, ...]:
        """All labels, indexed by code: codes run from 0 without a gap."""
        return tuple(member.label for member in sorted(cls))


class Outcome(Code):
    """What the reward service found; the last three have no reward.

    truncated: the response met its limit, and `reward.truncated` is mask.
    """

    CORRECT = 0
    WRONG = 1
    UNPARSED = 2
    TIMEOUT = 3
    ERROR = 4
    TRUNCATED = 5


class Finish(Code):
    """Why a response ended: its own end-of-sequence token, or the budget."""

    EOS = 0
    LENGTH = 1


class Fate(Code):
    """What became of a finished sample.

    consumed: trained on; filtered: its group was rejected by the success filter; excluded: its group was consumed,
    this sample took no part (no usable reward); leftover: finished, the run ended first; dropped: its group was
    given up.
    """

    CONSUMED = 0
    FILTERED = 1
    EXCLUDED = 2
    LEFTOVER = 3
    DROPPED = 4


class Activity(Code):
    """What a rank is busy with; idle is everything that is not named."""

    IDLE = 0
    STARTUP = 1
    GENERATE = 2
    SWAP = 3
    SHIP = 4
    WAIT_BATCH = 5
    RECEIVE = 6
    TRAIN_PROXIMAL = 7
    TRAIN_UPDATE = 8
    PUBLISH = 9
    SCHEDULE = 10
    LOG = 11
    SCORE = 12
