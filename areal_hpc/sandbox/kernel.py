"""Linux calls that Python 3.10 has no name for. Every one raises OSError with the call's name when it fails."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_NOATIME, MS_NODIRATIME = 1, 2, 4, 8, 32, 1024, 2048
MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME, MS_STRICTATIME = 4096, 16384, 1 << 18, 1 << 21, 1 << 24
_ST_RELATIME = 4096
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_NEWANY = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38

_libc = ctypes.CDLL(None, use_errno=True)

# name: number on x86_64, on aarch64
NUMBERS = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "socket": (41, 198),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "clone": (56, 220),
    "clone3": (435, 435),
    "kill": (62, 129),
    "capset": (126, 91),
    "mmap": (9, 222),
    "prlimit64": (302, 261),
}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_MACHINES = list(_AUDIT_ARCH)
_OWN_RULES = ("clone", "clone3", "kill", "capset", "mmap", "prlimit64")
_SHARED_ANONYMOUS = 0x01 | 0x20


def machine() -> str:
    """The processor's name if system call numbers are known for it. Raises OSError."""
    name = platform.machine()
    if name not in _MACHINES:
        raise OSError(f"system calls are known for {' and '.join(_MACHINES)}, not for {name}")
    return name


def _number(name: str) -> int:
    return NUMBERS[name][_MACHINES.index(machine())]


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, value: int, pointer: object = 0) -> None:
    arguments = [ctypes.c_ulong(value), pointer if pointer else ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)]
    _check(_libc.prctl(option, *arguments), f"prctl({option})")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    texts = [text.encode() if text else None for text in (source, target, kind)]
    result = _libc.mount(*texts, ctypes.c_ulong(flags), data.encode() if data else None)
    _check(result, f"mount {kind or source} on {target}")


def unmount(target: str) -> None:
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    _check(_libc.syscall(ctypes.c_long(_number("pivot_root")), new.encode(), old.encode()), "pivot_root")


def remount_readonly(target: str) -> None:
    """Make one mount read-only without the loss of flags that a user namespace may not take away."""
    has = os.statvfs(target).f_flag
    flags = MS_NODEV | has & (MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
    flags |= MS_RELATIME if has & _ST_RELATIME else 0 if has & MS_NOATIME else MS_STRICTATIME
    mount("", target, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | flags)


def drop_privileges() -> None:
    """Give up every capability for ever, and gain none by running a set-user-id program."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # beyond the last one, or nothing to drop
            continue
    header, data = struct.pack("=II", 0x20080522, 0), struct.pack("=6I", 0, 0, 0, 0, 0, 0)
    _check(_libc.syscall(ctypes.c_long(_number("capset")), header, data), "capset")
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def forbid_calls(shared_processes: bool) -> None:
    """Seccomp filter for this process and all of its children: no way out, and no memory that escapes the limits.

    Args:
        shared_processes: other processes of the user are in sight, so `kill(-1, ...)` is forbidden, too.
    """
    program = _filter(machine(), shared_processes)
    instructions = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]

    header = Program(len(program) // 8, ctypes.addressof(instructions))
    prctl(PR_SET_SECCOMP, 2, ctypes.byref(header))  # type: ignore[arg-type]


def _filter(name: str, shared_processes: bool) -> bytes:
    """Classic BPF over struct seccomp_data: number at 0, architecture at 4, low halves of the arguments from 16 on.

    Anonymous memory that is shared outlives the resident pages of whoever made it, and so escapes the count. The limits
    of other processes are theirs.
    """
    load, jump_equal, jump_above, jump_set, mask, give = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    allow, kill, eperm, enosys = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
    column = _MACHINES.index(name)

    def step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
        return struct.pack("=HBBI", code, then, otherwise, value)

    def number(call: str, verdict: int) -> bytes:
        return step(jump_equal, NUMBERS[call][column], 0, 1) + step(give, verdict)

    parts = [step(load, 4), step(jump_equal, _AUDIT_ARCH[name], 1, 0), step(give, kill), step(load, 0)]
    if name == "x86_64":  # the x32 numbers name the same calls a second time
        parts += [step(jump_above, 0x40000000, 0, 1), step(give, eperm)]
    parts += [number(call, eperm) for call in NUMBERS if call not in _OWN_RULES]
    parts += [number("clone3", enosys)]  # its flags lie in memory; libc falls back to clone
    parts += [step(jump_equal, NUMBERS["mmap"][column], 0, 5), step(load, 40), step(mask, _SHARED_ANONYMOUS)]
    parts += [step(jump_equal, _SHARED_ANONYMOUS, 0, 1), step(give, eperm), step(give, allow)]
    parts += [step(jump_equal, NUMBERS["prlimit64"][column], 0, 4), step(load, 16)]
    parts += [step(jump_equal, 0, 1, 0), step(give, eperm), step(give, allow)]
    if shared_processes:
        parts += [step(jump_equal, NUMBERS["kill"][column], 0, 4), step(load, 16)]
        parts += [step(jump_equal, 0xFFFFFFFF, 0, 1), step(give, eperm), step(give, allow)]
    parts += [step(jump_equal, NUMBERS["clone"][column], 0, 3), step(load, 16)]
    parts += [step(jump_set, CLONE_NEWANY, 0, 1), step(give, eperm), step(give, allow)]
    return b"".join(parts)
