"""The Slurm job."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from areal_hpc.config.types import Count, Section, Text, Unit, Whole


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
    """Trainer, rollout or reward ranks on one node; null: one per GPU, or all on one node without GPUs."""
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
    reserve_s: Annotated[Whole, Field(ge=0), Unit("s")] | None = None
    """If Slurm has told it nothing, the run does so by itself so long before the limit; null: as long as it takes here,
    with a margin; 0: it never looks at its time."""
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
    reward: ComponentConfig = ComponentConfig()
    """Nodes of the reward ranks, if reward.ranks asks for any; common.gpus_per_node does not hold for them."""
    head: ComponentConfig | None = None
    """A component of its own for the controller, on a CPU partition say; null: beside the first trainers."""
