"""What the doctor hears without MPI, from marked lines of output, and the screen it prints. Pure but for `say`."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from areal_hpc.exits import Exit
from areal_hpc.slurmfacts import LEVELS, Finding, compact, spans

MARK = "@areal-hpc-doctor "
WIDTH = 100
PHASES = ("started", "loaded", "joined")
"""A rank runs; it has loaded the MPI library; it has come through the start of MPI."""

STEP_ENDED = "Terminating"
"""srun says so when it kills all ranks because of one."""

BACKTRACE = re.compile(r"\[[^\]]*\] (\[ ?\d+\]|Signal code:|Failing at address:|\*\*\* )")
"""What Open MPI prints of a crash beside the name of the signal, such as "[node1:269] [ 3] /lib/libmpi.so(+0xf)"."""

Mark = dict[str, Any]

CAUSES = (
    (
        "More processors requested|configuration is not available|nodes are busy",
        "the allocation is not what the configuration needs: see areal-hpc submit CONFIG --dry-run, or use --submit",
    ),
    (
        "[Ii]nvalid MPI|plugin_load|[Cc]annot find mpi",
        "Slurm lacks this MPI plugin: see srun --mpi=list, set slurm.mpi",
    ),
    (
        "No module named|No such file or directory|execve|command not found",
        "the environment is not visible on the nodes: put it on a shared file system, name it in slurm.python",
    ),
    ("direct connection|Cannot create directory", "PMIx failed: see the mpi lines, or MPICH with slurm.mpi=pmi2"),
    ("Unable to confirm allocation|has expired|Invalid job id", "the allocation is over: ask for a new one"),
)
"""Pattern in what srun prints -> what to do."""


def say(**content: Any) -> None:
    """One marked line on stdout, which srun carries to the doctor."""
    print(MARK + json.dumps(content), flush=True)


def say_findings(findings: Sequence[Finding]) -> None:
    for finding in findings:
        say(finding=asdict(finding))


def parse(line: str) -> Mark | None:
    """The content of a marked line; None for any other."""
    _, mark, text = line.partition(MARK)
    try:
        content = json.loads(text) if mark else None
    except ValueError:
        return None  # two ranks wrote into one line: it will be shown as it is
    return content if isinstance(content, dict) else None


def findings_in(marks: Sequence[Mark]) -> list[Finding]:
    return [Finding(**mark["finding"]) for mark in marks if "finding" in mark]


def unfinished(
    num_ranks: int, hosts: Sequence[str], marks: Sequence[Mark], ended: str, gave_up: bool, noise: Sequence[str]
) -> list[Finding]:
    """Why the ranks came to no result.

    Args:
        num_ranks: as configured.
        hosts: all hosts of the allocation; empty when unknown.
        marks: what ranks said.
        ended: how srun ended, for instance "srun ended with exit code 1".
        gave_up: the deadline ended it: the others wait for whoever is furthest behind. Otherwise, or once srun began to
            end the step, those behind may have been killed because of one that was further.
        noise: last lines of everything else that was printed.
    """
    seen = [{int(m["rank"]): str(m["host"]) for m in marks if m.get("phase") == phase} for phase in PHASES]
    sizes = sorted({int(m["size"]) for m in marks if m.get("phase") == "joined"})
    if sizes and sizes != [num_ranks]:
        found = [_many_worlds(num_ranks, len(seen[-1]), sizes)]
    else:
        late = list(_late(num_ranks, hosts, seen))
        waited = gave_up and not any(line.startswith("srun:") and STEP_ENDED in line for line in noise)
        found = [replace(finding, text=f"{finding.text}: {ended}") for finding in (late[:1] if waited else late[-1:])]
    said = _said(noise)
    if said:
        advice = next((advice for pattern, advice in CAUSES if re.search(pattern, "\n".join(noise))), "")
        found.append(Finding("bad", "srun", said, advice))
    return found


def _said(noise: Sequence[str]) -> str:
    """The lines most worth reading: the last of ranks, then the first of srun, which knows why it ended."""
    lines = list(dict.fromkeys(line.strip() for line in noise if line.strip() and not BACKTRACE.match(line.strip())))
    slurm = [line for line in lines if line.startswith(("srun:", "slurmstepd"))]
    rest = [line for line in lines if line not in slurm]
    return " | ".join(line[:250] for line in [*rest[-2:], *slurm[:2]])


def _many_worlds(num_ranks: int, num_joined: int, sizes: Sequence[int]) -> Finding:
    each = (
        "each is alone in a world of its own" if sizes == [1] else f"worlds have {' or '.join(map(str, sizes))} ranks"
    )
    text = f"{num_joined} of {num_ranks} ranks came up, but {each}"
    advice = "the MPI library does not speak the plugin's language: slurm.mpi=pmi2 for MPICH, pmix for Open MPI"
    return Finding("bad", "world", text, advice)


def _late(num_ranks: int, hosts: Sequence[str], seen: Sequence[dict[int, str]]) -> Iterator[Finding]:
    """One finding per phase that some ranks did not reach; the last one is the furthest that any rank came."""
    started, loaded, joined = seen
    if not started:
        yield Finding("bad", "start", f"no rank of {num_ranks} started", "" if hosts else "is this job still running?")
        return
    if len(started) < num_ranks:
        empty = compact(set(hosts) - set(started.values()))
        text = f"{_ranks(set(range(num_ranks)) - set(started))} did not start" + (
            f" (none on {empty})" if empty else ""
        )
        yield Finding("bad", "start", text, "look at slurmd on these hosts, and whether Python is visible there")
    if len(loaded) < len(started):
        advice = "mpi4py needs the library on every node: load its module in slurm.setup"
        yield Finding("bad", "mpi", f"{_lacking(started, loaded)} could not load the MPI library", advice)
    if loaded and len(joined) < len(loaded):
        advice = "plugin and library must fit (slurm.mpi), and all hosts must reach each other over the network"
        yield Finding("bad", "mpi", f"{_lacking(loaded, joined)} did not come through the start of MPI", advice)
    if len(joined) == num_ranks:
        advice = "run it again with a longer --deadline; look for hosts that are slow or lost"
        yield Finding("bad", "messages", f"all {num_ranks} ranks were there, then came no result", advice)


def _lacking(there: dict[int, str], others: dict[int, str]) -> str:
    ranks = set(there) - set(others)
    return f"{_ranks(ranks)} on {compact(there[rank] for rank in ranks)}"


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank{'s' * (len(listed) > 1)} {spans(listed)}"


def exit_code(findings: Sequence[Finding]) -> Exit:
    """PREFLIGHT when something would break a run."""
    return Exit.PREFLIGHT if any(finding.level == "bad" for finding in findings) else Exit.DONE


def render(title: str, findings: Sequence[Finding]) -> str:
    """The screen: one line per finding, what to do about it below, and the verdict with the exit code."""
    lines = [title]
    for finding in findings:
        lines += _wrapped(f"  {finding.level:<5} {finding.topic:<9} ", finding.text)
        if finding.advice:
            lines += _wrapped(" " * 18 + "-> ", finding.advice)
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    code = exit_code(findings)
    worst = "a run would break here" if code else "a run can start here"
    lines.append(f"{worst}: {counts['bad']} bad, {counts['warn']} warnings (exit code {int(code)})")
    return "\n".join(lines)


def code_in(screen: str) -> int | None:
    """The exit code that a printed screen ends with."""
    codes = re.findall(r"\(exit code (\d+)\)$", screen, re.MULTILINE)
    return int(codes[-1]) if codes else None


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)
