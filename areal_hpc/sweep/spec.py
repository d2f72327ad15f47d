"""What a sweep is: a YAML file with a base configuration and what varies, and the points it comes to.

base: configs/scale.yaml
directory: runs/scaling
vary:
  gpus: [64, 128, 256, 512]
  staleness.max_staleness: [0, 4]
max_jobs: 2
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from areal_hpc.config.check import ConfigErrors, read_file, shown
from areal_hpc.config.rules import Problem
from areal_hpc.config.schema import as_yaml, nearest, settings, walk
from areal_hpc.config.types import Count, Number, Section, Text, Unit

GPUS = "gpus"
"""The axis that is no setting: trainer.ranks and rollout.ranks follow from it."""

FOLLOWS = ("trainer.ranks", "rollout.ranks")
SET_BY_SWEEP = ("run_dir", "name")
MAX_NAME = 64


class SweepSpec(Section):
    """A sweep."""

    base: Text
    """Configuration file of all points, seen from the current directory."""
    directory: Text
    """DIRECTORY/POINT is the run directory of a point."""
    vary: Annotated[dict[str, list[Any]], Field(min_length=1)]
    """Setting -> list of values, or gpus -> numbers of GPUs; the points are all combinations."""
    trainer_share: Annotated[Number, Field(gt=0, lt=1)] = 0.25
    """With gpus: share of the GPUs that trains; both parts must be whole nodes of slurm.common.gpus_per_node."""
    gpus_per_rank: Annotated[Count, Unit("GPUs")] = 1
    """With gpus: GPUs that one rank stands for, more than 1 for simulated compute only."""
    max_jobs: Annotated[Count, Unit("jobs")] | None = None
    """Most jobs of the sweep that run at the same time; the others wait for their end in the queue; null: no limit."""
    overrides: dict[str, Any] = {}
    """Setting -> value for all points."""


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration of a sweep.

    Attributes:
        name: made from what varies, safe as a file name, for instance gpus-64_seed-1.
        varied: axis -> value.
        settings: dotted name -> value of everything that differs from the base, but for what follows from gpus.
    """

    name: str
    varied: dict[str, Any]
    settings: dict[str, Any]

    @property
    def gpus(self) -> int | None:
        return self.varied.get(GPUS)


def load_spec(path: Path) -> SweepSpec:
    """Read a sweep. Raises ConfigErrors with everything that is wrong with it."""
    document = read_file(path)
    problems = list(document.problems)
    spec = None
    try:
        spec = SweepSpec.model_validate(document.data)
    except ValidationError as error:
        problems += _translate(error)
    known = {problem.where for problem in problems}
    problems += [problem for problem in _axes(document.data) if problem.where not in known]
    if problems or spec is None:
        line = {name: number for name, (number, _) in document.places.items()}
        problems.sort(key=lambda problem: line.get(problem.where, math.inf))
        raise ConfigErrors(problems, str(path), document.places)
    return spec


def points(spec: SweepSpec) -> list[Point]:
    """All combinations, the first axis outermost."""
    labels = _labels(list(spec.vary))
    found = []
    for values in itertools.product(*spec.vary.values()):
        varied = {axis: _plain(value) for axis, value in zip(spec.vary, values, strict=True)}
        name = _shortened("_".join(f"{labels[axis]}-{_in_name(value)}" for axis, value in varied.items()))
        own = {axis: value for axis, value in varied.items() if axis != GPUS}
        run_dir = f"{spec.directory}/{name}"
        found.append(Point(name, varied, {**spec.overrides, **own, "name": name, "run_dir": run_dir}))
    return found


def split_gpus(gpus: int, share: float, per_rank: int, trainer_node: int, rollout_node: int) -> tuple[int, int]:
    """Trainer and rollout ranks on so many GPUs.

    Args:
        share: of the GPUs that trains.
        per_rank: GPUs that one rank stands for.
        trainer_node, rollout_node: GPUs of one node of each kind.

    Raises:
        ValueError: a part is no whole number of nodes, or a node no whole number of ranks; says what would be.
    """
    for node in (trainer_node, rollout_node):
        if node % per_rank:
            raise ValueError(f"a node of {node} GPUs holds no whole number of ranks with gpus_per_rank = {per_rank}")

    def parts(total: int) -> tuple[int, int] | None:
        trainers = round(total * share)
        whole = math.isclose(trainers, total * share, rel_tol=1e-9) and 0 < trainers < total
        return (trainers, total - trainers) if whole and not trainers % trainer_node else None

    def fits(total: int) -> bool:
        both = parts(total)
        return both is not None and not both[1] % rollout_node

    if not fits(gpus):
        near = [*filter(fits, range(gpus, 0, -1))][:1] + [*filter(fits, range(gpus, 2 * gpus + 64 * trainer_node))][:1]
        hint = f"; {' or '.join(map(str, near))} would do" if near else ""
        raise ValueError(
            f"{gpus} GPUs with trainer_share = {share:g} are {gpus * share:g} to train and {gpus * (1 - share):g} to "
            f"generate, which are no whole nodes of {trainer_node} and {rollout_node} GPUs{hint}"
        )
    trainers, rollouts = parts(gpus) or (0, 0)
    return trainers // per_rank, rollouts // per_rank


# --------------------------------------------------------------------------------------------------------- names
def _labels(axes: list[str]) -> dict[str, str]:
    """The shortest end of each dotted name that no other axis has: lr, or trainer.ranks beside rollout.ranks."""
    labels = {}
    for axis in axes:
        parts = axis.split(".")
        ends = [".".join(parts[i:]) for i in range(len(parts) - 1, -1, -1)]
        labels[axis] = next(
            e for e in ends if e == axis or not any(f".{o}".endswith(f".{e}") for o in axes if o != axis)
        )
    return labels


def _plain(value: Any) -> Any:
    """YAML 1.1 reads 1e-5 as text."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?e[+-]?\d+", value, re.IGNORECASE):
        return float(value)
    return value


def _in_name(value: Any) -> str:
    """A value as part of a file name; where characters had to go, a few digits of its hash keep it unique."""
    text = (
        f"{value:g}".replace("e+", "e") if isinstance(value, float) and float(f"{value:g}") == value else as_yaml(value)
    )
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", text)
    return text if safe == text else f"{safe.strip('-.')}.{_digits(text)}".lstrip(".")


def _shortened(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 9]}.{_digits(name)}"


def _digits(text: str) -> str:
    return blake2b(text.encode(), digest_size=4).hexdigest()


# ------------------------------------------------------------------------------------------------------ problems
def _translate(error: ValidationError) -> Iterator[Problem]:
    """What pydantic found, one sentence per key."""
    keys = {setting.name: setting for setting in walk(SweepSpec, "")}
    for entry in error.errors(include_url=False, include_context=False):
        loc = [str(part) for part in entry["loc"] if part != "[key]"]
        name = ".".join(loc)
        if entry["type"] in ("extra_forbidden", "invalid_key"):
            close = difflib.get_close_matches(name, keys, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            yield Problem(name, "unknown key", f"{hint}There are {', '.join(keys)}")
        elif entry["type"] == "missing":
            yield Problem(name, "is missing", keys[name].doc)
        elif len(loc) > 1 and loc[0] == "vary":
            yield Problem(name, f"must be a list of values, got {shown(entry['input'])}")
        else:
            setting = keys[loc[0]]
            legal = "a mapping of settings" if loc[0] in ("vary", "overrides") else setting.must_be[len("must be ") :]
            yield Problem(name, f"must be {legal}, got {shown(entry['input'])}", setting.doc)


def _axes(data: Mapping[str, Any]) -> Iterator[Problem]:
    """What is wrong with the names and values under vary and overrides, as far as they are well-formed."""
    vary, overrides = data.get("vary"), data.get("overrides")
    vary = vary if isinstance(vary, dict) else {}
    overrides = overrides if isinstance(overrides, dict) else {}
    for section, names in (("vary", vary), ("overrides", overrides)):
        for name in names:
            if section == "overrides" or name != GPUS:
                yield from _setting(f"{section}.{name}", name, with_gpus=GPUS in vary)
    for name in vary.keys() & overrides.keys():
        yield Problem(f"overrides.{name}", "is one of the axes under vary", "delete it in one of the two places")
    for axis, values in vary.items():
        if isinstance(values, list):
            yield from _values(f"vary.{axis}", axis, values)


def _setting(where: str, name: str, with_gpus: bool) -> Iterator[Problem]:
    if name in SET_BY_SWEEP:
        yield Problem(where, "is set by the sweep, from the name of the point")
    elif with_gpus and name in FOLLOWS:
        yield Problem(where, "follows from vary.gpus", "delete one of them")
    elif name not in settings():
        near = nearest(name)
        yield Problem(where, "unknown setting", f"did you mean {' or '.join(near)}?" if near else "")
    elif settings()[name].is_section:
        yield Problem(where, "is a section", f"write {name}.SETTING for each of its settings")


def _values(where: str, axis: str, values: list[Any]) -> Iterator[Problem]:
    if not values:
        yield Problem(where, "is an empty list")
    texts = [as_yaml(_plain(value)) for value in values]
    for text in dict.fromkeys(text for text in texts if texts.count(text) > 1):
        yield Problem(where, f"holds {text} more than once")
    if axis == GPUS:
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                yield Problem(where, f"must hold whole numbers of GPUs, got {shown(value)}")
