"""`areal-hpc bench weights`: a versioned weight update against one raw broadcast of the same bytes.

One sender and some receivers, processes of their own on this machine, take turns: an update through WeightSender and
WeightReceiver (snapshot, buckets, checksums, verification, polled every millisecond as a decoding loop would), then one
broadcast of one buffer, unchecked. Both count from the moment all receivers have posted their receives until the last
one holds everything; the monotonic clock of one machine serves all of them.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from areal_hpc.buckets import BUCKET_BYTES, BucketPlan
from areal_hpc.process_group import ProcessGroups, open_store, store_port
from areal_hpc.weights import WeightReceiver, WeightSender

GOAL = 0.8
MIB = 2**20
DEADLINE_S = 120.0


def main(argv: list[str]) -> int:
    """Run the benchmark, or, with --rank, one of its processes."""
    options = parse(argv)
    if options.rank is not None:
        torch.set_num_threads(1)
        bench = Sender(options) if options.rank == 0 else Receiver(options)
        bench.run()
        return 0
    from areal_hpc.bench.report import report

    result = measure(argv, options)
    report(
        "weights",
        "MB/s",
        [result["num_bytes"] / 1e6 / s for s in result["ours_s"]],
        [result["num_bytes"] / 1e6 / s for s in result["raw_s"]],
        goal=GOAL,
        rows=table(options, result),
    )
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="areal-hpc bench weights", description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the model (default: %(default)s)")
    parser.add_argument("--receivers", type=int, default=2, help="number of rollout ranks (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="turns of each side (default: %(default)s)")
    parser.add_argument("--bucket-mib", type=float, default=BUCKET_BYTES / MIB, help="(default: %(default)s)")
    parser.add_argument("--interface", default="lo", help="network interface (default: %(default)s)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def measure(argv: list[str], options: argparse.Namespace) -> dict:
    """Start the ranks and return what rank 0 measured; leaves none behind."""
    store = open_store("127.0.0.1", is_master=True, world_size=1 + options.receivers)
    command = [sys.executable, "-c", "import sys; from areal_hpc.bench.weights import main; main(sys.argv[1:])", *argv]
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank), "--port", str(store_port(store))],
            stdout=subprocess.PIPE if rank == 0 else None,
        )
        for rank in range(1 + options.receivers)
    ]
    try:
        output, _ = ranks[0].communicate(timeout=60 + options.repeats * DEADLINE_S)
        return json.loads(output)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def table(options: argparse.Namespace, result: dict) -> list[tuple[str, str]]:
    """Further rows of the report."""
    received = result["receivers"]
    return [
        (
            "model",
            f"{result['num_bytes'] / MIB:.0f} MiB, {result['num_tensors']} tensors, {result['num_buckets']} buckets",
        ),
        ("receivers", str(options.receivers)),
        ("training held up by publish()", f"{statistics.median(result['snapshot_s']) * 1e3:.0f} ms"),
        ("poll() between two tokens", f"{max(r['poll_us'] for r in received):.2f} us median, worst rank"),
        ("memory of a receiver", f"{max(r['memory'] for r in received):.2f} x the model"),
        (
            "page faults of an update",
            f"{max(r['faults'] for r in received)} on a receiver, {result['faults']} on the sender",
        ),
    ]


def synthetic_model(num_bytes: int) -> dict[str, Tensor]:
    """An embedding of a quarter of the model, then square matrices with small norms between them; bfloat16."""
    tensors = {"embedding": torch.ones(num_bytes // 4 // 2048, 1024, dtype=torch.bfloat16)}
    size = tensors["embedding"].nbytes
    while size < num_bytes:
        layer = {"matrix": torch.ones(1024, 1024, dtype=torch.bfloat16), "norm": torch.ones(1024, dtype=torch.bfloat16)}
        tensors |= {f"layer{len(tensors)}.{name}": tensor for name, tensor in layer.items()}
        size += sum(tensor.nbytes for tensor in layer.values())
    return tensors


class Side:
    """What both kinds of rank have: the groups, the model's plan, and a buffer for the raw broadcast."""

    def __init__(self, options: argparse.Namespace) -> None:
        size = 1 + options.receivers
        store = open_store("127.0.0.1", is_master=False, world_size=size, port=options.port, timeout_s=60.0)
        self.groups = ProcessGroups(
            store,
            backend="gloo",
            rank=options.rank,
            size=size,
            trainer_ranks=[0],
            generation=1,
            timeout_s=DEADLINE_S,
            interface=options.interface,
        )
        self.weights = synthetic_model(options.mib * MIB)
        self.plan = BucketPlan.of(self.weights, int(options.bucket_mib * MIB))
        self.raw = torch.ones(self.plan.num_bytes, dtype=torch.uint8)
        self.turns = range(1 + options.repeats)  # the first is a warm-up
        self.faults = 0

    def run(self) -> None:
        for turn in self.turns:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            self.update(turn)
            self.faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            self.raw_broadcast(turn)
        self.finish()

    def update(self, turn: int) -> None: ...

    def raw_broadcast(self, turn: int) -> None: ...

    def finish(self) -> None: ...


class Sender(Side):
    """Rank 0: starts each turn when all receivers are ready, and takes the time of the last one."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.sender = WeightSender(self.groups, self.plan)
        self.ours_s: list[float] = []
        self.raw_s: list[float] = []
        self.snapshot_s: list[float] = []

    def update(self, turn: int) -> None:
        began_s = self.all_ready("update", turn)
        self.sender.publish(turn, self.weights)
        self.sender.wait()
        assert self.sender.last is not None
        self.snapshot_s.append(self.sender.last.snapshot_s)
        self.ours_s.append(self.last_end("update", turn) - began_s)

    def raw_broadcast(self, turn: int) -> None:
        began_s = self.all_ready("raw", turn)
        self.groups.broadcast(self.raw, 0, label="raw broadcast", async_op=False)
        self.raw_s.append(self.last_end("raw", turn) - began_s)

    def all_ready(self, kind: str, turn: int) -> float:
        for rank in self.groups.rollout_ranks:
            self.groups.fetch(f"{kind}-ready-{turn}", rank)
        return time.monotonic()

    def last_end(self, kind: str, turn: int) -> float:
        return max(float(self.groups.fetch(f"{kind}-end-{turn}", rank)) for rank in self.groups.rollout_ranks)

    def finish(self) -> None:
        result = {
            "num_bytes": self.plan.num_bytes,
            "num_tensors": len(self.plan.slots),
            "num_buckets": self.plan.num_buckets,
            "ours_s": self.ours_s[1:],
            "raw_s": self.raw_s[1:],
            "snapshot_s": self.snapshot_s[1:],
            "faults": self.faults,
            "receivers": [json.loads(self.groups.fetch("result", rank)) for rank in self.groups.rollout_ranks],
        }
        print(json.dumps(result))


class Receiver(Side):
    """A rollout rank that does nothing but poll every millisecond."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        before = resident_bytes()
        self.receiver = WeightReceiver(self.groups, self.plan)
        self.memory_before = before
        self.poll_s: list[float] = []

    def update(self, turn: int) -> None:
        self.receiver.begin(turn)
        self.groups.post(f"update-ready-{turn}", "")
        ready = None
        while ready is None:
            time.sleep(0.001)
            began_s = time.perf_counter()
            ready = self.receiver.poll()
            self.poll_s.append(time.perf_counter() - began_s)
        self.groups.post(f"update-end-{turn}", repr(time.monotonic()))

    def raw_broadcast(self, turn: int) -> None:
        transfer = self.groups.broadcast(self.raw, 0, label="raw broadcast")
        self.groups.post(f"raw-ready-{turn}", "")
        transfer.wait(DEADLINE_S)
        self.groups.post(f"raw-end-{turn}", repr(time.monotonic()))

    def finish(self) -> None:
        result = {
            "poll_us": statistics.median(self.poll_s) * 1e6,
            "memory": (resident_bytes() - self.memory_before) / self.plan.num_bytes,
            "faults": self.faults,
        }
        self.groups.post("result", json.dumps(result))


def resident_bytes() -> int:
    """Memory of this process that is really there."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
