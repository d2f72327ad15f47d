"""Where a model's tensors lie in one flat byte buffer, and where that buffer is cut into buckets.

Buckets are slices of the buffer, so a tensor may span several and is still one view.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes: a cache line, and enough for a view of any dtype."""

BUCKET_BYTES = 8 * 2**20
"""Small enough to overlap well, large enough to keep calls rare (measured with `areal-hpc bench weights`)."""

Entry = tuple[str, Sequence[int], torch.dtype]
"""(name, shape, dtype) of one tensor."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's place in the flat buffer: bytes start .. start + num_bytes, padded up to stop."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    num_bytes: int
    stop: int


class BucketPlan:
    """The layout of a model; equal on all ranks.

    Args:
        entries: in order, with unique names. A tensor under two names (tied weights) is carried twice.
        bucket_bytes: upper bound of a bucket.

    Raises:
        ValueError: no entry, a name given twice, or a bucket of no bytes.
    """

    def __init__(self, entries: Iterable[Entry], bucket_bytes: int = BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self.slots = tuple(_lay_out(entries))
        names = [slot.name for slot in self.slots]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if bucket_bytes < 1 or not names or twice:
            raise ValueError(
                f"{len(names)} tensors, names given twice: {twice}, buckets of {bucket_bytes} bytes: no plan"
            )
        self.num_bytes = self.slots[-1].stop
        self.num_buckets = -(-self.num_bytes // bucket_bytes)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES) -> BucketPlan:
        """The plan of these tensors, in the order of the mapping."""
        return cls(((name, tuple(t.shape), t.dtype) for name, t in tensors.items()), bucket_bytes)

    def __str__(self) -> str:
        size = f"{len(self.slots)} tensors, {self.num_bytes} bytes, {self.num_buckets} buckets"
        return f"{self.fingerprint:016x} ({size})"

    @cached_property
    def fingerprint(self) -> int:
        """63 bits that differ when names, order, shapes, dtypes or bucket size differ."""
        facts = [self.bucket_bytes, [[s.name, list(s.shape), str(s.dtype)] for s in self.slots]]
        return int.from_bytes(hashlib.sha256(json.dumps(facts).encode()).digest()[:8], "big") >> 1

    def bucket(self, index: int) -> slice:
        """Bytes of the flat buffer that bucket `index` carries."""
        start = index * self.bucket_bytes
        return slice(start, min(start + self.bucket_bytes, self.num_bytes))

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each tensor as a view of `flat`, uint8 [num_bytes]."""
        return {s.name: flat[s.start : s.start + s.num_bytes].view(s.dtype).view(s.shape) for s in self.slots}

    def match(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensors in the order of the plan.

        Raises:
            ValueError: a name is missing or unknown, or a shape or dtype differs.
        """
        if odd := tensors.keys() ^ {slot.name for slot in self.slots}:
            raise ValueError(f"weights and plan differ in {len(odd)} names: {sorted(odd)[:8]}")
        matched = [tensors[slot.name] for slot in self.slots]
        for slot, tensor in zip(self.slots, matched, strict=True):
            if tuple(tensor.shape) != slot.shape or tensor.dtype != slot.dtype:
                found = f"{tuple(tensor.shape)} {tensor.dtype}"
                raise ValueError(f"{slot.name} is {found}, but the plan says {slot.shape} {slot.dtype}")
        return matched

    def fill(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> Iterator[int]:
        """Copy tensor after tensor into `flat`; yields a bucket as soon as its last byte is in place."""
        views, sources, index = self.views(flat), self.match(tensors), 0
        for slot, source in zip(self.slots, sources, strict=True):
            views[slot.name].copy_(source.detach())
            while index < self.num_buckets and self.bucket(index).stop <= slot.stop:
                yield index
                index += 1


def _lay_out(entries: Iterable[Entry]) -> Iterator[Slot]:
    start = 0
    for name, shape, dtype in entries:
        num_bytes = prod(shape) * dtype.itemsize
        stop = start + -(-num_bytes // ALIGNMENT) * ALIGNMENT
        yield Slot(name, tuple(shape), dtype, start, num_bytes, stop)
        start = stop
