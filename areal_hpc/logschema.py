"""The schema of the run log as plain data: every table and column with its type, unit and meaning.

`python -m areal_hpc.logschema` prints it as markdown; runlog.py writes and reads it as HDF5. Rows are never
changed once written. All times are seconds on the run clock (the controller's monotonic clock, zero at its start).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_hpc.logcodes import Activity, Fate, Finish, Outcome

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        name: name of the dataset inside its table.
        dtype: numpy type string in the file, little-endian; "S<n>" is text in UTF-8 of at most n bytes.
        unit: unit of the values; "1" for a ratio, "id" for an identifier, "text" or "code".
        doc: meaning in one line.
        labels: for codes, the names in order of their code.
    """

    name: str
    dtype: str
    unit: str
    doc: str
    labels: tuple[str, ...] = ()

    def encode(self, values: Sequence[Any] | NDArray[Any]) -> NDArray[Any]:
        """Values as a 1-D array of this column's type; ValueError, naming the column, when they do not fit."""
        try:
            if self.dtype.startswith("S"):
                return np.array([_shorten(value, int(self.dtype[1:])) for value in values], dtype=self.dtype)
            array = np.asarray(values, dtype=np.float64) if "f" in self.dtype else np.asarray(values)
            if self.labels:
                array = self._codes(array)
            with np.errstate(invalid="ignore"):
                stored = array.astype(self.dtype)
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"column '{self.name}' ({self.dtype}): {error}") from error
        if stored.ndim != 1:
            raise ValueError(f"column '{self.name}' takes a 1-D sequence, got shape {stored.shape}")
        if "f" not in self.dtype and stored.dtype != array.dtype and not (stored == array).all():
            wrong = array[stored != array][0]
            raise ValueError(f"column '{self.name}' ({self.dtype}) cannot hold the value {wrong!r}")
        return stored

    def _codes(self, array: NDArray[Any]) -> NDArray[Any]:
        if array.dtype.kind == "U":
            code = {label: index for index, label in enumerate(self.labels)}
            unknown = sorted(set(array.tolist()) - set(code))
            if unknown:
                raise ValueError(f"{unknown} not among {', '.join(self.labels)}")
            return np.array([code[label] for label in array.tolist()])
        if array.size and not 0 <= array.min() <= array.max() < len(self.labels):
            raise ValueError(f"codes run from 0 to {len(self.labels) - 1} ({', '.join(self.labels)})")
        return array


@dataclass(frozen=True, slots=True)
class Table:
    """A group of equally long columns; `chunk_rows` rows of a column lie together in the file."""

    name: str
    doc: str
    chunk_rows: int
    columns: tuple[Column, ...]

    def encode(self, rows: Mapping[str, Sequence[Any] | NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Rows given by column as arrays of the file's types.

        Raises:
            ValueError: a column is missing, unknown, of another length or does not fit its type; names it.
        """
        names = [column.name for column in self.columns]
        if len(rows) != len(names) or any(name not in rows for name in names):
            missing, unknown = [n for n in names if n not in rows], [n for n in rows if n not in names]
            raise ValueError(f"table {self.name}: missing columns {missing}, unknown columns {unknown}; it has {names}")
        try:
            encoded = {column.name: column.encode(rows[column.name]) for column in self.columns}
        except ValueError as error:
            raise ValueError(f"table {self.name}: {error}") from error
        num_rows = len(encoded[names[0]])
        for name, values in encoded.items():
            if len(values) != num_rows:
                raise ValueError(
                    f"table {self.name}: column '{name}' has {len(values)} rows, column '{names[0]}' has {num_rows}"
                )
        return encoded


def _shorten(text: str, width: int) -> bytes:
    """UTF-8 of at most `width` bytes; what is longer is cut and ends in "~" and eight hex digits of its hash."""
    data = text.encode("utf-8", errors="replace").rstrip(b"\0")
    if len(data) <= width:
        return data
    head = data[: width - 9].decode("utf-8", errors="ignore").encode()
    return head + b"~" + blake2b(data, digest_size=4).hexdigest().encode()


LOSS_TERMS = (
    Column("loss", "f8", "1", "policy objective of the batch, minimised"),
    Column("u_mean", "f8", "1", "mean over tokens of the ratio u = current / proximal"),
    Column("u_max", "f8", "1", "largest ratio u"),
    Column("w_mean", "f8", "1", "mean over tokens of the behaviour weight w = proximal / behaviour"),
    Column("w_max", "f8", "1", "largest behaviour weight w"),
    Column("clip_fraction", "f8", "1", "share of tokens whose ratio u was clipped"),
    Column("cap_fraction", "f8", "1", "share of tokens whose weight w met the cap"),
    Column("dual_clip_fraction", "f8", "1", "share of tokens bounded by the dual clip"),
    Column("kl_behaviour_proximal", "f8", "nats", "estimate of the KL divergence of behaviour and proximal per token"),
    Column("kl_proximal_current", "f8", "nats", "estimate of the KL divergence of proximal and current per token"),
    Column("advantage_mean", "f8", "1", "mean advantage over response tokens"),
    Column("entropy", "f8", "nats", "entropy of the policy per response token; NaN if it was not computed"),
    Column("nonfinite_tokens", "f8", "tokens", "tokens whose ratio or loss term was NaN or inf"),
)
"""What a step reports about its loss; the figures of losses.LossStats.finish, but for the number of tokens."""

PHASES = (
    Column("wait_s", "f8", "s", "trainer waited for the batch"),
    Column("receive_s", "f8", "s", "trainer waited for the trajectories of the batch"),
    Column("proximal_s", "f8", "s", "recomputing log-probs with the weights before the step"),
    Column("update_s", "f8", "s", "forward, backward and optimizer"),
    Column("publish_s", "f8", "s", "handing the new weights to the broadcast"),
    Column("total_s", "f8", "s", "from the end of the step before to the end of this one"),
)
"""Where the time of a step went, as seen by the first trainer rank."""

TRAJECTORIES = Table(
    "trajectories",
    "One row per finished sample, written when its fate is known.",
    1024,
    (
        Column("group_id", "i8", "id", "admission number of the prompt group"),
        Column("sample", "i4", "id", "index within the group"),
        Column("prompt_id", "S64", "text", "identity of the prompt in its data set"),
        Column("num_prompt", "i4", "tokens", "length of the prompt"),
        Column("num_response", "i4", "tokens", "length of the response, end-of-sequence token included"),
        Column("num_sampled", "i4", "tokens", "tokens of it that the policy sampled; the others came from a workflow"),
        Column("num_turns", "i4", "turns", "turns of the episode; 1 without a workflow"),
        Column("reward", "f8", "1", "reward, the sum over turns; NaN where the outcome is timeout, error or truncated"),
        Column("outcome", "u1", "code", "what the reward service or the workflow found", Outcome.labels()),
        Column("finish", "u1", "code", "why the response ended", Finish.labels()),
        Column("fate", "u1", "code", "what became of the sample", Fate.labels()),
        Column("first_version", "i4", "versions", "policy version of the first sampled token"),
        Column("last_version", "i4", "versions", "policy version of the last sampled token"),
        Column("mean_version", "f4", "versions", "mean policy version over sampled tokens"),
        Column("head_lag", "i4", "versions", "trainer version before the step minus first_version; -1 if not consumed"),
        Column("tail_lag", "i4", "versions", "trainer version before the step minus last_version; -1 if not consumed"),
        Column("admit_s", "f8", "s", "the controller admitted the group"),
        Column("start_s", "f8", "s", "first prefill"),
        Column("finish_s", "f8", "s", "last token sampled"),
        Column("consume_s", "f8", "s", "the controller put it into a batch; NaN if not consumed"),
        Column("rollout_rank", "i4", "rank", "world rank that generated it"),
        Column("interruptions", "i4", "updates", "weight updates it lived through"),
        Column("consumed_step", "i4", "id", "step that trained on it; -1 if not consumed"),
        Column("trainer_rank", "i4", "rank", "world rank that trained on it; -1 if not consumed"),
    ),
)

STEPS = Table(
    "steps",
    "One row per training batch.",
    128,
    (
        Column("step", "i4", "id", "number of the batch"),
        Column("version_before", "i4", "versions", "policy version before the step"),
        Column("version_after", "i4", "versions", "policy version after the step"),
        Column("skipped", "?", "1", "loss or gradient was not finite, no weight was changed"),
        Column("time_s", "f8", "s", "the controller learnt that the step was done"),
        *LOSS_TERMS,
        Column("grad_norm", "f8", "1", "gradient norm over all parameters before it was scaled down"),
        Column("lr", "f8", "1", "learning rate"),
        Column("reward_mean", "f8", "1", "mean reward of the batch"),
        Column("prompt_tokens", "i8", "tokens", "prompt tokens in the batch"),
        Column("response_tokens", "i8", "tokens", "response tokens in the batch"),
        Column("consumed_tokens", "i8", "tokens", "prompt and response tokens trained on; 0 for a skipped step"),
        Column("num_groups", "i4", "groups", "groups in the batch; fewer than B where filter.refill is off"),
        Column("num_sequences", "i4", "sequences", "samples in the batch"),
        Column("num_micro_batches", "i4", "micro-batches", "forward and backward passes over all trainer ranks"),
        Column("packing_bound", "i4", "micro-batches", "no packing of these lengths needs fewer"),
        Column("packing_waste", "f8", "1", "share of micro-batch token capacity left empty"),
        *PHASES,
        Column("head_lag_max", "i4", "versions", "largest head lag in the batch"),
        Column("head_lag_mean", "f8", "versions", "mean head lag in the batch"),
        Column("tail_lag_max", "i4", "versions", "largest tail lag in the batch"),
        Column("num_admitted", "i8", "groups", "groups admitted since the start of the attempt"),
        Column("num_consumed", "i8", "groups", "places of batches consumed, B each"),
        Column("num_filtered", "i8", "groups", "groups filtered so far"),
        Column("num_empty_batches", "i8", "batches", "batches so far of which the filter left nothing"),
        Column("log_s", "f8", "s", "controller time spent on this log since the step before"),
    ),
)

WEIGHT_UPDATES = Table(
    "weight_updates",
    "One row per broadcast of new weights.",
    128,
    (
        Column("version", "i4", "versions", "policy version that was sent"),
        Column("time_s", "f8", "s", "the controller learnt that it had left completely"),
        Column("num_bytes", "i8", "bytes", "size of the weights"),
        Column("snapshot_s", "f8", "s", "copying the weights for the broadcast"),
        Column("broadcast_s", "f8", "s", "sending them"),
    ),
)

WEIGHT_LOADS = Table(
    "weight_loads",
    "One row per rollout rank and version it loaded.",
    256,
    (
        Column("version", "i4", "versions", "policy version that was loaded"),
        Column("rank", "i4", "rank", "rollout rank (world rank)"),
        Column("time_s", "f8", "s", "the controller learnt that decoding went on"),
        Column("receive_s", "f8", "s", "receiving the weights while decoding went on"),
        Column("pause_s", "f8", "s", "decoding stood still, re-prefill included"),
        Column("interrupted", "i4", "samples", "running samples that were interrupted"),
        Column("reprefilled_tokens", "i8", "tokens", "tokens whose KV entries were computed anew"),
    ),
)

ACTIVITY = Table(
    "activity",
    "What every rank did when: intervals of one rank never overlap.",
    8192,
    (
        Column("rank", "i4", "rank", "world rank"),
        Column("kind", "u1", "code", "what it did", Activity.labels()),
        Column("start_s", "f8", "s", "begin"),
        Column("stop_s", "f8", "s", "end"),
    ),
)

RANKS = Table(
    "ranks",
    "One row per rank, written at the start: where it runs.",
    64,
    (
        Column("rank", "i4", "rank", "world rank"),
        Column("role", "S16", "text", "controller, trainer, rollout or reward"),
        Column("host", "S64", "text", "its host"),
        Column("pid", "i8", "id", "its process there"),
        Column("gpu", "S64", "text", "the GPU that is its own, as in CUDA_VISIBLE_DEVICES; empty: none"),
    ),
)

EVALUATIONS = Table(
    "evaluations",
    "One row per answer to a held-out prompt, written when its evaluation is complete.",
    1024,
    (
        Column("version", "i4", "versions", "newest policy version when the evaluation began; no token is older"),
        Column("data", "S64", "text", "name of the held-out set"),
        Column("prompt_id", "S64", "text", "identity of the prompt in its data set"),
        Column("sample", "i4", "id", "index among the answers to this prompt"),
        Column("reward", "f8", "1", "reward; NaN where the outcome is timeout or error"),
        Column("outcome", "u1", "code", "what the reward service found", Outcome.labels()),
        Column("finish", "u1", "code", "why the response ended", Finish.labels()),
        Column("num_response", "i4", "tokens", "length of the response, end-of-sequence token included"),
        Column("first_version", "i4", "versions", "policy version of the first response token"),
        Column("last_version", "i4", "versions", "policy version of the last response token"),
        Column("finish_s", "f8", "s", "last token sampled; NaN where an earlier attempt got the answer"),
    ),
)

EVENTS = Table(
    "events",
    "What a person may want to know later: drops, retries, time-outs, fallbacks, the reason of the end.",
    64,
    (
        Column("time_s", "f8", "s", "the controller wrote it down"),
        Column("rank", "i4", "rank", "world rank it happened on"),
        Column("kind", "S32", "text", "short name, the same for the same sort of event"),
        Column("text", "S256", "text", "one sentence"),
    ),
)

TOKEN_INDEX = Table(
    "token_index",
    "With log.tokens: one row per trajectory, where its tokens lie in the two tables below.",
    1024,
    (
        Column("group_id", "i8", "id", "admission number of the prompt group"),
        Column("sample", "i4", "id", "index within the group"),
        Column("sequence_start", "i8", "tokens", "row of its first prompt token in sequence_tokens"),
        Column("response_start", "i8", "tokens", "row of its first response token in response_tokens"),
        Column("num_prompt", "i4", "tokens", "length of the prompt"),
        Column("num_response", "i4", "tokens", "length of the response"),
    ),
)

SEQUENCE_TOKENS = Table(
    "sequence_tokens",
    "With log.tokens: prompts and responses, one after the other.",
    65536,
    (Column("token", "i4", "id", "token id"),),
)

RESPONSE_TOKENS = Table(
    "response_tokens",
    "With log.tokens: one row per response token.",
    65536,
    (
        Column("logprob", "f4", "nats", "behaviour log-prob, natural logarithm"),
        Column("version", "i4", "versions", "policy version that sampled the token"),
        Column("turn", "i2", "id", "turn of the episode that it belongs to; -1 for a token of the workflow"),
    ),
)

TABLES = (RANKS, TRAJECTORIES, STEPS, WEIGHT_UPDATES, WEIGHT_LOADS, ACTIVITY, EVALUATIONS, EVENTS)
TOKEN_TABLES = (TOKEN_INDEX, SEQUENCE_TOKENS, RESPONSE_TOKENS)


def markdown() -> str:
    """The schema as markdown: a heading, a sentence and a table per group of the file."""
    lines = []
    for table in TABLES + TOKEN_TABLES:
        lines += [f"### /{table.name}", "", table.doc, ""]
        lines += ["| column | type | unit | meaning |", "| --- | --- | --- | --- |"]
        for column in table.columns:
            meaning = column.doc + (f": {', '.join(column.labels)}" if column.labels else "")
            lines.append(f"| {column.name} | {column.dtype} | {column.unit} | {meaning} |")
        lines.append("")
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    print(markdown())
