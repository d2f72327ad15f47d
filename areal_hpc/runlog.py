"""The run log, reading side: what a notebook imports. The layout of the file is described in runlog_writer.py.

These two files are the only ones that import h5py.
"""

from __future__ import annotations

import ctypes
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
from numpy.typing import NDArray

from areal_hpc.logschema import TOKEN_INDEX
from areal_hpc.runlog_writer import RunLogError, RunLogWriter

if TYPE_CHECKING:
    from pandas import DataFrame
    from typing_extensions import Self

__all__ = ["RunLog", "RunLogError", "RunLogWriter"]

HDF5_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError)
METADATA_READ_ATTEMPTS = 24


class RunLog:
    """A run log as pandas tables, finished or still growing; opens read-only and never disturbs the writer.

        log = RunLog("runs/demo")              # newest attempt; RunLog("runs/demo", attempt=1) for another
        log.steps.plot("time_s", "reward_mean")
        log.refresh()                          # rows written since

    Each table is a DataFrame of the rows that were complete at the last refresh, codes as categories, units and
    meanings in `.attrs["units"]` and `.attrs["docs"]`. What cannot be read (a truncated or damaged file) is left
    out, warned about and listed in `problems`.
    """

    def __init__(self, path: Path | str, attempt: int | None = None) -> None:
        """Args: path: a log file or the directory of a run; attempt: of a run directory, none: the newest.

        Raises:
            RunLogError: no such log, or not readable at all.
        """
        self.path = _find(Path(path), attempt)
        try:
            self._file = _open(self.path)
            self.attributes = {name: _plain(value) for name, value in self._file.attrs.items()}
            self._names = [str(name) for name in self._file["num_rows"].attrs["tables"]]
        except HDF5_ERRORS as error:
            raise RunLogError(
                f"cannot read {self.path} as a run log: {error}. It may be truncated or not a run log, just being "
                "created (try again), or open in a program that writes it without SWMR (close that program)"
            ) from error
        self.refresh()

    def refresh(self) -> Self:
        """Look again: afterwards tables hold every row whose flush has finished."""
        self._problems: dict[str, None] = {}
        self._frames: dict[str, DataFrame] = {}
        try:
            counters = self._file["num_rows"]
            counters.refresh()
            if _intact_rows(counters, 1, self._size()) < 1:
                raise OSError("the file ends before it (truncated)")
            self._rows = dict(zip(self._names, counters[:].tolist(), strict=True))
        except HDF5_ERRORS as error:
            self._rows = dict.fromkeys(self._names, 0)
            self._problem(f"/num_rows cannot be read, so no row can be trusted: {error}")
        return self

    @property
    def problems(self) -> list[str]:
        """What cannot be read, one sentence each; reads every table, of logged tokens only the index."""
        for name in self._names:
            if name in ("sequence_tokens", "response_tokens"):
                self._intact(name)
            else:
                self._table(name)
        return list(self._problems)

    @property
    def ranks(self) -> DataFrame:
        return self._table("ranks")

    @property
    def trajectories(self) -> DataFrame:
        return self._table("trajectories")

    @property
    def steps(self) -> DataFrame:
        return self._table("steps")

    @property
    def weight_updates(self) -> DataFrame:
        return self._table("weight_updates")

    @property
    def weight_loads(self) -> DataFrame:
        return self._table("weight_loads")

    @property
    def activity(self) -> DataFrame:
        return self._table("activity")

    @property
    def evaluations(self) -> DataFrame:
        return self._table("evaluations")

    @property
    def events(self) -> DataFrame:
        return self._table("events")

    def tokens(self, group_id: int, sample: int) -> dict[str, NDArray[Any]]:
        """Tokens of one trajectory: tokens int32 [P + R], logprobs float32 [R], versions int32 [R], num_prompt int,
        and turns int16 [R], -1 for what a workflow put in (not in logs from before there were any).

        Raises:
            KeyError: no tokens of this sample in the log.
            RunLogError: the log was made without tokens, or this part of it is damaged.
        """
        if "token_index" not in self._names:
            raise RunLogError(f"{self.path} holds no tokens: the run was made with log.tokens = false")
        index = self._table("token_index")
        if len(index.columns) < len(TOKEN_INDEX.columns):
            raise RunLogError(f"{self.path}: the index of logged tokens is damaged: {list(self._problems)}")
        found = index[(index["group_id"] == group_id) & (index["sample"] == sample)]
        if found.empty:
            raise KeyError(f"no tokens of trajectory {group_id}/{sample} in {self.path}")
        row = {name: int(value) for name, value in found.iloc[-1].items()}
        start, num_tokens = row["sequence_start"], row["num_prompt"] + row["num_response"]
        arrays: dict[str, Any] = {"num_prompt": row["num_prompt"]}
        arrays["tokens"] = self._slice("sequence_tokens", "token", start, num_tokens)
        for name in ("logprob", "version", "turn"):
            if name == "turn" and name not in self._file["response_tokens"]:
                continue
            arrays[f"{name}s"] = self._slice("response_tokens", name, row["response_start"], row["num_response"])
        return arrays

    def summary(self) -> dict[str, Any]:
        """What the run has done so far, in a dozen numbers: counts, tokens/s, rewards, lags.

        Raises RunLogError if a column it needs is damaged.
        """
        try:
            return self._summary()
        except KeyError as error:
            raise RunLogError(f"{self.path}: no summary without column {error}: {self.problems}") from error

    def _summary(self) -> dict[str, Any]:
        steps, samples = self.steps, self.trajectories
        last = steps.iloc[-1] if len(steps) else None
        head_lags = samples["head_lag"][samples["fate"] == "consumed"]
        seconds = float("nan") if last is None else float(last["time_s"])
        tokens = int(steps["consumed_tokens"].sum())
        return {
            "log": str(self.path),
            "steps": len(steps),
            "skipped_steps": int(steps["skipped"].sum()),
            "version": 0 if last is None else int(last["version_after"]),
            "time_s": seconds,
            "consumed_tokens": tokens,
            "consumed_tokens_per_s": tokens / seconds if seconds else float("nan"),
            "reward_first_10_steps": float(steps["reward_mean"].head(10).mean()),
            "reward_last_10_steps": float(steps["reward_mean"].tail(10).mean()),
            "head_lag_max": int(head_lags.max()) if len(head_lags) else -1,
            "fates": samples["fate"].value_counts().to_dict(),
            "outcomes": samples["outcome"].value_counts().to_dict(),
            "problems": self.problems,
        }

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _table(self, name: str) -> DataFrame:
        if name not in self._frames:
            self._frames[name] = self._read(name)
        return self._frames[name].copy()

    def _intact(self, table: str) -> tuple[dict[str, h5py.Dataset], int]:
        """The columns that can be opened, and for how many rows all of them are there."""
        columns: dict[str, h5py.Dataset] = {}
        wanted = num_rows = self._rows.get(table, 0)
        size = self._size()
        try:
            names = list(self._file[table])
        except HDF5_ERRORS as error:
            self._problem(f"table {table} cannot be read: {error}")
            return columns, 0
        for name in names:
            try:
                columns[name] = self._column(table, name)
                num_rows = min(num_rows, _intact_rows(columns[name], wanted, size))
            except HDF5_ERRORS as error:
                columns.pop(name, None)
                self._problem(f"column {table}/{name} cannot be read: {error}")
        if num_rows < wanted:
            self._problem(f"table {table}: only {num_rows} of {wanted} rows are there; the file is cut at {size} bytes")
        return columns, num_rows

    def _read(self, table: str) -> DataFrame:
        from pandas import DataFrame  # here, so that the controller, which only writes, does not load pandas

        columns, num_rows = self._intact(table)
        values, units, docs = {}, {}, {}
        for name, dataset in columns.items():
            try:
                units[name], docs[name] = str(dataset.attrs["unit"]), str(dataset.attrs["doc"])
                values[name] = _decode(dataset[:num_rows], dataset.attrs.get("labels"))
            except HDF5_ERRORS as error:
                self._problem(f"column {table}/{name} cannot be read: {error}")
        frame = DataFrame(values)
        frame.attrs = {"units": units, "docs": docs}
        return frame

    def _column(self, table: str, name: str) -> h5py.Dataset:
        dataset = self._file[table][name]
        dataset.refresh()
        return dataset

    def _slice(self, table: str, name: str, start: int, count: int) -> NDArray[Any]:
        try:
            dataset = self._column(table, name)
            if _intact_rows(dataset, start + count, self._size(), start) < start + count:
                raise OSError("the file is cut off before it")
            return dataset[start : start + count]
        except HDF5_ERRORS as error:
            raise RunLogError(f"{self.path}: {table}/{name}, rows {start} to {start + count}: {error}") from error

    def _size(self) -> int:
        with open(self.path, "rb") as file:  # opening it anew, NFS looks at the server's size
            return os.fstat(file.fileno()).st_size

    def _problem(self, text: str) -> None:
        if text not in self._problems:
            self._problems[text] = None
            warnings.warn(f"{self.path}: {text}", stacklevel=2)


def _open(path: Path) -> h5py.File:
    """Open for reading beside a writer, without locks.

    A reader meets metadata that is just being written, and HDF5 then tries again, after 1, 2, 4 ... ns, 100 times:
    on a damaged file it would wait for ever. 24 attempts are 17 ms. h5py has no call for this setting, its library
    has.
    """
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_file_locking(False, True)
    set_attempts = ctypes.CDLL(h5py.h5p.__file__).H5Pset_metadata_read_attempts
    set_attempts.argtypes = [ctypes.c_int64, ctypes.c_uint]
    if set_attempts(access.id, METADATA_READ_ATTEMPTS) < 0:
        raise RuntimeError("HDF5 refused a number of read attempts")
    flags = h5py.h5f.ACC_RDONLY | h5py.h5f.ACC_SWMR_READ
    return h5py.File(h5py.h5f.open(os.fsencode(path), flags, fapl=access))


def _intact_rows(dataset: h5py.Dataset, num_rows: int, file_bytes: int, start: int = 0) -> int:
    """How many of the first `num_rows` rows lie inside the file; HDF5 itself reads zeros behind its end."""
    chunk_rows = dataset.chunks[0]
    num_rows = min(num_rows, dataset.shape[0])
    for row in range(start - start % chunk_rows, num_rows, chunk_rows):
        chunk = dataset.id.get_chunk_info_by_coord((row,))
        if chunk.byte_offset is None or chunk.byte_offset + chunk.size > file_bytes:
            return row
    return num_rows


def _decode(values: NDArray[Any], labels: Sequence[str] | None) -> Any:
    if labels is not None:
        from pandas import Categorical, Index

        return Categorical.from_codes(values, Index([str(label) for label in labels]))
    if values.dtype.kind == "S":
        return [value.decode("utf-8", errors="replace") for value in values.tolist()]
    return values


def _find(path: Path, attempt: int | None) -> Path:
    """The log file at `path`, or that of an attempt (None: the newest) of the run directory `path`."""
    if path.is_file():
        return path
    found = {int(m[1]): p for p in path.glob("log/attempt_*.h5") if (m := re.fullmatch(r"attempt_(\d+)\.h5", p.name))}
    if not found:
        raise RunLogError(f"no run log at {path}: it is neither a log file nor a run directory with log/attempt_N.h5")
    if attempt is not None and attempt not in found:
        raise RunLogError(f"{path} has no attempt {attempt}; there are {sorted(found)}")
    return found[max(found) if attempt is None else attempt]


def _plain(value: Any) -> Any:
    """An attribute as Python value."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
