"""What runs in the process of an untrusted program. Nothing that it reports is a verdict: it reports values."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import io
import os
import signal
import socket
import sys
import threading
from types import ModuleType
from typing import Any

from areal_hpc.sandbox import rpc, values, wire

_REPLY_FD = 3
_STACK_NAME = "main.py"


def exit_code(error: SystemExit) -> int:
    """The exit status that Python would give."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def load(source: str, name: str) -> dict[str, Any]:
    """Run the text as module `name`; returns its namespace. Raises whatever it raises."""
    module = ModuleType(name)
    module.__dict__.update(__builtins__=builtins, __file__=_STACK_NAME)
    sys.modules[name] = module
    sys.argv = [_STACK_NAME]
    for leave in ("exit", "quit"):  # what `site` would add
        setattr(builtins, leave, sys.exit)
    exec(compile(source, _STACK_NAME, "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def run_main(program: dict[str, Any]) -> None:
    """The program as a script between standard input and output; ends the process as Python would."""
    if program["command"]:
        _execute(program)
    code = 0
    _open_streams()
    try:
        load(program["source"], "__main__")
    except SystemExit as error:
        code = exit_code(error)
    except BaseException:
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        code = code or 1
    _flush_the_rest()
    os._exit(code)


def _open_streams() -> None:
    """As Python makes them: those of the zygote were opened on something else, and remember that it could seek."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        errors = "backslashreplace" if fd == 2 else "surrogateescape"
        stream = open(fd, "w" if fd else "r", encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _flush_the_rest() -> None:
    """Files that the program has left open: Python would write them out as it takes its objects apart."""
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase):
            with contextlib.suppress(BaseException):
                thing.flush()


def _execute(program: dict[str, Any]) -> None:
    """Become the interpreter of another language, in a new directory with the program's file."""
    import tempfile

    os.chdir(tempfile.mkdtemp(prefix="program_"))
    with open(program["file"], "w") as file:
        file.write(program["source"])
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(program["command"][0], [*program["command"], program["file"]])


def run_call(program: dict[str, Any]) -> None:
    """One call of one function: the request comes from standard input, the value goes to its own pipe."""
    reply = os.dup(_REPLY_FD)
    request = wire.receive(_as_socket(), 1 << 30)
    name, module = request["name"], load(program["source"], "program")
    solution = module.get("Solution")
    function = getattr(solution(), name) if isinstance(solution, type) and name not in module else module[name]
    result = values.encode(function(*request["args"]), _refuse)
    body = wire.pack(result)
    while body:
        body = body[os.write(reply, body) :]


def _refuse(value: Any) -> Any:
    raise TypeError(f"returned a {type(value).__name__}")


class _Pipe:
    """Standard input with the one method that frames are read by."""

    @staticmethod
    def recv(size: int) -> bytes:
        return os.read(0, size)


def _as_socket() -> Any:
    return _Pipe()


def run_server(program: dict[str, Any], max_bytes: int) -> None:
    """Load the program and let the tests' process use what it defines."""
    sock = socket.socket(fileno=_REPLY_FD)
    module = load(program["source"], "program")
    operations = {**rpc.OF_PROGRAM, "has": lambda names: [name for name in names if name in module]}
    operations["name"] = module.__getitem__
    try:
        rpc.Peer(sock, max_bytes, operations, keeps=lambda value: True).serve()
    except rpc.Lost:
        os._exit(0)
