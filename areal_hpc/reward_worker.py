"""The process that calls the user's reward function: `python -m areal_hpc.reward_worker FUNCTION PARENT_PID`.

Started by `areal_hpc.rewards`, never by hand: one request after another comes in on fd 0, one answer each goes out on
what was fd 1. A frame is a little-endian uint32 length and a msgpack array. The process may be killed at any moment,
so it holds nothing worth keeping. It imports neither torch, MPI nor numpy unless the user's function does.

It protects the rank from accidents (loops, crashes, prints, memory), not from malice: code written by a model must not
run in here without a sandbox.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.util
import math
import numbers
import os
import reprlib
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO, Literal

import msgspec

RewardFunction = Callable[[str, str, dict[Any, Any]], Any]
Verdict = Literal["correct", "wrong", "unparsed"]

MAX_ANSWER_BYTES = 4096
"""Largest answer frame. Not above PIPE_BUF: an answer is one atomic write."""

_MAX_DETAIL = 500
_MAX_ANSWER_TEXT_BYTES = 500
_OUTCOMES: tuple[Verdict, ...] = ("correct", "wrong", "unparsed")
_RANK_PREFIXES = ("PMI", "OMPI_", "MPI", "I_MPI_", "MV2_", "HYD", "PRTE_", "PALS_", "SLURM")
_RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PR_SET_PDEATHSIG = 1
_HEADER = struct.Struct("<I")


class Request(msgspec.Struct, array_like=True, frozen=True):
    """Rank to worker: score one answer. Texts are UTF-8 with `surrogatepass`: a tokenizer may leave lone surrogates."""

    id: int
    prompt: bytes
    completion: bytes
    metadata: dict[Any, Any]


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """Worker to rank. The first one has id 0: "ready", or "error" when the function cannot be loaded."""

    id: int
    reward: float
    outcome: Literal["ready", "correct", "wrong", "unparsed", "error"]
    seconds: float
    detail: str
    answer: str | None = None


class RewardError(RuntimeError):
    """The reward service cannot do its work: the run cannot go on without a change by the user."""


class BadReward(Exception):
    """The function returned something that is not a reward."""


def full_name(function: str) -> str:
    """`package.module:name` as it is, `file.py:name` with the absolute path. Raises RewardError for anything else."""
    place, colon, name = function.rpartition(":")
    if not (place and colon and name.isidentifier()):
        raise RewardError(f"reward function {function!r}: write package.module:name or /path/file.py:name")
    return f"{os.path.abspath(place)}:{name}" if place.endswith(".py") else function


def command(function: str) -> list[str]:
    """Command line of a worker of the calling process."""
    return [sys.executable, "-m", "areal_hpc.reward_worker", function, str(os.getpid())]


def environment() -> dict[str, str]:
    """Environment of a worker: the rank's, without whatever would make a child think that it is a rank, too."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_RANK_PREFIXES) and name not in _RANK_NAMES
    }
    kept["OMP_NUM_THREADS"] = "1"
    kept["PYTHONPATH"] = os.pathsep.join(os.path.abspath(place) for place in sys.path if place)
    return kept


def frame(message: msgspec.Struct) -> bytes:
    """Length and msgpack body of one message. Raises what msgspec raises for values that msgpack cannot carry."""
    body = msgspec.msgpack.encode(message)
    if len(body) >= 1 << 32:
        raise ValueError(f"a message of {len(body)} bytes; the limit is 4 GiB")
    return _HEADER.pack(len(body)) + body


def request_frame(id: int, prompt: str, completion: str, metadata: dict[Any, Any]) -> bytes:
    """A whole request. Raises TypeError, ValueError, OverflowError or RecursionError for what msgpack cannot carry."""
    texts = [text.encode("utf-8", "surrogatepass") for text in (prompt, completion)]
    return frame(Request(id, texts[0], texts[1], metadata))


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


def load_function(name: str) -> RewardFunction:
    """The function called `package.module:name` or `/path/file.py:name`. Raises whatever its import raises."""
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        sys.path.insert(0, os.path.dirname(place))  # as for a script: files beside it can be imported
        spec = importlib.util.spec_from_file_location("reward_file_" + os.path.basename(place)[:-3], place)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = getattr(module, attribute)
    if not callable(function):
        raise TypeError(f"{name} is {type(function).__name__}, not a function")
    return function


def judge(value: object) -> tuple[float, Verdict]:
    """Reward and outcome of what the function returned; a bare number above 0 is correct. Raises BadReward."""
    outcome: object = None
    if isinstance(value, tuple):
        if len(value) != 2 or value[1] not in _OUTCOMES:
            raise BadReward(f"expected (reward, 'correct' | 'wrong' | 'unparsed'), got {reprlib.repr(value)}")
        value, outcome = value
    if not isinstance(value, numbers.Real):
        raise BadReward(f"expected a number or (number, outcome), got {type(value).__name__}: {reprlib.repr(value)}")
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise BadReward(f"expected a finite reward, got {reprlib.repr(value)}")
    for known in _OUTCOMES:
        if outcome == known:
            return reward, known
    return reward, "correct" if reward > 0 else "wrong"


def split_answer(value: object) -> tuple[object, str | None]:
    """Take the answer, which a function may return as a third element, off the rest. Raises BadReward.

    The text is what votes are counted by (maj@k): equal answers must be equal texts, so a verifier returns its normal
    form. A long one is cut and ends in a hash of all of it.
    """
    if not isinstance(value, tuple) or len(value) != 3:
        return value, None
    text = value[2]
    if text is None:
        return value[:2], None
    if not isinstance(text, str):
        raise BadReward(f"expected (reward, outcome, answer as text or None), got {reprlib.repr(value)}")
    data = text.encode("utf-8", "backslashreplace")
    if len(data) > _MAX_ANSWER_TEXT_BYTES:
        mark = hashlib.blake2b(data, digest_size=8).hexdigest().encode()
        data = data[: _MAX_ANSWER_TEXT_BYTES - len(mark) - 1] + b"~" + mark
    return value[:2], data.decode("utf-8", "ignore")


def one_line(text: str) -> str:
    """`text` without line breaks, short enough for an answer frame, and always encodable."""
    line = " ".join(text[: 4 * _MAX_DETAIL].split()).encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= _MAX_DETAIL else line[: _MAX_DETAIL - 3] + "..."


def describe(error: BaseException) -> str:
    """One line: file:line where it was raised, then type and message as in the last line of a traceback."""
    try:
        message = str(error)
    except BaseException:  # user code may raise anything
        message = "(message unreadable)"
    place, traceback = "", error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file != describe.__code__.co_filename and not file.startswith("<"):
            place = f"{file}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
    return (f"{place}: " if place else "") + one_line(f"{type(error).__name__}: {message}")


def score(function: RewardFunction, request: Request) -> Answer:
    """Call the function. Whatever it raises, SystemExit included, is an answer with outcome "error" and reward NaN."""
    started = time.monotonic()
    try:
        prompt = request.prompt.decode("utf-8", "surrogatepass")
        completion = request.completion.decode("utf-8", "surrogatepass")
        value, text = split_answer(function(prompt, completion, request.metadata))
        reward, outcome = judge(value)
    except BaseException as error:  # user code may raise anything
        return Answer(request.id, math.nan, "error", time.monotonic() - started, one_line(describe(error)))
    return Answer(request.id, reward, outcome, time.monotonic() - started, "", text)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies, and leave at once if it is dead already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed: the worker could outlive its rank")
    if os.getppid() != parent:
        os._exit(1)


def settle() -> tuple[BinaryIO, int]:
    """Move the protocol away from fd 0 and 1, which user code may read and print to; returns (requests, answers)."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:  # when memory ends, the kernel shall take a worker and not the rank
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        # Slurm's walltime warning is for ranks. A handler, since SIG_IGN would pass on to children of the function.
        signal.signal(number, lambda *_: None)
    return requests, answers


def main(arguments: list[str]) -> None:
    """Load the function, say "ready", answer until the rank closes the pipe; does not return."""
    name, parent = arguments
    die_with(int(parent))
    requests, answers = settle()
    try:
        function = load_function(name)
    except BaseException as error:  # user code may raise anything
        os.write(answers, frame(Answer(0, math.nan, "error", 0.0, one_line(describe(error)))))
        os._exit(1)
    os.write(answers, frame(Answer(0, math.nan, "ready", 0.0, "")))
    me = os.getpid()
    decoder = msgspec.msgpack.Decoder(Request)
    while (body := read_frame(requests)) is not None:
        answer = score(function, decoder.decode(body))
        if os.getpid() != me:
            os._exit(0)  # a child forked by the function came back from it: the answer is its parent's to give
        os.write(answers, frame(answer))
    os._exit(0)  # threads left by the function must not hold the process


if __name__ == "__main__":
    main(sys.argv[1:])
