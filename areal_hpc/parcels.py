"""A message on its way out of a rank, and one on its way in: what comm.py keeps of it until MPI is done with it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from areal_hpc.codec import CodecError, Frame, Incoming, Payload

if TYPE_CHECKING:
    from mpi4py import MPI  # comm.py has to import it first, with settings of its own

HASHER = ThreadPoolExecutor(1, thread_name_prefix="hash")  # starts with the first large payload; never touches MPI


@dataclass(frozen=True)
class Received:
    """One message as it arrived. Its arrays belong to the receiver and share one block: keep one and you keep all."""

    source: int
    message: Any
    arrays: dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Parcel:
    """A message on its way out. Keeps its buffers alive until MPI has read them."""

    name: str
    frame: Frame
    requests: list[MPI.Request]
    posted_s: float


@dataclass
class Arrival:
    """A message on its way in: its frame, then the parts (chunks, trailer) of a large payload."""

    source: int
    frame: NDArray[np.uint8]
    request: MPI.Request
    incoming: Incoming | None = None
    wanted: bool = True
    arrays: dict[str, NDArray[Any]] | None = None
    payload: Payload | None = None
    parts: list[Any] = field(default_factory=list)
    requests: list[MPI.Request] = field(default_factory=list)
    num_parts: int = 0
    hashing: list[Future[None]] = field(default_factory=list)
    idle_s: float = 0.0

    def post(self, receive: Callable[[Any], MPI.Request], payload: Payload, status: MPI.Status) -> None:
        """Post the receives of all parts, taking those that are there already."""
        self.payload = payload
        self.parts = [*payload.chunks, bytearray(payload.trailer_bytes)]
        for part in self.parts:
            self.requests.append(receive(part))
            self.take(status)

    def take(self, status: MPI.Status) -> bool:
        """Take the parts that have come, in order; True if there was one. Raises CodecError on a part that differs."""
        assert self.payload is not None
        before = self.num_parts
        while self.num_parts < len(self.requests) and self.requests[self.num_parts].Test(status):
            size, expected = status.Get_count(), len(self.parts[self.num_parts])
            if size != expected:
                raise CodecError(f"payload part {self.num_parts} has {size} bytes, expected {expected}")
            to_come = len(self.payload.chunks) - self.num_parts
            if to_come > 1:  # hashed beside this thread, which goes on receiving
                self.hashing.append(HASHER.submit(self.payload.arrived, self.num_parts))
            elif to_come == 1:
                self.payload.arrived(self.num_parts)
            self.num_parts += 1
        if self.arrays is None and self.num_parts == len(self.parts) and all(job.done() for job in self.hashing):
            self.arrays = self.payload.finish(self.parts[-1])
        return self.num_parts > before

    def __str__(self) -> str:
        name = type(self.incoming.message).__name__ if self.incoming else "a frame"
        return f"{name} from rank {self.source}, {self.num_parts} of {len(self.parts)} payload parts here"
