"""Out of the sandbox: files, processes, network and doors of the kernel. Each reports what it got at."""

from __future__ import annotations

from tests.unit.hostile.base import NOTHING, hostile, private

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
        got = sorted(set(os.listdir("/dev")) - set("null full random urandom fd stdin stdout stderr shm".split()))
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
