"""Which GPU of its node a rank uses, from what Slurm says to the task. Pure: environments in, device names out."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from areal_hpc.exits import Exit, RunError

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Where a task finds its devices; the first that is set counts (a second list would count within the first)."""

COMPUTES_NOTHING = ("controller", "reward")
"""Roles without a GPU."""


def own_gpu(environ: Mapping[str, str], role: str, beside: str = "trainer") -> str | None:
    """The device this rank computes on, as it stands in CUDA_VISIBLE_DEVICES.

    One device per trainer or rollout rank of a node, in local order. Local rank 0 of the first node is the controller,
    which computes nothing, so the ranks beside it begin with the first device at local rank 1. A task that sees fewer
    devices than the node has was bound by Slurm (--gpus-per-task, --gpu-bind) and takes the first of its own.

    Args:
        environ: the environment of a task as Slurm made it.
        role: controller, trainer, rollout or reward.
        beside: role of the ranks that share the first node with the controller.

    Returns:
        None for the controller and reward ranks, and where Slurm (or no Slurm at all) gave the task no devices.

    Raises:
        RunError: PREFLIGHT, there is no device left for this rank.
    """
    devices = visible(environ)
    if role in COMPUTES_NOTHING or not devices or "SLURM_LOCALID" not in environ:
        return None
    if is_bound(environ):
        return devices[0]
    index = int(environ["SLURM_LOCALID"])
    if role == beside and environ.get("SLURM_NODEID") == "0":
        index -= 1
    if not 0 <= index < len(devices):
        place = f"{role} rank number {index} of node {environ.get('SLURMD_NODENAME', '?')} (counted from 0)"
        reason = f"{place} finds no GPU of its own: Slurm shows {len(devices)} ({','.join(devices)})"
        raise RunError(Exit.PREFLIGHT, f"{reason}; ask for more gpus_per_node or fewer ranks_per_node")
    return devices[index]


def is_bound(environ: Mapping[str, str]) -> bool:
    """Slurm gave this task some of the node's devices, not all. On a node with one device there is no telling."""
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    return on_node.isdecimal() and 0 < len(visible(environ)) < int(on_node)


def visible(environ: Mapping[str, str]) -> list[str]:
    """Devices the task may use, by the first of VISIBLE that is set."""
    name = _variable(environ)
    return [device.strip() for device in environ[name].split(",") if device.strip()] if name else []


def narrow(environ: MutableMapping[str, str], role: str, beside: str = "trainer") -> str | None:
    """Leave this rank its own device only; call it before torch is imported.

    The controller and reward ranks keep none. Where Slurm gave no devices nothing changes.

    Raises:
        RunError: as own_gpu.
    """
    gpu, name = own_gpu(environ, role, beside), _variable(environ)
    if gpu is not None and name:
        environ[name] = gpu
    elif role in COMPUTES_NOTHING and name and "SLURM_LOCALID" in environ:
        environ[name] = ""
    return gpu


def _variable(environ: Mapping[str, str]) -> str | None:
    return next((name for name in VISIBLE if name in environ), None)
