"""What the trainer and rollout roles need from whatever computes for them; `backends.py` builds it.

Everything with weights in it hides behind these: a transformers model on this machine, or a timed model of a large one
(`simulation`). The roles know neither torch nor which of them it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from areal_hpc.trajectory import Key, Trajectory

if TYPE_CHECKING:
    from areal_hpc.checkpoint import FileRecord
    from areal_hpc.engines.base import Engine
    from areal_hpc.rewards import RewardResult
    from areal_hpc.workflows.episodes import WorkflowCompute

Between = Callable[[], None]
"""Called again and again while a batch is being trained, so that messages move on."""

ActivityHook = Callable[[str], AbstractContextManager[object]]
"""Entered with the label of an activity around the part of a step that it names."""


# ------------------------------------------------------------------------------------------------- trainer ranks
@dataclass(frozen=True, slots=True)
class Batch:
    """This rank's share of one training batch.

    Attributes:
        trajectories: [n], None for samples that other ranks hold.
        advantages: float64 [sum of turns], one per turn of every sequence of the whole batch.
        micro_batches: [minibatch] -> micro-batches of this rank, lists of indices into `trajectories`; may be empty.
        minibatch_tokens: [minibatch] -> sampled tokens over all ranks, the denominator of the token mean.
        first_turn: int64 [n], where the turns of each sequence begin in `advantages`; None: each is a single turn.
    """

    trajectories: Sequence[Trajectory | None]
    advantages: NDArray[np.float64]
    micro_batches: Sequence[Sequence[Sequence[int]]]
    minibatch_tokens: Sequence[int]
    first_turn: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did. `skipped`: loss or gradient norm was not finite on some rank; weights are as before.

    `phases`: proximal_s, update_s and their total_s.
    """

    skipped: bool
    stats: dict[str, float]
    phases: dict[str, float]


class Learns(Protocol):
    """The policy with its optimizer."""

    def train(self, batch: Batch) -> StepResult:
        """One optimizer step per minibatch, together with all other trainer ranks. An exception of `Between` leaves
        the step as if it had never begun."""

    def state(self) -> Mapping[str, Any]:
        """Weights and optimizer of this moment, as copies."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""


class Update(Protocol):
    """A weight update that has left: training stood still for `snapshot_s`, the broadcast took `broadcast_s`."""

    @property
    def version(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def snapshot_s(self) -> float: ...
    @property
    def broadcast_s(self) -> float: ...


class Sender(Protocol):
    """The root of the weight broadcast. Ranks are those of its groups."""

    @property
    def last(self) -> Update | None:
        """The newest update that has left."""

    def publish(self, version: int, tensors: Mapping[str, Any]) -> object:
        """Snapshot the weights and start to broadcast them; the caller may change them on return."""

    def hold(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Snapshot the weights; they leave after the next `regroup`."""

    def regroup(self, members: Sequence[int], generation: int) -> None:
        """Give up what is under way, build a group of these ranks, and broadcast the newest snapshot to it."""

    def poll(self) -> bool:
        """True when no update is under way; never blocks."""

    def wait(self) -> None:
        """Block until no update is under way."""


@dataclass(frozen=True, slots=True)
class TrainerCompute:
    """What computes for a trainer rank.

    Attributes:
        make_learner: the learner, given what to call between micro-batches and around the parts of a step.
        weights: the current ones by name, as `Sender.publish` takes them.
        sender: None on all trainer ranks but the first.
        save: writes the model into a directory.
        write_state, read_state: the learner's state to and from a file of a checkpoint; they run in any thread.
    """

    make_learner: Callable[[Between, ActivityHook], Learns]
    weights: Callable[[], Mapping[str, Any]]
    sender: Sender | None
    save: Callable[[Path], None]
    write_state: Callable[[Path, Mapping[str, Any]], FileRecord]
    read_state: Callable[[Path], Mapping[str, Any]]


# ------------------------------------------------------------------------------------------------- rollout ranks
class Arrived(Protocol):
    """A complete set of weights; `tensors` are valid until the next `begin`."""

    @property
    def version(self) -> int: ...
    @property
    def tensors(self) -> Mapping[str, Any]: ...
    @property
    def receive_s(self) -> float: ...


class Receiver(Protocol):
    """A leaf of the weight broadcast."""

    def begin(self, version: int) -> None:
        """Start to receive; one version at a time."""

    def regroup(self, members: Sequence[int], generation: int) -> None:
        """Give up what is under way, build a group of these ranks, and receive what its sender sends first."""

    def poll(self) -> Arrived | None:
        """The set once it is complete; never blocks."""


class NoUpdates:
    """The `Receiver` of a run that trains nothing."""

    def begin(self, version: int) -> None:
        raise RuntimeError(f"version {version} was announced in a run without trainers")

    def regroup(self, members: Sequence[int], generation: int) -> None:
        raise RuntimeError("a run without trainers has no weights group")

    def poll(self) -> Arrived | None:
        return None


class Rewards(Protocol):
    """Scores answers while decoding goes on."""

    num_restarts: int

    @property
    def num_pending(self) -> int:
        """Answers submitted and not yet returned."""

    def submit(
        self, key: Key, prompt: str, completion: str, metadata: dict[Any, Any], facts: Mapping[str, Any] = ...
    ) -> None:
        """Queue one answer with what is known about it (rewards.recipe.FACTS); never blocks."""

    def poll(self) -> list[RewardResult]:
        """Results since the last call, each answer exactly once; never blocks."""


@dataclass(frozen=True, slots=True)
class RolloutCompute:
    """What computes for a rollout rank.

    Attributes:
        encode: text -> token ids.
        decode: token ids -> text as the reward function sees it.
        workflow: what episodes of several turns need; None: an answer is a single turn.
    """

    encode: Callable[[str], Iterable[int]]
    decode: Callable[[NDArray[np.int32]], str]
    engine: Engine
    receiver: Receiver
    rewards: Rewards
    workflow: WorkflowCompute | None = None
