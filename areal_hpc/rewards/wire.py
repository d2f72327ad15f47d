"""Frames between a rank and its reward processes: a little-endian uint32 length and a msgpack array."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, Literal

import msgspec

Verdict = Literal["correct", "wrong", "unparsed"]

MAX_ANSWER_BYTES = 4096
"""Largest answer frame. Not above PIPE_BUF: an answer is one atomic write."""

MAX_SAMPLE_BYTES = 1 << 30
"""Largest sample; what a process gets at once is less than four times as much."""

MAX_ANSWER_TEXT_BYTES = 500
MAX_DETAIL = 500
_HEADER = struct.Struct("<I")


class Sample(msgspec.Struct, array_like=True, frozen=True):
    """One answer to score. Texts are UTF-8 with `surrogatepass`: a tokenizer may leave lone surrogates."""

    id: int
    prompt: bytes
    completion: bytes
    metadata: dict[Any, Any]
    facts: dict[str, Any] = {}

    @classmethod
    def pack(
        cls, id: int, prompt: str, completion: str, metadata: dict[Any, Any], facts: Mapping[str, Any]
    ) -> msgspec.Raw:
        """A sample as msgpack. Raises TypeError, ValueError, OverflowError or RecursionError for what msgpack cannot
        carry."""
        texts = [text.encode("utf-8", "surrogatepass") for text in (prompt, completion)]
        body = msgspec.msgpack.encode(cls(id, texts[0], texts[1], metadata, dict(facts)))
        if len(body) > MAX_SAMPLE_BYTES:
            raise ValueError(f"{len(body):,} bytes; the limit is {MAX_SAMPLE_BYTES:,}")
        return msgspec.Raw(body)

    @property
    def prompt_text(self) -> str:
        return self.prompt.decode("utf-8", "surrogatepass")

    @property
    def completion_text(self) -> str:
        return self.completion.decode("utf-8", "surrogatepass")


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """Process to rank. The first one has id 0: "ready", or "error" when a function cannot be loaded.

    `last`: the process wants to be replaced. `answer`: what the function read, at most MAX_ANSWER_TEXT_BYTES of UTF-8.
    """

    id: int
    reward: float
    outcome: Literal["ready", "correct", "wrong", "unparsed", "truncated", "error"]
    seconds: float
    detail: str
    last: bool = False
    answer: str | None = None


def frame(body: bytes) -> bytes:
    """Length and body of one message."""
    return _HEADER.pack(len(body)) + body


def request_frame(samples: Sequence[msgspec.Raw]) -> bytes:
    """Rank to process: score these, as `Sample.pack` made them."""
    return frame(msgspec.msgpack.encode(list(samples)))


def answer_frame(answer: Answer) -> bytes:
    return frame(msgspec.msgpack.encode(answer))


def pop_frame(buffer: bytearray) -> bytes | None:
    """Take the first whole frame body out of `buffer`; None if there is none yet. Raises ValueError above the limit."""
    if len(buffer) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack_from(buffer)
    end = _HEADER.size + size
    if end > MAX_ANSWER_BYTES:
        raise ValueError(f"answer of {size} bytes")
    if len(buffer) < end:
        return None
    body = bytes(buffer[_HEADER.size : end])
    del buffer[:end]
    return body


def read_frame(pipe: BinaryIO) -> bytes | None:
    """Wait for the next frame body; None when the rank has closed the pipe."""
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack(header)
    body = pipe.read(size)
    return body if len(body) == size else None


def one_line(text: str) -> str:
    """`text` without line breaks, short enough for an answer frame, and always encodable."""
    line = " ".join(text[: 4 * MAX_DETAIL].split()).encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= MAX_DETAIL else line[: MAX_DETAIL - 3] + "..."
