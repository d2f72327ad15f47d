"""Which files of a directory make up a data set: as `datasets` saves it to disk, or as a hub repository lays it out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from areal_hpc.data.prompts import DatasetError
from areal_hpc.data.rows import cannot_be_read

_NAME = re.compile(r"(?P<stem>.+?)(-\d+-of-\d+)?\.(parquet|arrow|jsonl|json)(\.gz)?")
_NOT_DATA = {"dataset_info.json", "dataset_dict.json", "state.json", "dataset_infos.json"}


def files_of(path: Path, split: str | None) -> list[Path]:
    """The files of a directory in their order.

    A directory is one that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote, or one of files whose names say
    the split, as in `train-00000-of-00002.parquet`, `gsm8k-train.arrow` or `train.jsonl`.

    Raises DatasetError: no such split, no files, or several parts and no split to choose one.
    """
    if (path / "dataset_dict.json").is_file():
        names = _listed(path / "dataset_dict.json", "splits")
        path = path / _chosen(path, split, [name for name in names if isinstance(name, str)])
    if (path / "state.json").is_file():
        return _saved(path)
    return _loose(path, split)


def _chosen(path: Path, split: str | None, names: list[str]) -> str:
    if split is None and len(names) == 1:
        split = names[0]
    if split not in names or Path(split).name != split:
        wanted = "name one as split" if split is None else f"there is no {split}"
        raise DatasetError([f"{path}: has the splits {', '.join(names) or '(none)'}; {wanted}"])
    return split


def _saved(path: Path) -> list[Path]:
    state = path / "state.json"
    if _json(state).get("_indices_data_files"):
        raise DatasetError([f"{path}: is a selection of rows by number (_indices_data_files); save it flattened"])
    names = [entry.get("filename") for entry in _listed(state, "_data_files") if isinstance(entry, dict)]
    odd = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if odd or not names:
        raise DatasetError([f"{state}: names no data files of this directory"])
    return [path / str(name) for name in names]


def _loose(path: Path, split: str | None) -> list[Path]:
    parts: dict[str, list[Path]] = {}
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise cannot_be_read(path, error) from None
    for entry in entries:
        if (match := _NAME.fullmatch(entry.name)) and entry.name not in _NOT_DATA and entry.is_file():
            parts.setdefault(match["stem"], []).append(entry)
    if not parts:
        scripts = [entry.name for entry in entries if entry.suffix == ".py"]
        ran = f"; {scripts[0]} is a loading script, which is never run: convert it to Parquet" if scripts else ""
        below = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
        inside = f"; give one of its directories: {', '.join(below[:8])}" if below else ""
        raise DatasetError([f"{path}: holds no JSONL, JSON, Parquet or Arrow file{inside}{ran}"])
    found = [stem for stem in parts if split is None or stem == split or re.search(rf"[-_.]{re.escape(split)}$", stem)]
    if len(found) != 1:
        wanted = "name one as split, or give the path of a file"
        if split is not None:
            wanted = f"{len(found) or 'none'} of them {'are' if len(found) > 1 else 'is'} the split {split}"
        raise DatasetError([f"{path}: holds {', '.join(parts)}; {wanted}"])
    return parts[found[0]]


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise cannot_be_read(path, error) from None
    except (ValueError, RecursionError) as error:
        raise DatasetError([f"{path}: is not JSON: {error}"]) from None
    return value if isinstance(value, dict) else {}


def _listed(path: Path, key: str) -> list[Any]:
    value = _json(path).get(key)
    if not isinstance(value, list):
        raise DatasetError([f"{path}: has no list {key}"])
    return value
