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
    """

    group_id: int
    sample: int
    tokens: NDArray[np.int32]
    num_prompt: int
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]

    @property
    def key(self) -> Key:
        return (self.group_id, self.sample)

    @property
    def num_response(self) -> int:
        return len(self.tokens) - self.num_prompt

    def validate(self) -> None:
        """Raise BadTrajectory when lengths disagree, a log-prob is above 0, or versions fall.

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
