"""The daemons of the cluster: packages, munge, MariaDB, slurmdbd, slurmctld, slurmd."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
from pathlib import Path

from tests.slurm import conf
from tests.slurm.hosts import ClusterError, inside, link_trouble, run, wait_until

PACKAGES = [
    "slurmctld",
    "slurmd",
    "slurmdbd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "slurm-wlm-mysql-plugin",
    "libpmi0",
    "libpmi2-0",
    "libpmix-dev",
    "mariadb-server",
    "mariadb-client",
    "munge",
    "iproute2",
    "util-linux",
]
PROGRAMS = [
    "slurmctld",
    "slurmd",
    "slurmdbd",
    "srun",
    "sacct",
    "mariadbd",
    "mariadb-install-db",
    "munged",
    "ip",
    "tc",
    "unshare",
    "nsenter",
]
HEALTHY = {"idle", "mixed", "allocated", "completing", "planned", "reserved"}
POLICY = Path("/usr/sbin/policy-rc.d")


def missing_programs() -> list[str]:
    """What the cluster needs and this machine does not have yet."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    # Slurm's PMIx plugin opens "libpmix.so", which Debian keeps in the package for developers.
    try:
        ctypes.CDLL("libpmix.so")
    except OSError:
        missing.append("libpmix.so")
    return missing


def install() -> None:
    """Debian packages, if a program is missing; their services are never started.

    Raises:
        ClusterError: no apt-get here, or it failed.
    """
    missing = missing_programs()
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise ClusterError(f"{', '.join(missing)}: not on this machine, and without apt-get they cannot be installed")
    print(f"installing Debian packages for {', '.join(missing)}", flush=True)
    ours = not POLICY.exists()
    if ours:
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    apt = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q"]
    try:
        run(*apt, "update", timeout_s=300)
        run(*apt, "install", "-y", "--no-install-recommends", *PACKAGES, timeout_s=900)
    finally:
        if ours:
            POLICY.unlink(missing_ok=True)


def _spawn(host: str, name: str, *command: object, **environment: object) -> None:
    """A daemon that stays in the foreground of its own session, logged, before the tasks in priority."""
    settings = [f"{key}={value}" for key, value in environment.items()]
    with open(conf.LOG / f"out-{name}.log", "ab") as log:
        subprocess.Popen(
            inside(host, "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", *settings, "nice", "-n", "-10", *command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
        )


def start_munge() -> None:
    """One munged for all hosts: they share its socket through the file system."""
    directory = conf.MUNGE_SOCKET.parent
    key = directory / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    files = [f"--{what}-file={directory / what}" for what in ("key", "pid", "seed", "log")]
    _spawn(conf.HEAD, "munged", "munged", "--foreground", f"--socket={conf.MUNGE_SOCKET}", *files)
    wait_until("munge socket", conf.MUNGE_SOCKET.exists, 20)


def start_database() -> None:
    """MariaDB without network, on a socket of its own, with an account for slurmdbd."""
    data = conf.STATE / "db" / "data"
    run(
        *("mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}", "--skip-test-db"),
        *("--auth-root-authentication-method=normal", "--innodb-log-file-size=8M"),
    )
    options = ["--innodb-buffer-pool-size=64M", "--innodb-log-file-size=8M", "--innodb-flush-log-at-trx-commit=0"]
    _spawn(
        *(conf.HEAD, "mariadbd", "mariadbd", "--no-defaults", "--user=root", "--skip-networking", f"--datadir={data}"),
        *(f"--socket={conf.DB_SOCKET}", f"--pid-file={conf.STATE}/run/mariadbd.pid", *options),
    )
    client = ["mariadb", "--no-defaults", f"--socket={conf.DB_SOCKET}", "--user=root", "-e"]
    grant = "CREATE USER slurm@localhost IDENTIFIED BY 'slurm'; GRANT ALL ON slurm.* TO slurm@localhost;"
    wait_until("database", conf.DB_SOCKET.exists, 60)
    run(*client, grant)


def start_accounting() -> None:
    """slurmdbd, and the cluster's entry in it."""
    # Slurm has no setting for the socket; the MariaDB client library takes it from the environment.
    _spawn(conf.HEAD, "slurmdbd", "slurmdbd", "-D", MYSQL_UNIX_PORT=conf.DB_SOCKET, SLURM_CONF=conf.CONF)
    add = slurm("sacctmgr", "-i", "add", "cluster", "areal")
    wait_until("answer of slurmdbd", lambda: subprocess.run(add, capture_output=True).returncode == 0, 90)


def start_controller() -> None:
    """slurmctld, until it answers."""
    _spawn(conf.HEAD, "slurmctld", "slurmctld", "-D", SLURM_CONF=conf.CONF)
    wait_until("answer of slurmctld", controller_answers, 60)


def start_slurmd(host: str) -> None:
    """The node daemon of a host; returns before it has registered."""
    _spawn(host, f"slurmd-{host}", "slurmd", "-D", "-N", host, SLURM_CONF=conf.CONF)


def slurm(*command: object) -> list[str]:
    """A Slurm command line for this cluster, whatever the caller's environment says."""
    return ["env", f"SLURM_CONF={conf.CONF}", "timeout", "30", *map(str, command)]


def controller_answers() -> bool:
    """Whether slurmctld replies."""
    done = subprocess.run(slurm("scontrol", "ping"), capture_output=True, text=True)
    return done.returncode == 0 and "UP" in done.stdout


def node_states() -> dict[str, str]:
    """State of every host as Slurm sees it, such as "idle", "mixed" or "down*".

    Raises:
        ClusterError: slurmctld does not answer.
    """
    lines = run(*slurm("sinfo", "-h", "-N", "-p", "all", "-o", "%N %T")).split("\n")
    return dict(line.split(maxsplit=1) for line in lines if line.strip())


def troubles() -> dict[str, str]:
    """What is wrong, by host; empty if all are well.

    Raises:
        ClusterError: slurmctld does not answer.
    """
    states = node_states()
    found = {}
    for host in conf.HOSTS:
        state = states.get(host, "unknown")
        reason = link_trouble(host) or ("" if state.rstrip("+-") in HEALTHY else state)
        if reason:
            found[host] = reason
    return found
