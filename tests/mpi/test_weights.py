"""Weights from one trainer rank to rollout ranks: real processes, real Gloo groups on loopback.

No MPI here: all that weights and process_group need from MPI is the store's port.
"""

import json
import multiprocessing
import signal
import time

import pytest

from areal_hpc.bench import weights as bench
from areal_hpc.process_group import GroupError, ProcessGroups, open_store, store_port
from tests.mpi import weight_ranks

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["areal_hpc.weights", "pytest"])  # ranks start in milliseconds


def run(scenario: str, *, size: int = 3, timeout_s: float = 60.0) -> list[int | None]:
    """Run a scenario of weight_ranks on `size` ranks; shows what failed, returns exit codes, leaves nothing behind."""
    store = open_store("127.0.0.1", is_master=True, world_size=size)
    ranks = [
        CONTEXT.Process(target=weight_ranks.run_rank, args=(scenario, rank, size, store_port(store)))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    deadline_s = time.monotonic() + timeout_s
    for process in ranks:
        process.join(max(0.0, deadline_s - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    failures = [store.get(key).decode() for rank in range(size) if store.check([key := f"failure/{rank}"])]
    assert not failures, "\n".join(failures)
    return codes


@pytest.mark.parametrize(
    "scenario",
    [
        "several_versions",
        "late_receivers",
        "two_trainers",
        "corrupted",
        "wrong_version",
        "other_plan",
        "bad_tensors",
        "silent_sender",
        "slow_sender",
        "absent_receivers",
        "late_trainer",
        "missing_rank",
    ],
)
def test_ranks(scenario: str):
    assert run(scenario) == [0, 0, 0]


@pytest.mark.fault("weight update torn: sender killed", row=29)
def test_sender_killed_after_half_the_buckets():
    assert run("torn") == [-signal.SIGKILL, 0, 0]


@pytest.mark.fault("weight update torn: receiver killed", row=29)
def test_receiver_killed_and_groups_rebuilt_without_it():
    assert run("lost_receiver") == [0, 0, -signal.SIGKILL]


def test_nobody_keeps_the_store():
    with pytest.raises(GroupError, match=r"cannot reach the store at 127.0.0.1:1 \(0 s\)"):
        open_store("127.0.0.1", is_master=False, world_size=2, port=1, timeout_s=0.4)


@pytest.mark.parametrize(
    "rank, trainer_ranks, text", [(0, [1], "trainer_ranks"), (0, [], "trainer_ranks"), (2, [0], "rank 2")]
)
def test_contradicting_arguments(rank: int, trainer_ranks: list[int], text: str):
    store = open_store("127.0.0.1", is_master=True, world_size=2)
    with pytest.raises(ValueError, match=text):
        ProcessGroups(
            store, backend="gloo", rank=rank, size=2, trainer_ranks=trainer_ranks, generation=1, timeout_s=1.0
        )


def test_bench_ends_with_one_line_of_json(capsys: pytest.CaptureFixture[str]):
    assert bench.main(["--mib", "2", "--repeats", "2", "--receivers", "1"]) == 0
    line = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (line["bench"], line["unit"], line["repeats"]) == ("weights", "MB/s", 2)
    assert line["ratio"] == pytest.approx(line["ours"] / line["reference"])
