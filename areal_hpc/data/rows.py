"""The rows of a file or directory, told by content and not by name, and where each of them stands.

A row is an object of fields, or the reason why there is none: who reads decides how many of those are too many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from areal_hpc.data.prompts import DatasetError

GZIP, PARQUET, ARROW_FILE, ARROW_STREAM = b"\x1f\x8b", b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
UTF16 = (b"\xff\xfe", b"\xfe\xff")
_TABLES = (PARQUET, ARROW_FILE, ARROW_STREAM)


class Row(NamedTuple):
    """One row.

    Attributes:
        number: its number from 1 in the whole source, blank lines counted; its identity where it has no other.
        place: where it stands, for people.
        fields: None if it cannot be read.
        reason: why it cannot be read.
    """

    number: int
    place: str
    fields: dict[str, Any] | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Count:
    """How many rows a source has; `is_all`: counting went on to its end."""

    num_rows: int
    is_all: bool = True


def read_rows(path: Path, split: str | None, max_line_bytes: int) -> Iterator[Row]:
    """All rows of a source, one after the other.

    Raises:
        DatasetError: a file cannot be read, or not to its end; there is no such split.
        RunError: pyarrow is needed and not installed.
    """
    from areal_hpc.data import jsonl

    before = 0
    for file in files_of(path, split):
        number = 0
        if is_table(file):
            from areal_hpc.data import columnar

            rows = columnar.read(file)
        else:
            rows = jsonl.read(file, max_line_bytes)
        for row in rows:
            number = row.number
            yield row._replace(number=before + number) if before else row
        before += number


def count_rows(path: Path, split: str | None, seconds: float) -> Count:
    """Rows of a source without reading them; of text files as many as can be counted in so many seconds.

    Raises:
        DatasetError, RunError: as `read_rows`.
    """
    from areal_hpc.data import jsonl

    counts = []
    for file in files_of(path, split):
        if is_table(file):
            from areal_hpc.data import columnar

            counts.append(Count(columnar.count(file)))
        else:
            counts.append(jsonl.count(file, seconds))
    return Count(sum(count.num_rows for count in counts), all(count.is_all for count in counts))


def is_table(path: Path) -> bool:
    """The file is Parquet or Arrow. Raises DatasetError: it cannot be read."""
    return first_bytes(path).startswith(_TABLES)


def first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(8)
    except OSError as error:
        raise cannot_be_read(path, error) from None


def cannot_be_read(path: Path, error: OSError, after: str = "") -> DatasetError:
    return DatasetError([f"{path}: cannot be read{after}: {error.strerror or error}"])


def files_of(path: Path, split: str | None) -> list[Path]:
    """The files that make up a source. Raises DatasetError: there are none, or too many to know which are meant."""
    if not path.is_dir():
        return [path]
    from areal_hpc.data import directories

    return directories.files_of(path, split)
