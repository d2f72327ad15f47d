"""The batch script of a job, as text a person can read, keep and submit by hand."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from areal_hpc.jobspec import Component, JobSpec

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""No network look-ups, no thread pools beside the ranks' own, no output that waits."""
SURVIVE = "AREAL_HPC_SURVIVE"
"""Tells the ranks that the death of one of them ends no other."""
FENCE = "export SLURM_PMIX_FENCE=${SLURM_PMIX_FENCE:-ring} # with the tree, MPI_Init crashes now and then"
"""Slurm's PMIx plugin answers a barrier at once, with an error, when its tree algorithm is asked for the next one too
early. Open MPI takes that for the end of the barrier, and a rank crashes in MPI_Init: 6 of 266 starts with Slurm's
default, 41 of 334 with the tree, 0 of 217 with the ring (22.05, hosts under load)."""
WATCH = 'srun() { "$PYTHON" -m areal_hpc.srun "$@"; } # which over PMIx may hang when all ranks have ended'
"""See srun.py."""


def render(spec: JobSpec) -> str:
    """The script: #SBATCH lines of all components, setup, prologue, one srun that makes one MPI world, epilogue."""
    parts = [list(spec.prologue), ["code=0"] if spec.epilogue else [], list(_srun(spec)), list(spec.epilogue)]
    return head(spec) + _text(parts)


def head(spec: JobSpec) -> str:
    """All of it that comes before the prologue: directives, the user's setup, environment, PYTHON."""
    parts = [
        ["#!/bin/bash", *(f"# {line}" for line in spec.title), f"# {summary(spec)}"],
        list(_directives(spec)),
        ["", "set -euo pipefail", *spec.setup],
        [
            f"export {' '.join(f'{name}={value}' for name, value in environment(spec).items())}",
            f"unset {' '.join(_inherited(spec))} # each component says its own below",
        ],
        [f"PYTHON={shlex.quote(spec.python)}"],
        [FENCE, WATCH] if spec.mpi.startswith("pmix") else [],
    ]
    return _text(parts)


def _text(parts: Iterable[Iterable[str]]) -> str:
    return "".join(f"{line}\n" for part in parts for line in part)


def environment(spec: JobSpec) -> dict[str, str]:
    """What every rank sees."""
    return ENVIRONMENT | ({SURVIVE: "1"} if spec.survive else {})


def _inherited(spec: JobSpec) -> list[str]:
    """Variables of the batch step that srun would take for flags."""
    cpus = ["SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK"]
    return [*cpus, "SLURM_NTASKS_PER_NODE"] if _shares_one_allocation(spec) else cpus


def _shares_one_allocation(spec: JobSpec) -> bool:
    """One allocation that others may share nodes with, so that it must say how much of each node it takes."""
    return spec.shape == "steps" and spec.components[0].settings.exclusive is False


def summary(spec: JobSpec) -> str:
    """One sentence: which ranks on how many nodes."""
    places = [f"{c.holds or c.name} on {c.nodes} node{'s' * (c.nodes > 1)}" for c in spec.components]
    return f"One MPI world of {spec.num_tasks} ranks: {', '.join(places)}."


def _directives(spec: JobSpec) -> Iterator[str]:
    yield from flags(("job-name", spec.name), ("output", spec.output), ("open-mode", "append"), ("time", spec.minutes))
    if spec.requeue:
        yield "#SBATCH --requeue"
    if spec.shape == "steps":
        if spec.survive:
            yield "#SBATCH --no-kill"
        yield from _allocation(spec)
        yield from flags(("signal", spec.signal))
        return
    for number, component in enumerate(spec.components):
        if number:
            yield "#SBATCH hetjob"
        yield from _component(component)
        yield from flags(("signal", spec.signal))  # not inherited by every version of Slurm


def _component(component: Component) -> Iterator[str]:
    yield from _resources(component)
    cpus = component.settings.cpus_per_task
    yield from flags(("nodes", component.nodes), ("ntasks", component.tasks), ("cpus-per-task", cpus))
    yield from _rest(component)


def _allocation(spec: JobSpec) -> Iterator[str]:
    """All nodes of all components; what they ask for is the same (slurmrules.py sees to it)."""
    first = spec.components[0]
    yield from _resources(first)
    yield from flags(("nodes", sum(c.nodes for c in spec.components)))
    if _shares_one_allocation(spec):
        tasks = max(-(-c.tasks // c.nodes) for c in spec.components)
        cpus = max(c.settings.cpus_per_task or 1 for c in spec.components)
        yield from flags(("ntasks-per-node", tasks), ("cpus-per-task", cpus))
    yield from _rest(first)


def _resources(component: Component) -> Iterator[str]:
    s = component.settings
    yield from flags(("partition", s.partition), ("account", s.account), ("qos", s.qos))
    yield from flags(("reservation", s.reservation), ("constraint", s.constraint))


def _rest(component: Component) -> Iterator[str]:
    s = component.settings
    yield from flags(("gpus-per-node", s.gpus_per_node or None), ("mem", s.memory))
    if s.exclusive is not False:
        yield "#SBATCH --exclusive"
    for flag in s.flags:
        yield _hide_hetjob(f"#SBATCH {flag}")


def flags(*pairs: tuple[str, str | int | None]) -> Iterator[str]:
    """One #SBATCH line per value that is not None."""
    for name, value in pairs:
        if value is not None:
            yield _hide_hetjob(f"#SBATCH --{name}={shlex.quote(str(value))}")


def _hide_hetjob(line: str) -> str:
    """Versions of sbatch were reported that take any #SBATCH line with this word in it for the border between two
    components (22.05 does not)."""
    for word in ("hetjob", "packjob"):
        line = line.replace(word, f"{word[0]}''{word[1:]}")
    return line


def _srun(spec: JobSpec) -> Iterator[str]:
    if spec.shape == "steps" and spec.mpi == "pmi2":
        yield from _plain_step(spec)
        return
    yield shlex.join(["srun", f"--mpi={spec.mpi}", *_deaths(spec), *spec.srun]) + " \\"
    for number, component in enumerate(spec.components):
        is_het = spec.shape == "het" and len(spec.components) > 1
        where = [f"--het-group={number}"] if is_het else [f"--nodes={component.nodes}"]
        where.append(f"--ntasks={component.tasks}")
        if component.settings.cpus_per_task:
            where.append(f"--cpus-per-task={component.settings.cpus_per_task}")
        last = number == len(spec.components) - 1
        yield f"  {' '.join(where)} {component.command}" + (_status(spec) if last else " : \\")


def _deaths(spec: JobSpec) -> list[str]:
    """What the death of a task means to the others. --wait: without it a site's WaitTime ends them after the first."""
    if not spec.survive:
        return ["--kill-on-bad-exit=1"]
    return ["--kill-on-bad-exit=0", "--wait=0", *(["--no-kill"] if spec.shape == "steps" else [])]


def _plain_step(spec: JobSpec) -> Iterator[str]:
    """One allocation over PMI2: a heterogeneous step hangs in MPI_Init (seen with MPICH 5 on Slurm 22.05), a plain one
    with the same layout does not. Ranks know their roles by their number."""
    counts = [
        c.tasks // c.nodes + (node < c.tasks % c.nodes) for c in spec.components for node in range(c.nodes)
    ]  # Slurm, too, gives the odd task to the first nodes
    cpus = max(c.settings.cpus_per_task or 0 for c in spec.components)
    words = ["srun", f"--mpi={spec.mpi}", *_deaths(spec), "--distribution=arbitrary"]
    words += [f"--ntasks={spec.num_tasks}", *([f"--cpus-per-task={cpus}"] if cpus else []), *spec.srun]
    yield "export SLURM_HOSTFILE=$(mktemp)"
    yield "trap 'rm -f \"$SLURM_HOSTFILE\"' EXIT"
    yield f"set -- {' '.join(map(str, counts))} # ranks on each host"
    yield 'scontrol show hostnames "$SLURM_JOB_NODELIST" |'
    yield '  while read -r host; do for _ in $(seq "$1"); do echo "$host"; done; shift; done > "$SLURM_HOSTFILE"'
    yield shlex.join(words) + " \\"
    yield f"  {spec.components[0].command.partition(' --component ')[0]}{_status(spec)}"


def _status(spec: JobSpec) -> str:
    """Keep srun's exit code for the epilogue, which `set -e` would not reach."""
    return " || code=$?" if spec.epilogue else ""
