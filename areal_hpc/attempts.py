"""What each attempt of a run came to, and whether another one makes sense.

RUN/attempt_N/begin.json   who began, and at which step it went on; written again once that is known
RUN/attempt_N/end.json     how it ended and what it has done; missing after SIGKILL or the loss of a node
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from areal_hpc.rundir import write_json

BEGIN = "begin.json"
END = "end.json"

T = TypeVar("T")


@dataclass(frozen=True)
class Begin:
    """The start of an attempt; `steps_done` is None until it has loaded what it goes on from."""

    host: str
    job_id: str | None
    steps_done: int | None = None


@dataclass(frozen=True)
class End:
    """The end of an attempt, as its controller saw it; steps are counted from the beginning of the run."""

    state: str
    exit_code: int
    why_ended: str
    steps_done_before: int
    steps_done_after: int
    host: str
    job_id: str | None


@dataclass(frozen=True)
class Attempt:
    """What is known of an attempt."""

    number: int
    begin: Begin | None
    end: End | None

    @property
    def job_id(self) -> str | None:
        known = self.end or self.begin
        return known.job_id if known else None

    @property
    def steps_before(self) -> int | None:
        if self.end is not None:
            return self.end.steps_done_before
        return self.begin.steps_done if self.begin is not None else None

    @property
    def in_words(self) -> str:
        known = self.end or self.begin
        job = f"job {known.job_id}, " if known and known.job_id else ""
        where = f" ({job}host {known.host})" if known else ""
        if self.end is not None:
            return (
                f"attempt {self.number}{where}: {self.end.state}, exit code {self.end.exit_code}: {self.end.why_ended}"
            )
        return f"attempt {self.number}{where}: left no word; it was killed, or its node was lost"


def write_begin(attempt_dir: Path, begin: Begin) -> None:
    write_json(attempt_dir / BEGIN, asdict(begin))


def write_end(attempt_dir: Path, end: End) -> None:
    write_json(attempt_dir / END, asdict(end))


def read_ends(run_dir: Path) -> list[Attempt]:
    """All attempts that have a directory, oldest first; a file that is missing or damaged is None."""
    numbers = [int(m[1]) for path in run_dir.glob("attempt_*") if (m := re.fullmatch(r"attempt_(\d+)", path.name))]
    directories = [(number, run_dir / f"attempt_{number}") for number in sorted(numbers)]
    return [Attempt(n, _read(path / BEGIN, Begin), _read(path / END, End)) for n, path in directories]


def may_go_on(run_dir: Path, reached: int, max_fruitless: int = 3, job_id: str | None = None) -> str | None:
    """None if another attempt may start, else the sentence for people, with all reasons.

    Args:
        reached: step of the newest valid checkpoint, 0 without one.
        max_fruitless: attempts in a row that may end without having finished a step that no attempt before had.
        job_id: count attempts of this job only, so that a start by hand has a budget of its own.
    """
    counted = [one for one in read_ends(run_dir) if job_id is None or one.job_id == job_id]
    fruitless, record = _fruitless(counted, reached)
    if len(fruitless) < max_fruitless:
        return None
    listed = "\n  ".join(one.in_words for one in fruitless[-max_fruitless:])
    return f"not started again: the last {max_fruitless} attempts finished no step beyond {record}:\n  {listed}"


def _fruitless(attempts: Sequence[Attempt], reached: int) -> tuple[list[Attempt], int]:
    """Attempts since the last one that got further than all before it, and the furthest step."""
    fruitless: list[Attempt] = []
    record, last_before = 0, 0
    for index, one in enumerate(attempts):
        before = one.steps_before
        if before is not None:
            # Further back than the attempt before: it fell back on an older checkpoint, and what was lost counts again.
            record = before if before < last_before else max(record, before)
            last_before = before
        after = _steps_after(one, attempts[index + 1 :], reached)
        if after > record or (one.end is not None and one.end.exit_code == 0):
            fruitless = []
            record = max(record, after)
        else:
            fruitless.append(one)
    return fruitless, record


def _steps_after(one: Attempt, later: Sequence[Attempt], reached: int) -> int:
    """Steps done when an attempt ended; of one that left no word, those from which the next one went on."""
    if one.end is not None:
        return one.end.steps_done_after
    if one.steps_before is None:
        return 0
    return next((next_one.steps_before for next_one in later if next_one.steps_before is not None), reached)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return kind(**_of_right_type(content, kind))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _of_right_type(content: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Raises TypeError, KeyError."""
    values = {field.name: content[field.name] for field in fields(kind)}
    for name, value in values.items():
        wanted: Any = int if name.startswith("steps") or name == "exit_code" else str
        if not isinstance(value, wanted) and not (value is None and name in ("job_id", "steps_done")):
            raise TypeError(name)
    return values
