"""The state of heterogeneous jobs, from what sacct, squeue and scontrol print. Pure text in, states out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

FINE = ("COMPLETED", "RUNNING", "COMPLETING", "CONFIGURING", "STAGE_OUT", "RESIZING", "SIGNALING", "STOPPED")
WAITING = ("SUSPENDED", "PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
BAD = ("REVOKED", "PREEMPTED", "CANCELLED", "TIMEOUT", "DEADLINE", "BOOT_FAIL", "OUT_OF_MEMORY", "NODE_FAIL", "FAILED")
RANKING = FINE + WAITING + BAD
"""From harmless to bad: the state of a job is that of its worst component."""

ENDED = {"COMPLETED", *BAD}
UNKNOWN = "UNKNOWN"
States = dict[str, dict[str, str]]
"""Job id of the leader -> component ("0", "1", ...; "" for a plain job) -> state."""

_AS_OF = re.compile(r"^Configuration data as of (\d+)$", re.MULTILINE)
_ID = re.compile(r"(\d+)(?:\+(\d+))?$")


def parse_table(text: str) -> States:
    """States from lines `JOBID|STATE|...`, as `sacct --parsable2 --noheader` and `squeue --format` print them.

    Steps (`12+0.batch`) and lines that are no job are ignored; a state may carry words, as in `CANCELLED by 1000`.
    """
    states: States = {}
    for line in text.splitlines():
        name, bar, rest = line.strip().partition("|")
        match = _ID.match(name)
        if bar and match:
            state = (rest.partition("|")[0].split() or [UNKNOWN])[0].rstrip("+")
            states.setdefault(match[1], {})[match[2] or ""] = state.upper()
    return states


def parse_scontrol(text: str) -> States:
    """States from `scontrol show job ID`: one paragraph per component."""
    rows = []
    for paragraph in re.split(r"\n\s*\n", text):
        fields = dict(re.findall(r"(\w+)=(\S*)", paragraph))
        if "JobId" in fields:
            leader, offset = fields.get("HetJobId", fields["JobId"]), fields.get("HetJobOffset")
            rows.append(f"{leader}{'' if offset is None else '+' + offset}|{fields.get('JobState', UNKNOWN)}")
    return parse_table("\n".join(rows))


def seconds_left(job: str, config: str) -> float | None:
    """How long a job may still run, by one clock; inf without a limit, None when nothing says so.

    The component that ends first counts.

    Args:
        job: what `scontrol show job ID` prints with SLURM_TIME_FORMAT=%s.
        config: what `scontrol show config` prints right after it; its first line has the time of Slurm's controller.
    """
    as_of = _AS_OF.search(config)
    ends = re.findall(r"^\s*StartTime=\S+ EndTime=(\S+)", job, re.MULTILINE)
    if as_of is None or not ends or not all(end.isdecimal() or end == "Unknown" for end in ends):
        return None
    return min((float(end) for end in ends if end != "Unknown"), default=math.inf) - float(as_of[1])


def worst(states: Iterable[str]) -> str:
    """The state that matters of several; a state this list does not know counts as worse than all."""
    known = {state: rank for rank, state in enumerate(RANKING)}
    return max(states, key=lambda state: known.get(state, len(RANKING)), default=UNKNOWN)


def has_ended(states: Iterable[str]) -> bool:
    """All components have ended; false while nothing is known."""
    listed = list(states)
    return bool(listed) and all(state in ENDED for state in listed)
