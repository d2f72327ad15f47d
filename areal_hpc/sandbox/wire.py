"""Frames between caller, init, program and tester: a little-endian uint32 length, then JSON in UTF-8."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_HEADER = struct.Struct("<I")


class Closed(Exception):
    """The other end is gone, or sent something that is no frame."""


def pack(message: Any) -> bytes:
    """One whole frame. Raises ValueError or RecursionError for what JSON cannot carry."""
    body = json.dumps(message, check_circular=False).encode()
    return _HEADER.pack(len(body)) + body


def send(sock: socket.socket, message: Any) -> None:
    """Send one frame. Raises Closed."""
    try:
        sock.sendall(pack(message))
    except OSError as error:
        raise Closed(f"cannot be sent: {error}") from None


def receive(sock: socket.socket, max_bytes: int) -> Any:
    """The next frame; blocks for as long as the socket's time-out allows. Raises Closed."""
    (size,) = _HEADER.unpack(_exactly(sock, _HEADER.size))
    if size > max_bytes:
        raise Closed(f"a message of {size} bytes, the limit is {max_bytes}")
    try:
        return json.loads(_exactly(sock, size))
    except (ValueError, RecursionError) as error:
        raise Closed(f"not JSON: {error}") from None


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = sock.recv(min(size - len(parts), 1 << 20))
        except OSError as error:
            raise Closed(f"cannot be received: {error or type(error).__name__}") from None
        if not part:
            raise Closed("closed by the other end")
        parts += part
    return bytes(parts)
