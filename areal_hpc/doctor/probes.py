"""What one rank of the doctor can find out alone: names, GPUs, cores, files, clocks."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from areal_hpc import __version__
from areal_hpc.doctor.diagnosis import SLOW_NAME_S, Files, Looked, Plan, RankReport
from areal_hpc.exits import RunError
from areal_hpc.placement import is_bound, own_gpu, visible

NAMES_S = 5.0
VISIBLE_S = 10.0
DRIVER_S = 10.0

T = TypeVar("T")


def role_of(rank: int, plan: Plan) -> str:
    """World order: controller, trainers, rollouts, reward ranks."""
    if rank > plan.trainers + plan.rollouts:
        return "reward"
    return "controller" if rank == 0 else "trainer" if rank <= plan.trainers else "rollout"


def report_of(plan: Plan, rank: int, component: str, library: str, environ: Mapping[str, str]) -> RankReport:
    """Everything about this rank that needs no other."""
    role = role_of(rank, plan)
    began_s = time.monotonic()
    address = within(NAMES_S, lambda: address_of(socket.gethostname()), "")
    address_s = time.monotonic() - began_s
    gpus, gpu, identity, trouble = _gpu(environ, role)
    wanted = {"controller": plan.data, "reward": ()}.get(role, (plan.model,) if plan.model else ())
    return RankReport(
        rank=rank,
        host=socket.gethostname(),
        component=component,
        role=role,
        version=__version__,
        python=platform.python_version(),
        library=library,
        cwd=os.getcwd(),
        address=address,
        address_s=address_s,
        gpus=gpus,
        gpu=gpu,
        gpu_identity=identity,
        gpu_trouble=trouble,
        cpus=sorted(os.sched_getaffinity(0)),
        host_cpus=os.cpu_count() or 1,
        offline=environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"),
        unseen=[path for path in wanted if not Path(path).exists()],
        interfaces=[name for _, name in socket.if_nameindex()],
        wall_s=time.time(),
    )


def _gpu(environ: Mapping[str, str], role: str) -> tuple[list[str], str | None, str | None, str]:
    """Devices that the task sees, its own one, a name for it that means one device of this host, what is wrong."""
    gpus = visible(environ)
    try:
        gpu = own_gpu(environ, role)
    except RunError as error:
        return gpus, None, None, error.reason
    if gpu is None:
        return gpus, None, None, ""
    uuids = _driver()
    if uuids is None or not gpu.isdecimal():
        return gpus, gpu, None if is_bound(environ) and gpu.isdecimal() else gpu, ""
    if int(gpu) >= len(uuids):
        return gpus, gpu, None, f"the driver shows {len(uuids)} GPUs, Slurm says it may use number {gpu}"
    return gpus, gpu, uuids[int(gpu)], ""


def _driver() -> list[str] | None:
    """UUIDs of the GPUs that the driver shows to this task; None without NVIDIA's tool."""
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_S, check=False)
    except FileNotFoundError:
        return None
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []


# ------------------------------------------------------------------------------------------------------- names
def within(timeout_s: float, question: Callable[[], T], otherwise: T) -> T:
    """The answer, or `otherwise` after so many seconds; the question may go on behind (look-ups know no deadline)."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(question()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else otherwise


def address_of(host: str) -> str:
    """First address of a host; "" when it cannot be resolved."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def look_up(hosts: Mapping[str, str], timeout_s: float = NAMES_S) -> tuple[list[str], list[str], list[str]]:
    """Resolve hosts forwards, and the addresses they gave themselves backwards.

    Args:
        hosts: name -> address as the host itself resolves it.

    Returns:
        Hosts that cannot be resolved, that took longer than SLOW_NAME_S (or were not reached in time), and those
        whose address has another name or none.
    """
    unknown, slow, other, done = [], [], [], set()

    def go() -> bool:
        for host, address in hosts.items():
            began_s = time.monotonic()
            if not address_of(host):
                unknown.append(host)
            elif address and host.partition(".")[0] not in _names_of(address):
                other.append(host)
            if time.monotonic() - began_s > SLOW_NAME_S:
                slow.append(host)
            done.add(host)
        return True

    if not within(timeout_s, go, False):
        current = next((host for host in hosts if host not in done), None)
        slow += [current] if current else []
    return sorted(unknown), sorted(set(slow)), sorted(other)


def _names_of(address: str) -> set[str]:
    try:
        name, aliases, _ = socket.gethostbyaddr(address)
    except OSError:
        return set()
    return {text.partition(".")[0] for text in (name, *aliases)}


# ------------------------------------------------------------------------------------------------------- files
def write_token(plan: Plan) -> Files:
    """Write the file that all hosts look for, and see what it costs."""
    path = token_path(plan)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        began_s = time.monotonic()
        with open(temporary, "w") as stream:
            stream.write(plan.token)
            stream.flush()
            os.fsync(stream.fileno())
        written_s = time.monotonic()
        temporary.replace(path)
        renamed_s = time.monotonic()
        space = os.statvfs(path.parent)
    except OSError as error:
        return Files(trouble=f"{error.strerror or error}")
    kind = file_system(path.resolve(), Path("/proc/self/mounts").read_text())
    return Files(kind, written_s - began_s, renamed_s - written_s, space.f_bavail * space.f_frsize)


def token_path(plan: Plan) -> Path:
    return Path(plan.run_dir) / f".doctor-{plan.token}"


def file_system(path: Path, mounts: str) -> str:
    """Kind of the file system that holds a path, from the text of /proc/self/mounts; "" when it is not listed."""
    best, kind = "", ""
    for line in mounts.splitlines():
        place, found = (line.split() + ["", "", ""])[1:3]
        place = place.replace("\\040", " ")
        inside = str(path) == place or str(path).startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best):
            best, kind = place, found
    return kind


def see_token(plan: Plan, serve: Callable[[], object]) -> float | None:
    """Seconds until rank 0's file is seen here; None after VISIBLE_S. `serve` is called between two looks."""
    began_s = time.monotonic()
    while (waited_s := time.monotonic() - began_s) < VISIBLE_S:
        try:
            if token_path(plan).read_text() == plan.token:
                return waited_s
        except OSError:
            pass
        serve()
    return None


def look(plan: Plan, hosts: Mapping[str, str], serve: Callable[[], object]) -> Looked:
    visible_s = see_token(plan, serve)
    unknown, slow, other = look_up(hosts)
    return Looked(visible_s=visible_s, unknown=unknown, slow=slow, other_name=other)
