"""One sampled answer with everything the trainer needs to learn from it.

A trajectory may have been sampled by several policy versions: every response token carries the version that
sampled it and the log-prob under exactly that version (behaviour policy, paper Proposition 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Key = tuple[int, int]
"""(group id, sample index): names one trajectory in a whole run."""


ENVIRONMENT = -1
"""The turn of a token that no policy sampled."""


class BadTrajectory(ValueError):
    """A trajectory whose parts contradict each other; it must never reach the objective."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Prompt and response of one sample.

    Attributes:
        group_id: admission number of the prompt group, unique within a run.
        sample: index within the group, 0 .. group_size - 1.
        tokens: int32 [P + R], prompt then response, end-of-sequence token included.
        num_prompt: P.
        logprobs: float32 [R], behaviour log-prob of each response token, natural log.
        versions: int32 [R], policy version that sampled each response token; never decreasing.
        turns: int16 [R], turn of the episode that each response token belongs to; ENVIRONMENT for one that a workflow
            put in: it has log-prob 0, the version of that moment, and no part in the loss. None: one turn is all.
    """

    group_id: int
    sample: int
    tokens: NDArray[np.int32]
    num_prompt: int
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    turns: NDArray[np.int16] | None = None

    @property
    def key(self) -> Key:
        return (self.group_id, self.sample)

    @property
    def num_response(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """[R]: which response tokens the policy sampled."""
        return np.ones(self.num_response, np.bool_) if self.turns is None else self.turns != ENVIRONMENT

    def validate(self) -> None:
        """Raise BadTrajectory when lengths disagree, a log-prob is above 0, versions fall or turns make no sense.

        A log-prob that is not a number passes: it makes the loss not finite, and that is agreed on by all trainers.
        """
        where = f"trajectory {self.group_id}/{self.sample}"
        response = self.num_response
        if self.num_prompt < 1 or response < 1:
            raise BadTrajectory(
                f"{where}: prompt of {self.num_prompt} and response of {response} tokens; both need at least one"
            )
        if len(self.logprobs) != response or len(self.versions) != response:
            raise BadTrajectory(
                f"{where}: {response} response tokens but {len(self.logprobs)} log-probs "
                f"and {len(self.versions)} versions"
            )
        if (self.logprobs > 1e-6).any():
            raise BadTrajectory(f"{where}: behaviour log-prob of {self.logprobs.max()}; none may be above 0")
        if (np.diff(self.versions) < 0).any() or self.versions[0] < 0:
            raise BadTrajectory(
                f"{where}: policy versions must not fall along a trajectory, got {self.versions.tolist()[:8]}..."
            )
        if self.turns is not None:
            self._validate_turns(where, self.turns)

    def _validate_turns(self, where: str, turns: NDArray[np.int16]) -> None:
        if len(turns) != self.num_response:
            raise BadTrajectory(f"{where}: {self.num_response} response tokens but {len(turns)} of them have a turn")
        sampled = turns[turns != ENVIRONMENT]
        if not len(sampled) or sampled[0] < 0 or (np.diff(sampled) < 0).any():
            raise BadTrajectory(f"{where}: turns must count up from 0 and hold a token, got {turns.tolist()[:8]}...")
