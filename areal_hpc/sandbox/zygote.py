"""Parent of sandboxes: `python -s -S -c BOOT SOCKET_FD PARENT_PID`, one for each process that has programs run.

A fresh interpreter per program would cost more than the program. This one starts once, with an empty environment, and
loads what programs like to import; every sandbox is a fork of it, which then makes namespaces of its own. It never
runs a program itself and never sees one: each fork reads its orders from a socket that the zygote only passes on.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
from typing import NoReturn

from areal_hpc.sandbox import init, kernel

PRELOADED = """ast bisect cmath collections contextlib copy dataclasses datetime decimal fractions functools heapq io
    itertools json math operator queue random re statistics string tempfile threading traceback typing"""
NUM_DESCRIPTORS = 3
"""Of a request: the init's sockets (control, tests) and what stays open until the last process is gone."""


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> NoReturn:
    """Fork for every message until the parent closes its end."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):
        os._exit(1)
    requests = socket.socket(fileno=int(sys.argv[1]))
    del sys.path[0]
    for name in PRELOADED.split():
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    me = os.getpid()
    requests.sendall(b"+")
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1, NUM_DESCRIPTORS)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            init.start((descriptors[0], descriptors[1], descriptors[2]), parent=me)
        for fd in descriptors:
            os.close(fd)
