"""Every message between ranks: who sends it to whom, what its fields and arrays mean.

Arrays travel beside the header as raw buffers (codec.py); `ARRAYS` names them with their dtypes. All times are
seconds on the run clock: the controller's monotonic clock, zero at its start (see `ClockPing`).

The life of one prompt in messages:

    controller --AdmitGroup---> rollout --GroupFinished-> controller --ShipSamples-> rollout --Samples--> trainer
    controller --TrainBatch---> trainer --StepFinished--> controller
    controller --LoadWeights--> rollout --WeightsLoaded-> controller
    rollout ---Score----------> reward --Scored---------> rollout        (only in runs with reward ranks)

What is said about checkpoints and about lost ranks stands in saving_messages.py and survival_messages.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from areal_hpc import saving_messages, survival_messages
from areal_hpc.codec import Message

Purpose = Literal["train", "evaluate"]


# ---------------------------------------------------------------------------------------------- start of a run
class Hello(Message):
    """Every rank -> controller, first of all: who I think I am.

    `gpu`: the one that is mine alone, "" for none. `lifeline_port`: where rollout ranks hold a line to me, 0 for
    nowhere; see lifelines.py.
    """

    role: str
    world_size: int
    host: str
    pid: int
    code_version: str
    config_fingerprint: str
    gpu: str = ""
    lifeline_port: int = 0
    lifeline_token: str = ""


class Welcome(Message):
    """Controller -> every rank: all ranks agree, go on.

    `single_host`: the whole run is on one machine. `resume`: directory of the checkpoint that the run goes on from,
    "" for a new one; `version`: its policy version. `lifelines`: host, port and token of every rank that a rollout
    rank holds a line to.
    """

    single_host: bool = False
    resume: str = ""
    version: int = 0
    lifelines: tuple[tuple[str, int, str], ...] = ()


class ClockPing(Message):
    """Rank -> controller: my monotonic clock now; answered at once."""

    local_s: float


class ClockPong(Message):
    """Controller -> rank: the run clock when the ping was answered, and the ping's own time."""

    local_s: float
    run_s: float


class StoreAddress(Message):
    """First trainer -> every other trainer and rollout rank: where the weights group meets."""

    host: str
    port: int


class Ready(Message):
    """Every other rank -> controller: model loaded, process group joined, reward processes started."""


# -------------------------------------------------------------------------------------------------- generation
class AdmitGroup(Message):
    """Controller -> rollout: sample `num_samples` answers to one prompt.

    `min_version`: the first token must be sampled by this policy version or a newer one. `first_sample`: number of the
    first of them among all answers to this prompt, where they are asked for in several groups (evaluation).
    """

    group_id: int
    prompt_id: str
    prompt: str
    metadata: dict[str, Any]
    num_samples: int
    min_version: int
    purpose: Purpose = "train"
    first_sample: int = 0


class Credits(Message):
    """Rollout -> controller: I can take this many more samples (flow control; first of all for all slots)."""

    num_samples: int


class GroupFinished(Message):
    """Rollout -> controller: all answers of a group are scored; the tokens stay here until told where to go.

    Arrays [num_samples], by sample index: reward (NaN without a score), outcome and finish (codes of logschema),
    num_response [tokens], first/last/mean_version of sampled tokens, interruptions, start_s, finish_s, num_turns; and
    [sum of num_turns], sample after sample: turn_reward, turn_tokens (sampled ones). `texts` and `answers` (what the
    reward function read) come along where nothing is trained, by sample index.
    """

    ARRAYS: ClassVar[Mapping[str, str]] = {
        "reward": "float64",
        "outcome": "uint8",
        "finish": "uint8",
        "num_response": "int32",
        "first_version": "int32",
        "last_version": "int32",
        "mean_version": "float32",
        "interruptions": "int32",
        "start_s": "float64",
        "finish_s": "float64",
        "num_turns": "int32",
        "turn_reward": "float64",
        "turn_tokens": "int32",
    }
    group_id: int
    num_prompt: int
    purpose: Purpose = "train"
    texts: list[str] = []
    answers: list[str | None] = []


class GroupRefused(Message):
    """Rollout -> controller: this prompt cannot be generated from (too long); reason for a person."""

    group_id: int
    reason: str
    purpose: Purpose = "train"


class Score(Message):
    """Rollout -> reward: judge this answer; its texts are UTF-8 as arrays of bytes, `facts` as in rewards.recipe."""

    ARRAYS: ClassVar[Mapping[str, str]] = {"prompt": "uint8", "completion": "uint8"}
    group_id: int
    sample: int
    metadata: dict[str, Any]
    facts: dict[str, Any]


class Scored(Message):
    """Reward -> rollout: what became of an answer; the fields of rewards.RewardResult."""

    group_id: int
    sample: int
    reward: float
    outcome: Literal["correct", "wrong", "unparsed", "timeout", "error", "truncated"]
    seconds: float
    detail: str
    answer: str | None = None


class ShipSamples(Message):
    """Controller -> rollout: send these samples of step `step` to these trainer ranks.

    Arrays [n]: group_id, sample, trainer (world rank). `also_log`: send them to the controller as well.
    """

    ARRAYS: ClassVar[Mapping[str, str]] = {"group_id": "int64", "sample": "int32", "trainer": "int32"}
    step: int
    also_log: bool = False


class DropGroups(Message):
    """Controller -> rollout: forget these groups, running or finished; they will not be trained on."""

    ARRAYS: ClassVar[Mapping[str, str]] = {"group_id": "int64"}


class Samples(Message):
    """Rollout -> trainer (and controller, when tokens are logged): trajectories of one step, concatenated.

    Arrays: group_id, sample, num_prompt, num_response [n]; tokens [sum of P + R]; logprobs, versions [sum of R]; turns
    [sum of R], or empty where all are single turns.
    """

    ARRAYS: ClassVar[Mapping[str, str]] = {
        "group_id": "int64",
        "sample": "int32",
        "num_prompt": "int32",
        "num_response": "int32",
        "tokens": "int32",
        "logprobs": "float32",
        "versions": "int32",
        "turns": "int16",
    }
    step: int


# ---------------------------------------------------------------------------------------------------- training
class TrainBatch(Message):
    """Controller -> trainer: one training batch.

    Arrays describe the samples of the WHOLE batch, of all trainer ranks: group_id, sample, num_turns [n]; turn_reward
    and turn_tokens (sampled ones) [sum of num_turns], sample after sample.
    `micro_batches[minibatch]` lists this rank's micro-batches as lists of indices into those arrays; their number is
    the same on every rank. `minibatch_tokens[minibatch]` counts sampled tokens over all ranks: the denominator.
    `save_to`: directory of a checkpoint; the first trainer writes its state into it after this step. `edition`: how
    often batches were recalled before this one was composed.
    """

    ARRAYS: ClassVar[Mapping[str, str]] = {
        "group_id": "int64",
        "sample": "int32",
        "num_turns": "int32",
        "turn_reward": "float64",
        "turn_tokens": "int32",
    }
    step: int
    micro_batches: list[list[list[int]]]
    minibatch_tokens: list[int]
    save_to: str = ""
    edition: int = 0


class SamplesArrived(Message):
    """Trainer -> controller: all samples that this rank needs for this step are here."""

    step: int
    edition: int


class BeginStep(Message):
    """Controller -> every trainer: all of you have your samples of this step; train it when its turn has come."""

    step: int


class StepFinished(Message):
    """First trainer -> controller: the step is done, version `version` is on its way to the rollout ranks.

    `skipped`: loss or gradient was not finite, nothing was updated. `stats` as in losses.LossStats, plus grad_norm
    and lr. `phases`: seconds per phase, the columns of logschema.PHASES.
    """

    step: int
    version: int
    skipped: bool
    stats: dict[str, float]
    phases: dict[str, float]


class WeightsSent(Message):
    """First trainer -> controller: the broadcast of a version has left completely."""

    version: int
    num_bytes: int
    snapshot_s: float
    broadcast_s: float


class SaveModel(Message):
    """Controller -> first trainer: training is over, write the model directory."""


class ModelSaved(Message):
    """First trainer -> controller: it is there."""

    path: str
    seconds: float


class LoadWeights(Message):
    """Controller -> rollout: a broadcast of this version is on its way; take it."""

    version: int


class WeightsLoaded(Message):
    """Rollout -> controller: decoding goes on with this version; what it cost."""

    version: int
    receive_s: float
    pause_s: float
    interrupted: int
    reprefilled_tokens: int


# ------------------------------------------------------------------------------------------------- checkpoints
class Trained(Message):
    """Controller -> rollout: these groups were trained on or skipped; forget them."""

    ARRAYS: ClassVar[Mapping[str, str]] = {"group_id": "int64"}
    step: int


# ------------------------------------------------------------------------------------------- upkeep and the end
class ActivityReport(Message):
    """Any rank -> controller, about once a second, and before Farewell: what it did. Also a sign of life.

    Arrays [n]: kind (code of logschema), start_s, stop_s.
    """

    ARRAYS: ClassVar[Mapping[str, str]] = {"kind": "uint8", "start_s": "float64", "stop_s": "float64"}


class Event(Message):
    """Any rank -> controller: something a person may want to know later (drop, retry, time-out, fallback)."""

    kind: str
    text: str


class Warned(Message):
    """Any rank -> controller: Slurm sent me this signal; the job, or my component of it, is about to end."""

    signal: str


class RankFailed(Message):
    """Any rank -> controller: I cannot go on; the run ends with this exit code and reason."""

    code: int
    reason: str


class Stop(Message):
    """Controller -> every rank: finish now; nothing more is expected from you but Farewell.

    `healthy`: the run is done and every collective is complete, so that nothing can hold up a rank that ends as usual.
    `whole`: nobody is lost, so MPI can be finalized.
    """

    reason: str
    healthy: bool = False
    whole: bool = True


class Farewell(Message):
    """Every rank -> controller: my last message."""


MESSAGE_TYPES: tuple[type[Message], ...] = tuple(
    value
    for value in [*globals().values(), *vars(saving_messages).values(), *vars(survival_messages).values()]
    if isinstance(value, type) and issubclass(value, Message) and value is not Message
)
