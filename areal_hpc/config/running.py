"""What keeps a run going: log, weights, checkpoints, deadlines."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from areal_hpc.config.types import Count, Fraction, Seconds, Section, Text, Unit, Whole


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


class SurviveConfig(Section):
    lost_rollouts: Fraction = 0.5
    """Share of the rollout ranks that may be lost before the run ends and starts again from its checkpoint. Where MPI
    lets the others live, which is slurm.mpi pmi2; elsewhere none."""


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
