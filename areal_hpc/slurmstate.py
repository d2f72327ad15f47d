"""The state of heterogeneous jobs, from what sacct, squeue and scontrol print. Pure text in, states out."""

from __future__ import annotations

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


def worst(states: Iterable[str]) -> str:
    """The state that matters of several; a state this list does not know counts as worse than all."""
    known = {state: rank for rank, state in enumerate(RANKING)}
    return max(states, key=lambda state: known.get(state, len(RANKING)), default=UNKNOWN)


def has_ended(states: Iterable[str]) -> bool:
    """All components have ended; false while nothing is known."""
    listed = list(states)
    return bool(listed) and all(state in ENDED for state in listed)
