"""The run log of a writer that is killed at any instant of a flush.

SIGKILL ends a write between two pages of the file (measured: half of 10,000 kills in a loop of writes over a page
boundary left the first part new and the second old). So the file has two sorts of states: after every write, and, for
a write over a page boundary, torn there. The writer is stopped by ptrace after each of its writes, and a reader looks
at all of them.
"""

import ctypes
import mmap
import os
import platform
import random
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from areal_hpc.logschema import STEPS, TABLES, WEIGHT_LOADS, Table
from areal_hpc.runlog import RunLog
from tests.unit.test_runlog import WRITER, assert_rows, run

SYSCALL, SETOPTIONS, GET_SYSCALL_INFO = 24, 0x4200, 0x420E  # requests to ptrace
OPTIONS = 0x100001  # tell system calls from signals, and end the process with this one
ENTRY = 1
PWRITE = {"x86_64": 18, "aarch64": 67}.get(platform.machine())
LIBC = ctypes.CDLL(None, use_errno=True)
BEFORE, AFTER = 250, 300  # rows; a new chunk of the table begins in between

ONE_FLUSH = f"""
import ctypes, os, signal
table = next(table for table in t.TABLES if table.name == sys.argv[2])
writer = t.RunLogWriter(sys.argv[1], attributes={{"config": "of some length"}})
t.write(writer, table, 0, {BEFORE})
writer.flush()
t.write(writer, table, {BEFORE}, {AFTER})
if ctypes.CDLL(None).ptrace(0, 0, None, None) == 0:  # PTRACE_TRACEME
    os.kill(os.getpid(), signal.SIGSTOP)
    writer.flush()
os._exit(0)
"""


class SyscallInfo(ctypes.Structure):
    """ptrace_syscall_info, as it is when a call begins."""

    _fields_ = (
        *(("op", ctypes.c_uint8), ("pad", ctypes.c_uint8 * 3), ("arch", ctypes.c_uint32)),
        *(("instruction", ctypes.c_uint64), ("stack", ctypes.c_uint64)),
        *(("number", ctypes.c_uint64), ("arguments", ctypes.c_uint64 * 6)),
    )


def ptrace(request: int, pid: int, address: int = 0, data: object = None) -> None:
    if LIBC.ptrace(request, pid, ctypes.c_void_p(address), data) < 0:
        raise OSError(ctypes.get_errno(), f"ptrace {request:#x}")


def stops(pid: int) -> Iterator[SyscallInfo]:
    """Every beginning and end of a system call of a traced process that has stopped itself, until it exits."""
    info = SyscallInfo()
    ptrace(SETOPTIONS, pid, 0, ctypes.c_void_p(OPTIONS))
    while True:
        ptrace(SYSCALL, pid)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            return
        ptrace(GET_SYSCALL_INFO, pid, ctypes.sizeof(info), ctypes.byref(info))
        yield info


def states(pid: int, file: int) -> Iterator[str]:
    """Bring `file` into every state that a killed writer can leave; yields what each of them is."""
    calls = stops(pid)
    for call in calls:
        if call.op != ENTRY or call.number != PWRITE:
            continue
        _, _, count, offset = call.arguments[:4]
        before = os.pread(file, count, offset).ljust(count, b"\0")
        next(calls)
        after = os.pread(file, count, offset)
        assert len(after) == count
        for boundary in range(offset - offset % -mmap.PAGESIZE, offset + count, mmap.PAGESIZE):
            if boundary > offset:
                os.pwrite(file, before[boundary - offset :], boundary)
                yield f"write of {count} bytes to {offset}, torn at {boundary}"
                os.pwrite(file, after[boundary - offset :], boundary)
        yield f"write of {count} bytes to {offset}"


@pytest.mark.fault("log writer killed in the middle of appends", row=15)
@pytest.mark.parametrize("table", [WEIGHT_LOADS, pytest.param(STEPS, marks=pytest.mark.slow)], ids=lambda t: t.name)
def test_a_writer_killed_at_any_instant_loses_no_finished_flush(table: Table, tmp_path):
    if PWRITE is None:
        pytest.skip(f"the number of the system call pwrite64 on {platform.machine()} is not known here")
    path = tmp_path / "log.h5"
    writer = run(ONE_FLUSH, path, table.name)
    _, status = os.waitpid(writer.pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        pytest.skip("processes cannot be traced here")
    file = os.open(path, os.O_RDWR)
    seen = []
    try:
        for state in states(writer.pid, file):
            with RunLog(path) as log:
                frame = getattr(log, table.name)
            seen.append(len(frame))
            assert len(frame) in (BEFORE, AFTER), state
            assert_rows(frame, table, len(frame))
    finally:
        os.close(file)
        writer.kill()
        writer.wait()
    assert seen == sorted(seen) and seen[-1] == AFTER
    assert len(seen) > 3 * len(table.columns), "at least the chunk, its index and the extent of every column"


@pytest.mark.fault("log writer killed in the middle of appends", row=15)
@pytest.mark.slow
def test_sigkill_of_the_writer_loses_no_finished_flush(tmp_path):
    delays = random.Random(50)
    for attempt in range(50):
        path = tmp_path / f"{attempt}.h5"
        writer = run(WRITER, path, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        first = writer.stdout.readline()
        time.sleep(delays.uniform(0, 0.15))
        writer.send_signal(signal.SIGKILL)
        flushed = int((first + writer.stdout.read()).split()[-1])
        assert writer.wait() == -signal.SIGKILL
        log = RunLog(path)
        assert log.problems == []
        num_rows = len(log.steps)
        assert num_rows in (flushed, flushed + 7)  # at most the flush that had no time to be announced
        for table in TABLES:
            assert_rows(getattr(log, table.name), table, num_rows)
