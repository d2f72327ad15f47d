"""The configuration of a run: one YAML file, `a.b=value` overrides, every field documented under it.

Importing this module needs neither torch nor MPI nor h5py. `check.py` turns what pydantic rejects into
sentences and adds the rules that look at several fields at once.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field

from areal_hpc.config.data import DataConfig, EvaluationConfig, ModelConfig, PrepareConfig
from areal_hpc.config.job import SlurmConfig
from areal_hpc.config.reward import RewardConfig
from areal_hpc.config.rollout import FilterConfig, RolloutConfig, StalenessConfig, WorkflowConfig
from areal_hpc.config.running import CheckpointConfig, DeadlinesConfig, LogConfig, SurviveConfig, WeightsConfig
from areal_hpc.config.simulation import SimulationConfig
from areal_hpc.config.trainer import TrainerConfig
from areal_hpc.config.types import Count, Section, Text, Unit, Whole


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
    preset: Text | None = None
    """YAML file of settings, for instance configs/presets/areal.yaml; they count where this file says nothing."""
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
    workflow: WorkflowConfig = WorkflowConfig()
    """Episodes of several turns with tools."""
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
    survive: SurviveConfig = SurviveConfig()
    """What a run goes on without."""
    deadlines: DeadlinesConfig = DeadlinesConfig()
    """How long anything may take."""
    simulation: SimulationConfig = SimulationConfig()
    """The timed models that stand in for computing where the engines are simulated."""
    slurm: SlurmConfig = SlurmConfig()
    """The Slurm job of `areal-hpc submit`."""

    @property
    def world_size(self) -> int:
        """Controller, trainers, rollouts, reward ranks, in this rank order."""
        return 1 + self.trainer.ranks + self.rollout.ranks + self.reward.ranks

    @property
    def ranks_in_words(self) -> str:
        """For instance "1 controller + 2 trainer + 6 rollout"."""
        counts = {"controller": 1, "trainer": self.trainer.ranks, "rollout": self.rollout.ranks}
        counts |= {"reward": self.reward.ranks}
        return " + ".join(f"{count} {role}" for role, count in counts.items() if count)

    @property
    def max_pending(self) -> int:
        """Answers of one rollout rank that may wait for their reward before it takes in no new prompts."""
        return self.reward.max_pending or self.rollout.slots

    @property
    def num_expendable(self) -> int:
        """How many rollout ranks may be lost, where MPI lets the others live. An evaluation goes on where it was in any
        case."""
        if self.is_evaluation:
            return 0
        return min(int(self.survive.lost_rollouts * self.rollout.ranks), self.rollout.ranks - 1)

    def temperature_of(self, purpose: Literal["train", "evaluate"]) -> float:
        """Of sampling, for training or for held-out answers."""
        evaluation = self.evaluation.temperature
        return self.rollout.temperature if purpose == "train" or evaluation is None else evaluation

    @property
    def max_sequence_tokens(self) -> int:
        return self.rollout.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def is_evaluation(self) -> bool:
        """Nothing is trained: held-out prompts are answered with the weights in model.path."""
        return self.trainer.ranks == 0

    @property
    def is_simulated(self) -> bool:
        """Compute is a timed model; trainer.engine is the same (rules.py)."""
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
