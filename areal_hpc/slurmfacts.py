"""Which combinations of Slurm, MPI library and kind of job are known to fail. Pure: texts in, findings out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

Level = Literal["ok", "warn", "bad"]
LEVELS: tuple[Level, ...] = ("ok", "warn", "bad")
Version = tuple[int, ...]

PMIX_ORDER = (23, 2)
HET_FLOOR = (24, 11)
HET_FIXES: tuple[tuple[Version, str], ...] = (
    ((23, 2), "MPI start across components (23.02)"),
    ((24, 5), "PMIx hangs there (24.05)"),
    ((24, 11), "PMIx races there (24.11)"),
    ((25, 5), "plain steps hanging inside such a job (25.05)"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's screen.

    Attributes:
        level: bad would break a run; warn may.
        topic: one word.
        text: what was seen.
        advice: what to do about it; empty when there is nothing to do.
    """

    level: Level
    topic: str
    text: str
    advice: str = ""


def slurm_version(text: str) -> Version:
    """(22, 5, 8) from "slurm 22.05.8" or "slurm-wlm 22.05.8"; empty when there is no version in it."""
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part) for part in match.groups() if part is not None) if match else ()


def mpi_library(text: str) -> tuple[str, Version]:
    """("MPICH", (5, 0, 2)) or ("Open MPI", (5, 0, 11)) from what the library says about itself; "" when unknown."""
    names = ("Open MPI", "CRAY MPICH", "MVAPICH2", "Intel(R) MPI", "MPICH")
    name = next((name for name in names if name.lower() in text.lower()), "")
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text[text.lower().find(name.lower()) :]) if name else None
    return name, tuple(int(part) for part in match.groups() if part is not None) if match else ()


def library_name(text: str) -> str:
    """ "MPICH 5.0.2": what the MPI library says about itself, shortened where it is a known one."""
    name, version = mpi_library(text)
    return f"{name} {_dotted(version)}" if version else text


def plugins(text: str) -> set[str]:
    """Names in the output of `srun --mpi=list`, versions such as pmix_v4 included."""
    lines = [line.partition(":")[2] or line for line in text.splitlines() if not line.rstrip().endswith("...")]
    return {word for line in lines for word in re.split(r"[\s,]+", line) if word}


def combination(
    slurm: Version, plugin: str, library: str, shape: str, hosts: Sequence[Sequence[str]] = ()
) -> list[Finding]:
    """Every known trouble of this combination, the worst first.

    Args:
        slurm: version of Slurm; empty when unknown.
        plugin: srun's MPI plugin, as configured.
        library: what the MPI library says about itself; empty when unknown.
        shape: het or steps.
        hosts: host names of each component, in world order; empty when unknown.
    """
    found = [*_library_rows(plugin, *mpi_library(library)), *_slurm_rows(slurm, plugin, shape, hosts)]
    return sorted(found, key=lambda finding: -LEVELS.index(finding.level))


def _library_rows(plugin: str, name: str, version: Version) -> Iterator[Finding]:
    pmix, mpich = plugin.startswith("pmix"), name in ("MPICH", "MVAPICH2", "Intel(R) MPI")
    if pmix and mpich:
        yield Finding("bad", "mpi", f"{name} ends at start-up under the plugin {plugin}", "set slurm.mpi=pmi2")
    if plugin == "pmi2" and name == "Open MPI" and version >= (5,):
        text = f"Open MPI {_dotted(version)} knows no PMI2: every rank would be alone in a world of its own"
        yield Finding("bad", "mpi", text, "set slurm.mpi=pmix")
    elif plugin == "pmi2" and name == "Open MPI":
        text = "Open MPI finds its ranks over PMI2 only if it was built with it"
        yield Finding("warn", "mpi", text, "set slurm.mpi=pmix")
    if plugin == "cray_shasta" and name not in ("CRAY MPICH", ""):
        yield Finding("warn", "mpi", f"the plugin cray_shasta is made for Cray MPICH, this is {name}")


def _slurm_rows(slurm: Version, plugin: str, shape: str, hosts: Sequence[Sequence[str]]) -> Iterator[Finding]:
    if plugin.startswith("pmix") and slurm and slurm < PMIX_ORDER and not first_sorts_first(hosts):
        yield Finding(
            "bad",
            "mpi",
            f"before Slurm 23.02 a PMIx step dies when hosts of the first component ({compact(hosts[0])}) sort after "
            f"others ({compact(host for group in hosts[1:] for host in group)})",
            "choose partitions or nodes that sort the other way, or use MPICH with slurm.mpi=pmi2",
        )
    if plugin == "cray_shasta" and shape == "het":
        text = "Slurm's manual says that cray_shasta cannot start heterogeneous jobs; on some systems it does"
        yield Finding("warn", "mpi", text, "trust the messages line below; if it fails, set slurm.shape=steps")
    if shape == "het" and slurm and slurm < HET_FLOOR:
        fixed = ", ".join(text for version, text in HET_FIXES if slurm < version)
        text = f"repaired in heterogeneous jobs since {_dotted(slurm)}: {fixed}"
        yield Finding("warn", "slurm", text, "if starts hang now and then, set slurm.shape=steps")


def settings(text: str, shape: str) -> list[Finding]:
    """Troubles in the output of `scontrol show config`."""
    values = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", text, re.MULTILINE))
    if shape == "het" and "disable_hetjob_steps" in values.get("SchedulerParameters", ""):
        reason = "this site has switched off steps across components (disable_hetjob_steps)"
        return [Finding("bad", "slurm", reason, "set slurm.shape=steps")]
    return []


def first_sorts_first(hosts: Sequence[Sequence[str]]) -> bool:
    """Every host of component 0 has a name below those of the others; true when hosts are unknown."""
    rest = [host for group in hosts[1:] for host in group]
    return not rest or not hosts[0] or max(hosts[0]) < min(rest)


def expand(text: str) -> list[str]:
    """Host names of a Slurm list: "node[1-3,07],gpu1" -> node1, node2, node3, node07, gpu1."""
    names = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        head, bracket, rest = part.partition("[")
        if not bracket:
            names.append(part)
            continue
        numbers, _, tail = rest.partition("]")
        for piece in numbers.split(","):
            first, _, last = piece.partition("-")
            span = range(int(first), int(last or first) + 1)
            names += [name for n in span for name in expand(f"{head}{n:0{len(first)}d}{tail}")]
    return names


def compact(hosts: Iterable[str]) -> str:
    """The opposite of `expand` for names that end in a number."""
    parts: list[str] = []
    split = [(m[1], m[2]) for host in sorted(set(hosts), key=_natural) if (m := re.fullmatch(r"(.*?)(\d*)", host))]
    for (stem, width), group in groupby(split, key=lambda pair: (pair[0], _width(pair[1]))):
        numbers = spans([int(number) for _, number in group if number], width)
        parts.append(stem + (f"[{numbers}]" if re.search("[-,]", numbers) else numbers))
    return ",".join(parts)


def spans(numbers: Sequence[int], width: int = 0) -> str:
    """ "1-3,7" for 1, 2, 3, 7."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]:0{width}d}" + (f"-{run[-1]:0{width}d}" if len(run) > 1 else "") for run in runs)


def _natural(host: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", host)]


def _width(number: str) -> int:
    """Of a zero-padded number; 0 for others."""
    return len(number) if number.startswith("0") else 0


def _dotted(version: Version) -> str:
    """Slurm writes 22.05, everybody else 5.0."""
    width = 2 if version[0] > 19 else 1
    return ".".join([str(version[0]), *(f"{part:0{width}d}" for part in version[1:2]), *map(str, version[2:])])
