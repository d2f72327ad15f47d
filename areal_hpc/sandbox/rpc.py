"""Calls between the process of a program and the process of its tests.

Only plain values cross (`values`). Anything else stays where it is, and the other side gets a number for it: the tests
hold objects of the program as `Remote`, the program may call functions that a test hands over, and no more.
"""

from __future__ import annotations

import builtins
import operator
import socket
from collections.abc import Callable
from typing import Any

from areal_hpc.sandbox import values, wire

Operation = Callable[..., Any]


class Refused(BaseException):
    """A test wants from an object of the program what only the program could answer: equality, order, truth."""


class Lost(BaseException):
    """The program's process is gone or talks nonsense."""


class ProgramError(Exception):
    """The program raised an exception of its own class."""


class Peer:
    """One end: asks for operations of the other side, and serves its own while it waits for an answer.

    Args:
        operations: what the other side may ask for; each takes decoded arguments.
        keeps: whether this value, which is not plain, may be handed over as a number.
    """

    def __init__(
        self, sock: socket.socket, max_bytes: int, operations: dict[str, Operation], keeps: Callable[[Any], bool]
    ) -> None:
        self._sock, self._max_bytes, self._operations, self._keeps = sock, max_bytes, operations, keeps
        self._kept: list[Any] = []

    def ask(self, operation: str, *arguments: Any) -> Any:
        """What the operation returns over there, or the exception that it raised. Raises Lost."""
        self._send(["ask", operation, [self._encode(argument) for argument in arguments]])
        while True:
            kind, *content = self._receive()
            if kind == "ask" and len(content) == 2:
                self._answer(*content)
            elif kind == "value" and len(content) == 1:
                return self._decode(content[0])
            elif kind == "changed" and operation == "call" and len(content) == 1:
                _change(arguments, self._decode(content[0]))
                return None
            elif kind == "raised" and len(content) == 2:
                name, message = map(str, content)
                if name == "StopIteration" and operation != "next":  # it would end a loop of the test before its end
                    raise ProgramError(f"{name}: {message}")
                raise _exception(name, message)
            else:
                raise Lost(f"not a message: {kind}")

    def serve(self) -> None:
        """Answer until the other side is gone, then raise Lost."""
        while True:
            _, operation, arguments = self._receive()
            self._answer(operation, arguments)

    def _answer(self, operation: str, arguments: list[Any]) -> None:
        try:
            given = [self._decode(argument) for argument in arguments]
            value = self._operations[operation](*given)
            message = ["value", self._encode(value)]
            if value is None and operation == "call":
                after = [self._encode(argument) for argument in given[:2]]
                message = ["changed", after] if after != arguments[:2] else message
            frame = wire.pack(message)
        except Exception as error:
            frame = wire.pack(["raised", type(error).__name__, str(error)[:1000]])
        self._sock.sendall(frame)

    def _encode(self, value: Any) -> Any:
        return values.encode(value, self._number)

    def _number(self, value: Any) -> dict[str, int]:
        if isinstance(value, Remote):
            return {"yours": object.__getattribute__(value, "_number")}
        if not self._keeps(value):
            raise Refused(f"the test hands over a {type(value).__name__}; only plain values and functions can go")
        self._kept.append(value)
        return {"mine": len(self._kept) - 1}

    def _decode(self, data: Any) -> Any:
        try:
            return values.decode(data, self._object)
        except (ValueError, RecursionError) as error:
            raise Lost(str(error)) from None

    def _object(self, tag: str, number: Any) -> Any:
        if tag == "mine" and isinstance(number, int):
            return Remote(self, number)
        if tag == "yours" and isinstance(number, int) and 0 <= number < len(self._kept):
            return self._kept[number]
        raise ValueError(f"not a value: {tag}")

    def _send(self, message: Any) -> None:
        try:
            wire.send(self._sock, message)
        except wire.Closed as error:
            raise Lost(str(error)) from None

    def _receive(self) -> list[Any]:
        try:
            message = wire.receive(self._sock, self._max_bytes)
        except wire.Closed as error:
            raise Lost(str(error)) from None
        if not (isinstance(message, list) and message):
            raise Lost("not a message")
        return message


def _change(before: tuple[Any, ...], after: Any) -> None:
    """Arguments that a call changed in place. Only calls that return None may do so: else the answer is the value."""
    if not (isinstance(after, list) and len(after) == 2 and isinstance(after[0], list) and isinstance(after[1], dict)):
        raise Lost("not the arguments of a call")
    pairs = [*zip(before[0], after[0], strict=False)]
    pairs += [(before[1][key], value) for key, value in after[1].items() if key in before[1]]
    for old, new in pairs:
        if type(old) is not type(new):
            continue
        if isinstance(old, (list, bytearray)):
            old[:] = new
        elif isinstance(old, (dict, set)):
            old.clear()
            old.update(new)


def _exception(name: str, message: str) -> Exception:
    known = getattr(builtins, name, None)
    if isinstance(known, type) and issubclass(known, Exception):
        try:
            return known(message)
        except TypeError:
            pass
    return ProgramError(f"{name}: {message}")


class Remote:
    """An object of the other side. What is asked of it happens there and comes back as a plain value or a Remote."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _ask(self, "call", list(args), kwargs)

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "setitem", key, value)

    def __contains__(self, key: Any) -> bool:
        return any(item == key for item in self)  # to ask would be to tell `key`, and to believe the answer

    def __iter__(self) -> Any:
        return iter(_ask(self, "list"))

    def __next__(self) -> Any:
        return _ask(self, "next")

    def __len__(self) -> int:
        return int(_ask(self, "len"))

    def __str__(self) -> str:
        return str(_ask(self, "str"))

    def __repr__(self) -> str:
        return str(_ask(self, "repr"))

    def _refuse(self, *_: Any) -> Any:
        raise Refused("the test compares an object of the program's own class")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = _refuse  # type: ignore[assignment]


def _ask(remote: Remote, operation: str, *arguments: Any) -> Any:
    return object.__getattribute__(remote, "_peer").ask(operation, *_call_first(remote, operation, arguments))


def _call_first(remote: Remote, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """A call goes as (arguments, keywords, function), so that what it changed comes back in its place."""
    return (*arguments, remote) if operation == "call" else (remote, *arguments)


def call(args: list[Any], kwargs: dict[str, Any], function: Any) -> Any:
    return function(*args, **kwargs)


OF_PROGRAM: dict[str, Operation] = {
    "call": call,
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "list": list,
    "next": next,
    "len": len,
    "str": str,
    "repr": repr,
}
OF_TESTS: dict[str, Operation] = {"call": call}
