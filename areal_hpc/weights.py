"""Versioned weights from the first trainer rank to every rollout rank, in buckets, while both go on working.

Each side holds one more copy of the model: the sender's snapshot (training may change the weights at once) and the
receiver's shadow (what is being received never touches what is being used).

One update on the wire, each item a broadcast over the weights group, in this order:
    header   int64 [3]                version, fingerprint of the plan, number of bytes
    bucket i uint8 [<= bucket_bytes]  i = 0 .. n-1
    trailer  int64 [1 + n]            version, CRC-32C of each bucket
Checksums come last so that the sender hashes bucket i while it travels. A receiver hashes it in a helper thread while
bucket i+1 arrives, so that a decoding loop pays for one look at a flag per token.

Departs from AReaL: no barrier before or after, generation is not paused while weights travel, and a set is verified
byte by byte before it can be used.

Buffers live on `device`. On a GPU the snapshot is copied on a side stream and hashed through host memory; that path
(NCCL) was never run here, only Gloo on CPUs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import crc32c
import torch
from torch import Tensor

from areal_hpc.buckets import BucketPlan
from areal_hpc.exits import Exit, RunError
from areal_hpc.process_group import GroupError, ProcessGroups, Rebuild, Transfer
from areal_hpc.waiting import Backoff

WHICHEVER = -1
"""Instead of a version: the one that comes."""


class WeightError(RunError):
    """A weight update that must not be used; the weights in use stay as they are."""


@dataclass(slots=True)
class _Update:
    """One update under way; the helper thread counts `num_received` and, at its end, sets `is_torn` and `outcome`."""

    version: int
    transfers: list[Transfer]
    started_s: float
    num_received: int = 0
    is_torn: bool = False
    outcome: ReadyWeights | WeightError | None = None


class _Side:
    """What sender and receiver share: the plan all agree on, and buffers allocated and touched once for all updates.

    Args:
        groups: those of the current generation.
        plan: equal on all ranks.
        root: rank of the sender.
        device: where the buffers live.

    Raises:
        WeightError: another rank of the weights group has another plan; names it and both fingerprints.
        GroupError: another rank did not state its plan within the deadline of the groups.
    """

    def __init__(
        self, groups: ProcessGroups, plan: BucketPlan, root: int = 0, *, device: torch.device | str = "cpu"
    ) -> None:
        self._device = device = torch.device(device)
        self.groups, self.plan, self.root = groups, plan, root
        self._allocate()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._broken: tuple[Exit, str] | None = None
        self._rebuild: Rebuild | None = None
        self._agree()

    def _allocate(self) -> None:
        self._flat = torch.zeros(self.plan.num_bytes, dtype=torch.uint8, device=self._device)
        self._buckets = [self._flat[self.plan.bucket(index)] for index in range(self.plan.num_buckets)]
        self._header = torch.zeros(3, dtype=torch.int64, device=self._device)
        self._trailer = torch.zeros(1 + self.plan.num_buckets, dtype=torch.int64, device=self._device)

    def _agree(self) -> None:
        """Compare plans before anything is broadcast: buffers of different size would crash the library."""
        self.groups.post("plan", str(self.plan))
        for rank in self.groups.rollout_ranks if self.groups.rank == self.root else [self.root]:
            theirs = self.groups.fetch("plan", rank)
            if theirs != str(self.plan):
                where = f"rank {self.groups.rank}: the plan of the weights is"
                raise WeightError(Exit.FAILED, f"{where} {self.plan} here but {theirs} on rank {rank}")

    def regroup(self, members: Sequence[int], generation: int) -> None:
        """Give up what is under way and build the next weights group of these ranks, the sender first, while `poll`
        looks at it; it raises WeightError when that fails."""
        self._broken = None
        self._rebuild = Rebuild(self.groups, members, generation)

    def _is_rebuilt(self) -> bool:
        """True once, when the new group is there."""
        try:
            if self._rebuild is None or not self._rebuild.poll():
                return False
        except GroupError as error:
            self._rebuild = None
            raise self._break(error.code, error.reason) from None
        self._rebuild = None
        return True

    def _broadcast(self, tensor: Tensor, version: int, what: str) -> Transfer:
        try:
            return self.groups.broadcast(tensor, self.root, label=f"version {version}, {what}")
        except GroupError as error:
            raise self._break(error.code, f"rank {self.groups.rank}: {error.reason}") from None

    def _bucket_name(self, index: int) -> str:
        return f"bucket {index + 1} of {self.plan.num_buckets}"

    def _check_intact(self, version: int) -> None:
        if self._broken is not None:
            code, reason = self._broken
            raise WeightError(code, f"version {version} not possible after: {reason}")

    def _break(self, code: Exit, reason: str) -> WeightError:
        """From here on the ranks are out of step; nothing more can travel over these groups."""
        self._broken = (code, reason)
        return WeightError(code, reason)

    def _torn(self, update: _Update, cause: Exception) -> WeightError:
        """What a person needs to know about an update that has ended in the middle."""
        code, text = (cause.code, cause.reason) if isinstance(cause, RunError) else (Exit.FAILED, repr(cause))
        done, elapsed_s = max(update.num_received, 0), time.monotonic() - update.started_s
        so_far = f"{done} of {self.plan.num_buckets} buckets after {elapsed_s:.1f} s"
        reason = f"rank {self.groups.rank}, version {update.version}: {so_far}; rebuild the groups ({text})"
        return WeightError(code, reason)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Put device work on a side stream: after what the caller's stream has queued, before what it queues next."""
        if self._stream is None:
            yield
            return
        caller = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)


# ---------------------------------------------------------------------------------------------------------- the sender
@dataclass(frozen=True, slots=True)
class Manifest:
    """What was published: CRC-32C of each bucket, and the fingerprint of the plan."""

    version: int
    num_bytes: int
    checksums: tuple[int, ...]
    fingerprint: int


@dataclass(frozen=True, slots=True)
class Sent:
    """An update that has left: `snapshot_s` is how long publish() held up training once the update before had left,
    `broadcast_s` runs from the same moment until poll() or wait() saw the last receiver served."""

    version: int
    num_bytes: int
    snapshot_s: float
    broadcast_s: float


class WeightSender(_Side):
    """Publishes versions from the root of the weights group."""

    last: Sent | None = None
    """The newest update that has left."""

    def __init__(
        self, groups: ProcessGroups, plan: BucketPlan, root: int = 0, *, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(groups, plan, root, device=device)
        self._pending: deque[Transfer] = deque()
        self._version = -1
        self._checksums: list[int] = []
        self._started_s = self._snapshot_s = 0.0

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> Manifest:
        """Snapshot the weights and start to broadcast them; the caller may change them on return.

        Waits first until the update before has left, so two versions never mix.

        Raises:
            WeightError: the update before did not leave in time.
            ValueError: the tensors do not fit the plan; nothing was sent.
        """
        self.wait()
        self._check_intact(version)
        self.plan.match(tensors)
        self._version, self._checksums = version, []
        self._send_all(self.plan.fill(self._flat, tensors))
        self._snapshot_s = time.monotonic() - self._started_s
        return Manifest(version, self.plan.num_bytes, tuple(self._checksums), self.plan.fingerprint)

    def hold(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Snapshot the weights only: the group is torn, and they leave when the next one is built."""
        began_s = time.monotonic()
        self._pending.clear()
        self._version = version
        with self._beside():
            self._checksums = [_checksum(self._buckets[index]) for index in self.plan.fill(self._flat, tensors)]
        self._snapshot_s = time.monotonic() - began_s

    def _send_all(self, filled: Iterable[int]) -> None:
        """Broadcast the snapshot; `filled` yields the buckets as they are ready, whose checksums follow if unknown."""
        self._started_s = time.monotonic()
        with self._beside():
            self._header.copy_(torch.tensor([self._version, self.plan.fingerprint, self.plan.num_bytes]))
            self._send(self._header, "header")
            for index in filled:
                self._send(self._buckets[index], self._bucket_name(index))
                if len(self._checksums) <= index:
                    self._checksums.append(_checksum(self._buckets[index]))
            self._trailer.copy_(torch.tensor([self._version, *self._checksums]))
            self._send(self._trailer, "checksums")

    def poll(self) -> bool:
        """True when no update is under way any more, nor a group in the making; never blocks.

        Raises:
            WeightError: the update failed, or is not over at the deadline of the groups; they must be rebuilt.
        """
        if self._is_rebuilt():
            self._pending.clear()
            self._send_all(range(self.plan.num_buckets))
        if self._rebuild is not None:
            return False
        while self._pending and (self._pending[0].done() or time.monotonic() > self._deadline_s):
            self._finish_next(0.0)
        return not self._pending

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until no update is under way; the default deadline is that of the groups, counted from publish().

        Raises:
            WeightError: the update failed, or is not over at the deadline; the groups must be rebuilt.
        """
        deadline_s = self._deadline_s if timeout_s is None else time.monotonic() + timeout_s
        while self._pending:
            self._finish_next(deadline_s - time.monotonic())

    @property
    def _deadline_s(self) -> float:
        return self._started_s + self.groups.timeout_s

    def _send(self, tensor: Tensor, what: str) -> None:
        self._pending.append(self._broadcast(tensor, self._version, what))

    def _finish_next(self, timeout_s: float) -> None:
        try:
            self._pending[0].wait(timeout_s)
        except GroupError as error:
            num_sent = self.plan.num_buckets + 1 - len(self._pending)
            self._pending.clear()
            torn = self._torn(_Update(self._version, [], self._started_s, num_sent), error)
            raise self._break(torn.code, torn.reason) from None
        self._pending.popleft()
        if not self._pending:
            elapsed_s = time.monotonic() - self._started_s
            self.last = Sent(self._version, self.plan.num_bytes, self._snapshot_s, elapsed_s)


# -------------------------------------------------------------------------------------------------------- the receiver
@dataclass(frozen=True, slots=True)
class ReadyWeights:
    """A complete, verified set. `tensors` are views of the shadow buffer, valid until the next begin()."""

    version: int
    tensors: dict[str, Tensor]
    num_bytes: int
    receive_s: float


class WeightReceiver(_Side):
    """Takes versions into a shadow buffer on a rollout rank."""

    _update: _Update | None = None

    def begin(self, version: int) -> None:
        """Start to receive `version`, or WHICHEVER comes; the views of the set before become invalid.

        Raises:
            WeightError: another version is still arriving, or the groups broke in an earlier update.
        """
        self._check_intact(version)
        if self._update is not None:
            where = f"rank {self.groups.rank}: version {self._update.version}"
            raise WeightError(Exit.FAILED, f"{where} is still arriving, cannot begin version {version}")
        parts = [("header", self._header)]
        parts += [(self._bucket_name(index), bucket) for index, bucket in enumerate(self._buckets)]
        parts += [("checksums", self._trailer)]
        started_s = time.monotonic()
        transfers = [self._broadcast(part, version, what) for what, part in parts]
        self._update = _Update(version, transfers, started_s)
        threading.Thread(target=self._receive, args=[self._update], name=f"weights-{version}", daemon=True).start()

    def regroup(self, members: Sequence[int], generation: int) -> None:
        """Once the group is there, the next set is whichever the sender sends first."""
        if self._update is not None and self._update.outcome is None:  # what it still brings must not meet new buffers
            self._allocate()
        self._update = None
        super().regroup(members, generation)

    def poll(self) -> ReadyWeights | None:
        """The complete set once it is here and verified, else None. Looks at a flag; call it between two tokens.

        Raises:
            WeightError: version, plan or a checksum is wrong (the next version may still be received), or the transfer
                failed or is not over at the deadline of the groups (then they must be rebuilt).
        """
        if self._is_rebuilt():
            self.begin(WHICHEVER)
        update = self._update
        if update is None:
            return None
        if update.outcome is None:
            if (
                time.monotonic() < update.started_s + self.groups.timeout_s + 1.0
            ):  # the helper thread has the first word
                return None
            late = GroupError(Exit.DEADLINE, "deadline passed while waiting for the device")
            update.is_torn, update.outcome = True, self._torn(update, late)
        self._update = None
        if isinstance(update.outcome, WeightError):
            raise self._break(update.outcome.code, update.outcome.reason) if update.is_torn else update.outcome
        return update.outcome

    def _receive(self, update: _Update) -> None:
        """Body of the helper thread; whatever goes wrong must reach the rank's own thread through poll()."""
        try:
            with self._beside():
                wrong = self._difference(update.version, self._collect(update))
        except Exception as error:
            update.transfers.clear()  # they would keep the connections open
            update.is_torn, update.outcome = True, self._torn(update, error)
            return
        if wrong is None:
            elapsed_s = time.monotonic() - update.started_s
            tensors = self.plan.views(self._flat)
            update.outcome = ReadyWeights(int(self._header[0]), tensors, self.plan.num_bytes, elapsed_s)
        else:
            reason = f"rank {self.groups.rank}, version {update.version} refused: {wrong}"
            update.outcome = WeightError(Exit.FAILED, reason)

    def _collect(self, update: _Update) -> list[int]:
        """Wait for all parts in order; returns the checksums of the buckets as they lie in the shadow buffer."""
        deadline_s = update.started_s + self.groups.timeout_s
        header, *transfers, trailer = update.transfers
        _sleep_until(header, deadline_s)
        checksums = []
        for transfer, bucket in zip(transfers, self._buckets, strict=True):
            _sleep_until(transfer, deadline_s)
            checksums.append(_checksum(bucket))
            update.num_received += 1
        _sleep_until(trailer, deadline_s)
        return checksums

    def _difference(self, version: int, checksums: list[int]) -> str | None:
        """What differs between the update that has arrived and the one expected, if anything."""
        header, trailer = self._header.tolist(), self._trailer.tolist()
        version = header[0] if version == WHICHEVER else version
        expected = [version, self.plan.fingerprint, self.plan.num_bytes, version]
        names = ["version", "fingerprint of the plan", "number of bytes", "version after the last bucket"]
        for name, mine, theirs in zip(names, expected, [*header, trailer[0]], strict=True):
            if mine != theirs:
                return f"{name} is {theirs}, expected {mine}"
        for index, (mine, theirs) in enumerate(zip(checksums, trailer[1:], strict=True)):
            if mine != theirs:
                return f"{self._bucket_name(index)} has CRC-32C {mine:08x} here, {theirs:08x} at the sender"
        return None


# ------------------------------------------------------------------------------------------------------- shared by both
def _checksum(bucket: Tensor) -> int:
    """CRC-32C; the package uses the CPU's instruction and lets other threads run meanwhile."""
    return crc32c.crc32c(bucket.cpu().numpy().data)


def _sleep_until(transfer: Transfer, deadline_s: float) -> None:
    """Wait without a blocking call into torch: a daemon thread inside one can crash the interpreter at exit."""
    pause = Backoff(longest_s=0.005)
    while not transfer.done():
        if time.monotonic() > deadline_s:
            raise GroupError(Exit.DEADLINE, f"{transfer.label} is not here at the deadline")
        pause.sleep()
    transfer.wait(0.0)
