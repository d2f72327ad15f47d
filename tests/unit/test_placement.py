"""Every rank of a node its own GPU, from the environment that Slurm makes. Environments as seen on a cluster."""

from __future__ import annotations

import pytest

from areal_hpc.exits import Exit, RunError
from areal_hpc.placement import is_bound, narrow, own_gpu


def task(local: int, node: int, devices: str | None = "0,1,2,3", on_node: int = 4, **more: str) -> dict[str, str]:
    environ = {"SLURM_LOCALID": str(local), "SLURM_NODEID": str(node), "SLURMD_NODENAME": "n9"} | more
    if devices is not None:
        environ |= {"CUDA_VISIBLE_DEVICES": devices, "SLURM_GPUS_ON_NODE": str(on_node)}
    return environ


@pytest.mark.parametrize(
    ("role", "local", "node", "gpu"),
    [
        ("controller", 0, 0, None),
        ("trainer", 1, 0, "0"),  # beside the controller the first trainer is local rank 1
        ("trainer", 4, 0, "3"),
        ("trainer", 0, 1, "0"),
        ("trainer", 3, 1, "3"),
        ("rollout", 0, 2, "0"),
        ("rollout", 3, 2, "3"),
    ],
)
def test_one_gpu_per_rank_in_local_order(role, local, node, gpu):
    assert own_gpu(task(local, node), role) == gpu


def test_device_names_are_kept_as_slurm_writes_them():
    assert own_gpu(task(1, 3, "GPU-aa,GPU-bb", 2), "rollout") == "GPU-bb"
    assert own_gpu(task(1, 3, "4,6", 2), "rollout") == "6"


@pytest.mark.parametrize("role, local, node", [("rollout", 4, 2), ("trainer", 5, 0), ("trainer", 4, 1)])
def test_a_rank_too_many_is_told(role, local, node):
    with pytest.raises(RunError, match=r"number 4 of node n9 .* no GPU of its own: Slurm shows 4 \(0,1,2,3\)") as error:
        own_gpu(task(local, node), role)
    assert error.value.code == Exit.PREFLIGHT


def test_what_slurm_bound_is_kept():
    """--gpus-per-task=1 on a node of four: each task sees one, under its own number or, with cgroups, as 0."""
    assert own_gpu(task(3, 1, "3"), "trainer") == "3"
    assert own_gpu(task(3, 0, "0"), "trainer") == "0"
    assert is_bound(task(3, 0, "0")) and not is_bound(task(3, 0))
    assert own_gpu(task(1, 1, "2,3"), "rollout") == "2"


def test_a_node_with_one_gpu_has_room_for_one_rank():
    assert own_gpu(task(0, 1, "0", 1), "trainer") == "0"
    assert own_gpu(task(1, 0, "0", 1), "trainer") == "0"  # beside the controller
    with pytest.raises(RunError, match="no GPU of its own: Slurm shows 1"):
        own_gpu(task(1, 1, "0", 1), "trainer")


def test_a_trainer_never_counts_backwards():
    """Local rank 0 of the first node is the controller; a trainer there means the layout is not what we think."""
    with pytest.raises(RunError, match="number -1"):
        own_gpu(task(0, 0), "trainer")


@pytest.mark.parametrize("environ", [{}, {"CUDA_VISIBLE_DEVICES": "0,1"}, task(1, 1, None), task(1, 1, "", 0)])
def test_without_slurm_or_gpus_nothing_is_chosen(environ):
    before = dict(environ)
    assert narrow(environ, "rollout") is None
    assert environ == before


def test_narrow_leaves_one_device():
    environ = task(2, 0)
    assert narrow(environ, "trainer") == "1"
    assert environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_narrow_hides_all_from_the_controller():
    environ = task(0, 0)
    assert narrow(environ, "controller") is None
    assert environ["CUDA_VISIBLE_DEVICES"] == ""


def test_amd_devices_are_narrowed_once():
    """ROCm counts CUDA_VISIBLE_DEVICES inside ROCR_VISIBLE_DEVICES: narrowing both would leave nothing."""
    environ = task(2, 1, ROCR_VISIBLE_DEVICES="0,1,2,3")
    assert narrow(environ, "rollout") == "2"
    assert (environ["CUDA_VISIBLE_DEVICES"], environ["ROCR_VISIBLE_DEVICES"]) == ("2", "0,1,2,3")
    only = {"SLURM_LOCALID": "1", "SLURM_NODEID": "1", "ROCR_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "2"}
    assert narrow(only, "rollout") == only["ROCR_VISIBLE_DEVICES"] == "1"
