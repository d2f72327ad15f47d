"""Process 1 of a sandbox: a fork of `zygote`, or what bubblewrap has started; never started by hand.

It runs one test after another in children of its own, watches them, and kills whatever a test has left before the next
one begins. It never holds what a test expects: the tests' process reads that from a socket of its own. Children cannot
read its memory or files (it is not dumpable), and in a process namespace they cannot signal it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from areal_hpc.sandbox import enter, kernel, program, tester, wire
from areal_hpc.sandbox.limits import Limits

MAX_MESSAGE_BYTES = 256 << 20
MAX_FILES = 1 << 14
"""In /tmp and in /dev/shm: empty files cost memory, too."""

WRITABLE = ("/tmp", "/dev/shm")
"""All that a program can write to: it has no rights, sockets, shared memory or queues besides (see `kernel`)."""

_TICK_S = 0.02
_STACK_BYTES = 64 << 20
_NAMESPACES_COUNT_PROCESSES = (5, 14)
"""Since this Linux RLIMIT_NPROC counts within a user namespace and not all processes of the user."""


class Ending:
    """How a test's first process ended: exit, signal, or the limit that was reached; and what it had written."""

    def __init__(self) -> None:
        self.end, self.code, self.output = "", 0, bytearray()

    def message(self) -> dict[str, Any]:
        return {"end": self.end, "code": self.code, "output": self.output.decode("latin-1")}


class Init:
    """One program and its tests."""

    def __init__(self, control: socket.socket, tests: socket.socket, mode: str, limits: Limits) -> None:
        self._control, self._tests, self._limits = control, tests, limits
        self._alone = mode != "rlimits"
        self._program: dict[str, Any] = {}
        self._wall_s = limits.wall_s
        self._wake, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._fresh = _traces() if self._alone else None

    def serve(self) -> NoReturn:
        """Answer the caller until it closes its end."""
        while True:
            request = wire.receive(self._control, MAX_MESSAGE_BYTES)
            name = request.pop("do")
            if name == "program":
                self._program = request
                continue
            if name == "empty":
                wire.send(self._control, self._empty().message())
                continue
            self._wall_s = request.pop("wall_s")
            ending = self._check() if name == "check" else self._run(name, request)
            wire.send(self._control, ending.message())

    def _empty(self) -> Ending:
        """Kill and delete what is left of a program; code 0 if nothing is, and everything is as it was at the start."""
        self._program, ending = {}, Ending()
        ending.end, ending.code = "exit", 1
        self._kill_all()
        with contextlib.suppress(OSError, RecursionError):
            for place in WRITABLE:
                _wipe(place)
            ending.code = int(_traces() != self._fresh)
        return ending

    def _run(self, name: str, request: dict[str, Any]) -> Ending:
        """A test of one process: its input goes in by one pipe, its output comes out by another."""
        feed = request["input"].encode("latin-1") if name == "main" else wire.pack(request)
        read_end, write_end = os.pipe()
        out, theirs = os.pipe()
        task = {"main": program.run_main, "call": program.run_call}[name]
        child = self._fork(lambda: task(self._program), {0: read_end, 1 if name == "main" else 3: theirs})
        os.close(read_end)
        os.close(theirs)
        os.set_blocking(write_end, False)
        return self._watch(child, feed, write_end, out)

    def _check(self) -> Ending:
        """A test of two processes: the program's and, out of its reach, the tests', which answers to the caller."""
        ours, theirs = socket.socketpair()
        size = self._limits.output_bytes
        self._fork(lambda: program.run_server(self._program, size), {3: theirs.fileno()})
        theirs.close()
        descriptors = {3: ours.fileno(), 4: self._tests.fileno()}
        child = self._fork(lambda: tester.run(size), descriptors, trusted=True)
        ours.close()
        return self._watch(child, b"", -1, -1)

    def _fork(self, task: Callable[[], None], descriptors: dict[int, int], trusted: bool = False) -> int:
        """Child with exactly these descriptors (its number: ours), standard streams included, and under the limits."""
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            _move(descriptors)
            if not trusted:
                kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # /dev/stdin and /proc/self work for the program
            self._set_limits()
            task()
            code = 0
        except SystemExit as error:
            code = program.exit_code(error)
        finally:
            os._exit(code)

    def _set_limits(self) -> None:
        limits = self._limits
        wanted = {
            resource.RLIMIT_CPU: (limits.cpu_s, limits.cpu_s + 1),
            resource.RLIMIT_AS: (limits.memory_bytes,) * 2,
            resource.RLIMIT_FSIZE: (limits.file_bytes,) * 2,
            resource.RLIMIT_NOFILE: (limits.open_files,) * 2,
            resource.RLIMIT_STACK: (_STACK_BYTES,) * 2,
            resource.RLIMIT_CORE: (0, 0),
            resource.RLIMIT_MEMLOCK: (0, 0),
            resource.RLIMIT_MSGQUEUE: (0, 0),
        }
        release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
        if not self._alone or release >= _NAMESPACES_COUNT_PROCESSES:  # else `_excess` has to be fast enough
            others = 0 if self._alone else _num_tasks(os.getuid())
            wanted[resource.RLIMIT_NPROC] = (others + limits.processes + 2,) * 2  # with process 1 and the tests'
        for kind, (soft, hard) in wanted.items():
            most = resource.getrlimit(kind)[1]
            if most != resource.RLIM_INFINITY:
                soft, hard = min(soft, most), min(hard, most)
            resource.setrlimit(kind, (soft, hard))

    def _watch(self, child: int, feed: bytes, write_end: int, out: int) -> Ending:
        """Wait for the end of `child`, or make it; then nothing but process 1 is left."""
        ending, rest = Ending(), memoryview(feed)
        deadline = time.monotonic() + self._wall_s
        poll = select.poll()
        for fd, events in ((self._wake, select.POLLIN), (self._control.fileno(), select.POLLIN), (out, select.POLLIN)):
            poll.register(fd, events) if fd >= 0 else None
        if write_end >= 0:
            poll.register(write_end, select.POLLOUT)
        next_look = time.monotonic() + _TICK_S
        while not ending.end:
            ready = dict(poll.poll(_TICK_S * 1000))
            if self._control.fileno() in ready:
                self._kill_all()  # the caller is gone or speaks out of turn
                os._exit(0)
            if write_end in ready:
                with contextlib.suppress(BlockingIOError):
                    rest = _write(write_end, rest)
                if not rest:
                    poll.unregister(write_end)
                    os.close(write_end)
                    write_end = -1
            if out in ready and not self._read(out, ending):
                poll.unregister(out)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
            ending.end = ending.end or self._ended(child, ending) or ("wall" if time.monotonic() > deadline else "")
            if not ending.end and time.monotonic() > next_look:
                ending.end = self._excess()
                next_look = time.monotonic() + _TICK_S
        self._kill_all()
        if out >= 0:
            os.set_blocking(out, False)
            while self._read(out, ending):
                pass
        for fd in (write_end, out):
            if fd >= 0:
                os.close(fd)
        return ending

    def _read(self, out: int, ending: Ending) -> bool:
        """Take what is there; False at the end of it."""
        try:
            part = os.read(out, 1 << 16)
        except BlockingIOError:
            return False
        ending.output += part
        if len(ending.output) > self._limits.output_bytes:
            ending.end = "output"
            del ending.output[self._limits.output_bytes :]
            return False
        return bool(part)

    def _ended(self, child: int, ending: Ending) -> str:
        """Reap whoever is dead; "exit" or "signal" if `child` is among them."""
        end = ""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return end
            if pid == 0:
                return end
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                end, ending.code = ("exit", code) if code >= 0 else ("signal", -code)

    def _members(self) -> list[int]:
        """Every process of the sandbox but this one."""
        if self._alone:
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        found, todo = [], [os.getpid()]
        while todo:
            parent = todo.pop()
            with contextlib.suppress(OSError):
                for thread in os.listdir(f"/proc/{parent}/task"):
                    with open(f"/proc/{parent}/task/{thread}/children") as file:
                        todo += (children := [int(pid) for pid in file.read().split()])
                        found += children
        return found

    def _excess(self) -> str:
        """The limit that all processes together have passed, if any."""
        members, kibibytes = self._members(), 0
        if len(members) > self._limits.processes + 1:  # the tests' process is no fault of the program
            return "processes"
        for pid in members:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
                kibibytes += sum(int(line.split()[1]) for line in file if line.startswith(("VmRSS:", "VmSwap:")))
        if kibibytes << 10 > self._limits.memory_bytes:
            return "memory"
        if self._alone:
            for place in WRITABLE:
                has = os.statvfs(place)
                if has.f_files - has.f_ffree > MAX_FILES:
                    return "files"
        return ""

    def _kill_all(self) -> None:
        while True:
            if self._alone:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            else:
                for pid in self._members():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


def _traces() -> list[Any]:
    """Whatever one program can change and the next one see: names, sizes, numbers of files, rights and labels."""
    found: list[Any] = []
    for place in WRITABLE:
        has, info = os.statvfs(place), os.stat(place)
        found += [os.listdir(place), os.listxattr(place), has.f_bfree, has.f_ffree, info.st_mode, info.st_uid]
    return found


def _wipe(place: str) -> None:
    """Delete everything in a directory. Nobody else is alive to change it meanwhile."""
    with os.scandir(place) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
                _wipe(entry.path)
                os.rmdir(entry.path)
            else:
                os.unlink(entry.path)


def _num_tasks(uid: int) -> int:
    """Processes and threads of a user, as far as /proc shows them."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/status") as file:
            facts = dict(line.split(":", 1) for line in file if ":" in line)
            total += int(facts["Threads"]) if int(facts["Uid"].split()[0]) == uid else 0
    return total


def _write(fd: int, rest: memoryview) -> memoryview:
    """What is left after one write; nothing, if nobody reads."""
    try:
        return rest[os.write(fd, rest) :] if rest else rest
    except BrokenPipeError:
        return rest[:0]


def _move(descriptors: dict[int, int]) -> None:
    """Make `descriptors` (wanted: present) the only open ones; standard streams that are not named lead nowhere."""
    null = os.open(os.devnull, os.O_RDWR)
    wanted = {0: null, 1: null, 2: null, **descriptors}
    top = max(*wanted, *wanted.values()) + 1
    for number, fd in enumerate(wanted.values()):
        os.dup2(fd, top + number)
    for number, place in enumerate(wanted):
        os.dup2(top + number, place)
    os.closerange(max(wanted) + 1, 1 << 16)


def _lock(mode: str) -> None:
    """No privileges, no way out, no look inside; in every mode."""
    kernel.drop_privileges()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.forbid_calls(shared_processes=mode == "rlimits")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)


def start(descriptors: tuple[int, int, int], parent: int) -> NoReturn:
    """Read the settings, set up the isolation, say so, serve.

    Args:
        descriptors: the sockets for control and tests, and what stays open until the last process is gone.
        parent: process id of the zygote; 0 inside of bubblewrap.
    """
    control, tests = (socket.socket(fileno=fd) for fd in descriptors[:2])
    try:
        settings = wire.receive(control, MAX_MESSAGE_BYTES)
        try:
            kernel.machine()
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            if parent and os.getppid() != parent:
                os._exit(1)
            _enter(settings, descriptors[2])
            wire.send(control, {"ready": True, "pid_namespace": os.readlink("/proc/self/ns/pid")})
            _lock(settings["mode"])
        except OSError as error:
            wire.send(control, {"ready": False, "reason": str(error)})
            os._exit(1)
        Init(control, tests, settings["mode"], Limits(*settings["limits"])).serve()
    except wire.Closed:
        os._exit(0)
    finally:
        os._exit(1)


def main() -> NoReturn:
    """What bubblewrap starts."""
    del sys.path[0]  # everything of ours is imported
    start((int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])), parent=0)


def _enter(settings: dict[str, Any], gone_fd: int) -> None:
    if settings["mode"] == "namespaces":
        enter.namespaces()
        if child := os.fork():
            enter.stay(child, gone_fd)
        os.close(gone_fd)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        enter.build_root(settings["plan"])
    os.setsid() if os.getpid() != os.getsid(0) else None
    if os.geteuid() == 0:
        enter.become_nobody(own_user_namespace=settings["mode"] != "rlimits")
        if not os.access(os.__file__, os.R_OK):
            raise OSError(f"root's programs run as user {enter.NOBODY}, who cannot read {os.__file__}")
    os.chdir("/tmp" if settings["mode"] != "rlimits" else settings["directory"])
