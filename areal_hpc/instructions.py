"""What happens to the controller's state, and what is to be done then: the vocabulary of controller_state.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


# ------------------------------------------------------------------------------------------------------ events
@dataclass(frozen=True, slots=True)
class Start:
    """Rollout ranks hold the weights of the first version; admission may begin."""


@dataclass(frozen=True, slots=True)
class CreditsGranted:
    """A rollout rank can take `num_samples` more samples."""

    rank: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class GroupDone:
    """A group is generated and scored: `usable` samples have a reward, `correct` of them are right."""

    group_id: int
    usable: int
    correct: int


@dataclass(frozen=True, slots=True)
class GroupRefusedByRank:
    """A rollout rank cannot generate from this prompt."""

    group_id: int


@dataclass(frozen=True, slots=True)
class BatchTrained:
    """Trainers are through with the oldest taken batch; `skipped`: nothing was updated."""

    skipped: bool


@dataclass(frozen=True, slots=True)
class SamplesHere:
    """The trainers hold all samples of the batch of step `step`: it no longer depends on any rollout rank."""

    step: int


@dataclass(frozen=True, slots=True)
class RankLost:
    """A rollout rank is gone, with the tokens of all groups it held."""

    rank: int


Event = Start | CreditsGranted | GroupDone | GroupRefusedByRank | BatchTrained | SamplesHere | RankLost


# ------------------------------------------------------------------------------------------------ instructions
@dataclass(frozen=True, slots=True)
class Admit:
    """Send the next prompt to `rank` as group `group_id`."""

    group_id: int
    rank: int
    min_version: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Have `rank` go on with group `group_id` of an earlier attempt."""

    group_id: int
    rank: int


@dataclass(frozen=True, slots=True)
class Readmit:
    """Have `rank` generate group `group_id` anew; the rank that held it is lost."""

    group_id: int
    rank: int
    min_version: int


@dataclass(frozen=True, slots=True)
class Recall:
    """The batches of step `step` and later are none: samples are lost. They will be composed again."""

    step: int


@dataclass(frozen=True, slots=True)
class Compose:
    """Make these groups, in this order, the batch of step `step` and have them shipped to the trainers."""

    step: int
    group_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """The rollout rank may forget this group; it is not trained on.

    Another one takes its place, but for a filtered group where `filter.refill` is off.
    """

    group_id: int
    rank: int
    why: Literal["filtered", "unscored", "refused", "skipped"]


@dataclass(frozen=True, slots=True)
class EmptyBatch:
    """The filter has left nothing of a batch: there is no step, and its places are given to new groups."""

    num_groups: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the rollout ranks to load policy version `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing more to train on."""

    why: Literal["last step reached", "data set exhausted"]


Instruction = Admit | Restore | Readmit | Recall | Compose | Leave | EmptyBatch | Announce | Finish
