"""What the cluster of tests/slurm/cluster looks like: hosts, addresses, paths and the files Slurm reads."""

from __future__ import annotations

import os
import stat
from pathlib import Path

STATE = Path("/var/lib/areal-hpc-cluster")
CONF = STATE / "conf" / "slurm.conf"
SHARED = STATE / "shared"
LOG = STATE / "log"
MUNGE_SOCKET = STATE / "munge" / "socket"
DB_SOCKET = STATE / "db" / "socket"

HEAD = "ctl"
HOSTS = [f"node{i}" for i in range(1, 6)]
NUM_CPUS, NUM_GPUS = 64, 8
SUBNET = "172.31.77"
BRIDGE = "arealbr0"
# Not Slurm's usual ports, so that a Slurm of the machine itself is not disturbed.
CTLD_PORT, SLURMD_PORT, DBD_PORT = 26817, 26818, 26819


def address(host: str) -> str:
    """The IPv4 address of a virtual host, or of the controller."""
    return f"{SUBNET}.1" if host == HEAD else f"{SUBNET}.{10 + int(host.removeprefix('node'))}"


def link(host: str) -> str:
    """The end of the host's virtual cable that hangs in the bridge."""
    return f"areal-{host}"


# Two cores carry everything. Daemons run at nice -10 and PropagatePrioProcess=1 gives tasks the priority of whoever
# submitted them, so that 60 spinning ranks do not make a healthy slurmd look dead within SlurmdTimeout.
# bf_interval=1: het jobs are started by backfill only; with the default of 30 s each would wait half a minute.
# partition_prio: only jobs in `low` can be pre-empted, and only by `high`.
SLURM_CONF = """\
ClusterName=areal
SlurmctldHost={head}({head_address})
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge_socket}
CredType=cred/munge
StateSaveLocation={state}/ctld
SlurmdSpoolDir={state}/spool/%n
SlurmctldPidFile={state}/run/slurmctld.pid
SlurmdPidFile={state}/run/slurmd-%n.pid
SlurmctldLogFile={log}/slurmctld.log
SlurmdLogFile={log}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
PropagatePrioProcess=1
SlurmdParameters=config_overrides

SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_max_time=10,batch_sched_delay=1,sched_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2

KillWait=5
SlurmdTimeout=10
SlurmctldTimeout=60
MessageTimeout=10
TCPTimeout=2
BatchStartTimeout=60
UnkillableStepTimeout=60
InactiveLimit=0
MinJobAge=300

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={head_address}
AccountingStoragePort={dbd_port}
AccountingStoragePass={munge_socket}
AccountingStorageTRES=gres/gpu

GresTypes=gpu
NodeName=DEFAULT CPUs={cpus} Boards=1 SocketsPerBoard=2 CoresPerSocket={cores} ThreadsPerCore=1 RealMemory=1000000 \
Gres=gpu:{gpus} State=UNKNOWN
{nodes}
PartitionName=DEFAULT MaxTime=INFINITE DefaultTime=10 State=UP PriorityTier=1 PreemptMode=OFF
PartitionName=all Nodes=node[1-5] Default=YES
PartitionName=head Nodes=node1
PartitionName=trainer Nodes=node[1-2]
PartitionName=rollout Nodes=node[3-5]
PartitionName=low Nodes=node[1-5] PreemptMode=REQUEUE
PartitionName=high Nodes=node[1-5] PriorityTier=10
"""

SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={munge_socket}
DbdHost={head}
DbdAddr={head_address}
DbdPort={dbd_port}
SlurmUser=root
PidFile={state}/run/slurmdbd.pid
LogFile={log}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm
"""


def write_files() -> None:
    """The state directory with every configuration file in it; the directory must not exist yet."""
    STATE.mkdir(mode=0o755)
    for name in ["conf", "ctld", "db", "gpu", "log", "munge", "run", "shared", "spool", "tmp"]:
        (STATE / name).mkdir()
    SHARED.chmod(0o1777)
    facts = {
        "head": HEAD,
        "head_address": address(HEAD),
        "ctld_port": CTLD_PORT,
        "slurmd_port": SLURMD_PORT,
        "dbd_port": DBD_PORT,
        "munge_socket": MUNGE_SOCKET,
        "state": STATE,
        "log": LOG,
        "cpus": NUM_CPUS,
        "cores": NUM_CPUS // 2,
        "gpus": NUM_GPUS,
        "nodes": "\n".join(f"NodeName={host} NodeAddr={address(host)}" for host in HOSTS),
    }
    CONF.write_text(SLURM_CONF.format(**facts))
    dbd = CONF.with_name("slurmdbd.conf")
    dbd.touch(mode=0o600)
    dbd.write_text(SLURMDBD_CONF.format(**facts))
    # Slurm wants a device file per GPU and never opens it; the number at the end becomes the GPU's index.
    for index in range(NUM_GPUS):
        os.mknod(STATE / "gpu" / f"gpu{index}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    CONF.with_name("gres.conf").write_text(f"Name=gpu File={STATE}/gpu/gpu[0-{NUM_GPUS - 1}]\n")
    CONF.with_name("cgroup.conf").write_text("CgroupAutomount=no\n")
    # Both ways, and for sockets that speak IPv4 through IPv6: torch looks up the name behind every connection. Mapped
    # addresses carry names of their own, so that looking up "node1" yields one address.
    names = [f"{address(host)} {host}" for host in [HEAD, *HOSTS]]
    names += [f"::ffff:{address(host)} {host}.mapped" for host in [HEAD, *HOSTS]]
    (STATE / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
    for host in HOSTS:
        (STATE / "spool" / host).mkdir()
