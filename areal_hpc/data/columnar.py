"""Rows of Parquet files and of Arrow files as `datasets` writes them. The only file that imports pyarrow."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areal_hpc.data.prompts import DatasetError
from areal_hpc.data.rows import ARROW_FILE, PARQUET, Row, first_bytes
from areal_hpc.exits import Exit, RunError

_ROWS_AT_ONCE = 256


def read(path: Path) -> Iterator[Row]:
    """All rows of a Parquet file, an Arrow file or an Arrow stream.

    Raises:
        DatasetError: the file is cut off or damaged.
        RunError: CONFIG, pyarrow is not installed.
    """
    number = 0
    with _telling(path, lambda: f" after row {number}" if number else ""):
        for batch in _batches(path):
            for values in _values(batch):
                number += 1
                place = f"{path}: row {number}"
                if isinstance(values, str):
                    yield Row(number, place, None, values)
                else:
                    yield Row(number, place, {name: _plain(value) for name, value in values.items()})


def count(path: Path) -> int:
    """Number of rows; column data stays unread. Raises DatasetError, RunError as `read`."""
    with _telling(path, lambda: ""):
        pa = _pyarrow(path)
        if first_bytes(path).startswith(PARQUET):
            return int(pa.parquet.read_metadata(path).num_rows)
        return sum(batch.num_rows for batch in _batches(path))


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        kind = "Parquet" if first_bytes(path).startswith(PARQUET) else "Arrow"
        reason = f'{path}: a {kind} file needs pyarrow; install it with `pip install "areal-hpc[data]"`'
        raise RunError(Exit.CONFIG, reason) from None
    return pyarrow


@contextmanager
def _telling(path: Path, where: Any) -> Iterator[None]:
    """What pyarrow says about a file that is not whole, as one sentence."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:  # pyarrow's own kinds, OSError and ValueError, as the damage would have it
        said = " ".join(str(error).split())
        kind = "Parquet" if first_bytes(path).startswith(PARQUET) else "Arrow"
        raise DatasetError([f"{path}: the {kind} file is cut off or damaged{where()}: {said[:200]}"]) from None


def _batches(path: Path) -> Iterator[Any]:
    pa = _pyarrow(path)
    magic = first_bytes(path)
    if magic.startswith(PARQUET):
        with pa.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=_ROWS_AT_ONCE)
        return
    with pa.memory_map(str(path)) as source:
        if magic.startswith(ARROW_FILE):
            file = pa.ipc.open_file(source)
            yield from (file.get_batch(i) for i in range(file.num_record_batches))
        else:
            yield from pa.ipc.open_stream(source)


def _values(batch: Any) -> Iterator[dict[str, Any] | str]:
    """The rows of a batch; one that has no value in Python, such as text that is not UTF-8, is the reason instead."""
    names = batch.schema.names
    if len(set(names)) < len(names):
        raise ValueError(f"column {next(n for n in names if names.count(n) > 1)} is there twice")
    for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
        part = batch.slice(start, _ROWS_AT_ONCE)
        try:
            yield from part.to_pylist()
        except ValueError:
            for i in range(part.num_rows):
                try:
                    yield part.slice(i, 1).to_pylist()[0]
                except ValueError as error:
                    yield f"has no readable value: {error}"


def _plain(value: Any) -> Any:
    """A value as JSON would have it, if there is one; what stays is refused by name when it is used."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    return value
