"""What a Slurm job is made of: components with nodes and tasks, from a configuration. No Slurm is needed here."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from areal_hpc.config import ComponentConfig, Config
from areal_hpc.exits import Exit

Shape = Literal["het", "steps"]

FINAL = (Exit.DONE, Exit.CONFIG, Exit.PREFLIGHT, Exit.DIVERGED, Exit.DISK, Exit.INTERRUPTED)
"""After these ends another attempt would end the same way, or nobody wants one."""

VERDICT = (
    "# the attempt knows better than srun how it ended: a rank may have died, and the run have gone on without it",
    'verdict=$("$PYTHON" -m areal_hpc.verdict "$ATTEMPT_DIR" "$code") && code=$verdict',
)
EXIT = ('exit "$code"',)
REQUEUE = (
    'case "$code" in',
    f"  {'|'.join(str(int(code)) for code in FINAL)}) ;; # done, or another attempt would end the same way",
    '  *) scontrol requeue "$SLURM_JOB_ID" ;; # the time is over, or a rank was lost: the next attempt goes on',
    "esac",
)


@dataclass(frozen=True, slots=True)
class Component:
    """One group of nodes with the ranks that run on it.

    Attributes:
        name: head, trainer, rollout or reward.
        nodes: number of nodes.
        tasks: MPI ranks on them, the controller included where it belongs.
        settings: what sbatch is asked for, slurm.common already merged in.
        holds: the ranks in words.
        command: shell text that starts one rank.
    """

    name: str
    nodes: int
    tasks: int
    settings: ComponentConfig
    holds: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One job: everything the batch script says.

    Attributes:
        name: name of the job.
        folder: directory for scripts and output of jobs.
        components: in world order.
        shape: "het" for a heterogeneous job, "steps" for one allocation with a heterogeneous step.
        mpi: srun's MPI plugin.
        python: interpreter on the nodes, $PYTHON in the script.
        minutes: time limit.
        output: file for everything the job prints; %j is the job id.
        setup: shell lines before anything else, as the user wrote them.
        prologue: shell lines between setup and srun.
        epilogue: shell lines after it; `$code` is srun's exit code then.
        srun: further flags of srun.
        title: comment lines at the top.
        signal: `sbatch --signal`, for instance USR2@90.
        requeue: Slurm may start the job again after preemption or the loss of a node.
        survive: the death of one task, or with one allocation of one node, ends no other.
    """

    name: str
    folder: str
    components: tuple[Component, ...]
    shape: Shape
    mpi: str
    python: str
    minutes: int
    output: str
    setup: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    title: tuple[str, ...] = ()
    signal: str | None = None
    epilogue: tuple[str, ...] = ()
    requeue: bool = False
    survive: bool = False

    @property
    def num_tasks(self) -> int:
        return sum(component.tasks for component in self.components)


def merged(common: ComponentConfig, own: ComponentConfig) -> ComponentConfig:
    """`own`, with what it leaves null taken from `common`; flags of both, common first."""
    given = {name: value for name, value in own if value is not None}
    return common.model_copy(update=given | {"flags": common.flags + own.flags})


def without_gpus(common: ComponentConfig) -> ComponentConfig:
    """What holds for nodes of ranks that compute nothing."""
    return common.model_copy(update={"gpus_per_node": None})


def num_nodes(ranks: int, settings: ComponentConfig) -> int:
    """Nodes for so many ranks (the controller is extra and needs none): as told, else full nodes."""
    return settings.nodes or math.ceil(ranks / (settings.ranks_per_node or settings.gpus_per_node or ranks))


def components_of(config: Config) -> tuple[Component, ...]:
    """The components of a run in world order, without commands."""
    slurm, trainers, rollouts = config.slurm, config.trainer.ranks, config.rollout.ranks
    trainer, rollout = merged(slurm.common, slurm.trainer), merged(slurm.common, slurm.rollout)
    parts = [Component("rollout", num_nodes(rollouts, rollout), rollouts, rollout, f"{rollouts} rollout")]
    if trainers:
        parts.insert(0, Component("trainer", num_nodes(trainers, trainer), trainers, trainer, f"{trainers} trainer"))
    if rewards := config.reward.ranks:
        reward = merged(without_gpus(slurm.common), slurm.reward)
        parts.append(Component("reward", num_nodes(rewards, reward), rewards, reward, f"{rewards} reward"))
    if slurm.head is None:  # the controller sits beside the first ranks
        first = parts[0]
        parts[0] = replace(first, tasks=first.tasks + 1, holds=f"1 controller + {first.holds}")
    else:
        head = merged(without_gpus(slurm.common), slurm.head)
        parts.insert(0, Component("head", 1, 1, head, "1 controller"))
    return tuple(parts)


def run_job(config: Config, path: str, overrides: Sequence[str], python: str, title: Sequence[str] = ()) -> JobSpec:
    """The job that runs a configuration.

    Args:
        config: the configuration in `path` with `overrides`.
        path: its file, as seen from the directory of submission.
        python: what runs the ranks, unless the configuration names another one.
        title: comment lines for the top of the script.
    """
    slurm, folder = config.slurm, f"{config.run_dir}/slurm"
    begin = shlex.join(["-m", "areal_hpc.attempt", path, *overrides])
    rank = '"$PYTHON" -m areal_hpc.rank "$ATTEMPT_DIR" --component'
    components = components_of(config)
    survive = slurm.mpi == "pmi2" and config.num_expendable > 0
    return JobSpec(
        name=config.name,
        folder=folder,
        components=tuple(
            Component(c.name, c.nodes, c.tasks, c.settings, c.holds, f"{rank} {c.name}") for c in components
        ),
        shape=slurm.shape,
        mpi=slurm.mpi,
        python=slurm.python or python,
        minutes=slurm.minutes,
        output=slurm.output or f"{folder}/%j.out",
        setup=slurm.setup,
        prologue=(
            "export AREAL_HPC_BATCH_SCRIPT=$0",
            f'ATTEMPT_DIR=$("$PYTHON" {begin})',
            '[ -n "$ATTEMPT_DIR" ] || exit 0 # the run is finished',
        ),
        epilogue=(*VERDICT, *(REQUEUE if config.checkpoint.resume else ()), *EXIT)
        if survive or config.checkpoint.resume
        else (),
        survive=survive,
        signal=f"USR2@{slurm.signal_s}" if slurm.signal_s and config.checkpoint.resume else None,
        requeue=config.checkpoint.resume,
        srun=slurm.srun,
        title=tuple(title),
    )
