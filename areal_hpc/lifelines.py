"""A TCP connection from a rollout rank to each that sends to it (controller, reward ranks), which carries nothing: its
end is the rank's death.

The kernel closes it whatever kills the process, so the other end knows within the network's latency. That matters
twice. Nothing is waited for that will not come. And MPICH 5 must not send to a dead rank: its UCX module crashes in
MPI_Isend once the connection is reset, its OFI module aborts. So who sends to a rollout rank looks here before every
message; this line was opened after MPI's and says no more than that the other end was there a moment ago.

A host that loses its power or its network closes nothing. Sending to it does no harm, and its silence tells.
"""

from __future__ import annotations

import fcntl
import hmac
import resource
import secrets
import select
import socket
import struct
import time
from contextlib import suppress

GREETING = struct.Struct("<32sI")
GREETING_S = 10.0
"""For a connection to say whose it is; others are closed."""
HIGHEST_NUMBER = 65_536
"""Of a file; the kernel's table of files grows with the highest one, 8 bytes each."""
MAX_HELD = 256
"""Lines of one rank, to the controller and to reward ranks."""

_held: list[socket.socket] = []


class Lifelines:
    """The ends of the controller, or of a reward rank.

    Attributes:
        port: where rollout ranks call.
        token: what they prove with that they belong to the run, 32 characters.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("", 0), backlog=4096)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.token = secrets.token_hex(16)
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self._strangers: dict[int, tuple[socket.socket, float]] = {}
        self._ranks: dict[int, tuple[socket.socket, int]] = {}

    def look(self) -> list[int]:
        """Ranks whose line has ended since the last call; takes new lines as well. Never waits."""
        ended = []
        for number, _ in self._poll.poll(0):
            if number == self._listener.fileno():
                self._accept()
            elif number in self._strangers:
                self._greet(number)
            else:
                connection, rank = self._ranks.pop(number)
                self._poll.unregister(connection)
                connection.close()
                ended.append(rank)
        return ended

    @property
    def num_ranks(self) -> int:
        """Lines that are open."""
        return len(self._ranks)

    def _accept(self) -> None:
        with suppress(BlockingIOError, ConnectionError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._strangers[connection.fileno()] = connection, time.monotonic()
            self._poll.register(connection, select.EPOLLIN | select.EPOLLRDHUP)
        for connection, since_s in list(self._strangers.values()):
            if time.monotonic() - since_s > GREETING_S:
                self._refuse(connection)

    def _greet(self, number: int) -> None:
        connection, _ = self._strangers[number]
        try:
            greeting = connection.recv(GREETING.size, socket.MSG_PEEK)
            if 0 < len(greeting) < GREETING.size:
                return
            token, rank = GREETING.unpack(connection.recv(GREETING.size))
        except (OSError, struct.error):
            self._refuse(connection)
            return
        if not hmac.compare_digest(token, self.token.encode()):
            self._refuse(connection)
            return
        del self._strangers[number]
        self._ranks[number] = connection, rank

    def _refuse(self, connection: socket.socket) -> None:
        del self._strangers[connection.fileno()]
        self._poll.unregister(connection)
        connection.close()


def hold_lifeline(host: str, port: int, token: str, rank: int, timeout_s: float) -> None:
    """This rank's end, open as long as the process lives. Raises OSError when the other cannot be reached."""
    connection = socket.create_connection((host, port), timeout=timeout_s)
    connection.sendall(GREETING.pack(token.encode(), rank))
    _held.append(_closed_first(connection))


def _closed_first(connection: socket.socket) -> socket.socket:
    """The same connection under a number above all that MPI will open.

    Linux closes the files of a dying process from the highest number down, and lets others run in between. MPI connects
    at the first message to a peer, that is later than this line: below it, MPI's end could be gone before the line's.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = max(0, min(allowed, HIGHEST_NUMBER) - MAX_HELD)
    number = fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, lowest)
    connection.close()
    return socket.socket(fileno=number)
