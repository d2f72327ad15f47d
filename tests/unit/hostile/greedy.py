"""Too much of everything: processes, memory, time, output, files."""

from __future__ import annotations

from tests.unit.hostile.base import ASSERT, CALL, NOTHING, STDIN, hostile

hostile(
    "fork_bomb",
    CALL,
    """
    import os
    while True:
        os.fork()
    """,
    wall_s=1.5,
)
hostile(
    "shell_fork_bomb",
    CALL,
    """
    import subprocess
    subprocess.run(['sh', '-c', 'b() { b | b & }; b; sleep 9'])
    """,
    wall_s=1.5,
)
hostile(
    "ten_gigabyte_list",
    CALL,
    """
    a = [0] * (10 * 2**30 // 8)
    f = lambda x: 4
    """,
)
hostile(
    "ten_gigabytes_slowly",
    CALL,
    """
    a = []
    while True:
        a.append(bytearray(2**24))
    """,
)
hostile(
    "reserved_memory",
    CALL,
    """
    import mmap
    m = mmap.mmap(-1, 10 * 2**30)
    f = lambda x: 4
    """,
)
hostile(
    "memory_of_many",
    CALL,
    """
    import os, time
    for _ in range(6):
        if os.fork() == 0:
            a = bytearray(100 * 2**20)
            time.sleep(9)
    time.sleep(9)
    """,
)
hostile(
    "endless_print",
    STDIN,
    """
    while True:
        print('4' * 1000)
    """,
)
hostile(
    "endless_line",
    STDIN,
    """
    import os
    while True:
        os.write(1, b'4' * 65536)
    """,
)
hostile(
    "huge_int",
    CALL,
    "f = lambda x: 10 ** 10 ** 10",
    limits={"cpu_s": 1},
)
hostile(
    "deep_recursion",
    CALL,
    """
    import sys
    sys.setrecursionlimit(10**9)
    f = lambda x: f(x + 1) + f(x + 2)
    """,
    wall_s=2.0,
)
hostile(
    "regex_blow_up",
    CALL,
    """
    import re
    f = lambda x: re.match('(a+)+$', 'a' * 60 + 'b')
    """,
    limits={"cpu_s": 1},
)
hostile(
    "sleep",
    CALL,
    """
    import time
    time.sleep(1000)
    """,
    wall_s=0.5,
)
hostile(
    "busy_loop",
    CALL,
    """
    while True:
        pass
    """,
    limits={"cpu_s": 1},
)
hostile(
    "ignored_signals",
    CALL,
    """
    import signal
    for number in set(signal.valid_signals()) - {9, 19}:
        try:
            signal.signal(number, signal.SIG_IGN)
        except OSError:
            pass
    while True:
        pass
    """,
    limits={"cpu_s": 1},
)
hostile(
    "thousand_threads",
    CALL,
    """
    import threading, time
    for _ in range(1000):
        threading.Thread(target=time.sleep, args=(9,)).start()
    f = lambda x: 4
    """,
)
hostile(
    "hundred_megabytes_returned",
    CALL,
    "f = lambda x: 'x' * (100 * 2**20)",
)
hostile(
    "deep_value",
    CALL,
    """
    def f(x):
        v = 4
        for _ in range(10**6):
            v = [v]
        return v
    """,
)
hostile(
    "abort",
    CALL,
    """
    import os
    os.abort()
    """,
)
hostile(
    "segfault",
    ASSERT,
    """
    import ctypes
    f = lambda x: ctypes.string_at(0)
    """,
)
hostile(
    "full_tmp",
    NOTHING,
    """
    import os
    def f():
        total = 0
        for place in ("/tmp", "/dev/shm"):
            try:
                for i in range(1000):
                    with open(f"{place}/{i}", "wb", 0) as file:
                        for _ in range(64):
                            total += file.write(bytes(2**20))
            except OSError:
                pass
        return [total] if total > 2**26 else []
    """,
    limits={"tmp_bytes": 2**24},
)
hostile(
    "memory_beside_the_limit",
    NOTHING,
    """
    import ctypes, os
    libc = ctypes.CDLL(None)
    def f():
        got = []
        try:
            got.append(os.memfd_create("x"))
        except OSError:
            pass
        got += [name for name in ("shmget", "msgget") if getattr(libc, name)(0, 2**20, 0o1600) >= 0]
        return got
    """,
)
hostile(
    "more_open_files",
    NOTHING,
    """
    import os, resource
    def f():
        got, opened = [], 0
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (10000, 10000))
            got.append("limit")
        except (ValueError, OSError):
            pass
        try:
            while opened < 1000:
                os.dup(1)
                opened += 1
        except OSError:
            pass
        return got if opened < 100 else [opened]
    """,
)
