"""What the ranks of test_weights.py do; each function is one scenario, run by every rank in a process of its own.

The store lives in the test's own process, so that any rank may be killed. Rank 0 is the first trainer.
"""

import os
import signal
import time
import traceback

import pytest
import torch

from areal_hpc.exits import Exit
from areal_hpc.process_group import GroupError, ProcessGroups, Store, Transfer, open_store
from areal_hpc.weights import BucketPlan, ReadyWeights, WeightError, WeightReceiver, WeightSender

SHAPES = {
    "embedding": ((300, 100), torch.float32),
    "norm": ((1001,), torch.bfloat16),
    "odd": ((33, 1, 17), torch.float32),
    "steps": ((5,), torch.int64),
    "scalar": ((), torch.float32),
    "empty": ((0, 4), torch.float32),
    "flags": ((7,), torch.bool),
    "last": ((999, 7), torch.bfloat16),
}


def model(version: int) -> dict[str, torch.Tensor]:
    """Arbitrary bytes, NaNs included, that differ in every version; the last name is tied to the first tensor."""
    random = torch.Generator().manual_seed(version)
    tensors = {}
    for name, (shape, dtype) in SHAPES.items():
        high = 2 if dtype is torch.bool else 256
        num_bytes = torch.empty(shape, dtype=dtype).nbytes
        data = torch.randint(0, high, (num_bytes,), dtype=torch.uint8, generator=random)
        tensors[name] = data.view(dtype).view(shape)
    return tensors | {"head": tensors["embedding"]}


PLAN = BucketPlan.of(model(0), bucket_bytes=10_007)  # cuts through tensors, and through their elements
NUM_BUCKETS = PLAN.num_buckets


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bytes differ."""
    assert list(a) == list(b)
    as_bytes = [[t.reshape(-1).view(torch.uint8) for t in tensors.values()] for tensors in (a, b)]
    return [name for name, x, y in zip(a, *as_bytes, strict=True) if not torch.equal(x, y)]


def groups(
    rank: int, size: int, store: Store, *, kind: type[ProcessGroups] = ProcessGroups, **changes
) -> ProcessGroups:
    settings = {"trainer_ranks": [0], "generation": 1, "timeout_s": 20.0, "interface": "lo"} | changes
    return kind(store, backend="gloo", rank=rank, size=size, **settings)


def finish(receiver: WeightReceiver) -> ReadyWeights:
    while (ready := receiver.poll()) is None:
        time.sleep(0.001)
    return ready


def receive(receiver: WeightReceiver, version: int) -> ReadyWeights:
    receiver.begin(version)
    return finish(receiver)


def await_ready(store: Store, ranks: list[int]) -> None:
    store.wait([f"ready/{rank}" for rank in ranks])


# ---------------------------------------------------------------------------------------------------------- all is well
def several_versions(rank: int, size: int, store: Store) -> None:
    """Weights change right after publish(), receivers still get the snapshot, byte by byte."""
    group = groups(rank, size, store)
    if rank == 0:
        sender = WeightSender(group, PLAN)
        await_ready(store, [1, 2])
        for version in range(4):
            weights = model(version)
            manifest = sender.publish(version, weights)
            for tensor in weights.values():
                tensor.zero_()
            assert (manifest.version, manifest.num_bytes) == (version, PLAN.num_bytes)
            assert len(manifest.checksums) == NUM_BUCKETS
        sender.wait()
        assert sender.poll() and sender.last.version == 3
        assert 0 < sender.last.snapshot_s <= sender.last.broadcast_s
    else:
        receiver = WeightReceiver(group, PLAN)
        assert receiver.poll() is None  # nothing begun
        receiver.begin(0)
        with pytest.raises(WeightError, match="version 0 is still arriving, cannot begin version 1"):
            receiver.begin(1)
        assert [receiver.poll() for _ in range(100)] == [None] * 100  # returns although nothing was sent yet
        store.set(f"ready/{rank}", "")
        assert differing(finish(receiver).tensors, model(0)) == []
        for version in range(1, 4):
            ready = receive(receiver, version)
            assert ready.version == version
            assert differing(ready.tensors, model(version)) == []
            assert differing(ready.tensors, model(version - 1)) != []  # the comparison can fail
        group.close()
        with pytest.raises(WeightError, match=f"rank {rank}: version 4, header: the groups are closed"):
            receiver.begin(4)
    group.close()


def late_receivers(rank: int, size: int, store: Store) -> None:
    """publish(2) must not overtake version 1, which nobody has begun to receive yet."""
    group = groups(rank, size, store)
    if rank == 0:
        sender = WeightSender(group, PLAN)
        sender.publish(1, model(1))
        assert not sender.poll() and sender.last is None
        sender.publish(2, model(2))
        assert store.check(["ready/1", "ready/2"]), "publish(2) came back before version 1 was received"
        sender.wait()
    else:
        receiver = WeightReceiver(group, PLAN)
        time.sleep(0.5)
        store.set(f"ready/{rank}", "")
        assert differing(receive(receiver, 1).tensors, model(1)) == []
        time.sleep(0.2)
        assert differing(receive(receiver, 2).tensors, model(2)) == []


def two_trainers(rank: int, size: int, store: Store) -> None:
    """Trainers 0 and 1 reduce among themselves; trainer 1 takes no part in the weights."""
    group = groups(rank, size, store, trainer_ranks=[0, 1])
    if rank == 2:
        with pytest.raises(ValueError, match="not a trainer rank"):
            group.all_reduce_sum(torch.ones(1))
        assert differing(receive(WeightReceiver(group, PLAN), 1).tensors, model(1)) == []
        return
    values = torch.tensor([1.0, -2.0, 4.0]) * (rank + 1)  # [1, -2, 4] and [2, -4, 8]
    for reduce, expected in [
        (group.all_reduce_sum, [3.0, -6.0, 12.0]),
        (group.all_reduce_max, [2.0, -2.0, 8.0]),
        (group.all_reduce_min, [1.0, -4.0, 4.0]),
    ]:
        result = values.clone()
        reduce(result)
        assert result.tolist() == expected
    if rank == 0:
        sender = WeightSender(group, PLAN)
        sender.publish(1, model(1))
        sender.wait()
    else:
        with pytest.raises(ValueError, match="outside the weights group"):
            group.broadcast(torch.ones(1), 0, label="weights")


# ------------------------------------------------------------------------------------------------------ refused updates
class FlippedBit(ProcessGroups):
    """One bit of bucket 2 is wrong on arrival, in version 1 only."""

    def broadcast(self, tensor: torch.Tensor, root: int, *, label: str, async_op: bool = True) -> Transfer:
        transfer = super().broadcast(tensor, root, label=label, async_op=async_op)
        if "version 1, bucket 2 of" not in label:
            return transfer
        arrived = transfer.wait

        def wait(timeout_s: float) -> None:
            arrived(timeout_s)
            tensor[77] ^= 4

        transfer.wait = wait
        return transfer


def corrupted(rank: int, size: int, store: Store) -> None:
    """The rank with the wrong byte refuses version 1, the other takes it; both take version 2."""
    group = groups(rank, size, store, kind=FlippedBit if rank == 1 else ProcessGroups)
    if rank == 0:
        sender = WeightSender(group, PLAN)
        store.set("sent", f"{sender.publish(1, model(1)).checksums[1]:08x}")
        sender.publish(2, model(2))
        sender.wait()
        return
    receiver = WeightReceiver(group, PLAN)
    receiver.begin(1)
    if rank == 1:
        crc = "[0-9a-f]{8}"
        text = rf"rank 1, version 1 refused: bucket 2 of {NUM_BUCKETS} has CRC-32C {crc} here, {crc} at the sender"
        with pytest.raises(WeightError, match=text) as caught:
            finish(receiver)
        assert store.get("sent").decode() + " at the sender" in caught.value.reason
    else:
        assert differing(finish(receiver).tensors, model(1)) == []
    assert differing(receive(receiver, 2).tensors, model(2)) == []


def wrong_version(rank: int, size: int, store: Store) -> None:
    group = groups(rank, size, store)
    if rank == 0:
        sender = WeightSender(group, PLAN)
        for version in (8, 9):
            sender.publish(version, model(version))
        sender.wait()
        return
    receiver = WeightReceiver(group, PLAN)
    with pytest.raises(WeightError, match=f"rank {rank}, version 7 refused: version is 8, expected 7"):
        receive(receiver, 7)
    assert differing(receive(receiver, 9).tensors, model(9)) == []


def other_plan(rank: int, size: int, store: Store) -> None:
    """Rank 2 has other buckets: it and the sender say so before anything is sent; rank 1 agrees with the sender."""
    group = groups(rank, size, store, timeout_s=5.0)
    mine = BucketPlan.of(model(0), bucket_bytes=10_008) if rank == 2 else PLAN
    kind = WeightSender if rank == 0 else WeightReceiver
    if rank == 1:
        kind(group, mine)
        return
    with pytest.raises(WeightError, match=f"rank {rank}: .*{mine.fingerprint:016x}.* here but .* on rank {2 - rank}"):
        kind(group, mine)


def bad_tensors(rank: int, size: int, store: Store) -> None:
    """Weights that do not fit the plan are refused before anything is sent: the next version arrives."""
    group = groups(rank, size, store)
    if rank == 0:
        sender = WeightSender(group, PLAN)
        with pytest.raises(ValueError, match="last is "):
            sender.publish(1, model(1) | {"last": torch.zeros(999, 8)})
        sender.publish(1, model(1))
        sender.wait()
    else:
        assert differing(receive(WeightReceiver(group, PLAN), 1).tensors, model(1)) == []


# -------------------------------------------------------------------------------------------------- lost and late ranks
class DiesHalfway(ProcessGroups):
    """Killed in version 2 once the first half of the buckets has left."""

    def broadcast(self, tensor: torch.Tensor, root: int, *, label: str, async_op: bool = True) -> Transfer:
        if "version 2, " in label and f"bucket {NUM_BUCKETS // 2 + 1} of" in label:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().broadcast(tensor, root, label=label, async_op="version 2" not in label)


def torn(rank: int, size: int, store: Store) -> None:
    """Receivers of half an update raise in time and still hold the complete set of before; then they go on alone."""
    group = groups(rank, size, store, kind=DiesHalfway if rank == 0 else ProcessGroups)
    if rank == 0:
        sender = WeightSender(group, PLAN)
        sender.publish(1, model(1))
        sender.publish(2, model(2))
        raise AssertionError("should be dead")
    receiver = WeightReceiver(group, PLAN)
    held = {name: tensor.clone() for name, tensor in receive(receiver, 1).tensors.items()}  # as an engine loads them
    with pytest.raises(
        WeightError, match=rf"rank {rank}, version 2: (\d+) of {NUM_BUCKETS} buckets after \d"
    ) as caught:
        receive(receiver, 2)
    assert caught.value.code is Exit.FAILED  # not DEADLINE: a closed connection is noticed at once
    assert differing(held, model(1)) == []
    with pytest.raises(WeightError, match="version 3 not possible after: .*rebuild the groups"):
        receiver.begin(3)
    group.close(abort=True)
    rebuilt = groups(rank - 1, size - 1, store, generation=2)
    if rank == 1:
        sender = WeightSender(rebuilt, PLAN)
        sender.publish(3, model(3))
        sender.wait()
    else:
        assert differing(receive(WeightReceiver(rebuilt, PLAN), 3).tensors, model(3)) == []


def lost_receiver(rank: int, size: int, store: Store) -> None:
    """A rollout rank dies before it receives: the sender notices and closes, the other receiver notices that, long
    before any deadline. Then the rest is rebuilt without the lost rank."""
    group = groups(rank, size, store)
    if rank == 2:
        WeightReceiver(group, PLAN)
        await_ready(store, [1])
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        sender = WeightSender(group, PLAN)
        sender.publish(1, model(1))
        with pytest.raises(
            WeightError, match=rf"rank 0, version 1: \d+ of {NUM_BUCKETS} buckets after \d.*rebuild"
        ) as caught:
            sender.wait()
        with pytest.raises(WeightError, match="version 2 not possible after: .*rebuild"):
            sender.publish(2, model(2))
        group.close(abort=True)
    else:
        receiver = WeightReceiver(group, PLAN)
        receiver.begin(1)
        store.set("ready/1", "")
        with pytest.raises(WeightError, match=rf"rank 1, version 1: \d+ of {NUM_BUCKETS} buckets after \d") as caught:
            finish(receiver)
        group.close(abort=True)
    assert caught.value.code is Exit.FAILED  # not DEADLINE
    rebuilt = groups(rank, size - 1, store, generation=2)
    if rank == 0:
        sender = WeightSender(rebuilt, PLAN)
        sender.publish(2, model(2))
        sender.wait()
    else:
        assert differing(receive(WeightReceiver(rebuilt, PLAN), 2).tensors, model(2)) == []


def silent_sender(rank: int, size: int, store: Store) -> None:
    """The sender lives but sends nothing: the deadline ends the wait, with figures."""
    group = groups(rank, size, store, timeout_s=1.0)
    if rank == 0:
        WeightSender(group, PLAN)
        await_ready(store, [1, 2])
        return
    receiver = WeightReceiver(group, PLAN)
    with pytest.raises(
        WeightError, match=rf"rank {rank}, version 7: 0 of {NUM_BUCKETS} buckets after \d+\.\d s"
    ) as caught:
        receive(receiver, 7)
    assert caught.value.code is Exit.DEADLINE
    store.set(f"ready/{rank}", "")


class Slow(ProcessGroups):
    """Each of the first parts takes a moment; none is late by itself."""

    num_parts = 0

    def broadcast(self, tensor: torch.Tensor, root: int, *, label: str, async_op: bool = True) -> Transfer:
        self.num_parts += 1
        time.sleep(0.25 if self.num_parts < 8 else 0.0)
        return super().broadcast(tensor, root, label=label, async_op=async_op)


def slow_sender(rank: int, size: int, store: Store) -> None:
    """The deadline is that of the whole update, not of one bucket."""
    group = groups(rank, size, store, kind=Slow if rank == 0 else ProcessGroups, timeout_s=1.0)
    if rank == 0:
        sender = WeightSender(group, PLAN)
        with pytest.raises(WeightError):
            sender.publish(1, model(1))
            sender.wait()
        return
    receiver = WeightReceiver(group, PLAN)
    with pytest.raises(
        WeightError, match=rf"version 1: [1-9] of {NUM_BUCKETS} buckets after \d+\.\d s.*at the deadline"
    ):
        receive(receiver, 1)


def absent_receivers(rank: int, size: int, store: Store) -> None:
    """Nobody takes version 1: waiting for it, and publishing the next one, ends at the deadline."""
    group = groups(rank, size, store, timeout_s=1.0)
    if rank == 0:
        sender = WeightSender(group, PLAN)
        sender.publish(1, model(1))
        with pytest.raises(WeightError, match=rf"version 1: 0 of {NUM_BUCKETS} buckets after \d+\.\d s") as caught:
            sender.publish(2, model(2))
        assert caught.value.code is Exit.DEADLINE
        store.set("ready/0", "")
    else:
        WeightReceiver(group, PLAN)
        await_ready(store, [0])


def late_trainer(rank: int, size: int, store: Store) -> None:
    """A trainer rank that does not join an all-reduce is noticed by the other at the deadline."""
    group = groups(rank, size, store, trainer_ranks=[0, 1], timeout_s=1.0)
    if rank == 0:
        text = r"rank 0: all_reduce_max of 3 x torch.float32 over trainer ranks \[0, 1\] failed after \d+\.\d s"
        with pytest.raises(GroupError, match=text) as caught:
            group.all_reduce_max(torch.ones(3))
        assert caught.value.code is Exit.DEADLINE
        store.set("ready/0", "")
    else:
        await_ready(store, [0])


def missing_rank(rank: int, size: int, store: Store) -> None:
    """Rank 2 never comes; a generation that was tried cannot be tried again."""
    if rank == 2:
        return
    text = rf"rank {rank}, generation 1: ranks \[2\] of 3 did not come within 1\.0 s"
    with pytest.raises(GroupError, match=text) as caught:
        groups(rank, size, store, timeout_s=1.0)
    assert caught.value.code is Exit.DEADLINE
    with pytest.raises(GroupError, match="generation 1 was built before; count it up"):
        groups(rank, size, store)


def run_rank(scenario: str, rank: int, size: int, port: int) -> None:
    """Entry point of a rank's process; a failure is left in the store for the test to show."""
    torch.set_num_threads(1)
    store = open_store("127.0.0.1", is_master=False, world_size=size, port=port, timeout_s=30.0)
    try:
        globals()[scenario](rank, size, store)
    except BaseException:
        store.set(f"failure/{rank}", traceback.format_exc())
        raise SystemExit(1) from None
