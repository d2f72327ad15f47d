"""What a prompt file may and may not hold, and the order in which prompts are drawn."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.config import DataConfig
from areal_hpc.config.sources import SourceConfig
from areal_hpc.data import DatasetError, Prompt, PromptSource, jsonl
from areal_hpc.data.reading import read_prompts
from areal_hpc.data.rows import Count
from areal_hpc.exits import Exit

GOOD = b'{"id": "a", "prompt": "1+1=", "answer": 2}\n{"id": 7, "prompt": "2+2=", "tests": ["x"]}\n'


def read(path: Path) -> list[Prompt]:
    return read_prompts(SourceConfig(path=str(path)), DataConfig(train=str(path))).prompts


def problems(path: Path, content: bytes) -> list[str]:
    """What is said about a file, without its path."""
    path.write_bytes(content)
    with pytest.raises(DatasetError) as caught:
        read(path)
    assert caught.value.code == Exit.CONFIG
    return [line.removeprefix(f"{path}:") for line in caught.value.problems]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train.jsonl"


# ------------------------------------------------------------------------------------------------- good files
def test_everything_but_prompt_and_id_is_metadata(path: Path) -> None:
    path.write_bytes(GOOD)
    assert read(path) == [Prompt("a", "1+1=", {"answer": 2}), Prompt("7", "2+2=", {"tests": ["x"]})]


def test_other_field_names(path: Path) -> None:
    path.write_text('{"question": "q", "id": "kept", "key": "k"}\n')
    data = DataConfig(train=str(path), prompt_field="question", id_field="key")
    assert read_prompts(data.train_sources[0], data).prompts == [Prompt("k", "q", {"id": "kept"})]
    source = SourceConfig(path=str(path), prompt_field="question", id_field="key")
    assert read_prompts(source, DataConfig(train="x")).prompts == [Prompt("k", "q", {"id": "kept"})]


def test_a_line_without_id_is_named_by_its_line_number_blank_lines_counted(path: Path) -> None:
    path.write_text('{"prompt": "p"}\n\n  \n{"prompt": "q"}')
    assert [(p.prompt_id, p.text) for p in read(path)] == [("1", "p"), ("4", "q")]


@pytest.mark.parametrize("name", ["train.jsonl.gz", "train.jsonl"])
def test_gzip_is_told_by_content(tmp_path: Path, name: str) -> None:
    plain, packed = tmp_path / "plain.jsonl", tmp_path / name
    plain.write_bytes(GOOD)
    packed.write_bytes(gzip.compress(GOOD))
    assert read(packed) == read(plain)


def test_plain_text_under_a_gz_name(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl.gz").write_bytes(GOOD)
    assert len(read(tmp_path / "train.jsonl.gz")) == 2


def test_byte_order_mark_and_crlf_change_nothing(path: Path) -> None:
    path.write_bytes(GOOD)
    expected = read(path)
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n"))
    assert read(path) == expected


def test_unicode_line_separators_do_not_end_a_line(path: Path) -> None:
    path.write_text('{"prompt": "a\u2028b\u0085c"}\n', encoding="utf-8")
    assert [p.text for p in read(path)] == ["a\u2028b\u0085c"]


def test_a_whole_surrogate_pair_is_a_character(path: Path) -> None:
    path.write_text(r'{"prompt": "\ud83d\ude00"}')
    assert read(path)[0].text == "\U0001f600"


def test_integers_of_64_bits_are_kept_exactly(path: Path) -> None:
    path.write_text('{"prompt": "p", "low": -9223372036854775808, "high": 18446744073709551615}')
    assert read(path)[0].metadata == {"low": -(2**63), "high": 2**64 - 1}


# -------------------------------------------------------------------------------------------------- bad lines
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "p"', "is not JSON at character 15: Expecting ',' delimiter"),
        (b"{'prompt': 'p'}", "is not JSON at character 2: Expecting property name enclosed in double quotes"),
        (b'{"prompt": "p"} x', "is not JSON at character 17: Extra data"),
        (b'{"prompt": "p\x00"}', "is not JSON at character 14: Invalid control character at"),
        (b'{"prompt": "p", "x": NaN}', "NaN is not JSON"),
        (b'{"prompt": "p", "x": -Infinity}', "-Infinity is not JSON"),
        (b'["prompt"]', "must be a JSON object, got a list"),
        (b'"prompt"', 'must be a JSON object, got "prompt"'),
        (b"null", "must be a JSON object, got null"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'\xff\xfe{"prompt"', "is not UTF-8 at byte 1"),
        (b'{"prompt": "p\xff"}', "is not UTF-8 at byte 14"),
        (b'\xef\xbb\xbf{"prompt": "p"}', "begins with a byte order mark, which belongs at the start of a file only"),
        (b'{"text": "p", "answer": 1}', 'field "prompt": is missing (data.prompt_field), the line has text, answer'),
        (b'{"prompt": null}', 'field "prompt": must be text that is not blank, got null'),
        (b'{"prompt": 3}', 'field "prompt": must be text that is not blank, got 3'),
        (b'{"prompt": [{"role": "user"}]}', 'field "prompt": must be text that is not blank, got a list'),
        (b'{"prompt": " \\n"}', 'field "prompt": must be text that is not blank, got " \\n"'),
        (b'{"prompt": "a\\u0000b"}', 'field "prompt": holds a NUL character'),
        (b'{"prompt": "p\\ud800"}', 'field "prompt": holds half of a surrogate pair, which is no character'),
        (
            b'{"prompt": "p", "m": {"k": ["\\uDC00"]}}',
            'field "m": holds half of a surrogate pair, which is no character',
        ),
        (b'{"prompt": "p", "\\ud800": 1}', 'field "\\ud800": holds half of a surrogate pair, which is no character'),
        (b'{"prompt": "p", "id": null}', 'field "id": must be text or a whole number, got null'),
        (b'{"prompt": "p", "id": true}', 'field "id": must be text or a whole number, got true'),
        (b'{"prompt": "p", "id": 1.5}', 'field "id": must be text or a whole number, got 1.5'),
        (b'{"prompt": "p", "id": ""}', 'field "id": must be one line of text, got ""'),
        (b'{"prompt": "p", "id": "a\\nb"}', 'field "id": must be one line of text, got "a\\nb"'),
        (b'{"prompt": "p", "prompt": "q"}', 'field "prompt": is given twice'),
        (
            b'{"prompt": "p", "n": 18446744073709551616}',
            "18446744073709551616 does not fit into 64 bits; write it as text",
        ),
        (b'{"prompt": "p", "n": ' + b"9" * 5000 + b"}", "does not fit into 64 bits; write it as text"),
        (b'{"prompt": "p", "n": 1e999}', "the number 1e999 does not fit into 64 bits; write it as text"),
    ],
)
def test_a_bad_line_is_named_with_its_reason(path: Path, line: bytes, reason: str) -> None:
    (found,) = problems(path, b'{"prompt": "fine"}\n' + line + b"\n" + b'{"prompt": "fine too"}\n')
    number, _, said = found.partition(": ")
    assert number == "2"
    assert said.endswith(reason)
    assert said == reason or "does not fit" in reason
    assert "\n" not in said and len(said) < 200


def test_a_long_value_is_cut_in_the_message(path: Path) -> None:
    (found,) = problems(path, json.dumps({"prompt": "p", "id": "x\n" * 1_000_000}).encode())
    assert found.startswith('1: field "id": must be one line of text, got "x\\n') and len(found) < 200


def test_duplicate_ids_name_the_first_line(path: Path) -> None:
    content = b'{"id": "a", "prompt": "p"}\n{"id": "b", "prompt": "p"}\n{"id": "a", "prompt": "q"}\n'
    assert problems(path, content) == ['3: field "id": "a" names the prompt of line 1 already']


def test_a_number_and_the_same_digits_are_one_id(path: Path) -> None:
    assert problems(path, b'{"id": 3, "prompt": "p"}\n{"id": "3", "prompt": "p"}\n{"id": 1.0, "prompt": "p"}') == [
        '2: field "id": "3" names the prompt of line 1 already',
        '3: field "id": must be text or a whole number, got 1.0',
    ]


def test_an_id_that_is_the_line_number_of_a_line_without_one(path: Path) -> None:
    assert problems(path, b'{"id": "2", "prompt": "p"}\n{"prompt": "q"}\n') == [
        '2: field "id": "2" names the prompt of line 1 already'
    ]


@pytest.mark.parametrize(
    ("num_bad", "shown", "tail"),
    [(20, 20, None), (21, 20, "and 1 more bad lines"), (300, 20, "and 280 more bad lines")],
)
def test_all_bad_lines_are_counted_and_20_are_shown(path: Path, num_bad: int, shown: int, tail: str | None) -> None:
    path.write_text('{"prompt": "fine"}\n' + "{}\n" * num_bad)
    with pytest.raises(DatasetError) as caught:
        read(path)
    error = caught.value
    assert error.num_bad == num_bad
    assert len(error.problems) == shown
    assert error.problems[0] == f'{path}:2: field "prompt": is missing (data.prompt_field), the line has no field'
    assert error.problems[-1].startswith(f"{path}:21:")
    assert error.reason.splitlines()[shown:] == ([tail] if tail else [])


# -------------------------------------------------------------------------------------------------- bad files
@pytest.mark.parametrize("content", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf", gzip.compress(b"", mtime=0)])
def test_a_file_without_a_prompt(path: Path, content: bytes) -> None:
    assert problems(path, content) == [" the file holds no prompt"]


def test_utf16_is_named(path: Path) -> None:
    assert problems(path, GOOD.decode().encode("utf-16")) == ["1: the file is UTF-16; save it as UTF-8"]


def test_a_line_that_is_too_long_is_refused_without_being_held(path: Path) -> None:
    """50 MB with a limit of 1 MB: no more than a few MB are ever allocated, and the next line is read as usual."""
    import tracemalloc

    with path.open("wb") as file:
        file.write(b'{"prompt": "fine"}\n{"prompt": "')
        for _ in range(50):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n{"prompt": "fine too"}\n')
    data = DataConfig(train=str(path), max_line_bytes=1_000_000, max_bad_lines=1)
    tracemalloc.start()
    loaded = read_prompts(data.train_sources[0], data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6_000_000
    assert [(p.prompt_id, p.text) for p in loaded.prompts] == [("1", "fine"), ("3", "fine too")]
    assert loaded.bad == [f"{path}:2: is 50,000,015 bytes long; at most 1,000,000 are allowed (data.max_line_bytes)"]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_the_limit_is_a_limit_to_the_byte(path: Path, end: bytes) -> None:
    line = b'{"prompt": "p"}'
    path.write_bytes(line + end)
    for limit, fits in ((len(line), True), (len(line) - 1, False)):
        data = DataConfig(train=str(path), max_line_bytes=limit)
        if fits:
            assert len(read_prompts(data.train_sources[0], data).prompts) == 1
        else:
            with pytest.raises(DatasetError, match="bytes long; at most 14 are allowed"):
                read_prompts(data.train_sources[0], data)


# ------------------------------------------------------------------------------------------------ bad lines allowed
def test_as_many_bad_lines_as_allowed_are_named_and_left_out(path: Path) -> None:
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": \n{"prompt": "c"}\n{"prompt": 4}\n{"prompt": "e"}\n')
    for allowed in (2, 3):
        data = DataConfig(train=str(path), max_bad_lines=allowed)
        loaded = read_prompts(data.train_sources[0], data)
        assert [p.prompt_id for p in loaded.prompts] == ["1", "3", "5"], "the others keep their names"
        assert loaded.bad == [
            f"{path}:2: is not JSON at character 12: Expecting value",
            f'{path}:4: field "prompt": must be text that is not blank, got 4',
        ]
    data = DataConfig(train=str(path), max_bad_lines=1)
    with pytest.raises(DatasetError) as caught:
        read_prompts(data.train_sources[0], data)
    assert caught.value.num_bad == 2


def test_a_file_of_bad_lines_only_is_refused_whatever_is_allowed(path: Path) -> None:
    path.write_bytes(b"{}\n{}\n")
    data = DataConfig(train=str(path), max_bad_lines=9)
    with pytest.raises(DatasetError, match="no line can be used; the first: .*:1: "):
        read_prompts(data.train_sources[0], data)


def test_a_torn_file_is_refused_whatever_is_allowed(path: Path) -> None:
    lines = b"".join(json.dumps({"prompt": f"{i * 7919 % 10007}" * 9}).encode() + b"\n" for i in range(500))
    path.write_bytes(gzip.compress(b"{}\n" * 30 + lines)[:-20])
    data = DataConfig(train=str(path), max_bad_lines=10_000)
    with pytest.raises(DatasetError) as caught:
        read_prompts(data.train_sources[0], data)
    assert "the gzip data is damaged" in caught.value.problems[-1], "named even after many bad lines"
    assert (len(caught.value.problems), caught.value.num_bad) == (20, 31)


# ------------------------------------------------------------------------------------------------- one list of JSON
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_file_that_is_one_list(path: Path, pack: Callable[[bytes], bytes], indent: int | None) -> None:
    rows = [{"prompt": "[a\u2028]"}, {"id": "x", "prompt": "b,", "n": [1, {"k": "}"}]}, {"prompt": "c\U0001f600"}]
    path.write_bytes(pack(b"\xef\xbb\xbf \n" + json.dumps(rows, indent=indent).encode() + b"\n"))
    assert read(path) == [
        Prompt("1", "[a\u2028]", {}),
        Prompt("x", "b,", {"n": [1, {"k": "}"}]}),
        Prompt("3", "c\U0001f600", {}),
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[]", [" the file holds no prompt"]),
        ('[{"prompt": "a"},\n3,\n{"prompt": NaN}, {"q": 1, "q": 2}]',
         ["2 (item 2): must be a JSON object, got 3", "3 (item 3): NaN is not JSON",
          '3 (item 4): field "q": is given twice']),
        ('[{"prompt": "\\ud800"}]',
         ['1 (item 1): field "prompt": holds half of a surrogate pair, which is no character']),
        ('[{"prompt": "a"}\n\n{"prompt": "b"}]', ["3: the list is cut off or lacks a comma"]),
        ('[{"prompt": "a"}', ["1: the list is cut off or lacks a comma"]),
        ('[{"prompt": "a"},', ["1: is not JSON: Expecting value: line 1 column 18 (char 17)"]),
        ('[{"prompt": "a"}] x', ["1: something follows the end of the list"]),
        ("[" * 100_000, ["1: is nested too deeply"]),
        ('[{"prompt": "\u00e9"}]'.encode("latin-1").decode("utf-8", "surrogateescape"), [" is not UTF-8 at byte 14"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_list(path: Path, text: str, found: list[str]) -> None:
    assert problems(path, text.encode("utf-8", "surrogateescape")) == found


def test_a_list_that_is_too_large(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LIST_BYTES", 20)
    assert problems(path, b'[{"prompt": "abcdefgh"}]') == [
        " a JSON file of more than 20 bytes; save it as JSONL or Parquet"
    ]


def test_counting_agrees_with_reading_and_knows_when_to_stop(path: Path) -> None:
    for content in (GOOD, GOOD + b"\n \n{}", json.dumps([{"prompt": "p"}] * 5).encode(), b"", b"[]"):
        path.write_bytes(content)
        assert jsonl.count(path, 9.0) == Count(sum(1 for _ in jsonl.read(path, 1000)))
    path.write_bytes(b"{}\n" * 5000)
    assert jsonl.count(path, 0.0) == Count(1024, is_all=False)
    path.write_bytes(gzip.compress(GOOD)[:-9])
    with pytest.raises(DatasetError, match="the gzip data is damaged"):
        jsonl.count(path, 9.0)


def test_no_such_file_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=f"{tmp_path}/none: cannot be read: No such file or directory"):
        read(tmp_path / "none")
    with pytest.raises(DatasetError, match=f"{tmp_path}: holds no JSONL, JSON, Parquet or Arrow file"):
        read(tmp_path)


def test_a_torn_gzip_file_says_where_and_keeps_what_was_found_before(path: Path) -> None:
    lines = b"".join(json.dumps({"prompt": f"{i * 7919 % 10007}" * 9}).encode() + b"\n" for i in range(5000))
    found = problems(path, gzip.compress(b"{}\n" + lines)[:-4000])
    assert found[0] == '1: field "prompt": is missing (data.prompt_field), the line has no field'
    assert found[1].startswith(" the gzip data is damaged after line ")
    assert len(found) == 2


def test_a_flipped_byte_in_a_gzip_file(path: Path) -> None:
    packed = bytearray(gzip.compress(GOOD))
    packed[-6] ^= 1  # the checksum
    (found,) = problems(path, bytes(packed))
    assert "CRC check failed" in found


# ---------------------------------------------------------------------------------------------------- drawing
def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", f"text {i}", {}) for i in range(count)]


def drawn(source: PromptSource, limit: int = 10_000) -> list[str]:
    ids: list[str] = []
    while len(ids) < limit and (prompt := source.next()) is not None:
        ids.append(prompt.prompt_id)
    return ids


def make(count: int = 5, **changes: Any) -> PromptSource:
    return PromptSource(prompts(count), **{"seed": 1, "shuffle": True, "epochs": 3, **changes})


def test_without_shuffle_the_file_order_repeats() -> None:
    assert drawn(make(3, shuffle=False, epochs=2)) == ["p0", "p1", "p2", "p0", "p1", "p2"]


def test_the_order_is_the_same_on_every_machine() -> None:
    """Written down once: a change of it would shift every resumed run."""
    assert drawn(make(5, epochs=2)) == ["p4", "p3", "p0", "p2", "p1", "p4", "p0", "p3", "p2", "p1"]


def test_seed_and_epoch_change_the_order() -> None:
    one, other = drawn(make(50, seed=1, epochs=2)), drawn(make(50, seed=2, epochs=2))
    orders = [one[:50], one[50:], other[:50], other[50:]]
    assert all(sorted(order) == sorted(one[:50]) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_every_place_is_reached_by_every_prompt_about_equally_often() -> None:
    """Mean place of a prompt over 400 epochs: 4.5 of 0..9, standard error 2.87 / 20 = 0.14."""
    ids = drawn(make(10, epochs=400))
    places = {p.prompt_id: [i % 10 for i, drawn_id in enumerate(ids) if drawn_id == p.prompt_id] for p in prompts(10)}
    assert all(abs(sum(of_one) / 400 - 4.5) < 0.72 for of_one in places.values())


def test_a_prompt_less_leaves_the_order_of_the_others() -> None:
    all_of_them, fewer = prompts(30), [p for p in prompts(30) if p.prompt_id != "p7"]
    settings_ = {"seed": 4, "shuffle": True, "epochs": 1}
    expected = [i for i in drawn(PromptSource(all_of_them, **settings_)) if i != "p7"]  # type: ignore[arg-type]
    assert drawn(PromptSource(fewer, **settings_)) == expected  # type: ignore[arg-type]


def test_exhausted_stays_exhausted() -> None:
    source = make(2, epochs=1)
    assert (source.num_total, source.cursor) == (2, (0, 0))
    assert len(drawn(source)) == 2
    assert source.cursor == (1, 0)
    assert source.next() is None
    assert source.next() is None
    assert source.cursor == (1, 0)


def test_without_epochs_it_never_ends() -> None:
    source = make(3, epochs=None)
    assert source.num_total is None
    ids = drawn(source, limit=3000)
    assert len(ids) == 3000
    assert source.cursor == (1000, 0)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 9), st.integers(1, 4), st.booleans(), st.integers(0, 2**31 - 1), st.data())
def test_seek_goes_on_exactly(count: int, epochs: int, shuffle: bool, seed: int, data: st.DataObject) -> None:
    whole = drawn(make(count, epochs=epochs, shuffle=shuffle, seed=seed))
    assert len(whole) == count * epochs
    for epoch in range(epochs):
        assert len(set(whole[epoch * count : (epoch + 1) * count])) == count
    stop = data.draw(st.integers(0, count * epochs))
    first = make(count, epochs=epochs, shuffle=shuffle, seed=seed)
    assert drawn(first, limit=stop) == whole[:stop]
    assert first.cursor == divmod(stop, count)
    second = make(count, epochs=epochs, shuffle=shuffle, seed=seed)
    second.seek(first.cursor)
    assert drawn(second) == whole[stop:]


@pytest.mark.parametrize("cursor", [(-1, 0), (0, -1), (0, 5), (3, 1), (4, 0)])
def test_a_cursor_of_other_data_is_refused(cursor: tuple[int, int]) -> None:
    source = make(5, epochs=3)
    source.next()
    with pytest.raises(ValueError, match=rf"epoch {cursor[0]}, index {cursor[1]}\) does not exist with 5 prompts"):
        source.seek(cursor)
    assert source.cursor == (0, 1), "a refused cursor changes nothing"


def test_no_prompts_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptSource([], seed=0, shuffle=False, epochs=None)
