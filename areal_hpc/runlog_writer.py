"""The run log, writing side: one HDF5 file per attempt, written by the controller, readable while it grows.

Layout: `/<table>/<column>` as in logschema.py, 1-D datasets with attributes `unit`, `doc` and, for codes, `labels`;
`/num_rows` holds the number of valid rows of each table (its attribute `tables` names them). Facts about the run are
attributes of the file. A flush appends the columns first and `/num_rows` last, so whoever believes `/num_rows` never
sees half a row. Columns grow in whole chunks; after a clean close they are as long as `/num_rows` says.

Single writer, many readers (SWMR): the file can be read while it is written, and survives the death of the writer
with all rows of finished flushes. A flush hands data to the operating system; it does not wait for the disk, so a
power failure of the node may cost more. A kill can tear a write between two pages of the file, and a torn block of
HDF5's own tables would make a whole column unreadable, so the file is laid out in pages that no such block crosses.
One sort is larger than a page: index blocks behind the first 8176 chunks of a column (8 million samples, 67 million
intervals of ranks).

Full disk: space is reserved before HDF5 is asked to write, so that a refusal is recoverable. HDF5 2.0 itself is not:
after a write that failed for want of space it goes on without an error, and chunks written later are lost.

Locking: this module asks HDF5 for no file locks, because many NFS and Lustre mounts refuse them (errno 37). The
writer is alone because it creates the file exclusively (O_EXCL) and no attempt ever opens an old one; HDF5 marks the
file as open for SWMR writing, which keeps out `h5py.File(path, "a")`. The environment variable
HDF5_USE_FILE_LOCKING, if set, overrides this. SWMR needs POSIX write order: on NFS read a live log on the node that
writes it, or after the end.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
from numpy.typing import NDArray

from areal_hpc import logschema
from areal_hpc.exits import Exit, RunError
from areal_hpc.logschema import Table
from areal_hpc.trajectory import Trajectory

if TYPE_CHECKING:
    from typing_extensions import Self

Rows = Mapping[str, Sequence[Any] | NDArray[Any]]
FORMAT = "areal_hpc run log"
SPARE_BYTES = 8 * 2**20  # reserved beyond the rows; half of it is more than HDF5's own tables grow in one flush
PAGE_BYTES = 4096  # of the operating system, or a part of one of its pages
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RunLogError(RunError):
    """The log cannot be written or read; says where and what to do."""

    def __init__(self, reason: str) -> None:
        super().__init__(Exit.DISK, reason)


class RunLogWriter:
    """Appends rows to a new log. Rows wait in memory until `flush`, which the controller calls once per step.

    Not thread-safe. Rows are given by column, in any order; codes as their integers or their labels. Every method
    that takes rows raises ValueError, naming the column, when one is missing, unknown, of another length or does not
    fit its type; nothing of that call is kept then.
    """

    def __init__(self, path: Path | str, *, attributes: Mapping[str, Any], tokens: bool = False) -> None:
        """Create the file.

        Args:
            path: file to make; its directory is made if absent.
            attributes: facts about the run: str, bool, int, float, or sequences of these.
            tokens: also make room for tokens, log-probs and versions.

        Raises:
            RunLogError: the file exists, or cannot be created.
            ValueError: an attribute of another type.
        """
        self.path = Path(path)
        self._tables = {t.name: _TableWriter(t) for t in logschema.TABLES + (logschema.TOKEN_TABLES if tokens else ())}
        _check_attributes(attributes)
        self._broken: Exception | None = None
        try:
            _claim(self.path)
            self._file = h5py.File(
                self.path, "w", libver="latest", locking=False, fs_strategy="page", fs_page_size=PAGE_BYTES
            )
            self._num_rows = self._create(attributes)
            self._file.swmr_mode = True
        except OSError as error:
            raise RunLogError(f"cannot create the run log {self.path}: {error}") from error

    def _create(self, attributes: Mapping[str, Any]) -> h5py.Dataset:
        for table in self._tables.values():
            table.create(self._file)
        shape = (len(self._tables),)
        num_rows = self._file.create_dataset("num_rows", data=np.zeros(shape, np.int64), chunks=shape, maxshape=(None,))
        num_rows.attrs["unit"] = "rows"
        num_rows.attrs["doc"] = "valid rows of each table, in the order of the attribute `tables`"
        num_rows.attrs["tables"] = list(self._tables)
        self._file.attrs.update({"format": FORMAT, "schema_version": logschema.SCHEMA_VERSION, **attributes})
        return num_rows

    def ranks(self, rows: Rows) -> None:
        """Where every rank runs."""
        self._tables["ranks"].add(rows)

    def trajectories(self, rows: Rows) -> None:
        """Finished samples whose fate is known."""
        self._tables["trajectories"].add(rows)

    def step(self, row: Mapping[str, Any]) -> None:
        """One training batch, by scalars."""
        self._tables["steps"].add(_one(row))

    def weight_update(self, row: Mapping[str, Any]) -> None:
        """One broadcast of new weights, by scalars."""
        self._tables["weight_updates"].add(_one(row))

    def weight_loads(self, rows: Rows) -> None:
        """What loading a version cost on rollout ranks."""
        self._tables["weight_loads"].add(rows)

    def activity(self, rows: Rows) -> None:
        """Intervals of any ranks."""
        self._tables["activity"].add(rows)

    def evaluations(self, rows: Rows) -> None:
        """Answers to held-out prompts."""
        self._tables["evaluations"].add(rows)

    def event(self, time_s: float, kind: str, text: str, rank: int = 0) -> None:
        """Something worth a sentence. Text beyond the column's width is cut, marked by "~" and a hash."""
        self._tables["events"].add(_one({"time_s": time_s, "rank": rank, "kind": kind, "text": text}))

    def tokens(self, trajectories: Sequence[Trajectory]) -> None:
        """Tokens, log-probs and versions of trajectories; RunLogError if the log was made without tokens."""
        if "token_index" not in self._tables:
            raise RunLogError(f"{self.path} was created without tokens (RunLogWriter(..., tokens=True))")
        if not trajectories:
            return
        num_prompt = np.array([t.num_prompt for t in trajectories], np.int64)
        num_response = np.array([t.num_response for t in trajectories], np.int64)
        sequences, responses = self._tables["sequence_tokens"], self._tables["response_tokens"]
        index: Rows = {
            "group_id": [t.group_id for t in trajectories],
            "sample": [t.sample for t in trajectories],
            "sequence_start": sequences.total_rows + _starts(num_prompt + num_response),
            "response_start": responses.total_rows + _starts(num_response),
            "num_prompt": num_prompt,
            "num_response": num_response,
        }
        logprobs, versions = ([getattr(t, name) for t in trajectories] for name in ("logprobs", "versions"))
        if sum(map(len, logprobs)) != num_response.sum():
            raise ValueError("tokens: log-probs and response tokens differ in number; see Trajectory.validate")
        turns = [np.zeros(t.num_response, np.int16) if t.turns is None else t.turns for t in trajectories]
        responses.add(
            {
                "logprob": np.concatenate(logprobs),
                "version": np.concatenate(versions),
                "turn": np.concatenate(turns),
            }
        )
        sequences.add({"token": np.concatenate([t.tokens for t in trajectories])})
        self._tables["token_index"].add(index)

    def flush(self) -> float:
        """Append the waiting rows and make them visible to readers, all tables at once; seconds it took.

        Raises:
            RunLogError: the file system refused (disk full, quota). What was visible before stays valid. If there
                was no room, the rows stay in memory and the next flush tries again; after any other failure this
                writer is broken: every later flush raises.
        """
        started = time.perf_counter()
        if self._broken:
            raise self._refused(self._broken, "The file cannot be continued") from self._broken
        waiting = [table for table in self._tables.values() if table.waiting]
        if waiting:
            self._reserve(sum(table.growth_bytes for table in waiting))
            try:
                self._append(waiting)
            except (OSError, RuntimeError) as error:
                self._broken = error
                raise self._refused(error, "The file cannot be continued") from error
        return time.perf_counter() - started

    def _reserve(self, num_bytes: int) -> None:
        """Have the file system set aside room for `num_bytes` more, or raise RunLogError with nothing touched."""
        if not num_bytes:
            return
        file, used = self._file.id.get_vfd_handle(), self._file.id.get_filesize()
        if used + num_bytes + SPARE_BYTES // 2 <= os.fstat(file).st_size:  # a flush may cut what was reserved before
            return
        try:
            os.posix_fallocate(file, used, num_bytes + SPARE_BYTES)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise self._refused(error, "The next flush tries again") from error
            # else a file system without reservations

    def _append(self, tables: Sequence[_TableWriter]) -> None:
        for table in tables:
            table.write()
        self._file.flush()
        totals = np.array([table.total_rows for table in self._tables.values()], np.int64)
        self._num_rows.id.write(h5py.h5s.ALL, h5py.h5s.ALL, totals)
        self._num_rows.flush()
        for table in tables:
            table.settle()

    def close(self) -> None:
        """Flush and close, also if the flush fails; a second call does nothing. RunLogError as in `flush`."""
        if not self._file:
            return
        try:
            self.flush()
        finally:
            try:
                if not self._broken:
                    self._trim()
                self._file.close()
            except (OSError, RuntimeError) as error:
                raise self._refused(error, "The file may not be complete") from error

    def _trim(self) -> None:
        """Give back what was reserved, in the columns and in the file."""
        for table in self._tables.values():
            table.trim()
        self._file.flush()
        os.truncate(self.path, self._file.id.get_filesize())

    def _refused(self, error: Exception, consequence: str) -> RunLogError:
        return RunLogError(
            f"cannot write the run log {self.path}: {error}. Rows since the last flush are not in the file, earlier "
            f"ones are safe. {consequence}. Check space and quota there: df -h {self.path.parent}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _TableWriter:
    """One table of an open log: its datasets, the rows in the file and the rows that wait."""

    def __init__(self, schema: Table) -> None:
        self.schema = schema
        self.waiting: list[dict[str, NDArray[Any]]] = []
        self._datasets: dict[str, h5py.h5d.DatasetID] = {}
        self._types = {c.name: h5py.h5t.py_create(np.dtype(c.dtype)) for c in schema.columns}
        self._written = 0
        self._capacity = 0

    def create(self, file: h5py.File) -> None:
        group = file.create_group(self.schema.name, track_order=True)
        group.attrs["doc"] = self.schema.doc
        for column in self.schema.columns:
            chunks = (self.schema.chunk_rows,)
            dataset = group.create_dataset(column.name, (0,), column.dtype, chunks=chunks, maxshape=(None,))
            dataset.attrs["unit"], dataset.attrs["doc"] = column.unit, column.doc
            if column.labels:
                dataset.attrs["labels"] = column.labels
            self._datasets[column.name] = dataset.id

    @property
    def total_rows(self) -> int:
        """Rows in the file and waiting rows."""
        return self._written + sum(len(next(iter(rows.values()))) for rows in self.waiting)

    @property
    def growth_bytes(self) -> int:
        """Room in the file that the waiting rows need."""
        chunk = self.schema.chunk_rows
        new_rows = max(0, -(-self.total_rows // chunk) * chunk - self._capacity)
        return new_rows * sum(np.dtype(column.dtype).itemsize for column in self.schema.columns)

    def add(self, rows: Rows) -> None:
        self.waiting.append(self.schema.encode(rows))

    def write(self) -> None:
        """Put the waiting rows behind the written ones."""
        total = self.total_rows
        count = total - self._written
        if not count:
            return
        if total > self._capacity:  # whole chunks: an extent that changes in every flush doubles the cost of it
            chunk = self.schema.chunk_rows
            self._resize(-(-total // chunk) * chunk)
        memory = h5py.h5s.create_simple((count,))
        space = h5py.h5s.create_simple((self._capacity,))
        space.select_hyperslab((self._written,), (count,))
        for name, dataset in self._datasets.items():
            dataset.write(memory, space, np.concatenate([rows[name] for rows in self.waiting]), self._types[name])

    def settle(self) -> None:
        """The waiting rows are in the file."""
        self._written = self.total_rows
        self.waiting = []

    def trim(self) -> None:
        """Make the columns as long as the table."""
        if self._capacity != self._written:
            self._resize(self._written)

    def _resize(self, rows: int) -> None:
        for dataset in self._datasets.values():
            dataset.set_extent((rows,))
        self._capacity = rows


def _claim(path: Path) -> None:
    """Make an empty file that was not there before; of several who try, one succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.touch(exist_ok=False)
    except FileExistsError as error:
        raise RunLogError(
            f"{path} exists already: every attempt of a run writes its own log and never touches an old one"
        ) from error


def _check_attributes(attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        items = value if isinstance(value, (list, tuple)) else [value]
        if name in ("format", "schema_version") or not all(isinstance(i, (str, bool, int, float)) for i in items):
            raise ValueError(f"run log attribute '{name}' = {value!r}: reserved, or not text, number or a list of them")


def _one(row: Mapping[str, Any]) -> Rows:
    return {name: [value] for name, value in row.items()}


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.cumsum(lengths) - lengths
