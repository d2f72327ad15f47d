"""Prompts from a JSONL file, and the order in which the controller draws them.

A file is taken whole or not at all: every line that cannot be used is named with its reason before the run starts, so
a bad line can never shift the cursor of a later resume. Only the controller reads data.

The order of an epoch is a sort by a hash of (seed, epoch, prompt id): the same on every machine and with every version
of Python or numpy, and a prompt more or less in the file leaves the order of the others as it was.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from areal_hpc.exits import Exit, RunError

Cursor = tuple[int, int]
"""(epoch, index in the order of that epoch) of the prompt that comes next; both from 0."""

_SHOWN = 20
_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a data set.

    Attributes:
        prompt_id: its identity, unique in the file; the line number where the line has none.
        text: the prompt.
        metadata: all other fields of the line, for the reward function.
    """

    prompt_id: str
    text: str
    metadata: dict[str, Any]


class DatasetError(RunError):
    """A file that cannot be used as a data set; `problems` are "file:line: reason", the first 20 of them."""

    def __init__(self, problems: Sequence[str], num_bad: int | None = None) -> None:
        self.problems = list(problems)
        self.num_bad = len(problems) if num_bad is None else num_bad
        more = self.num_bad - len(self.problems)
        super().__init__(
            Exit.CONFIG, "\n".join([*self.problems, f"and {more} more bad lines"] if more else self.problems)
        )


def read_prompts(path: Path, *, prompt_field: str, id_field: str) -> list[Prompt]:
    """Read a JSONL file, plain or gzip (told by its first bytes, not by its name), in UTF-8.

    Blank lines, a byte order mark at the start and CRLF line ends are fine. A line is bad when it is not a JSON object
    with every key once, when the prompt is not text or is blank, when the id is neither one line of text nor a whole
    number or was used before, and when anything in it could not be sent or logged: half a surrogate pair, NaN, an
    number beyond 64 bits, NUL in prompt or id.

    Raises DatasetError: the file cannot be read, has no prompt, or has bad lines (20 are named, all are counted).
    """
    prompts: list[Prompt] = []
    problems: list[str] = []
    lines_of: dict[str, int] = {}
    try:
        for number, raw in _lines(path):
            try:
                prompt = _prompt(raw, str(number), prompt_field, id_field)
                first = lines_of.setdefault(prompt.prompt_id, number)
                if first != number:
                    _bad(id_field, f"{_shown(prompt.prompt_id)} names the prompt of line {first} already")
                prompts.append(prompt)
            except (ValueError, RecursionError) as error:
                problems.append(f"{path}:{number}: {error}")
    except DatasetError as error:
        problems += error.problems
    if not prompts and not problems:
        problems.append(f"{path}: the file holds no prompt")
    if problems:
        raise DatasetError(problems[:_SHOWN], len(problems))
    return prompts


class PromptSource:
    """Draws prompts epoch after epoch; the order depends on seed and epoch only, no prompt comes twice in an epoch.

    Attributes:
        num_total: prompts in the whole run, or None when epochs repeat without end.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool, epochs: int | None) -> None:
        if not prompts:
            raise ValueError("a prompt source needs at least one prompt")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._by_id: dict[str, Prompt] | None = None
        self.num_total: int | None = None if epochs is None else epochs * len(prompts)
        self.seek((0, 0))

    @property
    def cursor(self) -> Cursor:
        """Where the next prompt stands; (epochs, 0) when the source is exhausted."""
        return self._epoch, self._index

    def seek(self, cursor: Cursor) -> None:
        """Go on from a cursor. Raises ValueError for one that this file and these settings never have."""
        epoch, index = cursor
        end = self._epochs is not None and epoch >= self._epochs
        if epoch < 0 or not 0 <= index < len(self._prompts) or (end and (epoch, index) != (self._epochs, 0)):
            raise ValueError(
                f"cursor (epoch {epoch}, index {index}) does not exist with {len(self._prompts)} prompts "
                f"and epochs = {self._epochs}: not the data set or the settings it was saved with"
            )
        self._epoch, self._index = epoch, index
        self._order = self._order_of(epoch)

    def named(self, prompt_id: str) -> Prompt:
        """The prompt with this id; KeyError if there is none."""
        if self._by_id is None:
            self._by_id = {prompt.prompt_id: prompt for prompt in self._prompts}
        return self._by_id[prompt_id]

    def next(self) -> Prompt | None:
        """The next prompt, or None when all epochs are over."""
        if self._epoch == self._epochs:
            return None
        prompt = self._prompts[self._order[self._index]]
        self._index += 1
        if self._index == len(self._prompts):
            self.seek((self._epoch + 1, 0))
        return prompt

    def _order_of(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._prompts))
        key = hashlib.sha256(f"{self._seed}/{epoch}".encode()).digest()
        return sorted(
            range(len(self._prompts)),
            key=lambda i: hashlib.blake2b(self._prompts[i].prompt_id.encode(), key=key, digest_size=16).digest(),
        )


# -------------------------------------------------------------------------------------------------------- lines
def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(Line number from 1, bytes) of every line that is not blank; only \\n ends a line."""
    number = 0
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                if number == 1 and raw.startswith(_UTF16):
                    raise DatasetError([f"{path}:1: the file is UTF-16; save it as UTF-8"])
                content = raw.removeprefix(_BOM) if number == 1 else raw
                if content.strip():
                    yield number, content
    except OSError as error:
        reason = error.strerror or error
        raise DatasetError([f"{path}: cannot be read{f' after line {number}' if number else ''}: {reason}"]) from None
    except (EOFError, zlib.error) as error:
        raise DatasetError([f"{path}: the gzip data is damaged after line {number}: {error}"]) from None


def _prompt(raw: bytes, line: str, prompt_field: str, id_field: str) -> Prompt:
    """One line as a prompt; ValueError says what is wrong with it."""
    fields = _decode(raw)
    if b"\\ud" in raw or b"\\uD" in raw:
        _check_surrogates(fields)
    if prompt_field not in fields:
        names = ", ".join(fields) or "no field"
        _bad(prompt_field, f"is missing (data.prompt_field), the line has {_shown(names).strip(chr(34))}")
    text, identity = fields.pop(prompt_field), fields.pop(id_field, line)
    if not isinstance(text, str) or not text.strip():
        _bad(prompt_field, f"must be text that is not blank, got {_shown(text)}")
    if isinstance(identity, bool) or not isinstance(identity, (str, int)):
        _bad(id_field, f"must be text or a whole number, got {_shown(identity)}")
    if "\0" in text:
        _bad(prompt_field, "holds a NUL character")
    if isinstance(identity, str) and (not identity.strip() or any(ord(c) < 32 for c in identity)):
        _bad(id_field, f"must be one line of text, got {_shown(identity)}")
    return Prompt(str(identity), text, fields)


def _decode(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 at byte {error.start + 1}") from None
    if text.startswith("\ufeff"):
        raise ValueError("begins with a byte order mark, which belongs at the start of a file only")
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON at character {error.pos + 1}: {error.msg}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got {_shown(value)}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        _bad(next(name for name in names if names.count(name) > 1), "is given twice")
    return fields


def _whole(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        raise ValueError(f"the integer {digits[:24]} does not fit into 64 bits; write it as text")
    return int(digits)


def _real(digits: str) -> float:
    if math.isinf(float(digits)):
        raise ValueError(f"the number {digits[:24]} does not fit into 64 bits; write it as text")
    return float(digits)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_whole, parse_float=_real, parse_constant=_no_number)


def _bad(field: str, reason: str) -> NoReturn:
    raise ValueError(f"field {_shown(field)}: {reason}")


def _check_surrogates(fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            _bad(name, "holds half of a surrogate pair, which is no character")


def _shown(value: Any) -> str:
    """A JSON value as it stands in the line, cut to a readable length."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 64 else f"{text[:60]}..."
