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
        "turns": _turns(trajectories),
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
    num_turns = len(arrays["turns"]) or int(responses.sum())
    if len(arrays["tokens"]) != total or not (
        len(arrays["logprobs"]) == len(arrays["versions"]) == num_turns == int(responses.sum())
    ):
        raise BadTrajectory(
            f"lengths add up to {total} tokens with {int(responses.sum())} responses, "
            f"got {len(arrays['tokens'])} tokens, {len(arrays['logprobs'])} log-probs, "
            f"{len(arrays['versions'])} versions and {len(arrays['turns'])} turns"
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
            arrays["turns"][response : response + r] if len(arrays["turns"]) else None,
        )
        trajectory.validate()
        out.append(trajectory)
        sequence, response = sequence + p + r, response + r
    return out


def _turns(trajectories: Sequence[Trajectory]) -> NDArray[np.int16]:
    """Empty if all of them are single turns."""
    if all(t.turns is None for t in trajectories):
        return np.zeros(0, np.int16)
    parts = [np.zeros(t.num_response, np.int16) if t.turns is None else t.turns for t in trajectories]
    return _concatenate(parts, np.int16)


def _concatenate(parts: Sequence[NDArray], dtype: type) -> NDArray:
    return np.concatenate([np.asarray(p, dtype) for p in parts]) if parts else np.zeros(0, dtype)
