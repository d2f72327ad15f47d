"""Virtual hosts: a process namespace each, with own network, host name, /tmp and /dev/shm, joined by a bridge."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.slurm import conf

MARK = "areal-hpc-cluster-init"
# MPICH and Open MPI take hosts that share System V memory, /dev/shm or process numbers for one host, whatever their
# names, and then fail to attach: hence --ipc, --pid and a /dev/shm each. PMIx does the same with /tmp.
# Process 1 of a host. It tells its process id as the machine sees it (the outer /proc is still there), adopts
# orphans, and takes everything on the host with it when it is killed.
INIT = """
set -e
read -r pid rest < /proc/self/stat
hostname "$1"
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
mkdir -p -m 1777 "$2/tmp/$1"
chmod 1777 "$2/tmp/$1"
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/conf" /etc/slurm
private="$2/tmp/$1"
for seen in "${@:3}"; do
  mkdir -p "$private/${seen#/tmp/}"
  mount --bind "$seen" "$private/${seen#/tmp/}"
done
mount --rbind "$private" /tmp
echo "$pid" > "$2/run/$1.new"
mv "$2/run/$1.new" "$2/run/$1.pid"
while :; do sleep 1000 & wait $! || :; done
"""


class ClusterError(Exception):
    """Something about the cluster that its user should read, not debug."""


def run(*command: object, timeout_s: float = 60, check: bool = True) -> str:
    """Standard output of a command.

    Raises:
        ClusterError: it failed, with what it said, or ran longer than timeout_s.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{' '.join(words)}: no end after {timeout_s:.0f} s") from None
    if check and done.returncode:
        raise ClusterError(f"{' '.join(words)}: exit code {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def wait_until(what: str, ready: Callable[[], object], timeout_s: float) -> None:
    """Polls `ready()` until it is true.

    Raises:
        ClusterError: still false after timeout_s, with `what` was waited for.
    """
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise ClusterError(f"no {what} after {timeout_s:.0f} s; the logs are in {conf.LOG}")
        time.sleep(0.05)


def init_pid(host: str) -> int | None:
    """Process 1 of a host as the machine numbers it; None if the host is off."""
    try:
        pid = int((conf.STATE / "run" / f"{host}.pid").read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return None
    return pid if MARK.encode() in command and host.encode() in command else None


def inside(host: str, *command: object, directory: str = "/") -> list[str]:
    """A command line that runs `command` on a host.

    Raises:
        ClusterError: the host is off.
    """
    pid = init_pid(host)
    if pid is None:
        raise ClusterError(f"{host} is off; `tests/slurm/cluster heal {host}` switches it on")
    enter = ["nsenter", f"--target={pid}", "--mount", "--uts", "--net", "--pid", "--ipc"]
    return [*enter, "--", "env", f"--chdir={directory}", *map(str, command)]


def boot(host: str) -> None:
    """Switches a host on; slurmd is not started yet. The controller shares the machine's network.

    Raises:
        ClusterError: a namespace, a mount or the network could not be made.
    """
    (conf.STATE / "run" / f"{host}.pid").unlink(missing_ok=True)
    network = [] if host == conf.HEAD else ["--net"]
    command = ["unshare", "--fork", "--kill-child", "--pid", "--ipc", "--mount", "--uts", *network, "--"]
    with open(conf.LOG / f"init-{host}.log", "ab") as log:
        subprocess.Popen(
            [*command, "bash", "-c", INIT, MARK, host, str(conf.STATE), *below_tmp()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )
    wait_until(f"process 1 on {host}", lambda: init_pid(host), 20)
    if host != conf.HEAD:
        _plug_in(host)


def below_tmp() -> list[str]:
    """What lies in this machine's /tmp and must be seen on the hosts, too: this repository and its Python."""
    needed = {str(Path(place).resolve()) for place in (Path(__file__).parents[2], sys.prefix, sys.base_prefix)}
    return sorted(place for place in needed if place.startswith("/tmp/"))


def _plug_in(host: str) -> None:
    name, pid = conf.link(host), init_pid(host)
    run("ip", "link", "del", name, check=False)
    # A fixed hardware address: others find a host again at once after a reboot.
    number = int(host.removeprefix("node"))
    peer = ["peer", "name", "eth0", "address", f"02:a4:ea:00:00:{number:02x}", "netns", pid]
    run("ip", "link", "add", name, "type", "veth", *peer)
    run("ip", "link", "set", name, "master", conf.BRIDGE, "up")
    for command in (f"addr add {conf.address(host)}/24 dev eth0", "link set lo up", "link set eth0 up"):
        run("nsenter", f"--target={pid}", "--net", "ip", *command.split())


def add_bridge() -> None:
    """The switch that all hosts hang on, with the controller's address."""
    run("ip", "link", "add", conf.BRIDGE, "type", "bridge")
    run("ip", "addr", "add", f"{conf.address(conf.HEAD)}/24", "dev", conf.BRIDGE)
    run("ip", "link", "set", conf.BRIDGE, "up")


def set_link(host: str, state: str) -> None:
    """Puts the host's cable "up" or "down"."""
    run("ip", "link", "set", conf.link(host), state)


def limit(host: str, rate: str) -> None:
    """Makes the host send and receive at most `rate`, in tc's notation with a bit unit ("1mbit").

    Raises:
        ClusterError: `rate` is no such figure.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate.lower())
    if match is None:
        raise ClusterError(f"rate {rate!r}: write a number and kbit, mbit or gbit, such as 1mbit")
    bits = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]]
    # A bucket of 10 ms, but never less than a few packets: a small one throttles high rates to far below `rate`.
    queue = ["root", "tbf", "rate", f"{bits:.0f}bit", "burst", max(6000, int(bits / 8 / 100)), "latency", "400ms"]
    run("tc", "qdisc", "replace", "dev", conf.link(host), *queue)
    run(*inside(host, "tc", "qdisc", "replace", "dev", "eth0", *queue))


def unlimit(host: str) -> None:
    """Undoes `limit`."""
    run("tc", "qdisc", "del", "dev", conf.link(host), "root", check=False)
    run(*inside(host, "tc", "qdisc", "del", "dev", "eth0", "root"), check=False)


def link_trouble(host: str) -> str:
    """What is wrong with a host that Slurm cannot know, or nothing."""
    if init_pid(host) is None:
        return "off"
    link = run("ip", "link", "show", conf.link(host), check=False)
    if "state UP" not in link:
        return "cut off"
    return "slowed down" if "qdisc tbf" in link else ""


def switch_off(host: str) -> None:
    """Power loss: nothing is said to anybody, then every process of the host is gone."""
    run("ip", "link", "set", conf.link(host), "down", check=False)  # first: nobody must hear it die
    pid = init_pid(host)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        wait_until(f"end of {host}", lambda: not Path(f"/proc/{pid}").exists(), 20)
    # Connections that could not say goodbye keep the network namespace, and with it the cable, for minutes.
    run("ip", "link", "del", conf.link(host), check=False)


def marked_pids(program: str = "") -> list[int]:
    """Process 1 ("bash") and its parent ("unshare") of every host, of a cluster that lost its state directory, too."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if MARK in words and str(conf.STATE) in words and words[0].startswith(program):
                found.append(int(entry.name))
    return found


def remove_everything() -> None:
    """Processes, namespaces (and with them mounts and cables), bridge, files. Nothing there is no error."""
    # Not the parents: they end by themselves, and first clear the dead process 1 away.
    for pid in marked_pids("bash"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until("end of all virtual hosts", lambda: not marked_pids(), 30)
    for host in conf.HOSTS:
        run("ip", "link", "del", conf.link(host), check=False)
    run("ip", "link", "del", conf.BRIDGE, check=False)
    if conf.STATE.exists():
        shutil.rmtree(conf.STATE)
