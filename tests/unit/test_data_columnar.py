"""Parquet files, and directories as `datasets` saves them or as a hub repository lays them out."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.config import DataConfig
from areal_hpc.config.sources import SourceConfig
from areal_hpc.data import DatasetError, Prompt
from areal_hpc.data.reading import read_prompts
from areal_hpc.data.rows import Count, count_rows
from areal_hpc.exits import Exit, RunError

pa = pytest.importorskip("pyarrow", reason="the extra data is not installed")
ipc, pq = pytest.importorskip("pyarrow.ipc"), pytest.importorskip("pyarrow.parquet")

ROWS = [{"id": f"r{i}", "prompt": f"{i}+{i}=", "answer": str(2 * i), "tags": ["sum"]} for i in range(5)]
EXPECTED = [Prompt(f"r{i}", f"{i}+{i}=", {"answer": str(2 * i), "tags": ["sum"]}) for i in range(5)]


def read(path: Path, **settings: Any) -> list[Prompt]:
    return read_prompts(SourceConfig(path=str(path), **settings), DataConfig(train="unused")).prompts


def problems(path: Path, **settings: Any) -> list[str]:
    with pytest.raises(DatasetError) as caught:
        read(path, **settings)
    assert caught.value.code == Exit.CONFIG
    return [line.removeprefix(f"{path}") for line in caught.value.problems]


def parquet(path: Path, rows: list[dict[str, Any]] = ROWS, **settings: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, **settings)
    return path


def stream(path: Path, rows: list[dict[str, Any]] = ROWS, at_once: int = 2) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=at_once)
    return path


def saved(path: Path, rows: list[dict[str, Any]] = ROWS, shards: int = 1, **state: Any) -> Path:
    """What Dataset.save_to_disk leaves behind."""
    path.mkdir(parents=True)
    files = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    for i, name in enumerate(files):
        stream(path / name, rows[i * len(rows) // shards : (i + 1) * len(rows) // shards])
    listed = {"_data_files": [{"filename": name} for name in files], "_split": None, **state}
    (path / "state.json").write_text(json.dumps(listed))
    (path / "dataset_info.json").write_text("{}")
    return path


# ------------------------------------------------------------------------------------------------------------ files
def test_parquet_arrow_stream_and_arrow_file_under_any_name(tmp_path: Path) -> None:
    assert read(parquet(tmp_path / "train.parquet", row_group_size=2)) == EXPECTED
    assert read(parquet(tmp_path / "parquet.jsonl")) == EXPECTED
    assert read(stream(tmp_path / "train.arrow")) == EXPECTED
    assert read(stream(tmp_path / "arrow.parquet")) == EXPECTED
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(tmp_path / "file"), "wb") as sink, ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert read(tmp_path / "file") == EXPECTED
    (tmp_path / "jsonl.parquet").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert read(tmp_path / "jsonl.parquet") == EXPECTED
    (tmp_path / "gzip.arrow").write_bytes(gzip.compress((tmp_path / "jsonl.parquet").read_bytes()))
    assert read(tmp_path / "gzip.arrow") == EXPECTED


def test_rows_without_id_are_named_by_their_number_and_nulls_stay(tmp_path: Path) -> None:
    path = parquet(tmp_path / "p", [{"prompt": "a", "x": None}, {"prompt": "b", "x": 1.5}])
    assert read(path) == [Prompt("1", "a", {"x": None}), Prompt("2", "b", {"x": 1.5})]


def test_dates_and_decimals_become_text(tmp_path: Path) -> None:
    row = {"prompt": "a", "day": datetime.date(2024, 2, 29), "price": decimal.Decimal("1.50"), "s": {"k": [True]}}
    assert read(parquet(tmp_path / "p", [row]))[0].metadata == {
        "day": "2024-02-29",
        "price": "1.50",
        "s": {"k": [True]},
    }


def test_layouts_read_parquet_as_they_read_json(tmp_path: Path) -> None:
    rows = [{"question": "How many?", "answer": "two\n#### 2"}]
    assert read(parquet(tmp_path / "p", rows), layout="gsm8k") == [Prompt("1", "How many?", {"answer": "2"})]


# -------------------------------------------------------------------------------------------------------- bad rows
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": None}, 'field "prompt": must be text that is not blank, got null'),
        ({"prompt": "p", "x": float("nan")}, 'field "x": holds nan, which is no number'),
        ({"prompt": "p", "x": b"bytes"}, 'field "x": holds a bytes, which is no JSON'),
        ({"prompt": "a\0b"}, 'field "prompt": holds a NUL character'),
        ({"prompt": "p", "id": 1.5}, 'field "id": must be text or a whole number, got 1.5'),
        ({"question": "p"}, 'field "prompt": is missing (data.prompt_field), the line has question'),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    assert problems(parquet(tmp_path / "p.parquet", [row])) == [f": row 1: {reason}"]


def test_duplicate_ids_name_the_first_row(tmp_path: Path) -> None:
    rows = [{"id": 1, "prompt": "a"}, {"id": 2, "prompt": "b"}, {"id": 1, "prompt": "c"}]
    assert problems(parquet(tmp_path / "p", rows)) == [': row 3: field "id": "1" names the prompt of row 1 already']


def test_text_that_is_not_utf8_spoils_its_row_only(tmp_path: Path) -> None:
    texts = pa.array([b"fine", b"b\xffd", b"fine too"], pa.binary()).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "p")
    data = DataConfig(train="unused", max_bad_lines=1)
    loaded = read_prompts(SourceConfig(path=str(tmp_path / "p")), data)
    assert [p.prompt_id for p in loaded.prompts] == ["1", "3"]
    assert len(loaded.bad) == 1 and "row 2: has no readable value: 'utf-8' codec" in loaded.bad[0]


# -------------------------------------------------------------------------------------------------------- bad files
def test_truncated_and_damaged_files_say_so(tmp_path: Path) -> None:
    whole = parquet(tmp_path / "p").read_bytes()
    for content in (whole[:-1], whole[: len(whole) // 2], whole[:8], b"PAR1"):
        (tmp_path / "torn.parquet").write_bytes(content)
        (said,) = problems(tmp_path / "torn.parquet")
        assert said.startswith(": the Parquet file is cut off or damaged: ") and "\n" not in said
    rows = [{"prompt": str(i)} for i in range(500)]
    (tmp_path / "torn.arrow").write_bytes(stream(tmp_path / "s", rows).read_bytes()[:-2000])
    (said,) = problems(tmp_path / "torn.arrow")
    assert said.startswith(": the Arrow file is cut off or damaged after row 4")


def test_an_empty_table_holds_no_prompt(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "p")
    assert problems(tmp_path / "p") == [": the file holds no prompt"]


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [parquet(tmp_path / "p"), stream(tmp_path / "a")]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for path, kind in zip(paths, ("Parquet", "Arrow"), strict=True):
        with pytest.raises(RunError) as caught:
            read(path)
        assert caught.value.reason == (
            f'{path}: a {kind} file needs pyarrow; install it with `pip install "areal-hpc[data]"`'
        )


# ------------------------------------------------------------------------------------------------------ directories
@pytest.mark.parametrize("shards", [1, 3])
def test_a_saved_dataset(tmp_path: Path, shards: int) -> None:
    assert read(saved(tmp_path / "d", shards=shards)) == EXPECTED
    assert count_rows(tmp_path / "d", None, 1.0) == Count(5)


def test_rows_of_later_files_go_on_counting(tmp_path: Path) -> None:
    rows = [{"prompt": str(i)} for i in range(5)]
    assert [p.prompt_id for p in read(saved(tmp_path / "d", rows, shards=3))] == ["1", "2", "3", "4", "5"]


def test_a_saved_dict_needs_a_split(tmp_path: Path) -> None:
    saved(tmp_path / "train")
    saved(tmp_path / "test", ROWS[:2])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert read(tmp_path, split="test") == EXPECTED[:2]
    assert problems(tmp_path) == [": has the splits train, test; name one as split"]
    assert problems(tmp_path, split="valid") == [": has the splits train, test; there is no valid"]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert read(tmp_path) == EXPECTED
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["../train"]}')
    assert problems(tmp_path, split="../train") == [": has the splits ../train; there is no ../train"]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ('{"_data_files": [{"filename": "../x.arrow"}]}', "/state.json: names no data files of this directory"),
        ('{"_data_files": []}', "/state.json: names no data files of this directory"),
        ("{}", "/state.json: has no list _data_files"),
        ("[", "/state.json: is not JSON"),
        ('{"_data_files": [], "_indices_data_files": [1]}', "is a selection of rows by number"),
        ('{"_data_files": [{"filename": "none.arrow"}]}', "/none.arrow: cannot be read: No such file"),
    ],
)
def test_a_saved_dataset_with_an_odd_state(tmp_path: Path, state: str, reason: str) -> None:
    (saved(tmp_path / "d") / "state.json").write_text(state)
    assert reason in problems(tmp_path / "d")[0]


def test_a_repository_of_parquet_files(tmp_path: Path) -> None:
    for i in range(2):
        parquet(tmp_path / f"train-0000{i}-of-00002.parquet", ROWS[i * 3 : i * 3 + 3])
    parquet(tmp_path / "test-00000-of-00001.parquet", ROWS[:1])
    (tmp_path / "README.md").write_text("x")
    (tmp_path / "loader.py").write_text("raise SystemExit('a script ran')")
    assert read(tmp_path, split="train") == EXPECTED
    assert read(tmp_path, split="test") == EXPECTED[:1]
    assert problems(tmp_path) == [": holds test, train; name one as split, or give the path of a file"]
    assert problems(tmp_path, split="dev") == [": holds test, train; none of them is the split dev"]


def test_a_cache_of_arrow_files(tmp_path: Path) -> None:
    stream(tmp_path / "gsm8k-train.arrow")
    stream(tmp_path / "gsm8k-test.arrow", ROWS[:1])
    (tmp_path / "dataset_info.json").write_text("{}")
    assert read(tmp_path, split="train") == EXPECTED


def test_a_directory_without_data_says_where_to_look(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    (tmp_path / "gsm8k.py").write_text("raise SystemExit('a script ran')")
    assert problems(tmp_path) == [
        ": holds no JSONL, JSON, Parquet or Arrow file; give one of its directories: main; "
        "gsm8k.py is a loading script, which is never run: convert it to Parquet"
    ]


def test_counting_reads_no_rows(tmp_path: Path) -> None:
    assert count_rows(parquet(tmp_path / "p", ROWS * 1000), None, 0.0) == Count(5000)
    with pytest.raises(DatasetError, match="cut off or damaged"):
        (tmp_path / "torn").write_bytes(b"PAR1")
        count_rows(tmp_path / "torn", None, 1.0)
