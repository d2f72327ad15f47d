"""Programs that attack, and what the sandbox says about how a program ended."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from areal_hpc.bench import menu
from areal_hpc.rewards import RewardError, RewardService
from areal_hpc.sandbox import isolation, kernel, nursery
from areal_hpc.sandbox.box import MODES, Ended, Sandbox
from areal_hpc.sandbox.languages import LANGUAGES
from areal_hpc.sandbox.limits import Limits, SandboxError
from tests.unit import hostile
from tests.unit.sandboxes import as_nobody, need

PYTHON = LANGUAGES["python"]
FULL = pytest.mark.parametrize("mode", isolation.FULL)


def run(mode: str, program: str, text: str = "", **limits) -> Ended:
    with Sandbox(mode, Limits(**{"wall_s": 20.0, "cpu_s": 10, "memory_bytes": 1 << 28, **limits})) as sandbox:
        sandbox.program(PYTHON, program)
        return sandbox.run_main(text)


QUICK = """exit_0 fork_bomb memory_of_many files_of_the_user environment processes_of_others writing_to_the_system
    network kernel_doors set_user_id_programs daemon kill_parent kill_everybody printed_verdict memory_of_the_tests
    expected_in_memory memory_beside_the_limit full_tmp more_open_files links_to_secrets devices"""


def hostile_cases():
    """All of them in namespaces, and in bubblewrap those that try its walls; in `make test-all` the rest."""
    for mode in isolation.FULL:
        for case in hostile.CORPUS:
            marks = pytest.mark.slow if mode == "bwrap" and (case.takes_long or case.name not in QUICK.split()) else ()
            yield pytest.param(mode, case, marks=marks, id=f"{mode}-{case.name}")


@pytest.mark.parametrize(("mode", "case"), list(hostile_cases()))
def test_hostile_programs_get_nothing_and_leave_nothing(mode, case, monkeypatch):
    need(mode)
    monkeypatch.setenv("AREAL_HPC_SANDBOX", mode)
    monkeypatch.setenv("AREAL_HPC_TEST_SECRET", "do not tell")
    outcome, left, seconds = hostile.run(mode, case)
    assert (outcome, left) == (case.outcome, [])
    assert seconds < case.wall_s + 10


@pytest.mark.parametrize("names", [QUICK.split(), pytest.param([], marks=pytest.mark.slow)], ids=["some", "all"])
@FULL
def test_hostile_programs_of_an_ordinary_user(mode, names):
    need(mode)
    done = as_nobody(["-m", "tests.unit.hostile", mode, *names], mode)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(name, got, left) for name, wanted, got, left, _ in results if got != wanted or left] == [], done.stderr
    assert len(results) == (len(names) or len(hostile.CORPUS))


@pytest.mark.parametrize(
    ("program", "limits", "ended"),
    [
        ("print(1)", {}, Ended("exit", 0, b"1\n")),
        ("print(1); raise SystemExit(3)", {}, Ended("exit", 3, b"1\n")),
        ("print(1); raise SystemExit('text')", {}, Ended("exit", 1, b"1\n")),
        ("import os; os.kill(os.getpid(), 15)", {}, Ended("signal", 15, b"")),
        ("print(1, flush=True)\nwhile True: pass", {"cpu_s": 1}, Ended("signal", signal.SIGXCPU, b"1\n")),
        ("print(1, flush=True)\nimport time; time.sleep(99)", {"wall_s": 0.5}, Ended("wall", 0, b"1\n")),
        ("print('x' * 999)", {"output_bytes": 10}, Ended("output", 0, b"x" * 10)),
        ("print('x' * 9)", {"output_bytes": 10}, Ended("exit", 0, b"x" * 9 + b"\n")),
        ("n = 0\nwhile True:\n    open(f'/tmp/{n}', 'w').close()\n    n += 1", {}, Ended("files", 0, b"")),
        ("a = bytearray(2**28)", {"memory_bytes": 1 << 27}, Ended("exit", 1, b"")),
        ("with open('/tmp/a', 'wb') as file: file.write(bytes(5000))", {"file_bytes": 4096}, Ended("exit", 1, b"")),
    ],
)
@FULL
def test_how_programs_end(mode, program, limits, ended):
    need(mode)
    assert run(mode, program, **limits) == ended


MANY = """
import os, time
for _ in range({num}):
    if os.fork() == 0:
        a = bytearray({size})
        time.sleep(99)
time.sleep(99)
"""


@FULL
def test_processes_share_one_memory_limit(mode):
    need(mode)
    program = MANY.format(num=4, size=80 << 20)  # each is below the limit of 256 MiB, together they are above
    assert run(mode, program).end == "memory"
    assert run(mode, program, memory_bytes=1 << 30, wall_s=1.0).end == "wall"


FORKS = """
import os, time
try:
    for n in range(99):
        if os.fork() == 0:
            time.sleep(99)
            os._exit(0)
except OSError:
    print(n)
"""


@FULL
def test_the_number_of_processes_is_limited(mode):
    need(mode)
    program = (
        "import os, time\nfor n in range(99):\n    if os.fork() == 0:\n        time.sleep(99)\n        os._exit(0)\n"
    )
    ended = run(mode, "try:\n    " + program.replace("\n", "\n    ") + "\nexcept OSError:\n    print(n)", processes=8)
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if release >= (5, 14):  # Linux counts by namespace: the fork fails, at 8 or 9 with the program itself
        assert ended.end == "exit" and int(ended.output) in (7, 8)
    else:
        assert ended.end == "processes"


DAEMON = """
import os, time
def f():
    if os.fork() == 0:
        os.setsid()
        time.sleep(99)
        os._exit(0)
def g():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] == [1, os.getpid()]
"""


@FULL
def test_between_two_tests_everything_dies(mode):
    need(mode)
    with Sandbox(mode) as sandbox:
        sandbox.program(PYTHON, DAEMON)
        assert sandbox.call("f", []).well and sandbox.call("g", []).output[4:] == b"true"
        assert sandbox.check("", "f()", None)[0] and sandbox.call("g", []).output[4:] == b"true"


@FULL
def test_every_kind_of_namespace_is_another(mode):
    need(mode)
    kinds = [
        kind
        for kind in ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"]
        if os.path.exists(f"/proc/self/ns/{kind}")
    ]
    program = f"import os\nfor kind in {kinds}:\n    print(os.readlink('/proc/self/ns/' + kind))"
    inside = run(mode, program).output.decode().split()
    assert len(inside) == len(kinds) >= 6
    assert not set(inside) & {os.readlink(f"/proc/self/ns/{kind}") for kind in kinds}


MOUNTS = "for line in open('/proc/self/mountinfo'):\n    print(*line.split()[4:6])"


@FULL
def test_every_mount_but_the_scratch_ones_is_read_only(mode):
    """Also for files that the user owns: his own interpreter, say."""
    need(mode)
    mounts = dict(line.split() for line in run(mode, MOUNTS).output.decode().splitlines())
    writable = {place for place, flags in mounts.items() if "ro" not in flags.split(",")}
    devices = {f"/dev/{name}" for name in ("null", "full", "random", "urandom")}
    assert writable == {"/tmp", "/dev/shm", "/proc"} | devices
    assert all("nosuid" in flags for place, flags in mounts.items() if place not in devices)


@FULL
def test_a_program_finds_nothing_of_another(mode):
    need(mode)
    leave = "import os\nfor place in ('/tmp', '/dev/shm'):\n    open(place + '/note', 'w').close()\nprint(os.getcwd())"
    look = "import os\nprint(os.listdir('/tmp'), os.listdir('/dev/shm'), len(os.listdir('/proc/self/fd')))"
    assert run(mode, leave).output == b"/tmp\n"
    assert run(mode, look).output == b"[] [] 4\n"  # its three streams, and the listing itself


@FULL
def test_a_sandbox_goes_on_after_whatever_a_test_did(mode):
    need(mode)
    with Sandbox(mode, Limits(wall_s=0.7)) as sandbox:
        first, space = hostile.alive(sandbox.pid_namespace), sandbox.pid_namespace
        sandbox.program(PYTHON, "import time\ndef f(x):\n    time.sleep(99 * (x == 0))\n    return x")
        assert sandbox.call("f", [1]).well and sandbox.call("f", [0]).end == "wall" and sandbox.call("f", [2]).well
        assert sandbox.pid_namespace == space and hostile.alive(space) == first
        assert sandbox.check("", "assert f(1) == 1", None) == (True, "")
        assert sandbox.check("", "assert f(0) == 0", None) == (False, "the tests ended by wall 0")
        assert sandbox.check("", "assert f(1) == 1", None) == (True, "")
        last = hostile.alive(sandbox.pid_namespace)
        assert hostile.running(first) == [] and len(first) == len(hostile.running(last)) == 1
    assert hostile.running(last) == []
    sandbox.close()  # twice is once


def test_without_its_zygote_a_test_is_lost_and_the_next_one_is_not():
    need("namespaces")
    with Sandbox("namespaces") as sandbox:
        sandbox.program(PYTHON, "print(1)")
        assert nursery._zygote is not None
        inside = hostile.alive(sandbox.pid_namespace)
        assert len(inside) == 1
        os.kill(nursery._zygote[1].pid, signal.SIGKILL)
        gone_within(5, inside)
        assert sandbox.run_main("") == Ended("lost", 0, b"")
        assert sandbox.run_main("") == Ended("exit", 0, b"1\n")


def answers(service: RewardService, *programs: str) -> list[tuple[str, str]]:
    tests = [{"kind": "assert", "code": "assert f(1) == 2"}]
    for number, program in enumerate(programs):
        service.submit((number, 0), "", program, {"tests": tests})
    results = sorted(service.wait(60), key=lambda result: result.key)
    return [(result.outcome, result.detail) for result in results]


@FULL
def test_in_a_reward_worker(mode, monkeypatch):
    need(mode)
    monkeypatch.setenv("AREAL_HPC_SANDBOX", mode)
    with RewardService("areal_hpc.verifiers.code:reward", num_workers=1, timeout_s=30) as service:
        good, bad = "```\nf = lambda x: x + 1\n```", "```\nf = lambda x: x\n```"
        assert answers(service, good, bad, "?") == [("correct", ""), ("wrong", ""), ("unparsed", "")]


@FULL
def test_with_its_worker_a_program_dies(mode, monkeypatch):
    need(mode)
    monkeypatch.setenv("AREAL_HPC_SANDBOX", mode)
    before, seen, processes = namespaces(), set(), set()
    program = "```\nimport os, time\nif os.fork() == 0:\n    os.setsid()\ntime.sleep(99)\n```"
    test = {"kind": "assert", "code": "assert f(1) == 2"}
    with RewardService("areal_hpc.verifiers.code:reward", num_workers=1, timeout_s=5) as service:
        service.submit((0, 0), "", program, {"tests": [test]})
        while service.num_pending:
            for space in namespaces() - before:
                if len(inside := hostile.alive(space)) >= 4:
                    seen.add(space)
                    processes.update(inside)
            results = service.wait(0.1)
    assert [result.outcome for result in results] == ["timeout"]
    assert len(seen) == 1  # process 1, the tests, the program and its child were there
    gone_within(5, processes)


def gone_within(seconds: float, pids: Iterable[int]) -> None:
    """What a kill has left to the kernel takes a moment."""
    deadline = time.monotonic() + seconds
    while left := hostile.running(pids):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def namespaces() -> set[str]:
    """PID namespaces of all sandboxes below this process; tests beside it have their own."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes()
            if b"areal_hpc.sandbox" in command and os.getpid() in hostile.ancestors(int(name)):
                found.add(os.readlink(f"/proc/{name}/ns/pid"))
        except OSError:
            continue
    return found - {os.readlink("/proc/self/ns/pid")}


def test_without_isolation_a_worker_does_not_start(monkeypatch, tmp_path):
    monkeypatch.setenv("AREAL_HPC_SANDBOX", "bwrap")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RewardError, match=r"code rewards need a sandbox .*bubblewrap is not installed.*rlimits"):
        RewardService("areal_hpc.verifiers.code:reward", num_workers=1, timeout_s=30)


def test_every_reason_is_told_and_nothing_weaker_is_taken(monkeypatch):
    def fail(mode):
        raise SandboxError(f"{mode}: not on this machine")

    monkeypatch.setattr(isolation, "probe", fail)
    monkeypatch.delenv("AREAL_HPC_SANDBOX", raising=False)
    with pytest.raises(SandboxError, match=r"bwrap: not on this machine; namespaces: not on this machine"):
        isolation.choose()
    with pytest.raises(SandboxError, match=r"AREAL_HPC_SANDBOX=none: choose one of auto, namespaces, bwrap, rlimits"):
        isolation.choose("none")


def test_the_order_of_choice(monkeypatch):
    tried = []
    monkeypatch.setattr(isolation, "probe", tried.append)
    monkeypatch.setenv("AREAL_HPC_SANDBOX", "namespaces")
    assert [isolation.choose(), isolation.choose("auto"), isolation.choose("bwrap")] == ["namespaces", "bwrap", "bwrap"]
    assert tried == ["namespaces", "bwrap", "bwrap"]
    monkeypatch.setattr(isolation, "probe", lambda mode: _fails("absent") if mode == "bwrap" else None)
    assert isolation.choose("auto") == "namespaces"


def _fails(reason: str) -> None:
    raise SandboxError(reason)


def test_a_hole_in_the_isolation_is_a_reason_against_it(monkeypatch):
    need("namespaces")
    monkeypatch.setattr(isolation, "_private", lambda limits: ["/usr"])
    with pytest.raises(SandboxError, match=r"namespaces: the home directory is in sight$"):
        isolation.probe("namespaces")


def test_the_line_for_the_doctor():
    need("namespaces")
    command = [sys.executable, "-m", "areal_hpc.sandbox"]
    for mode, line, code in (
        ("namespaces", "sandbox: full isolation by user namespaces\n", 0),
        ("x", "sandbox: AREAL_HPC_SANDBOX=x: choose one of auto, namespaces, bwrap, rlimits\n", 1),
    ):
        environment = {**os.environ, "AREAL_HPC_SANDBOX": mode}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.returncode) == (line, code)


LIMITS_ONLY = """
import json, logging, sys
logging.basicConfig(format="%(message)s")
from areal_hpc.sandbox.box import Sandbox
from areal_hpc.sandbox.isolation import choose
from areal_hpc.sandbox.languages import LANGUAGES
from areal_hpc.sandbox.limits import Limits
with Sandbox(choose(), Limits(cpu_s=1)) as sandbox:
    for program in sys.argv[1:]:
        sandbox.program(LANGUAGES["python"], program)
        ended = sandbox.run_main("")
        print(json.dumps([ended.end, ended.code, ended.output.decode()]))
"""


FORBIDDEN = """
import os, socket
for call in (lambda: os.kill(-1, 0), socket.socket):
    try:
        call()
    except OSError:
        print("no")
"""
FORKED = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1234.5)
print(os.getcwd())
"""


def test_limits_only_says_so_and_limits():
    programs = ["print(1)", "while True: pass", FORBIDDEN, FORKED]
    if os.geteuid() == 0:
        done = as_nobody(["-c", LIMITS_ONLY, *programs], "rlimits")
    else:
        environment = {**os.environ, "AREAL_HPC_SANDBOX": "rlimits"}
        command = [sys.executable, "-c", LIMITS_ONLY, *programs]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert results[:3] == [["exit", 0, "1\n"], ["signal", signal.SIGXCPU, ""], ["exit", 0, "no\nno\n"]], done.stderr
    assert done.stderr.startswith("code rewards run with limits only: a program can read files and processes")
    directory = Path(results[3][2].strip())
    assert directory.name.startswith("areal_hpc_sandbox_") and not directory.exists()
    assert not any(b"1234.5" in path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_of_system_calls(machine):
    column, architecture = (0, 0xC000003E) if machine == "x86_64" else (1, 0xC00000B7)
    allow, eperm, enosys, kill = 0x7FFF0000, 0x50001, 0x50026, 0x80000000

    def verdict(call: int, argument: int = 0, shared: bool = False, arch: int = architecture, fourth: int = 0) -> int:
        return interpret(kernel._filter(machine, shared), {0: call, 4: arch, 16: argument, 40: fourth})

    for name, numbers in kernel.NUMBERS.items():
        if name not in kernel._OWN_RULES:
            assert verdict(numbers[column]) == eperm, name
    clone, kill_call = kernel.NUMBERS["clone"][column], kernel.NUMBERS["kill"][column]
    mmap, prlimit = kernel.NUMBERS["mmap"][column], kernel.NUMBERS["prlimit64"][column]
    assert verdict(mmap, fourth=0x22) == verdict(mmap, fourth=0x01) == verdict(mmap, fourth=0x4022) == allow
    assert verdict(mmap, fourth=0x21) == verdict(mmap, fourth=0x23) == verdict(mmap, fourth=0x4021) == eperm
    assert verdict(prlimit, 0) == allow and verdict(prlimit, 1) == eperm
    assert verdict(0) == verdict(1000) == verdict(clone, 17) == verdict(clone, 0x3D0F00) == allow
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(clone, flag | 17) == eperm
    assert verdict(435) == enosys
    assert verdict(0, arch=0x40000003) == kill  # 32-bit calls have other numbers
    assert verdict(kill_call, 0xFFFFFFFF) == verdict(kill_call, 5, shared=True) == allow
    assert verdict(kill_call, 0xFFFFFFFF, shared=True) == eperm
    if machine == "x86_64":
        assert verdict(0x40000000 | 41) == eperm


def interpret(program: bytes, data: dict[int, int]) -> int:
    """Classic BPF, as far as the filter uses it."""
    steps, at, value = [*struct.iter_unpack("=HBBI", program)], 0, 0
    while True:
        code, then, otherwise, k = steps[at]
        at += 1
        if code == 0x06:
            return k
        if code == 0x20:
            value = data[k]
        elif code == 0x54:
            value &= k
        else:
            true = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
            at += then if true else otherwise


def test_an_unknown_processor_is_refused(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "ppc64le")
    with pytest.raises(OSError, match="known for x86_64 and aarch64, not for ppc64le"):
        kernel.machine()


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="none of namespaces, bwrap, rlimits"):
        Sandbox("chroot")
    assert set(isolation.FULL) < set(MODES)


def test_the_benchmark(capsys, monkeypatch):
    need("namespaces")
    monkeypatch.delenv("AREAL_HPC_SANDBOX", raising=False)
    assert menu.main(["sandbox", "--answers", "4", "--repeats", "1"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["bench"], record["unit"]) == ("sandbox", "answers/s")
    assert record["isolation"] == next(iter(record["per_s"])) == isolation.choose()
    assert record["ours"] == record["per_s"][record["isolation"]] > 0 < record["reference"]
