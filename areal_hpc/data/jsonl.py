"""Rows of a JSON Lines file, or of a JSON file that is one list of objects; plain or gzip, in UTF-8.

Blank lines, a byte order mark at the start and CRLF line ends are fine; only \\n ends a line.
"""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from areal_hpc.data.prompts import DatasetError
from areal_hpc.data.rows import GZIP, UTF16, Count, Row, cannot_be_read, first_bytes
from areal_hpc.data.strictjson import DECODER, as_object, check_whole_characters, parse

MAX_LIST_BYTES = 1024**3
"""A JSON file is one value and has to be held as a whole."""
_BOM = b"\xef\xbb\xbf"
_CHUNK = 1 << 20
_LENIENT = json.JSONDecoder()


def read(path: Path, max_line_bytes: int) -> Iterator[Row]:
    """All rows. Raises DatasetError: the file cannot be read, its gzip data is damaged, its JSON list has no end."""
    if first_bytes(path).startswith(UTF16):
        raise DatasetError([f"{path}:1: the file is UTF-16; save it as UTF-8"])
    number = 0
    with _telling(path, lambda: f" after line {number}" if number else ""), _open(path) as stream:
        if _is_list(stream):
            yield from _items(path, stream)
            return
        for number, raw, num_bytes in _lines(stream, max_line_bytes):
            place = f"{path}:{number}"
            if raw is None:
                reason = f"is {num_bytes:,} bytes long; at most {max_line_bytes:,} are allowed (data.max_line_bytes)"
                yield Row(number, place, None, reason)
            elif raw.strip():
                yield _row(number, place, raw)


def count(path: Path, seconds: float) -> Count:
    """Rows of the file, as many as can be counted in so many seconds. Raises DatasetError as `read`."""
    end_s = time.monotonic() + seconds
    num_rows, filled = 0, False
    with _telling(path, lambda: f" after line {num_rows}" if num_rows else ""), _open(path) as stream:
        if _is_list(stream):
            for num_rows, _ in enumerate(_spans(path, _text(path, stream)), start=1):
                if time.monotonic() > end_s:
                    return Count(num_rows, is_all=False)
            return Count(num_rows)
        while chunk := stream.readline(_CHUNK):
            filled = filled or bool(chunk.strip())
            if chunk.endswith(b"\n"):
                num_rows, filled = num_rows + filled, False
                if num_rows % 1024 == 0 and time.monotonic() > end_s:
                    return Count(num_rows, is_all=False)
    return Count(num_rows + filled)


def _open(path: Path) -> Any:
    return gzip.open(path) if first_bytes(path).startswith(GZIP) else path.open("rb")


@contextmanager
def _telling(path: Path, where: Any) -> Iterator[None]:
    """What goes wrong while reading, as a sentence."""
    try:
        yield
    except OSError as error:
        raise cannot_be_read(path, error, where()) from None
    except (EOFError, zlib.error) as error:
        raise DatasetError([f"{path}: the gzip data is damaged{where()}: {error}"]) from None


# -------------------------------------------------------------------------------------------------------- lines
def _lines(stream: BufferedReader, max_bytes: int) -> Iterator[tuple[int, bytes | None, int]]:
    """(Number from 1, bytes or None, length) of every line; one that is too long is read past, piece by piece."""
    number = 0
    while raw := stream.readline(max_bytes + 1):
        number += 1
        num_bytes = len(raw)
        if num_bytes <= max_bytes or raw.endswith(b"\n"):
            yield number, raw.removeprefix(_BOM) if number == 1 else raw, num_bytes
            continue
        last, raw = raw[-1:], b""
        while last != b"\n" and (piece := stream.readline(_CHUNK)):
            num_bytes, last = num_bytes + len(piece), piece[-1:]
        yield number, None, num_bytes


def _row(number: int, place: str, raw: bytes) -> Row:
    try:
        text = raw.decode().rstrip("\r\n")
        if text.startswith("\ufeff"):
            raise ValueError("begins with a byte order mark, which belongs at the start of a file only")
        return Row(number, place, as_object(parse(text)))
    except UnicodeDecodeError as error:
        return Row(number, place, None, f"is not UTF-8 at byte {error.start + 1}")
    except ValueError as error:
        return Row(number, place, None, str(error))


# --------------------------------------------------------------------------------------------------- a JSON list
def _is_list(stream: Any) -> bool:
    """The file begins with a bracket; a line that does is bad in any case."""
    return bool(stream.peek(_CHUNK).removeprefix(_BOM).lstrip().startswith(b"["))


def _text(path: Path, stream: BufferedReader) -> str:
    raw = stream.read(MAX_LIST_BYTES + 1)
    if len(raw) > MAX_LIST_BYTES:
        raise DatasetError([f"{path}: a JSON file of more than {MAX_LIST_BYTES:,} bytes; save it as JSONL or Parquet"])
    try:
        return raw.removeprefix(_BOM).decode()
    except UnicodeDecodeError as error:
        raise DatasetError([f"{path}: is not UTF-8 at byte {error.start + 1}"]) from None


def _items(path: Path, stream: BufferedReader) -> Iterator[Row]:
    text = _text(path, stream)
    line, counted = 1, 0
    for number, (start, end) in enumerate(_spans(path, text), start=1):
        line, counted = line + text.count("\n", counted, start), start
        place = f"{path}:{line} (item {number})"
        try:
            fields = as_object(DECODER.raw_decode(text, start)[0])
            if "\\ud" in (written := text[start:end]) or "\\uD" in written:
                check_whole_characters(fields)
            yield Row(number, place, fields)
        except ValueError as error:
            yield Row(number, place, None, str(error))


def _spans(path: Path, text: str) -> Iterator[tuple[int, int]]:
    """(First character, first one behind) of every item of the list."""
    position = _skip(text, _skip(text, 0) + 1)
    if text[position : position + 1] == "]":
        end = position + 1
    else:
        while True:
            try:
                _, end = _LENIENT.raw_decode(text, position)
            except (ValueError, RecursionError) as error:
                reason = "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON: {error}"
                raise DatasetError([f"{path}:{text.count(chr(10), 0, position) + 1}: {reason}"]) from None
            yield position, end
            end = _skip(text, end)
            if (mark := text[end : end + 1]) == ",":
                position = _skip(text, end + 1)
                continue
            end += 1
            if mark == "]":
                break
            raise DatasetError([f"{path}:{text.count(chr(10), 0, end) + 1}: the list is cut off or lacks a comma"])
    if text[_skip(text, end) :]:
        raise DatasetError([f"{path}:{text.count(chr(10), 0, end) + 1}: something follows the end of the list"])


def _skip(text: str, position: int) -> int:
    """The next position that is not white space."""
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position
