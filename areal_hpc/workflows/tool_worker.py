"""The process in which what workflows run is run: `python -m areal_hpc.workflows.tool_worker PARENT_PID`.

Frames of msgpack on stdin and stdout, as for rewards (rewards/process.py, whose parts this is made of). Each call is
answered by "begun" once its function is imported, so that an import does not count as time of the call, and then by
"done" or "error". It protects the rank from accidents; code written by a model needs the sandbox on top.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO, Literal

import msgspec

from areal_hpc.rewards.functions import describe, load_function
from areal_hpc.rewards.process import die_with, settle
from areal_hpc.rewards.wire import frame, one_line, read_frame

MAX_ANSWER_BYTES = 1 << 22
"""Most that a call may return."""


class Call(msgspec.Struct, array_like=True, frozen=True):
    """Rank to worker: call this; `args` is a msgpack list."""

    function: str
    args: bytes


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """Worker to rank; `value` is msgpack for done, `detail` one line for error."""

    kind: Literal["begun", "done", "error"]
    value: bytes = b""
    detail: str = ""
    seconds: float = 0.0


def call(functions: dict[str, Callable[..., Any]], answers: BinaryIO, request: Call) -> Reply:
    """Load and call the function; whatever it raises, SystemExit included, is an error that says where."""
    began_s = time.monotonic()
    try:
        if request.function not in functions:
            functions[request.function] = load_function(request.function)
        send(answers, Reply("begun"))
        began_s = time.monotonic()
        value = msgspec.msgpack.encode(functions[request.function](*msgspec.msgpack.decode(request.args)))
        if len(value) > MAX_ANSWER_BYTES:
            raise ValueError(f"{request.function} returned {len(value):,} bytes; the limit is {MAX_ANSWER_BYTES:,}")
        return Reply("done", value, seconds=time.monotonic() - began_s)
    except BaseException as error:  # user code may raise anything
        return Reply("error", detail=one_line(describe(error)), seconds=time.monotonic() - began_s)


def send(answers: BinaryIO, reply: Reply) -> None:
    answers.write(frame(msgspec.msgpack.encode(reply)))
    answers.flush()


def main(arguments: list[str]) -> None:
    """Answer until the rank closes the pipe; does not return."""
    die_with(int(arguments[0]))
    requests, descriptor = settle(None)
    answers = os.fdopen(descriptor, "wb")
    me = os.getpid()
    functions: dict[str, Callable[..., Any]] = {}
    decoder = msgspec.msgpack.Decoder(Call)
    while (body := read_frame(requests)) is not None:
        reply = call(functions, answers, decoder.decode(body))
        if os.getpid() != me:
            os._exit(0)  # a child forked by the function came back from it: the answer is its parent's to give
        send(answers, reply)
    os._exit(0)  # threads left by a function must not hold the process


if __name__ == "__main__":
    main(sys.argv[1:])
