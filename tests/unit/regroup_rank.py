"""One rank of test_regroup.py: `python -m tests.unit.regroup_rank RANK SIZE PORT VICTIM MOMENT`; prints what it got."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from areal_hpc.buckets import BucketPlan
from areal_hpc.exits import RunError
from areal_hpc.process_group import ProcessGroups, open_store
from areal_hpc.weights import WeightReceiver, WeightSender


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((1000,), float(version)), "b": torch.arange(5000.0) + version}


def finish(poll, timeout_s: float = 40.0):
    """Poll until something comes."""
    deadline_s = time.monotonic() + timeout_s
    while not (result := poll()):
        assert time.monotonic() < deadline_s, "nothing came"
        time.sleep(0.002)
    return result


def send(groups: ProcessGroups, plan: BucketPlan, members: list[int]) -> None:
    sender = WeightSender(groups, plan)
    sender.publish(0, weights(0))
    finish(sender.poll)
    time.sleep(1.0)  # the victim dies
    try:
        sender.publish(1, weights(1))
        finish(sender.poll)
        print("sent 1", flush=True)
    except RunError as error:
        print(f"torn: {error.reason}", flush=True)
    sender.hold(2, weights(2))
    sender.regroup(members, 1)
    finish(sender.poll)
    print(f"sent {sender.last.version}", flush=True)
    sender.publish(3, weights(3))
    finish(sender.poll)
    print(f"sent {sender.last.version}", flush=True)


def receive(groups: ProcessGroups, plan: BucketPlan, members: list[int], victim: int, moment: str) -> None:
    receiver = WeightReceiver(groups, plan)
    receiver.begin(0)
    finish(receiver.poll)
    if groups.rank == victim and moment == "idle":
        os.kill(os.getpid(), signal.SIGKILL)
    receiver.begin(1)
    if groups.rank == victim:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    deadline_s = time.monotonic() + 3.0  # or for ever, if this one waits for a rank that waits for the dead
    try:
        while time.monotonic() < deadline_s and receiver.poll() is None:
            time.sleep(0.002)
    except RunError as error:
        print(f"torn: {error.reason}", flush=True)
    receiver.regroup(members, 1)
    for number in (2, 3):
        ready = finish(receiver.poll)
        same = all(torch.equal(tensor, weights(ready.version)[name]) for name, tensor in ready.tensors.items())
        print(f"got {ready.version}, {'as sent' if same else 'WRONG'}", flush=True)
        if number == 2:
            receiver.begin(3)


def main() -> None:
    rank, size, port, victim = map(int, sys.argv[1:5])
    store = open_store("127.0.0.1", is_master=False, world_size=size, port=port, timeout_s=60.0)
    groups = ProcessGroups(
        store, backend="gloo", rank=rank, size=size, trainer_ranks=[0], generation=0, timeout_s=60.0, interface="lo"
    )
    plan = BucketPlan.of(weights(0), 4096)
    members = [other for other in range(size) if other != victim]
    if rank == 0:
        send(groups, plan, members)
    else:
        receive(groups, plan, members, victim, sys.argv[5])
    groups.post("done", "yes")  # nobody leaves before all have what they wait for
    for other in members:
        groups.fetch("done", other)
    sys.stdout.flush()
    os._exit(0)  # operations of the torn group are still pending


if __name__ == "__main__":
    main()
