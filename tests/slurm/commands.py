"""The commands of tests/slurm/cluster: a real Slurm with five hosts on this machine, for tests.

Needs root and Debian packages; at most one per machine.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.slurm import conf, hosts, services
from tests.slurm.hosts import ClusterError, run
from tests.slurm.services import slurm

SHOWN = shlex.quote(str(Path(__file__).resolve().with_name("cluster")))


@contextmanager
def only_one() -> Iterator[None]:
    """One change of the cluster at a time; a lock on the directory itself leaves no file behind."""
    handle = os.open(conf.STATE.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def up() -> None:
    """Starts what is not running; heals hosts of a running cluster, and clears away a broken one first."""
    with only_one():
        if conf.CONF.exists() and services.controller_answers() and (conf.STATE / "run" / "complete").exists():
            ill = list(services.troubles())
            print(f"already up{', healing ' + ', '.join(ill) if ill else ''}")
        else:
            ill = []
            build()
    for host in ill:
        heal(host)


def build() -> None:
    """Packages, a clean start, everything up to five idle hosts."""
    start = time.monotonic()
    services.install()
    hosts.remove_everything()
    installed = time.monotonic()
    conf.write_files()
    hosts.add_bridge()
    hosts.boot(conf.HEAD)
    services.start_munge()
    with ThreadPoolExecutor() as pool:
        pool.submit(services.start_database).result()
        for done in [pool.submit(services.start_accounting), *(pool.submit(hosts.boot, host) for host in conf.HOSTS)]:
            done.result()
    services.start_controller()
    for host in conf.HOSTS:
        services.start_slurmd(host)
    hosts.wait_until("five idle hosts", lambda: not services.troubles(), 60)
    (conf.STATE / "run" / "complete").touch()
    now = time.monotonic()
    print(f"up: {len(conf.HOSTS)} hosts in {now - installed:.0f} s (packages {installed - start:.0f} s)")


def down() -> None:
    """Removes every trace, also of a cluster that is half dead."""
    with only_one():
        there = conf.STATE.exists() or hosts.marked_pids()
        hosts.remove_everything()
    print("down" if there else "was not up")


def kill(host: str) -> None:
    """Power loss."""
    with only_one():
        hosts.switch_off(host)
    print(f"{host} is off")


def cut(host: str) -> None:
    """Network cable pulled; everything on the host goes on."""
    hosts.set_link(host, "down")
    print(f"{host} is cut off")


def slow(host: str, rate: str) -> None:
    """Network limited, both ways."""
    hosts.limit(host, rate)
    print(f"{host} sends and receives {rate}")


def heal(host: str) -> None:
    """Undoes kill, cut and slow; returns when Slurm uses the host again."""
    with only_one():
        if hosts.init_pid(host) is None:
            hosts.boot(host)
            # All hosts have one kernel and one boot time, so Slurm cannot see that this one forgot its jobs.
            run(*slurm("scontrol", "update", f"nodename={host}", "state=down", "reason=rebooted"))
        hosts.unlimit(host)
        hosts.set_link(host, "up")
        if not run(*hosts.inside(host, "pgrep", "-x", "slurmd"), check=False):
            services.start_slurmd(host)
    if services.node_states().get(host, "unknown").startswith(("down", "drain", "fail")):
        run(*slurm("scontrol", "update", f"nodename={host}", "state=resume"), check=False)
    hosts.wait_until(f"healthy {host}", lambda: host not in services.troubles(), 60)
    print(f"{host} is {services.node_states()[host]}")


def status() -> int:
    """One screen; 0 healthy, 1 ill, 3 down."""
    if not conf.STATE.exists():
        print("down")
        return 3
    if not services.controller_answers():
        print(f"ill: slurmctld does not answer; see {conf.LOG}/slurmctld.log, or `down` and `up` again")
        return 1
    since = time.time() - (conf.STATE / "hosts").stat().st_mtime
    print(f'up for {since / 60:.0f} min; eval "$({SHOWN} env)" lets srun, sbatch and sacct use it')
    print(f"  SLURM_CONF={conf.CONF}  shared directory {conf.SHARED}  logs {conf.LOG}")
    states = services.node_states()
    reasons = services.troubles()
    for host in conf.HOSTS:
        print(f"  {host}  {conf.address(host)}  {states.get(host, '?'):<12} {reasons.get(host, '')}")
    print(run(*slurm("squeue", "-o", "%.10i %.9P %.20j %.10T %.10M %.4D %R")), end="")
    ill = [f"{host} is {reason}" for host, reason in reasons.items()]
    print(f"ill: {', '.join(ill)}" if ill else "healthy")
    return 1 if ill else 0


def show_environment() -> int:
    """Prints what a shell must know to use the cluster; 3 if there is none."""
    if not conf.STATE.exists():
        print(f"the cluster is down; `{SHOWN} up` starts it", file=sys.stderr)
        return 3
    for key, value in {"SLURM_CONF": conf.CONF, "AREAL_HPC_CLUSTER_SHARED": conf.SHARED}.items():
        print(f"export {key}={shlex.quote(str(value))}")
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_ in {
        "up": "install what is missing and start; nothing to do if it is up",
        "down": "end every process, remove every trace",
        "status": "one screen; exit code 0 healthy, 1 ill, 3 down",
        "env": "shell lines to eval",
    }.items():
        commands.add_parser(name, help=help_)
    for name, help_ in {
        "kill": "power loss",
        "cut": "pull the network cable",
        "slow": "limit the network both ways",
        "heal": "undo all of these and wait until Slurm uses the host again",
        "exec": "run a command on a host",
    }.items():
        command = commands.add_parser(name, help=help_)
        command.add_argument("host", choices=conf.HOSTS)
        if name == "slow":
            command.add_argument("rate", help="such as 1mbit")
        if name == "exec":
            command.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND ...")
    return parser.parse_args()


def call(args: argparse.Namespace) -> int:
    """Runs one command; the exit code."""
    if args.command in ("status", "env"):
        return {"status": status, "env": show_environment}[args.command]()
    if os.geteuid():
        raise ClusterError("only root can make virtual hosts")
    if args.command in ("up", "down"):
        {"up": up, "down": down}[args.command]()
        return 0
    if not conf.STATE.exists():
        raise ClusterError(f"the cluster is down; `{SHOWN} up` starts it")
    if args.command == "exec":
        command = hosts.inside(args.host, *args.words, directory=os.getcwd())
        os.execvp(command[0], command)
    if args.command == "slow":
        slow(args.host, args.rate)
    else:
        {"kill": kill, "cut": cut, "heal": heal}[args.command](args.host)
    return 0


def main() -> int:
    """Entry point; errors are one line, without a traceback."""
    try:
        return call(arguments())
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
