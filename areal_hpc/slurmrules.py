"""Rules of a configuration about the Slurm job: what no cluster could do as it is asked."""

from __future__ import annotations

from collections.abc import Iterator

from areal_hpc.config import ComponentConfig, Config
from areal_hpc.config.rules import Problem, rule
from areal_hpc.jobspec import merged, without_gpus

PER_STEP = {"nodes", "ranks_per_node", "cpus_per_task"}
"""What the components of one allocation may differ in."""
SIGNAL_EARLY_S = 60
"""sbatch's manual: the signal of --signal may come so much earlier than asked for."""


def _components(c: Config) -> Iterator[tuple[str, int, ComponentConfig]]:
    """(Name, ranks that need a place, settings) of all components but a head."""
    if not c.is_evaluation:
        yield "trainer", c.trainer.ranks, merged(c.slurm.common, c.slurm.trainer)
    yield "rollout", c.rollout.ranks, merged(c.slurm.common, c.slurm.rollout)
    if c.reward.ranks:
        yield "reward", c.reward.ranks, merged(without_gpus(c.slurm.common), c.slurm.reward)


@rule("slurm", "trainer.ranks", "rollout.ranks", "reward.ranks")
def ranks_fill_nodes(c: Config) -> Iterator[Problem]:
    for name, ranks, settings in _components(c):
        nodes, per_node, where = settings.nodes, settings.ranks_per_node, f"slurm.{name}.nodes"
        if nodes is not None and nodes > ranks:
            yield Problem(where, f"{nodes} nodes for {name}.ranks = {ranks}: some would stay empty", "ask for fewer")
        elif nodes is not None and per_node is not None and nodes * per_node < ranks:
            yield Problem(
                where,
                f"{nodes} nodes with ranks_per_node = {per_node} hold {nodes * per_node} of {name}.ranks = {ranks}",
                "delete nodes, then it is computed",
            )


@rule("slurm", "reward.ranks")
def reward_nodes_are_used(c: Config) -> Iterator[Problem]:
    if c.slurm.reward.model_fields_set and not c.reward.ranks:
        yield Problem("slurm.reward", "has no effect, reward.ranks is 0: rollout ranks score", fatal=False)


@rule("slurm", "trainer.ranks", "rollout.ranks", "reward.ranks")
def one_gpu_one_rank(c: Config) -> Iterator[Problem]:
    for name, ranks, settings in _components(c):
        gpus = settings.gpus_per_node
        per_node = settings.ranks_per_node or -(-ranks // (settings.nodes or ranks))
        if gpus and per_node > gpus:
            yield Problem(
                f"slurm.{name}.ranks_per_node",
                f"{per_node} ranks on a node with gpus_per_node = {gpus}: some would share a GPU",
                "ask for more nodes or fewer ranks",
            )


@rule("slurm", "checkpoint.resume")
def the_warning_leaves_time(c: Config) -> Iterator[Problem]:
    limit_s, signal_s = 60 * c.slurm.minutes, c.slurm.signal_s if c.checkpoint.resume else 0
    if signal_s >= limit_s:
        text = f"{signal_s} s before the end of a job of {limit_s} s is before its start: nothing would get done"
        yield Problem("slurm.signal_s", text, "give more slurm.minutes, or less here")
    elif signal_s and signal_s + SIGNAL_EARLY_S > limit_s:
        text = f"Slurm may warn up to {SIGNAL_EARLY_S} s early: of {limit_s} s there may be none left for work"
        yield Problem("slurm.signal_s", text, "give more slurm.minutes, or less here", fatal=False)


@rule("slurm")
def one_allocation_has_one_kind_of_node(c: Config) -> Iterator[Problem]:
    slurm = c.slurm
    if slurm.shape != "steps":
        return
    if slurm.head is not None:
        yield Problem("slurm.head", "needs shape het: one allocation has one kind of node", "delete it")
    for name, settings in (("trainer", slurm.trainer), ("rollout", slurm.rollout), ("reward", slurm.reward)):
        own = [key for key, value in settings if value not in (None, ()) and key not in PER_STEP]
        for key in own:
            yield Problem(
                f"slurm.{name}.{key}",
                "with shape steps all nodes come from one allocation",
                f"set slurm.common.{key}, or use shape het",
            )
