"""The staleness rule (paper 4.1), as functions of integers: no clock, no lock, no messages.

A prompt group may be admitted iff

    floor((N_r - 1) / B) <= i + eta

N_r   number of this group, from 1, counting every admitted group that has not left the count (rejected, failed and
      skipped groups leave it), the candidate included
B     prompt groups per training batch
i     newest policy version that rollout ranks have been told to load
eta   the permitted staleness in versions; math.inf for no limit

We depart from AReaL in two ways: admission and consumption are counted by one owner, so nothing in transit is
missed; and a group carries i as the least version that may sample its first token, so that with consumption in
admission order the lag of a first token is at most eta, not eta + 1 while weights are still on their way.
"""

from __future__ import annotations

import math
from typing import TypeVar

from numpy import int32
from numpy.typing import NDArray

Versions = TypeVar("Versions", int, NDArray[int32])


def may_admit(number: int, batch_size: int, version: int, max_staleness: float) -> bool:
    """The rule itself; `number` is N_r >= 1, `max_staleness` is eta (an integer or math.inf)."""
    return math.isinf(max_staleness) or (number - 1) // batch_size <= version + max_staleness


def room(counted: int, batch_size: int, version: int, max_staleness: float) -> float:
    """How many more groups the rule admits now, given `counted` groups in the count; math.inf without a limit."""
    if math.isinf(max_staleness):
        return math.inf
    return max(0, (version + int(max_staleness) + 1) * batch_size - counted)


def counted_at_resume(version: int, batch_size: int, restored_groups: int) -> int:
    """The count to restart from at policy version `version`: v batches are consumed, restored groups count once."""
    return version * batch_size + restored_groups


def lag(trainer_version: int, token_version: Versions) -> Versions:
    """Version lag of tokens (one version or an array of them) when they are trained on; head lag for first tokens,
    tail lag for last ones."""
    return trainer_version - token_version
