"""Process groups over trainer and rollout ranks: the one door to torch.distributed.

Two groups carry all collectives: the weights group (first trainer rank and every rollout rank) and the trainer group.
The other trainer ranks stay out of the weights group: they hold the weights already, would need one more copy of the
model to receive them, and a busy one would hold up every update.

The groups are bootstrapped from a key-value store whose address travels over MPI, so no port is fixed and no
environment variable is needed. When a rollout rank is lost, the others build the next generation of the weights group
on the same store (`Rebuild`), while the trainer group goes on. The store should therefore live in a process whose death
ends the run anyway.

Gloo (CPU) is what the tests run. NCCL takes the same path with tensors on this rank's GPU, but was never run here.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor

from areal_hpc.exits import Exit, RunError

Store = dist.Store
WeightsGroup: TypeAlias = Any
"""A process group of torch, or one of its backends alone; they have the same `broadcast`."""


class GroupError(RunError):
    """A collective failed or did not end in time. Close the groups, and build the next generation."""


def open_store(host: str, is_master: bool, world_size: int, port: int = 0, timeout_s: float = 300.0) -> dist.TCPStore:
    """Open the store in which ranks find each other.

    Args:
        host: name or address of the master, as seen by all ranks.
        is_master: this process keeps the store and lives as long as the groups.
        world_size: number of processes that will use the store.
        port: 0 on the master lets the system choose; the others take the master's `store_port`.
        timeout_s: how long to try to connect, and to wait for a key.

    Raises:
        GroupError: the address cannot be bound, or nobody answers there.
    """
    try:
        return dist.TCPStore(host, port, world_size, is_master, timeout=_seconds(timeout_s), wait_for_workers=False)
    except RuntimeError as error:
        does = "keep" if is_master else "reach"
        raise GroupError(
            _code(error), f"cannot {does} the store at {host}:{port} ({timeout_s:.0f} s): {_line(error)}"
        ) from None


def store_port(store: dist.TCPStore) -> int:
    """The port the store listens on, to be told to the other ranks."""
    return store.port


class Transfer:
    """A collective under way; `label` says to a person what it carries."""

    def __init__(self, label: str, work: dist.Work) -> None:
        self.label = label
        self._work: dist.Work | None = work
        self._failure: GroupError | None = None

    def done(self) -> bool:
        """True when it has ended, well or badly; never blocks."""
        return self._work is None or self._work.is_completed()

    def wait(self, timeout_s: float) -> None:
        """Block until it has ended.

        Raises:
            GroupError: it failed, or is not over after `timeout_s`, and is given up.
        """
        started_s = time.monotonic()
        try:
            if self._work is not None:
                # 0 would mean "no deadline"; an explicit one makes NCCL block the host, too
                self._work.wait(_seconds(max(timeout_s, 0.001)))
        except RuntimeError as error:
            elapsed_s = time.monotonic() - started_s
            self._failure = GroupError(_code(error), f"{self.label} failed after {elapsed_s:.1f} s: {_line(error)}")
        # a work object keeps its connections open: peers would not see close() while someone holds the exception
        self._work = None
        if self._failure is not None:
            raise self._failure


class ProcessGroups:
    """One generation of the two groups; all ranks build it at the same time.

    Args:
        store: from open_store, the same one on all ranks.
        backend: "gloo" or "nccl".
        rank, size: position among the trainer and rollout ranks of this generation, trainers first.
        trainer_ranks: 0 .. T-1.
        generation: counts up with every rebuild; a number must not be used twice.
        timeout_s: deadline of every operation, and of the meeting itself.
        interface: network interface, for instance "ib0" or "lo"; None: the library chooses.

    Raises:
        GroupError: ranks are missing after `timeout_s` (it names them), or the generation was used before.
        ValueError: contradicting arguments.
    """

    def __init__(
        self,
        store: Store,
        *,
        backend: str,
        rank: int,
        size: int,
        trainer_ranks: Sequence[int],
        generation: int,
        timeout_s: float,
        interface: str | None = None,
    ) -> None:
        if list(trainer_ranks) != list(range(len(trainer_ranks))) or not 0 < len(trainer_ranks) <= size:
            raise ValueError(f"trainer_ranks must be 0 .. T-1 within {size} ranks, got {list(trainer_ranks)}")
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not within 0 .. {size - 1}")
        if dist.is_initialized():
            raise ValueError("the groups of the generation before are still open; close them first")
        self.rank, self.size, self.generation, self.timeout_s = rank, size, generation, timeout_s
        self.trainer_ranks = list(trainer_ranks)
        self.rollout_ranks = list(range(len(trainer_ranks), size))
        self.root = 0
        self._weights: WeightsGroup | None = None
        self._trainers: dist.ProcessGroup | None = None
        self._root_store = store
        self._left: list[object] = []  # operations that never end keep a group's connections; so nobody waits for them
        self._store = dist.PrefixStore(f"generation{generation}", store)
        self._meet()
        self._connect(backend, interface)
        self._backend = backend

    def _meet(self) -> None:
        """Wait for all ranks, so that the error names those who did not come."""
        if self._store.add(f"met/{self.rank}", 1) > 1:
            raise GroupError(
                Exit.FAILED, f"rank {self.rank}: generation {self.generation} was built before; count it up"
            )
        keys = {rank: f"met/{rank}" for rank in range(self.size)}
        try:
            self._store.wait(list(keys.values()), _seconds(self.timeout_s))
        except RuntimeError as error:
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            reason = f"ranks {missing} of {self.size} did not come within {self.timeout_s:.1f} s ({_line(error)})"
            raise GroupError(Exit.DEADLINE, f"rank {self.rank}, generation {self.generation}: {reason}") from None

    def _connect(self, backend: str, interface: str | None) -> None:
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
        # the default NCCL watchdog kills the process at a timeout; our deadlines raise, so that the rank can go on
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        timeout = _seconds(self.timeout_s)
        try:
            dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.size, timeout=timeout)
            self._trainers = dist.new_group(self.trainer_ranks, timeout=timeout)
            self._weights = dist.new_group([self.root, *self.rollout_ranks], timeout=timeout)
        except RuntimeError as error:
            self.close()
            what = f"rank {self.rank}, generation {self.generation}: {self.size} ranks could not connect over {backend}"
            where = f" on interface {interface}" if interface else ""
            raise GroupError(_code(error), f"{what}{where} within {self.timeout_s:.1f} s: {_line(error)}") from None

    def broadcast(self, tensor: Tensor, root: int, *, label: str, async_op: bool = True) -> Transfer:
        """Send `tensor` from `root` to the weights group, in place; all members call it in the same order.

        The tensor must stay untouched until the transfer is done. With `async_op` false it is done on return.

        Raises:
            ValueError: this rank is not in the weights group.
            GroupError: only when waited for; names `label`.
        """
        if self.rank != self.root and self.rank not in self.rollout_ranks:
            raise ValueError(f"rank {self.rank} is a trainer rank outside the weights group; it cannot join {label}")
        transfer = _start(label, _broadcast, tensor, root, group=self._weights)
        if not async_op:
            transfer.wait(self.timeout_s)
        return transfer

    def weights_group(self, members: Sequence[int], generation: int) -> WeightsGroup:
        """Build a weights group of these ranks, the root first; all of them call it. Blocks, so call it in a thread.

        Raises:
            GroupError: ranks are missing at the deadline of the groups, or they could not connect.
        """
        store = dist.PrefixStore(f"weights{generation}", self._root_store)
        where = f"rank {self.rank}: weights group {generation} of ranks {list(members)}"
        position, timeout = list(members).index(self.rank), _seconds(self.timeout_s)
        try:
            if self._backend == "gloo":
                return dist.ProcessGroupGloo(store, position, len(members), timeout)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, position, len(members), options)
        except RuntimeError as error:
            raise GroupError(_code(error), f"{where} could not be built: {_line(error)}") from None

    def adopt(self, group: WeightsGroup, members: Sequence[int]) -> None:
        """Use this weights group from now on; what is pending in the one before is given up."""
        if self._backend == "nccl" and self._weights is not None:
            self._weights.abort()
        self._left.append(self._weights)
        self._weights, self.rollout_ranks = group, list(members[1:])

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over the trainer ranks. Raises GroupError at the deadline."""
        self._reduce(tensor, dist.ReduceOp.SUM, "all_reduce_sum")

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Replace `tensor` by its maximum over the trainer ranks. Raises GroupError at the deadline."""
        self._reduce(tensor, dist.ReduceOp.MAX, "all_reduce_max")

    def all_reduce_min(self, tensor: Tensor) -> None:
        """Replace `tensor` by its minimum over the trainer ranks. Raises GroupError at the deadline."""
        self._reduce(tensor, dist.ReduceOp.MIN, "all_reduce_min")

    def _reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, name: str) -> None:
        label = f"rank {self.rank}: {name} of {tensor.numel()} x {tensor.dtype} over trainer ranks {self.trainer_ranks}"
        if self.rank not in self.trainer_ranks:
            raise ValueError(f"{label}: not a trainer rank")
        if len(self.trainer_ranks) == 1:
            return
        _start(label, dist.all_reduce, tensor, op, group=self._trainers).wait(self.timeout_s)

    def post(self, key: str, text: str) -> None:
        """Leave a short text for the other ranks of this generation."""
        self._store.set(f"{key}/{self.rank}", text)

    def fetch(self, key: str, rank: int) -> str:
        """The text that `rank` posted under `key`. Raises GroupError when there is none within the deadline."""
        try:
            self._store.wait([f"{key}/{rank}"], _seconds(self.timeout_s))
        except RuntimeError as error:
            reason = f"rank {rank} posted no {key} within {self.timeout_s:.1f} s"
            raise GroupError(Exit.DEADLINE, f"rank {self.rank}: {reason} ({_line(error)})") from None
        return self._store.get(f"{key}/{rank}").decode()

    def close(self, *, abort: bool = False) -> None:
        """Leave the groups; returns at once and may be called twice.

        Operations still pending keep their tensors until they fail: when the peer closes, at the latest at their
        deadline. With Gloo the process cannot end by itself before that (os._exit can).

        Args:
            abort: a peer is lost: give up pending operations. NCCL needs it (not run here), Gloo ignores it.
        """
        if not dist.is_initialized():
            return
        for group in (self._weights, self._trainers) if abort else ():
            if isinstance(group, dist.ProcessGroup):
                group.abort()
        self._weights = self._trainers = None  # the last reference: peers see the connections close
        dist.destroy_process_group()


class Rebuild:
    """The next weights group on its way, in a thread of its own: the others may be slow to come, or dead."""

    def __init__(self, groups: ProcessGroups, members: Sequence[int], generation: int) -> None:
        self._groups, self._members, self._generation = groups, list(members), generation
        self._built: WeightsGroup | None = None
        self._failure: GroupError | None = None
        self._thread = threading.Thread(target=self._build, name=f"regroup-{generation}", daemon=True)
        self._thread.start()

    def _build(self) -> None:
        try:
            self._built = self._groups.weights_group(self._members, self._generation)
        except GroupError as error:
            self._failure = error

    def poll(self) -> bool:
        """True once the groups have adopted it; never blocks. Raises GroupError when it could not be built."""
        if self._thread.is_alive():
            return False
        if self._built is None:
            raise self._failure or GroupError(Exit.FAILED, f"weights group {self._generation} could not be built")
        self._groups.adopt(self._built, self._members)
        return True


def _broadcast(tensor: Tensor, root: int, *, group: WeightsGroup, async_op: bool) -> dist.Work:
    return group.broadcast(tensor, root)


def _start(label: str, collective: Callable[..., Any], *args: Any, group: WeightsGroup | None) -> Transfer:
    if group is None:
        raise GroupError(Exit.FAILED, f"{label}: the groups are closed")
    try:
        return Transfer(label, collective(*args, group=group, async_op=True))
    except RuntimeError as error:
        raise GroupError(_code(error), f"{label} could not start: {_line(error)}") from None


def _seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


def _line(error: Exception) -> str:
    """The part of a torch error that a person can use: its first sentence, without the place in the C++ source."""
    line = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(". This is typically")[0][:200]


def _code(error: Exception) -> Exit:
    text = str(error).lower()
    return Exit.DEADLINE if "timed out" in text or "timeout" in text else Exit.FAILED
