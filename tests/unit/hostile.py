"""Programs that want out, want more, or want a verdict they have not earned. Each defines `f`, or is a whole script.

No imports but the standard library's: `python hostile.py MODE` runs all of them as whichever user calls it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
import time
from dataclasses import dataclass, field
from typing import Any

SECRET = "EXPECTED_" + "77"
ASSERT = [{"kind": "assert", "code": "assert f(3) == 4"}]
CALL = [{"kind": "call", "name": "f", "args": [3], "expected": 4}]
STDIN = [{"kind": "stdin", "input": "3\n", "output": ["4"]}]
SECRET_ASSERT = [{"kind": "assert", "code": f"assert f(3) == {SECRET!r}"}]
NOTHING = [{"kind": "call", "name": "f", "args": [], "expected": []}]
"""f reports what it got at; there must be nothing."""


@dataclass(frozen=True)
class Hostile:
    name: str
    program: str
    tests: list[dict[str, Any]]
    outcome: str = "wrong"
    wall_s: float = 20.0
    setup: str = ""
    limits: dict[str, Any] = field(default_factory=dict)

    @property
    def takes_long(self) -> bool:
        return "cpu_s" in self.limits or 1 <= self.wall_s < 20 or self.name == "many_files"


def private() -> list[str]:
    """Paths of this machine that no program may see: the home, the project, whatever does not lead to Python."""
    home = os.path.expanduser("~")
    paths = ["/etc/passwd", "/etc/shadow", "/etc/hosts", "/var/log", "/run", "/sys", "/boot", __file__, f"{home}/.ssh"]
    with contextlib.suppress(OSError):
        paths += [os.path.join(home, name) for name in os.listdir(home)] if home != "/" else []
    shown = {os.path.realpath(sys.executable), os.__file__}
    return [path for path in paths if not any(place.startswith(path + "/") for place in shown)]


CORPUS: list[Hostile] = []


def hostile(name: str, tests: list[dict[str, Any]], program: str, outcome: str = "", **more: Any) -> None:
    outcome = outcome or ("correct" if tests is NOTHING else "wrong")
    CORPUS.append(Hostile(name, textwrap.dedent(program), tests, outcome, **more))


# Too much of everything.
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
    "many_files",
    CALL,
    """
    for i in range(10**6):
        open(f'/tmp/{i}', 'w').close()
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

# Out of the sandbox.
hostile(
    "files_of_the_user",
    [{"kind": "call", "name": "f", "args": [private()], "expected": []}],
    """
    import os
    f = lambda paths: [path for path in paths if os.path.lexists(path)]
    """,
    "correct",
)
hostile(
    "environment",
    NOTHING,
    """
    import os
    def f():
        known = {"PATH", "HOME", "LANG", "PYTHONUTF8", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH",
                 "PWD", "LC_CTYPE"}
        return sorted(set(os.environ) - known)
    """,
)
hostile(
    "processes_of_others",
    NOTHING,
    """
    import os
    def f():
        got = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if int(pid) == os.getpid():
                continue
            for name in ("environ", "mem", "maps", "fd", "cwd", "root", "exe"):
                path = f"/proc/{pid}/{name}"
                try:
                    if name == "fd":
                        got += os.listdir(path)
                    elif name in ("cwd", "root", "exe"):
                        got.append(os.readlink(path))
                    else:
                        got.append(open(path, "rb").read(1).hex())
                except OSError:
                    pass
            if int(pid) > 10:
                got.append(pid)
        return got
    """,
)
hostile(
    "writing_to_the_system",
    NOTHING,
    """
    import os, sys
    def f():
        got = []
        for place in ("/", "/usr", "/usr/bin", "/etc", "/dev", "/proc", "/sandbox", os.path.dirname(os.__file__)):
            change = (lambda: os.mkdir(place + "/x"), lambda: os.chmod(place, 0o777), lambda: os.chown(place, 0, 0))
            for trick in change:
                try:
                    trick()
                    got.append(place)
                except OSError:
                    pass
        for path in ("sys/kernel/hostname", "sysrq-trigger", "1/oom_score_adj", "sys/vm/drop_caches"):
            try:
                open(f"/proc/{path}", "w").write("0")
                got.append(path)
            except OSError:
                pass
        return got
    """,
)
hostile(
    "links_to_secrets",
    NOTHING,
    """
    import os
    def f():
        got = []
        secrets = "/etc/shadow", "/proc/1/environ", "/proc/1/root/root", "/proc/1/cwd", "/root/.bashrc"
        for i, path in enumerate(secrets):
            os.symlink(path, f"/tmp/link{i}")
            try:
                got.append(open(f"/tmp/link{i}").read(1))
            except OSError:
                pass
        return got
    """,
)
hostile(
    "devices",
    NOTHING,
    """
    import os, stat
    def f():
        got = sorted(set(os.listdir("/dev")) - set("null zero full random urandom fd stdin stdout stderr shm".split()))
        try:
            os.mknod("/tmp/disk", stat.S_IFBLK | 0o600, os.makedev(8, 0))
            got.append("mknod")
        except OSError:
            pass
        return got
    """,
)
hostile(
    "network",
    NOTHING,
    """
    import os, socket
    def f():
        got = []
        places = [(socket.AF_INET, ("1.1.1.1", 53)), (socket.AF_INET, ("127.0.0.1", 22)), (40, (2, 1)),
                  (socket.AF_UNIX, "/run/dbus/system_bus_socket"), (socket.AF_NETLINK, (0, 0))]
        for family, place in places:
            try:
                s = socket.socket(family, socket.SOCK_STREAM if family != socket.AF_NETLINK else socket.SOCK_RAW)
                s.settimeout(1)
                s.connect(place) if family != socket.AF_NETLINK else s.bind(place)
                got.append(str(place))
            except OSError:
                pass
        return got + sorted(set(line.split(":")[0].strip() for line in list(open("/proc/net/dev"))[2:]) - {"lo"})
    """,
)
hostile(
    "kernel_doors",
    NOTHING,
    """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    def f():
        calls = {
            "mount": lambda: libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None),
            "umount": lambda: libc.umount2(b"/proc", 2),
            "unshare user": lambda: libc.unshare(0x10000000),
            "unshare mounts": lambda: libc.unshare(0x00020000),
            "ptrace 1": lambda: libc.ptrace(16, 1, 0, 0),
            "ptrace me": lambda: libc.ptrace(0, 0, 0, 0),
            "setns": lambda: libc.setns(os.open("/proc/self/ns/user", 0), 0),
            "chroot": lambda: libc.chroot(b"/tmp"),
            "keyctl": lambda: libc.syscall(250 if os.uname().machine == "x86_64" else 219, 0, -3, 1),
            "bpf": lambda: libc.syscall(321 if os.uname().machine == "x86_64" else 280, 0, 0, 0),
            "io_uring": lambda: libc.syscall(425, 8, ctypes.create_string_buffer(256)),
            "clone user": lambda: libc.syscall(56 if os.uname().machine == "x86_64" else 220, 0x10000011, 0, 0, 0, 0),
            "hostname": lambda: libc.sethostname(b"x", 1),
            "setuid": lambda: libc.setuid(0),
            "setgid": lambda: libc.setgid(0),
            "reboot": lambda: libc.reboot(0),
        }
        return [name for name, call in calls.items() if call() >= 0]
    """,
)
hostile(
    "set_user_id_programs",
    NOTHING,
    """
    import subprocess, glob, os
    def f():
        got = [os.getuid() == 0 and "root"] if os.getuid() == 0 else []
        for path in ("/usr/bin/su", "/usr/bin/mount", "/usr/bin/chsh"):
            if os.path.exists(path):
                done = subprocess.run([path, "--version"], capture_output=True, stdin=subprocess.DEVNULL)
        for line in open("/proc/self/status"):
            if line.startswith(("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")) and int(line.split()[1], 16):
                got.append(line)
            if line.startswith("NoNewPrivs") and line.split()[1] != "1":
                got.append(line)
        return got
    """,
)

# Those that would live on, or kill.
hostile(
    "daemon",
    CALL,
    """
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 3)
            time.sleep(1000)
        os._exit(0)
    f = lambda x: 4
    """,
    "correct",
)
hostile(
    "thread_that_stays",
    CALL,
    """
    import threading, time
    threading.Thread(target=time.sleep, args=(1000,)).start()
    f = lambda x: 4
    """,
    "correct",
)
hostile(
    "thread_of_a_script",
    STDIN,
    """
    import threading, time
    threading.Thread(target=time.sleep, args=(1000,)).start()
    print(4)
    """,
    wall_s=0.7,
)
hostile(
    "child_that_holds_the_output",
    STDIN,
    """
    import os, time
    if os.fork() == 0:
        time.sleep(1000)
    print(4)
    """,
    "correct",
)
hostile(
    "kill_everybody",
    ASSERT,
    """
    import os
    f = lambda x: os.kill(-1, 9) or 4
    """,
)
hostile(
    "kill_parent",
    CALL,
    """
    import os
    for s in (9, 15, 2, 19, 1, 3, 17, 12):
        os.kill(os.getppid(), s)
    f = lambda x: 4
    """,
    "correct",
)
hostile(
    "kill_the_tests",
    ASSERT,
    """
    import os
    def f(x):
        for pid in range(2, 50):
            if pid != os.getpid():
                try:
                    os.kill(pid, 15)
                except OSError:
                    pass
        return 4
    """,
)
hostile(
    "stop_the_tests",
    ASSERT,
    """
    import os
    def f(x):
        for pid in range(2, 50):
            if pid != os.getpid():
                try:
                    os.kill(pid, 19)
                except OSError:
                    pass
        return 4
    """,
    wall_s=0.7,
)
hostile(
    "limits_of_process_1",
    ASSERT,
    """
    import resource, os, time
    def f(x):
        for pid in (1, os.getppid()):
            resource.prlimit(pid, resource.RLIMIT_CPU, (0, 0))
        time.sleep(0.5)
        return 5
    """,
    wall_s=2.0,
)
hostile(
    "alarm",
    ASSERT,
    """
    import signal
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    f = lambda x: [0 for _ in range(10**9)]
    """,
)

# A verdict that was not earned.
hostile(
    "exit_0",
    ASSERT,
    """
    import sys
    sys.exit(0)
    """,
)
hostile(
    "exit_0_builtin",
    STDIN,
    "exit(0)",
)
hostile(
    "exit_0_in_call",
    CALL,
    """
    def f(x):
        raise SystemExit(0)
    """,
)
hostile(
    "os_exit_0",
    ASSERT,
    """
    import os
    os._exit(0)
    """,
)
hostile(
    "os_exit_0_in_thread",
    ASSERT,
    """
    import os, threading
    def f(x):
        threading.Thread(target=os._exit, args=(0,)).start()
        while True:
            pass
    """,
)
hostile(
    "atexit",
    ASSERT,
    """
    import atexit, os
    atexit.register(os._exit, 0)
    f = lambda x: 5
    """,
)
hostile(
    "base_exception",
    ASSERT,
    """
    class E(BaseException):
        pass
    def f(x):
        raise E
    """,
)
hostile(
    "assertion_error_gone",
    ASSERT,
    """
    import builtins
    class A(Exception):
        pass
    builtins.AssertionError = A
    f = lambda x: 5
    """,
)
hostile(
    "patched_builtins",
    ASSERT,
    """
    import builtins
    for name in ("isinstance", "len", "type", "getattr", "repr", "str", "bool", "all", "exec", "compile", "min", "max"):
        setattr(builtins, name, lambda *a, **k: True)
    f = lambda x: 5
    """,
    wall_s=1.0,
)
hostile(
    "own_builtins",
    [{"kind": "assert", "code": "assert abs(f(3) - 4) < 1e-6 and all([f(3) == 4]) and len({f(3)}) == 2"}],
    """
    abs = len = all = lambda *a: 0
    f = lambda x: 5
    """,
)
hostile(
    "own_math",
    [{"kind": "assert", "code": "assert math.isclose(f(3), 4)"}],
    """
    class math:
        isclose = staticmethod(lambda *a: True)
    f = lambda x: 5
    """,
)
hostile(
    "own_check",
    [{"kind": "assert", "code": "def check(candidate):\n    assert candidate(3) == 4\ncheck(f)"}],
    """
    def check(c):
        pass
    candidate = lambda x: 4
    f = lambda x: 5
    """,
)
hostile(
    "own_helper_of_setup",
    [{"kind": "assert", "code": "assert same(f(3), 4)"}],
    """
    same = lambda a, b: True
    f = lambda x: 5
    """,
    setup="def same(a, b):\n    return a == b",
)
hostile(
    "patched_json",
    ASSERT,
    """
    import json
    json.dumps = lambda *a, **k: 'true'
    json.loads = lambda *a, **k: True
    f = lambda x: 5
    """,
)
hostile(
    "patched_sandbox",
    ASSERT,
    """
    import sys
    for name, module in list(sys.modules.items()):
        if name.startswith("areal_hpc"):
            for key, value in list(vars(module).items()):
                if callable(value) and not isinstance(value, type):
                    setattr(module, key, lambda *a, **k: [True, ""])
                if isinstance(value, type) and "Remote" in key:
                    value.__eq__ = lambda *a: True
    f = lambda x: 5
    """,
)
hostile(
    "always_equal",
    ASSERT,
    """
    class E:
        def __eq__(self, other):
            return True
    f = lambda x: E()
    """,
)
hostile(
    "always_equal_call",
    CALL,
    """
    class E:
        def __eq__(self, other):
            return True
    f = lambda x: E()
    """,
)
hostile(
    "always_equal_int",
    ASSERT,
    """
    class E(int):
        __eq__ = lambda self, other: True
        __hash__ = int.__hash__
    f = lambda x: E(5)
    """,
)
hostile(
    "always_true",
    [{"kind": "assert", "code": "assert f(3)"}],
    """
    class E:
        pass
    f = lambda x: E()
    """,
)
hostile(
    "changed_arguments",
    [{"kind": "assert", "code": "want = [1, 2]\nassert f(want) == [1, 2] and want == [1, 2]"}],
    """
    def f(a):
        a.clear()
        return a
    """,
)
hostile(
    "printed_verdict",
    ASSERT,
    """
    import os, struct
    for fd in range(64):
        for body in (b'[true, ""]', b'{"end": "exit", "code": 0, "output": ""}', b'["value", 4]'):
            try:
                os.write(fd, struct.pack("<I", len(body)) + body)
            except OSError:
                pass
    os._exit(0)
    """,
)
hostile(
    "printed_verdict_of_a_call",
    CALL,
    """
    import os
    for fd in range(64):
        try:
            os.write(fd, b'correct passed OK 1.0')
        except OSError:
            pass
    os._exit(0)
    """,
)
hostile(
    "every_number_printed",
    STDIN,
    """
    for i in range(100):
        print(i)
    """,
)
hostile(
    "right_but_failed",
    STDIN,
    """
    print(4)
    raise SystemExit(3)
    """,
)
hostile(
    "expected_in_memory",
    SECRET_ASSERT,
    """
    import gc, sys
    def f(x):
        prefix = "EXPECTED" + "_"
        seen = [str(o) for o in gc.get_objects() if isinstance(o, (str, dict, list, tuple))]
        frame = sys._getframe()
        while frame:
            seen += map(str, frame.f_locals.values())
            frame = frame.f_back
        with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
            for line in maps:
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                try:
                    memory.seek(start)
                    seen.append(memory.read(end - start).decode("latin-1"))
                except (OSError, ValueError, OverflowError):
                    pass
        for text in seen:
            at = text.find(prefix)
            while at >= 0:
                if text[at + 9 : at + 11].isdigit():
                    return text[at : at + 11]
                at = text.find(prefix, at + 1)
        return ""
    """,
)
hostile(
    "expected_in_sockets",
    SECRET_ASSERT,
    """
    import os, socket
    def f(x):
        for pid in os.listdir("/proc"):
            for fd in range(3, 64):
                try:
                    data = os.read(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY), 1000)
                    if b"EXPECTED" in data:
                        return data[data.find(b"EXPECTED"):][:11].decode()
                except OSError:
                    pass
        return ""
    """,
)
hostile(
    "memory_of_the_tests",
    SECRET_ASSERT,
    """
    import os, ctypes
    libc = ctypes.CDLL(None)
    def f(x):
        for pid in range(1, 30):
            if pid == os.getpid():
                continue
            if libc.ptrace(16, pid, 0, 0) == 0:
                return "attached"
            try:
                open(f"/proc/{pid}/mem", "r+b")
                return "opened"
            except OSError:
                pass
        return ""
    """,
)
hostile(
    "lying_protocol",
    ASSERT,
    """
    import os, struct, json
    def f(x):
        for fd in range(3, 20):
            messages = [
                ["value", {"mine": 10**9}], ["raised", "StopIteration", ""], ["changed", [[5], {}]], {"no": 1}, [],
                ["ask", "call", [[], {"dict": []}, {"yours": 0}]], ["value", {"set": [[1]]}], ["value", {"int": "z"}],
            ]
            for message in messages:
                body = json.dumps(message).encode()
                try:
                    os.write(fd, struct.pack("<I", len(body)) + body)
                except OSError:
                    pass
        return 5
    """,
)


def alive(pid_namespace: str) -> list[int]:
    """Processes in that namespace, as far as this user may see."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{name}/ns/pid") == pid_namespace:
                found.append(int(name))
    return found


def run(mode: str, case: Hostile) -> tuple[str, list[int], float]:
    """Outcome, processes that were left, seconds."""
    os.environ["AREAL_HPC_SANDBOX"] = mode
    from areal_hpc.sandbox.limits import Limits
    from areal_hpc.verifiers import code

    namespaces = []

    class Watched(code.Sandbox):
        def _greet(self, settings):
            super()._greet(settings)
            namespaces.append(self.pid_namespace)

    limits = Limits(**{"wall_s": case.wall_s, "cpu_s": 10, "memory_bytes": 1 << 28, **case.limits})
    metadata = {"tests": case.tests, "setup": case.setup, "entry_point": None}
    started = time.monotonic()
    original, code.Sandbox, code._MODE = code.Sandbox, Watched, mode
    try:
        outcome = code.reward("", f"```python\n{case.program}\n```", metadata, limits=limits)[1]
    finally:
        code.Sandbox = original
    seconds = time.monotonic() - started
    return outcome, [pid for namespace in namespaces for pid in alive(namespace)], seconds


if __name__ == "__main__":
    for case in CORPUS:
        if len(sys.argv) < 3 or case.name in sys.argv[2:]:
            print(json.dumps([case.name, case.outcome, *run(sys.argv[1], case)]), flush=True)
