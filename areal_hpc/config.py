"""The configuration of a run: one YAML file, `a.b=value` overrides, every field documented under it.

Importing this module needs neither torch nor MPI nor h5py. `configcheck.py` turns what pydantic rejects into
sentences and adds the rules that look at several fields at once.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field

from areal_hpc.configtypes import Count, Fraction, Number, Ranks, Seconds, Section, Text, Tokens, Unit, Whole


class ModelConfig(Section):
    path: Text
    """Directory of the model in Hugging Face layout (config, safetensors, tokenizer)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter type on trainer and rollout ranks; log-softmax is float32 in any case."""


class PrepareConfig(Section):
    function: Text
    """`package.module:function`, called once with the directory before any rank starts; makes model and data."""
    directory: Text
    """Where it writes; what is already complete there is used as it is."""


class DataConfig(Section):
    train: Text
    """JSONL file of training prompts; each line an object with at least the prompt field."""
    heldout: Text | None = None
    """JSONL file of prompts for evaluation, never trained on."""
    prompt_field: Text = "prompt"
    """Key of the prompt text in a line."""
    id_field: Text = "id"
    """Key of the prompt's identity; a line without it is named by its line number."""
    shuffle: bool = True
    """Draw prompts in an order that depends on the seed and the epoch, instead of file order."""
    epochs: Annotated[Count, Unit("passes over the file")] | None = None
    """End of the run when the file has been read this often; null: repeat until the last step."""


class RewardConfig(Section):
    function: Text
    """`package.module:function` or `/path/file.py:function` of (prompt, completion, metadata) -> reward."""
    workers: Annotated[Count, Unit("processes per rollout rank")] = 1
    """Processes in which answers are scored."""
    timeout_s: Seconds = 10.0
    """Longest time for one answer, counted from the start of its scoring."""


class RolloutConfig(Section):
    ranks: Ranks = 1
    """Number of rollout ranks, one generation engine each."""
    engine: Literal["transformers", "simulated"] = "transformers"
    """Generation engine; simulated: a timed model without weights, see simulation."""
    slots: Annotated[Count, Unit("sequences")] = 64
    """Sequences that one engine decodes side by side."""
    max_prompt_tokens: Tokens = 1024
    """Longest prompt; a longer one is dropped and counted."""
    max_new_tokens: Tokens = 1024
    """Longest response, its end-of-sequence token included."""
    temperature: Annotated[Number, Field(gt=0)] = 1.0
    """Sampling temperature; log-probs are those of the distribution at this temperature."""
    interrupt: bool = True
    """Take new weights between two tokens of running sequences; false: running sequences finish first."""
    prefill_tokens: Tokens = 8192
    """Most tokens in one prefill pass."""
    threads: Annotated[Count, Unit("CPU threads")] = 1
    """Threads of one rollout rank for its model."""


class ObjectiveConfig(Section):
    kind: Literal["decoupled", "naive"] = "decoupled"
    """Decoupled PPO (paper Eq. 5), or PPO around the behaviour policy, for ablations."""
    clip_low: Annotated[Number, Field(gt=0, lt=1)] = 0.2
    """The ratio u is clipped below at 1 - clip_low."""
    clip_high: Annotated[Number, Field(gt=0)] = 0.2
    """The ratio u is clipped above at 1 + clip_high."""
    dual_clip: Annotated[Number, Field(gt=1)] | None = None
    """Bound on the ratio for negative advantages; null: off."""
    weight_cap: Annotated[Number, Field(ge=1)] | None = None
    """Cap on the behaviour weight w = proximal / behaviour; null: no cap."""
    cap_mode: Literal["mask", "clamp"] = "mask"
    """What happens to a token above the cap: it leaves the sum, or w is set to the cap."""


class AdvantageConfig(Section):
    group_norm: Literal["none", "mean", "mean_std"] = "mean_std"
    """Centre (and scale) rewards inside each prompt group (GRPO)."""
    batch_norm: bool = False
    """Centre and scale over all response tokens of the batch."""


class OptimizerConfig(Section):
    lr: Annotated[Number, Field(gt=0)] = 2e-5
    """Learning rate of AdamW after warm-up."""
    warmup_steps: Annotated[Whole, Field(ge=0), Unit("steps")] = 0
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: Annotated[Number, Field(ge=0)] = 0.05
    """Decoupled weight decay."""
    beta1: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[Number, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    eps: Annotated[Number, Field(gt=0)] = 1e-5
    """Term added to the denominator."""
    max_grad_norm: Annotated[Number, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm over all parameters."""


class TrainerConfig(Section):
    ranks: Ranks = 1
    """Number of trainer ranks; each holds the whole model, gradients are summed over them."""
    engine: Literal["transformers", "simulated"] = "transformers"
    """Training engine; simulated: a timed model without weights, see simulation."""
    batch_size: Annotated[Count, Unit("prompts")] = 512
    """Prompt groups per training batch (B); the policy version rises by one per batch."""
    group_size: Annotated[Count, Unit("answers per prompt")] = 16
    """Answers sampled for each prompt."""
    minibatches: Annotated[Count, Unit("optimizer steps per batch")] = 1
    """PPO minibatches that a batch is split into."""
    micro_batch_tokens: Tokens = 32768
    """Most tokens in one forward and backward pass."""
    max_skipped: Annotated[Count, Unit("batches in a row")] = 3
    """The run ends as diverged after this many batches without a finite loss and gradient."""
    export_every: Annotated[Whole, Field(ge=0), Unit("versions")] = 0
    """Also save the weights of every n-th version under RUN/weights; 0: only the final model."""
    threads: Annotated[Count, Unit("CPU threads")] = 1
    """Threads of one trainer rank."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """The policy objective."""
    advantage: AdvantageConfig = AdvantageConfig()
    """From rewards to advantages."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""


class StalenessConfig(Section):
    max_staleness: Annotated[Whole, Field(ge=0), Unit("versions")] | Literal["inf"] = 4
    """eta of the admission rule: 0 is synchronous; "inf" for no limit."""
    order: Literal["admission", "strict"] = "admission"
    """admission: bounded when admitted, finished groups go oldest first; strict: consumed in admission order, so
    that no first token is ever older than max_staleness."""
    max_running_groups: Annotated[Count, Unit("prompt groups")] | None = None
    """Most groups in generation at once over all rollout ranks; null: what fills all slots and one more per rank."""

    @property
    def eta(self) -> float:
        return math.inf if self.max_staleness == "inf" else float(self.max_staleness)


class FilterConfig(Section):
    min_success: Fraction = 0.0
    """A group with a smaller share of correct answers is rejected and replaced."""
    max_success: Fraction = 1.0
    """A group with a larger share of correct answers is rejected and replaced."""


class EvaluationConfig(Section):
    samples: Annotated[Count, Unit("answers per prompt")] = 1
    """Answers per held-out prompt; pass@1 is their mean."""
    at_start: bool = True
    """Evaluate the model before the first step."""
    at_end: bool = True
    """Evaluate the model after the last step."""


class LogConfig(Section):
    tokens: bool = False
    """Also keep every consumed trajectory's tokens, log-probs and versions in the log."""


class WeightsConfig(Section):
    bucket_bytes: Annotated[Count, Unit("bytes")] = 8 * 2**20
    """Size of one broadcast bucket."""
    interface: Text | None = None
    """Network interface for the weights group, for instance ib0; null: the library chooses."""


class CheckpointConfig(Section):
    every_s: Seconds | None = 600.0
    """Least time between two checkpoints; null: only when a signal says that the job is about to end."""
    keep: Annotated[Whole, Field(ge=2), Unit("checkpoints")] = 2
    """Checkpoints that are kept, the newest ones."""
    resume: bool = True
    """Go on from the newest valid checkpoint of run_dir; false: every start is a new run at version 0."""
    max_fruitless: Annotated[Count, Unit("attempts in a row")] = 3
    """The run is given up after so many attempts that trained no new step."""


class DeadlinesConfig(Section):
    startup_s: Seconds = 300.0
    """From the start of a rank until every rank has reported ready."""
    message_s: Seconds = 60.0
    """For the rest of a message whose beginning has arrived."""
    weights_s: Seconds = 120.0
    """For one weight update to reach a rollout rank."""
    checkpoint_s: Seconds = 300.0
    """For a checkpoint to be written by all ranks; one that takes longer is given up, the run goes on."""
    heartbeat_s: Seconds = 300.0
    """Longest silence of a trainer or rollout rank; ranks report about once a second between micro-batches."""
    step_s: Seconds = 3600.0
    """Between two finished steps; a longer silence ends the run with an explanation."""
    exit_s: Seconds = 30.0
    """From the decision to end until every process is gone."""

    @property
    def silence_s(self) -> float:
        """After so long without a word the controller must be lost: it allows itself an evaluation and a step."""
        return 2 * self.step_s + self.startup_s


class SimulationConfig(Section):
    speedup: Annotated[Number, Field(gt=0), Unit("simulated seconds per second")] = 1.0
    """All simulated times are divided by it; messages, controller and log are real and take what they take."""
    gpus_per_rank: Annotated[Count, Unit("GPUs")] = 8
    """GPUs that one rank stands for, each with a copy of the model; sequences and tokens are shared out evenly."""
    response_median: Annotated[Number, Field(gt=0), Unit("tokens")] = 6000.0
    """Median length of a response; lengths are log-normal, cut at rollout.max_new_tokens."""
    response_sigma: Annotated[Number, Field(ge=0), Unit("1")] = 0.9
    """Standard deviation of the logarithm of the length: how long the tail is."""
    success: Fraction = 0.5
    """Probability that an answer is right."""
    reward_s: Annotated[Number, Field(ge=0), Unit("s")] = 0.5
    """From the end of a response to its reward."""
    decode_s: Seconds = 0.008
    """One decoding step, before anything that grows with the batch."""
    decode_sequence_s: Annotated[Number, Field(ge=0), Unit("s")] = 4.0e-5
    """What each running sequence of a GPU adds to a decoding step."""
    decode_context_s: Annotated[Number, Field(ge=0), Unit("s")] = 1.2e-8
    """What each token in the KV cache of a GPU adds to a decoding step."""
    prefill_tokens_per_s: Annotated[Number, Field(gt=0), Unit("tokens/s of a GPU")] = 60000.0
    """Prefill of prompts and, after an interruption, of everything generated so far; decoding stands still."""
    load_s: Annotated[Number, Field(ge=0), Unit("s")] = 1.0
    """Swapping new weights in, before the prefill."""
    model_bytes: Annotated[Count, Unit("bytes")] = 3_100_000_000
    """Size of the weights that are broadcast."""
    broadcast_bytes_per_s: Annotated[Number, Field(gt=0), Unit("bytes/s")] = 1.0e10
    """Rate at which new weights reach all rollout ranks."""
    publish_s: Annotated[Number, Field(ge=0), Unit("s")] = 0.5
    """Training stands still while the first trainer rank copies its weights for the broadcast."""
    train_tokens_per_s: Annotated[Number, Field(gt=0), Unit("tokens/s of a GPU")] = 20000.0
    """Forward, backward and recomputed log-probs; the rank with most tokens decides."""
    train_step_s: Annotated[Number, Field(ge=0), Unit("s")] = 5.0
    """What a training step takes besides."""


class ComponentConfig(Section):
    """One component of the job: its own nodes. What is null here is taken from slurm.common."""

    partition: Text | None = None
    """Partition (`sbatch --partition`)."""
    account: Text | None = None
    """Account to charge."""
    qos: Text | None = None
    """Quality of service."""
    reservation: Text | None = None
    """Reservation to run in."""
    constraint: Text | None = None
    """Node features, for instance a100."""
    nodes: Annotated[Count, Unit("nodes")] | None = None
    """Number of nodes; null: as many as its ranks need at ranks_per_node."""
    ranks_per_node: Annotated[Count, Unit("MPI ranks")] | None = None
    """Trainer or rollout ranks on one node; null: one per GPU, or all on one node without GPUs."""
    gpus_per_node: Annotated[Whole, Field(ge=0), Unit("GPUs")] | None = None
    """GPUs of each node; null or 0: none."""
    cpus_per_task: Annotated[Count, Unit("CPUs")] | None = None
    """CPUs of each rank, the controller included; null: Slurm's default."""
    memory: Text | None = None
    """Memory of each node (`sbatch --mem`), for instance 480G."""
    exclusive: bool | None = None
    """Whole nodes; null: true. Without it Slurm may lay ranks out unevenly."""
    flags: tuple[Text, ...] = ()
    """Further sbatch flags, for instance --switches=1; those of slurm.common come first."""


class SlurmConfig(Section):
    site: Text | None = None
    """YAML file with settings of a cluster; they count wherever this file and the command line say nothing."""
    shape: Literal["het", "steps"] = "het"
    """het: one heterogeneous job, components may differ in everything; steps: one allocation, same node type."""
    mpi: Annotated[str, Field(pattern=r"^(pmix(_v[0-9]+)?|pmi2|cray_shasta)$")] = "pmix"
    """How srun starts MPI: pmix (Open MPI), pmi2 (MPICH) or cray_shasta (Cray MPICH)."""
    minutes: Annotated[Count, Unit("minutes")] = 60
    """Time limit of the job."""
    output: Text | None = None
    """File for what the job prints, %j is the job id; its directory must exist; null: RUN/slurm/%j.out."""
    python: Text | None = None
    """Python that runs the ranks, seen from the nodes; null: the one that submits."""
    signal_s: Annotated[Whole, Field(ge=0), Unit("s")] = 120
    """So long before the time limit Slurm tells the run to save and to requeue itself; 0: never."""
    setup: tuple[Text, ...] = ()
    """Shell lines before the ranks start, for instance `module load openmpi`."""
    srun: tuple[Text, ...] = ()
    """Further flags of the srun that starts the ranks."""
    common: ComponentConfig = ComponentConfig()
    """What holds for every component."""
    trainer: ComponentConfig = ComponentConfig()
    """Nodes of the trainer ranks, and of the controller unless there is a head."""
    rollout: ComponentConfig = ComponentConfig()
    """Nodes of the rollout ranks."""
    head: ComponentConfig | None = None
    """A component of its own for the controller, on a CPU partition say; null: beside the first trainers."""


class Config(Section):
    """One run of areal_hpc."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)] = "run"
    """Name of the run: letters, digits, dot, dash, underscore."""
    run_dir: Text = "runs/run"
    """Directory that the run writes to; made if absent."""
    seed: Annotated[Whole, Field(ge=0, lt=2**31)] = 0
    """Seed of prompt order, sampling and minibatches."""
    steps: Annotated[Count, Unit("policy versions")] = 1000
    """Batches to train on; the run ends with this policy version."""
    mode: Literal["async", "overlap", "sync"] = "async"
    """async: as configured; overlap: max_staleness 1 in strict order, without interruption; sync: max_staleness 0."""
    model: ModelConfig
    """The policy."""
    prepare: PrepareConfig | None = None
    """What has to be made before the run, if anything."""
    data: DataConfig
    """Prompts."""
    reward: RewardConfig
    """How answers are scored."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation."""
    trainer: TrainerConfig = TrainerConfig()
    """Learning."""
    staleness: StalenessConfig = StalenessConfig()
    """How far generation may run ahead of learning."""
    filter: FilterConfig = FilterConfig()
    """Which groups are not worth training on."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation on the rollout ranks."""
    weights: WeightsConfig = WeightsConfig()
    """The weight broadcast."""
    log: LogConfig = LogConfig()
    """What the HDF5 log keeps."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What survives the end of a job."""
    deadlines: DeadlinesConfig = DeadlinesConfig()
    """How long anything may take."""
    simulation: SimulationConfig = SimulationConfig()
    """The timed models that stand in for computing where the engines are simulated."""
    slurm: SlurmConfig = SlurmConfig()
    """The Slurm job of `areal-hpc submit`."""

    @property
    def world_size(self) -> int:
        """Controller, trainers, rollouts, in this rank order."""
        return 1 + self.trainer.ranks + self.rollout.ranks

    @property
    def max_sequence_tokens(self) -> int:
        return self.rollout.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def is_simulated(self) -> bool:
        """Compute is a timed model; trainer.engine is the same (configrules.py)."""
        return self.rollout.engine == "simulated"

    @property
    def compute(self) -> str:
        """What computes, for a person."""
        if not self.is_simulated:
            return "transformers"
        speedup, gpus_per_rank = self.simulation.speedup, self.simulation.gpus_per_rank
        gpus = gpus_per_rank * (self.trainer.ranks + self.rollout.ranks)
        return f"simulated at speedup {speedup:g}: timed models of {gpus} GPUs; divide tok/s by {speedup:g}"

    def resolved(self) -> Config:
        """The same run with the mode written out as settings."""
        if self.mode == "async":
            return self
        values = {"max_staleness": 0} if self.mode == "sync" else {"max_staleness": 1, "order": "strict"}
        staleness = self.staleness.model_copy(update=values)
        rollout = self.rollout.model_copy(update={"interrupt": False})
        return self.model_copy(update={"staleness": staleness, "rollout": rollout})

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def fingerprint(self) -> str:
        """Hash that every rank compares at start; run_dir is part of it."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


def load_resolved(path: Path) -> Config:
    """Read config.resolved.yaml of an attempt, which was checked when it was written."""
    return Config.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
