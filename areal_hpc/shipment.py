"""Trajectories of one step as the arrays of a Samples message, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from areal_hpc.trajectory import BadTrajectory, Trajectory


def join(trajectories: Sequence[Trajectory]) -> dict[str, NDArray]:
    """Concatenate; see messages.Samples for the arrays."""
    return {
        "group_id": np.array([t.group_id for t in trajectories], np.int64),
        "sample": np.array([t.sample for t in trajectories], np.int32),
        "num_prompt": np.array([t.num_prompt for t in trajectories], np.int32),
        "num_response": np.array([t.num_response for t in trajectories], np.int32),
        "tokens": _concatenate([t.tokens for t in trajectories], np.int32),
        "logprobs": _concatenate([t.logprobs for t in trajectories], np.float32),
        "versions": _concatenate([t.versions for t in trajectories], np.int32),
    }


def split(arrays: Mapping[str, NDArray]) -> list[Trajectory]:
    """The trajectories again, each validated.

    Raises:
        BadTrajectory: lengths do not add up, or a trajectory contradicts itself.
    """
    prompts, responses = arrays["num_prompt"], arrays["num_response"]
    counts = {name: len(arrays[name]) for name in ("group_id", "sample", "num_prompt", "num_response")}
    total = int(prompts.sum() + responses.sum())
    if len(set(counts.values())) != 1 or (prompts < 1).any() or (responses < 1).any():
        raise BadTrajectory(f"samples disagree about their number or have no tokens: {counts}")
    if len(arrays["tokens"]) != total or not len(arrays["logprobs"]) == len(arrays["versions"]) == int(responses.sum()):
        raise BadTrajectory(
            f"lengths add up to {total} tokens with {int(responses.sum())} responses, "
            f"got {len(arrays['tokens'])} tokens, {len(arrays['logprobs'])} log-probs "
            f"and {len(arrays['versions'])} versions"
        )
    out = []
    sequence, response = 0, 0
    for i in range(len(prompts)):
        p, r = int(prompts[i]), int(responses[i])
        trajectory = Trajectory(
            int(arrays["group_id"][i]),
            int(arrays["sample"][i]),
            arrays["tokens"][sequence : sequence + p + r],
            p,
            arrays["logprobs"][response : response + r],
            arrays["versions"][response : response + r],
        )
        trajectory.validate()
        out.append(trajectory)
        sequence, response = sequence + p + r, response + r
    return out


def _concatenate(parts: Sequence[NDArray], dtype: type) -> NDArray:
    return np.concatenate([np.asarray(p, dtype) for p in parts]) if parts else np.zeros(0, dtype)
