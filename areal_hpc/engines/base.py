"""What every generation engine promises to the rollout role."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from areal_hpc.trajectory import Key

if TYPE_CHECKING:
    from torch import Tensor

Finish = Literal["eos", "length", "stop"]


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """The beginning of a sample that is not finished; with its request and any engine, it goes on from there.

    Attributes:
        tokens: int32 [k], response so far; k may be 0.
        logprobs: float32 [k], log-prob of each token under the version that sampled it.
        versions: int32 [k], that version; never falling.
        interruptions: weight updates lived through so far.
        spent_s: seconds since its first prefill, in this and earlier attempts, without the time between attempts.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    interruptions: int = 0
    spent_s: float = 0.0

    @property
    def last_version(self) -> int | None:
        return int(self.versions[-1]) if len(self.versions) else None


NOT_BEGUN = Begun(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))


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
        temperature: of the sampling distribution; 0 is greedy (log-probs are then 0).
        begun: tokens that it has already. They count towards max_new_tokens, come first in its completion as they are,
            and use up the first numbers of its random stream. Going on with a newer version than that of the last
            one counts as an interruption.
        given: how many of these are from before this request was first made (earlier turns of an episode): they do not
            end it, whatever they are.
        stop: told the response so far, int32 [k], after each token: whether the sample ends here.
    """

    key: Key
    prompt: tuple[int, ...]
    max_new_tokens: int
    seed: int
    min_version: int = 0
    temperature: float = 1.0
    begun: Begun = NOT_BEGUN
    given: int = 0
    stop: Callable[[NDArray[np.int32]], bool] | None = None

    @property
    def earliest_version(self) -> int:
        """The sample may go on with this policy version or a newer one: versions never fall along a sample."""
        last = self.begun.last_version
        return self.min_version if last is None else max(self.min_version, last)

    def interruptions(self, version: int) -> int:
        """Those of its beginning, and one more if it goes on with a newer version."""
        last = self.begun.last_version
        return self.begun.interruptions + (last is not None and last < version)

    def ended(self, finish: Finish, now_s: float) -> Completion:
        """The completion of a sample whose beginning is all of it."""
        begun = self.begun
        arrays = (begun.tokens, begun.logprobs, begun.versions)
        return Completion(self.key, *arrays, finish, begun.interruptions, now_s - begun.spent_s, now_s)


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished sample.

    Attributes:
        key: that of the request.
        tokens: int32 [R], response with its end-of-sequence token if it ended by itself.
        logprobs: float32 [R], log-prob of each token under the version that sampled it.
        versions: int32 [R], that version.
        finish: "eos", "length" when the budget ran out, or "stop" where the request's `stop` said so.
        interruptions: weight updates this sample lived through.
        started_s: time.monotonic() at its first prefill; for a sample that had begun before, as much earlier than it
            went on as it had spent already (which may be before this attempt).
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

    @property
    def begun(self) -> Begun:
        """What a request needs to get to this completion again."""
        spent_s = self.finished_s - self.started_s
        return Begun(self.tokens, self.logprobs, self.versions, self.interruptions, spent_s)


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
    def num_running(self) -> int:
        """Those that have ended and are not returned by `step` yet count as well."""

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue samples; they start, or go on, oldest first, as slots fall free.

        One whose beginning is all of it is returned by the next step.
        """

    def step(self) -> list[Completion]:
        """Fill free slots, decode one token for every running sample, return those that finished."""

    def partials(self) -> dict[Key, Begun]:
        """All samples that have begun and are not returned by `step` yet: copies, and nothing is disturbed.

        A sample in flight that is not among them has no token to lose.
        """

    def cancel(self, keys: Iterable[Key]) -> int:
        """Forget samples, running or waiting; unknown keys are ignored. Returns how many there were."""

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Swap | None:
        """Swap in a complete set of weights between two tokens; every KV entry is dropped and computed anew.

        An engine that does not interrupt keeps the set aside until its running samples have ended, and returns None;
        `take_swap` tells later.
        """

    def take_swap(self) -> Swap | None:
        """A swap that was made by `step` since the last call, if any."""
