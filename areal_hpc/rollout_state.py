"""The groups a rollout rank holds: as it works on them, and as flat arrays in a file of a checkpoint.

    groups, partial samples --snapshot--> SavedGroup --pack_groups--> arrays --> file (group_files) --> SavedGroup

A snapshot is taken between two tokens. It copies what still grows and shares what is final, so it takes milliseconds;
packing and writing are left to a thread. The arrays are plain numbers and byte buffers, so nothing is ever unpickled.
The token ids of prompts are not stored: they follow from the text.

The clock of an attempt ends with it, so durations are stored, not moments: a finished sample counts as finished at the
moment it is read, a partial one goes on with the time it has spent already. Either may have begun before the attempt.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from areal_hpc.engines.base import NOT_BEGUN, Begun, Completion
from areal_hpc.logschema import Finish, Outcome
from areal_hpc.messages import AdmitGroup
from areal_hpc.preflight import RunClock
from areal_hpc.rewards import RewardResult
from areal_hpc.trajectory import ENVIRONMENT, Key, Trajectory
from areal_hpc.workflows.journal import Journal, turns_of

PER_GROUP = {"group_id": "int64", "header_bytes": "int64"}
PER_SAMPLE = {
    "state": "uint8",
    "num_tokens": "int64",
    "interruptions": "int32",
    "spent_s": "float64",
    "finish": "uint8",
    "scored": "uint8",
    "reward": "float64",
    "outcome": "uint8",
    "reward_s": "float64",
    "detail_bytes": "int64",
}
EPISODES = {"journal_bytes": "int64", "journal": "uint8"}
"""Only where a workflow writes the samples: per sample, the length of its part of `journal`, a Journal as msgpack."""
ARRAYS = {
    **PER_GROUP,
    **PER_SAMPLE,
    "header": "uint8",
    "detail": "uint8",
    "tokens": "int32",
    "logprobs": "float32",
    "versions": "int32",
}
"""Name and dtype of every array, all of one dimension.

Per group: group_id, and the length of its part of `header`, an AdmitGroup as msgpack. Per sample, group by group:
state (below), the length of its part of tokens, logprobs and versions, and the other figures of Completion, Begun and
RewardResult; finish counts in state FINISHED, reward, outcome, reward_s and its part of `detail` (UTF-8) if `scored`.
"""

WAITING, PARTIAL, FINISHED = range(3)
Value = TypeVar("Value")


class BadGroups(ValueError):
    """Arrays that `pack_groups` has not made."""


@dataclass(slots=True)
class Group:
    """One admitted prompt with what is known of its samples so far."""

    header: AdmitGroup
    prompt: tuple[int, ...]
    completions: dict[int, Completion] = field(default_factory=dict)
    rewards: dict[int, RewardResult] = field(default_factory=dict)
    journals: dict[int, Journal] = field(default_factory=dict)
    """Of finished episodes; empty without a workflow."""

    @property
    def is_complete(self) -> bool:
        return len(self.rewards) == self.header.num_samples

    def trajectory(self, sample: int) -> Trajectory:
        done = self.completions[sample]
        tokens = np.concatenate([np.asarray(self.prompt, np.int32), done.tokens])
        arrays = (tokens, len(self.prompt), done.logprobs, done.versions, self.turns(sample))
        return Trajectory(self.header.group_id, sample, *arrays)

    def turns(self, sample: int) -> NDArray[np.int16] | None:
        """[response tokens] as in Trajectory; None without a workflow."""
        journal = self.journals.get(sample)
        return None if journal is None else turns_of(journal.entries)

    def sampled_versions(self, sample: int) -> NDArray[np.int32]:
        """Of what the policy has written; of a failed episode without any such token, that of its admission."""
        versions, turns = self.completions[sample].versions, self.turns(sample)
        if turns is not None:
            versions = versions[turns != ENVIRONMENT]
        return versions if len(versions) else np.array([self.header.min_version], np.int32)

    def turn_figures(self) -> dict[str, NDArray]:
        """Number of turns of each sample; reward and sampled tokens of each turn."""
        rewards: list[list[float]] = []
        tokens: list[list[int]] = []
        for sample in range(self.header.num_samples):
            journal, reward = self.journals.get(sample), self.rewards[sample].reward
            rewards.append([reward] if journal is None else journal.turn_rewards(reward))
            tokens.append([len(self.completions[sample].tokens)] if journal is None else journal.turn_tokens)
        return {
            "num_turns": np.array([len(turns) for turns in tokens], np.int32),
            "turn_reward": np.array(sum(rewards, []), np.float64),
            "turn_tokens": np.array(sum(tokens, []), np.int32),
        }

    def figures(self, clock: RunClock) -> dict[str, NDArray]:
        """The arrays of GroupFinished, by sample index."""
        order = range(self.header.num_samples)
        done = [self.completions[s] for s in order]
        scored = [self.rewards[s] for s in order]
        versions = [self.sampled_versions(s) for s in order]
        return self.turn_figures() | {
            "reward": np.array([r.reward for r in scored], np.float64),
            "outcome": np.array([Outcome.of(r.outcome) for r in scored], np.uint8),
            "finish": np.array([Finish.of(c.finish) for c in done], np.uint8),
            "num_response": np.array([len(c.tokens) for c in done], np.int32),
            "first_version": np.array([v[0] for v in versions], np.int32),
            "last_version": np.array([v[-1] for v in versions], np.int32),
            "mean_version": np.array([v.mean() for v in versions], np.float32),
            "interruptions": np.array([c.interruptions for c in done], np.int32),
            "start_s": np.array([clock.at(c.started_s) for c in done], np.float64),
            "finish_s": np.array([clock.at(c.finished_s) for c in done], np.float64),
        }


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A group at one moment; samples in neither `completions` nor `begun` have not begun. `journals`: of episodes."""

    header: AdmitGroup
    completions: Mapping[int, Completion]
    rewards: Mapping[int, RewardResult]
    begun: Mapping[int, Begun]
    journals: Mapping[int, Journal] = field(default_factory=dict)

    @property
    def num_partial_tokens(self) -> int:
        return sum(len(begun.tokens) for begun in self.begun.values())

    def state(self, sample: int) -> int:
        return FINISHED if sample in self.completions else PARTIAL if sample in self.begun else WAITING

    def so_far(self, sample: int) -> Begun:
        done = self.completions.get(sample)
        return self.begun.get(sample, NOT_BEGUN) if done is None else done.begun


def snapshot(
    groups: Iterable[Group], partials: Mapping[Key, Begun], journals: Mapping[Key, Journal] | None = None
) -> list[SavedGroup]:
    """All groups that are for training, as they are now: later tokens and rewards do not show in it."""

    def of(group: Group, values: Mapping[Key, Value]) -> dict[int, Value]:
        keys = [(group.header.group_id, sample) for sample in range(group.header.num_samples)]
        return {key[1]: values[key] for key in keys if key in values}

    return [
        SavedGroup(
            group.header,
            dict(group.completions),
            dict(group.rewards),
            of(group, partials),
            of(group, journals or {}) | group.journals,
        )
        for group in groups
        if group.header.purpose == "train"
    ]


# ------------------------------------------------------------------------------------------------ arrays and back
def pack_groups(groups: Sequence[SavedGroup]) -> dict[str, NDArray[Any]]:
    """Everything about these groups as the arrays of `ARRAYS`, and of `EPISODES` if there are any."""
    samples = [(group, sample) for group in groups for sample in range(group.header.num_samples)]
    so_far = [group.so_far(sample) for group, sample in samples]
    rewards = [group.rewards.get(sample) for group, sample in samples]
    headers = [msgspec.msgpack.encode(group.header) for group in groups]
    details = [b"" if r is None else r.detail.encode("utf-8", "surrogatepass") for r in rewards]
    finish = [Finish.of(g.completions[s].finish) if s in g.completions else 0 for g, s in samples]
    columns: dict[str, Iterable[Any]] = {
        "group_id": [group.header.group_id for group in groups],
        "header_bytes": [len(header) for header in headers],
        "state": [group.state(sample) for group, sample in samples],
        "num_tokens": [len(begun.tokens) for begun in so_far],
        "interruptions": [begun.interruptions for begun in so_far],
        "spent_s": [begun.spent_s for begun in so_far],
        "finish": finish,
        "scored": [r is not None for r in rewards],
        "reward": [np.nan if r is None else r.reward for r in rewards],
        "outcome": [0 if r is None else Outcome.of(r.outcome) for r in rewards],
        "reward_s": [0.0 if r is None else r.seconds for r in rewards],
        "detail_bytes": [len(detail) for detail in details],
    }
    return {
        **{name: np.array(values, ARRAYS[name]) for name, values in columns.items()},
        "header": np.frombuffer(b"".join(headers), np.uint8),
        "detail": np.frombuffer(b"".join(details), np.uint8),
        **{
            name: np.concatenate([np.zeros(0, ARRAYS[name]), *(getattr(begun, name) for begun in so_far)])
            for name in ("tokens", "logprobs", "versions")
        },
        **_pack_journals([group.journals.get(sample) for group, sample in samples]),
    }


def _pack_journals(journals: Sequence[Journal | None]) -> dict[str, NDArray[Any]]:
    if not any(journals):
        return {}
    texts = [b"" if journal is None else msgspec.msgpack.encode(journal) for journal in journals]
    lengths = np.array([len(text) for text in texts], EPISODES["journal_bytes"])
    return {"journal_bytes": lengths, "journal": np.frombuffer(b"".join(texts), np.uint8)}


def unpack_groups(arrays: Mapping[str, NDArray[Any]], only: Collection[int] | None = None) -> list[SavedGroup]:
    """The groups again, or those of them whose ids are in `only`; nothing refers to `arrays` afterwards.

    Raises:
        BadGroups: the arrays contradict their description or each other.
    """
    headers = _headers(arrays)
    _check_lengths(arrays, sum(header.num_samples for header in headers))
    reader = _Reader(arrays, time.monotonic())
    groups = []
    first = 0
    for header in headers:
        if only is None or header.group_id in only:
            groups.append(reader.group(header, first))
        first += header.num_samples
    return groups


def _headers(arrays: Mapping[str, NDArray[Any]]) -> list[AdmitGroup]:
    found = {name: str(array.dtype) for name, array in arrays.items()}
    if found not in (ARRAYS, ARRAYS | EPISODES) or any(array.ndim != 1 for array in arrays.values()):
        raise BadGroups(f"not the arrays of saved groups: {found}")
    _same("header", len(arrays["header"]), int(arrays["header_bytes"].sum()))
    _same("groups", len(arrays["group_id"]), len(arrays["header_bytes"]))
    texts = np.split(arrays["header"], np.cumsum(arrays["header_bytes"]))[:-1]
    try:
        headers = [msgspec.msgpack.decode(text.tobytes(), type=AdmitGroup) for text in texts]
    except msgspec.MsgspecError as error:
        raise BadGroups(f"a group's header cannot be read: {error}") from None
    if [header.group_id for header in headers] != arrays["group_id"].tolist():
        raise BadGroups("group ids differ from those in the headers")
    return headers


def _check_lengths(arrays: Mapping[str, NDArray[Any]], num_samples: int) -> None:
    for name in PER_SAMPLE:
        _same(name, len(arrays[name]), num_samples)
    for name in ("tokens", "logprobs", "versions"):
        _same(name, len(arrays[name]), int(arrays["num_tokens"].sum()))
    _same("detail", len(arrays["detail"]), int(arrays["detail_bytes"].sum()))
    if "journal" in arrays:
        _same("journal_bytes", len(arrays["journal_bytes"]), num_samples)
        _same("journal", len(arrays["journal"]), int(arrays["journal_bytes"].sum()))
    for name, limit in (("state", 3), ("finish", len(Finish)), ("outcome", len(Outcome))):
        if (arrays[name] >= limit).any():
            raise BadGroups(f"{name} has codes of {limit} or more")


def _same(name: str, length: int, expected: int) -> None:
    if length != expected:
        raise BadGroups(f"{name} has {length} entries, expected {expected}")


class _Reader:
    """Cuts single samples out of the arrays."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], now_s: float) -> None:
        self.arrays, self.now_s = arrays, now_s
        self.token_ends = np.cumsum(arrays["num_tokens"]).tolist()
        self.detail_ends = np.cumsum(arrays["detail_bytes"]).tolist()
        self.journal_ends = np.cumsum(arrays.get("journal_bytes", [])).tolist()

    def group(self, header: AdmitGroup, first: int) -> SavedGroup:
        states = self.arrays["state"][first : first + header.num_samples].tolist()
        by_state: dict[int, list[int]] = {state: [] for state in range(3)}
        for sample, state in enumerate(states):
            by_state[state].append(sample)
        scored = np.flatnonzero(self.arrays["scored"][first : first + header.num_samples]).tolist()
        if not set(scored) <= set(by_state[FINISHED]):
            raise BadGroups(f"group {header.group_id} has rewards of unfinished samples")
        return SavedGroup(
            header,
            {sample: self.completion((header.group_id, sample), first + sample) for sample in by_state[FINISHED]},
            {sample: self.reward((header.group_id, sample), first + sample) for sample in scored},
            {sample: self.begun(first + sample) for sample in by_state[PARTIAL]},
            self.journals(header, first),
        )

    def journals(self, header: AdmitGroup, first: int) -> dict[int, Journal]:
        journals = {}
        for sample in range(header.num_samples if self.journal_ends else 0):
            end, size = self.journal_ends[first + sample], int(self.arrays["journal_bytes"][first + sample])
            if size:
                text = self.arrays["journal"][end - size : end].tobytes()
                try:
                    journals[sample] = msgspec.msgpack.decode(text, type=Journal)
                except msgspec.MsgspecError as error:
                    raise BadGroups(f"a journal of group {header.group_id} cannot be read: {error}") from None
        return journals

    def begun(self, i: int) -> Begun:
        arrays, end = self.arrays, self.token_ends[i]
        part = slice(end - int(arrays["num_tokens"][i]), end)
        return Begun(
            arrays["tokens"][part].copy(),
            arrays["logprobs"][part].copy(),
            arrays["versions"][part].copy(),
            int(arrays["interruptions"][i]),
            float(arrays["spent_s"][i]),
        )

    def completion(self, key: Key, i: int) -> Completion:
        begun, finish = self.begun(i), Finish.labels()[self.arrays["finish"][i]]
        tokens = (begun.tokens, begun.logprobs, begun.versions)
        started_s = self.now_s - begun.spent_s
        return Completion(key, *tokens, finish, begun.interruptions, started_s, self.now_s)  # type: ignore[arg-type]

    def reward(self, key: Key, i: int) -> RewardResult:
        arrays, end = self.arrays, self.detail_ends[i]
        detail = arrays["detail"][end - int(arrays["detail_bytes"][i]) : end].tobytes()
        return RewardResult(
            key,
            float(arrays["reward"][i]),
            Outcome.labels()[arrays["outcome"][i]],  # type: ignore[arg-type]
            float(arrays["reward_s"][i]),
            detail.decode("utf-8", "surrogatepass"),
        )
