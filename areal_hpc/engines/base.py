"""What every generation engine promises to the rollout role."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from areal_hpc.trajectory import Key

if TYPE_CHECKING:
    from torch import Tensor

Finish = Literal["eos", "length"]


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to generate.

    Attributes:
        key: (group id, sample index).
        prompt: token ids, at least one.
        max_new_tokens: response budget in tokens, interruptions included.
        seed: 63-bit seed of this sample's own random stream; the same seed, prompt and weights give the same
            response whatever else runs in the batch.
        min_version: the sample must not start before the engine holds at least this policy version.
    """

    key: Key
    prompt: tuple[int, ...]
    max_new_tokens: int
    seed: int
    min_version: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished sample.

    Attributes:
        key: that of the request.
        tokens: int32 [R], response with its end-of-sequence token if it ended by itself.
        logprobs: float32 [R], log-prob of each token under the version that sampled it.
        versions: int32 [R], that version.
        finish: "eos", or "length" when the budget ran out.
        interruptions: weight updates this sample lived through.
        started_s: time.monotonic() at its first prefill.
        finished_s: time.monotonic() after its last token.
    """

    key: Key
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish: Finish
    interruptions: int
    started_s: float
    finished_s: float


@dataclass(frozen=True, slots=True)
class Swap:
    """What one weight update cost: decoding stood still for `pause_s`, re-prefill included."""

    version: int
    pause_s: float
    interrupted: int
    reprefilled_tokens: int


class Engine(Protocol):
    """Continuous batching over a fixed number of slots, interruptible between two tokens."""

    version: int

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue samples; they start, oldest first, as slots fall free."""

    def step(self) -> list[Completion]:
        """Fill free slots, decode one token for every running sample, return those that finished."""

    def cancel(self, keys: Iterable[Key]) -> int:
        """Forget samples, running or waiting; unknown keys are ignored. Returns how many there were."""

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Swap | None:
        """Swap in a complete set of weights between two tokens; every KV entry is dropped and computed anew.

        An engine that does not interrupt keeps the set aside until its running samples have ended, and returns None;
        `take_swap` tells later.
        """

    def take_swap(self) -> Swap | None:
        """A swap that was made by `step` since the last call, if any."""
