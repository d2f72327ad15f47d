"""What a message looks like as bytes: a checked envelope, a schema-checked header, raw arrays beside it.

    envelope   44 bytes, little-endian: magic, protocol, attempt, source, sequence, header length, chunk size, payload
               length, CRC-32C of envelope and header
    header     msgpack of [message, [array name, dtype, shape] ...]
    payload    the arrays in that order, C-contiguous, each cut into chunks of at most `chunk size` bytes
    trailer    one uint32 CRC-32C per chunk

A small payload travels in one piece with its header (chunk size 0, one chunk per array); a large one follows chunk by
chunk, and the trailer comes last so that the first byte leaves before the last one is hashed. The CRC of a chunk
starts from the header's CRC plus the chunk's number: a chunk of another message, or in another place, does not pass.

Departs from AReaL, which sends pickles over HTTP and Ray: nothing that crossed the network is ever unpickled, and bytes
that do not fit the schema end in a `CodecError` of one line that names what differs.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

MAGIC = b"AHPC"
PROTOCOL = 1
ENVELOPE = struct.Struct("<4sIIIQIIQI")
TRAILER_DTYPE = np.dtype("<u4")

INLINE_BYTES = 64 * 1024
CHUNK_BYTES = 16 * 1024 * 1024
MAX_HEADER_BYTES = 64 * 1024 * 1024
MAX_PAYLOAD_BYTES = 16 * 1024**3
MAX_CHUNKS = 1_000_000
MAX_DIMENSIONS = 32
ALIGNMENT = 64

Arrays = Mapping[str, NDArray[Any]]
Allocate = Callable[[int], NDArray[np.uint8]]


class CodecError(ValueError):
    """Bytes, or a message to be sent, that do not fit the protocol."""


# Inherited by every message. By name, because type checkers want `frozen=True` repeated on each subclass otherwise.
STRICT: dict[str, Any] = {"frozen": True, "tag": True, "forbid_unknown_fields": True}


class Message(msgspec.Struct, **STRICT):
    """Base of everything ranks tell each other. `ARRAYS`: name -> numpy dtype of the arrays that travel beside it."""

    ARRAYS: ClassVar[Mapping[str, str]] = {}


class ArraySpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One array of a payload as the header announces it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Envelope(NamedTuple):
    """The fixed part, in wire order."""

    magic: bytes
    protocol: int
    attempt: int
    source: int
    sequence: int
    header_bytes: int
    chunk_bytes: int
    payload_bytes: int
    crc: int

    @property
    def end(self) -> int:
        """Offset of the first byte after the header."""
        return ENVELOPE.size + self.header_bytes


@dataclass(frozen=True)
class Incoming:
    """A decoded header: what was said, and the payload that belongs to it."""

    envelope: Envelope
    message: Any
    specs: tuple[ArraySpec, ...]


@dataclass(frozen=True)
class Frame:
    """A message ready to leave: `header` (envelope included) and one flat byte view per array."""

    envelope: Envelope
    header: bytes
    buffers: list[memoryview]

    @property
    def inline(self) -> bool:
        return self.envelope.chunk_bytes == 0

    def chunks(self) -> list[memoryview]:
        """Views of the payload in wire order."""
        return [
            buffer[start:stop]
            for buffer in self.buffers
            for start, stop in _cuts(len(buffer), self.envelope.chunk_bytes)
        ]

    def crc(self, index: int, chunk: memoryview) -> int:
        """CRC-32C of chunk number `index`."""
        return _chunk_crc(self.envelope.crc, index, chunk)

    def joined(self) -> bytes:
        """Header, payload and trailer as one piece (copies the payload)."""
        chunks = self.chunks()
        trailer = pack_trailer([self.crc(index, chunk) for index, chunk in enumerate(chunks)])
        return b"".join([self.header, *chunks, trailer])


class Payload:
    """Receiving side of a payload: one aligned block, the chunks to fill in wire order, and their check.

    Fill `chunks[i]`, call `arrived(i)` for each, from any thread, then `finish(trailer)`.
    """

    def __init__(self, incoming: Incoming, allocate: Allocate | None = None) -> None:
        self.incoming = incoming
        offsets, total = _layout(incoming.specs)
        self.block = allocate(total) if allocate else np.empty(total, np.uint8)
        self._parts = [
            self.block[offset : offset + spec.num_bytes] for offset, spec in zip(offsets, incoming.specs, strict=True)
        ]
        chunk_bytes = incoming.envelope.chunk_bytes
        self.chunks = [part[start:stop] for part in self._parts for start, stop in _cuts(len(part), chunk_bytes)]
        self._crcs: list[int] = [0] * len(self.chunks)

    @property
    def trailer_bytes(self) -> int:
        return len(self.chunks) * TRAILER_DTYPE.itemsize

    def arrived(self, index: int) -> None:
        """Hash chunk number `index`, which has just been filled."""
        self._crcs[index] = _chunk_crc(self.incoming.envelope.crc, index, self.chunks[index].data)

    def finish(self, trailer: bytes | bytearray | memoryview) -> dict[str, NDArray[Any]]:
        """Compare with the sender's CRCs and return the arrays: writable views of one block.

        Raises CodecError naming the first chunk that differs.
        """
        sent = np.frombuffer(trailer, TRAILER_DTYPE) if len(trailer) else np.empty(0, TRAILER_DTYPE)
        if len(sent) != len(self._crcs):
            raise CodecError(f"trailer holds {len(sent)} chunk CRCs, the header announced {len(self._crcs)} chunks")
        for index, (theirs, mine) in enumerate(zip(sent.tolist(), self._crcs, strict=True)):
            if theirs != mine:
                raise CodecError(
                    f"CRC of payload chunk {index} of {len(sent)} differs: sent {theirs:08x}, arrived {mine:08x}"
                )
        return {
            spec.name: part.view(spec.dtype).reshape(spec.shape)
            for spec, part in zip(self.incoming.specs, self._parts, strict=True)
        }


@dataclass
class SequenceCheck:
    """Every message of this attempt exactly once and in order, per source.

    Attributes:
        attempt: the Slurm attempt this world belongs to.
        duplicates: messages ignored because their number had been seen.
        stale: messages ignored because they belong to another attempt.
    """

    attempt: int
    duplicates: int = 0
    stale: int = 0
    _expected: dict[int, int] = field(default_factory=dict)

    def accept(self, envelope: Envelope) -> bool:
        """True for the next message of its source, False for one to ignore (counted). Raises CodecError on a gap."""
        if envelope.attempt != self.attempt:
            self.stale += 1
            return False
        expected = self._expected.get(envelope.source, 0)
        if envelope.sequence < expected:
            self.duplicates += 1
            return False
        if envelope.sequence > expected:
            raise CodecError(
                f"sequence gap: expected message {expected}, got {envelope.sequence}; "
                f"{envelope.sequence - expected} lost"
            )
        self._expected[envelope.source] = expected + 1
        return True


class Codec:
    """Encodes and decodes a closed set of message types.

    Args:
        types: every type that may travel; subclasses of `Message`.
        inline_bytes: payloads up to this size travel in one piece with their header.
        chunk_bytes: larger ones are cut into chunks of this size.
        max_payload_bytes: a larger payload is refused on both sides; bounds what a receiver allocates.

    Attributes:
        max_frame_bytes: largest piece that holds a frame; bounds what a receiver allocates before decoding.
    """

    def __init__(
        self,
        types: Sequence[type[Message]],
        *,
        inline_bytes: int = INLINE_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        if sys.byteorder != "little":
            raise CodecError("the wire carries little-endian arrays; this machine is big-endian")
        if not types:
            raise CodecError("a codec needs at least one message type")
        for kind in types:
            for name, dtype in kind.ARRAYS.items():
                if np.dtype(dtype).kind not in "biuf":
                    raise CodecError(f"{kind.__name__}.{name}: dtype {dtype} cannot travel; use bool, int or float")
        self._declared = {kind: [(name, np.dtype(dtype).name) for name, dtype in kind.ARRAYS.items()] for kind in types}
        self._inline_bytes = inline_bytes
        self._chunk_bytes = chunk_bytes
        self._max_payload_bytes = max_payload_bytes
        self._encoder = msgspec.msgpack.Encoder()
        union: Any = reduce(or_, types)
        self._decoder = msgspec.msgpack.Decoder(tuple[union, tuple[ArraySpec, ...]])
        most_arrays = max(len(kind.ARRAYS) for kind in types)
        self.max_frame_bytes = ENVELOPE.size + MAX_HEADER_BYTES + inline_bytes + most_arrays * TRAILER_DTYPE.itemsize

    def encode(
        self, message: Message, arrays: Arrays | None = None, *, source: int, sequence: int, attempt: int
    ) -> Frame:
        """Frame of `message` and the arrays its type declares.

        C-contiguous arrays are referenced, others copied. Raises CodecError when the type is unknown, a field has the
        wrong type, or the arrays differ from `ARRAYS` in name or dtype.
        """
        arrays = arrays or {}
        self._check_arrays(message, arrays)
        specs = [ArraySpec(name, dtype, arrays[name].shape) for name, dtype in self._declared[type(message)]]
        header = self._pack(message, specs)
        buffers = [arrays[spec.name].reshape(-1).view(np.uint8).data for spec in specs]
        payload_bytes = sum(len(buffer) for buffer in buffers)
        chunk_bytes = 0 if payload_bytes <= self._inline_bytes else self._chunk_bytes
        unsealed = Envelope(MAGIC, PROTOCOL, attempt, source, sequence, len(header), chunk_bytes, payload_bytes, 0)
        self._check_sizes(unsealed)
        envelope = unsealed._replace(crc=_header_crc(ENVELOPE.pack(*unsealed), header))
        return Frame(envelope, ENVELOPE.pack(*envelope) + header, buffers)

    def decode_header(self, data: bytes | bytearray | memoryview) -> Incoming:
        """Envelope and header at the start of `data`, checked. Raises CodecError and nothing else."""
        view = memoryview(data)
        if len(view) < ENVELOPE.size:
            raise CodecError(f"truncated: {len(view)} bytes, an envelope alone has {ENVELOPE.size}")
        envelope = Envelope(*ENVELOPE.unpack_from(view))
        if envelope.magic != MAGIC:
            raise CodecError(f"bad magic {envelope.magic!r}, expected {MAGIC!r}")
        if envelope.protocol != PROTOCOL:
            raise CodecError(f"protocol version {envelope.protocol}, this code speaks {PROTOCOL}")
        self._check_sizes(envelope)
        if len(view) < envelope.end:
            raise CodecError(f"truncated: {len(view)} bytes, envelope and header have {envelope.end}")
        header = view[ENVELOPE.size : envelope.end]
        crc = _header_crc(view[: ENVELOPE.size], header)
        if crc != envelope.crc:
            raise CodecError(f"CRC of the header differs: sent {envelope.crc:08x}, arrived {crc:08x}")
        try:
            message, specs = self._decoder.decode(header)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CodecError(f"header does not fit the schema: {error}") from error
        self._check_specs(message, specs, envelope)
        return Incoming(envelope, message, specs)

    def decode(self, data: bytes | bytearray | memoryview) -> tuple[Incoming, dict[str, NDArray[Any]]]:
        """A whole frame in one piece, `Frame.joined()` of the other side. Raises CodecError and nothing else."""
        incoming = self.decode_header(data)
        return incoming, self.unpack(incoming, data)

    def unpack(self, incoming: Incoming, data: bytes | bytearray | memoryview) -> dict[str, NDArray[Any]]:
        """Arrays of a frame in one piece whose header has been decoded. Raises CodecError."""
        payload = Payload(incoming)
        view = memoryview(data)
        end = incoming.envelope.end
        expected = end + incoming.envelope.payload_bytes + payload.trailer_bytes
        if len(view) != expected:
            raise CodecError(f"frame has {len(view)} bytes, its envelope announces {expected}")
        for index, chunk in enumerate(payload.chunks):
            chunk[:] = view[end : end + len(chunk)]
            payload.arrived(index)
            end += len(chunk)
        return payload.finish(view[end:])

    def _check_arrays(self, message: Message, arrays: Arrays) -> None:
        kind = type(message)
        if kind not in self._declared:
            known = ", ".join(other.__name__ for other in self._declared)
            raise CodecError(f"unknown message type {kind.__name__}; known: {known}")
        if set(arrays) != set(kind.ARRAYS):
            raise CodecError(f"{kind.__name__}: arrays {sorted(arrays)}, declared {sorted(kind.ARRAYS)}")
        for name, dtype in kind.ARRAYS.items():
            if arrays[name].dtype != np.dtype(dtype):
                raise CodecError(f"{kind.__name__}.{name}: dtype {arrays[name].dtype}, declared {dtype}")

    def _pack(self, message: Message, specs: Sequence[ArraySpec]) -> bytes:
        try:
            header = self._encoder.encode((message, specs))
            self._decoder.decode(header)  # msgspec checks types only here: fail on the rank that made the mistake
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CodecError(f"{type(message).__name__} does not fit its schema: {error}") from error
        return header

    def _check_sizes(self, envelope: Envelope) -> None:
        if envelope.header_bytes > MAX_HEADER_BYTES:
            raise CodecError(f"header of {envelope.header_bytes} bytes, limit {MAX_HEADER_BYTES}")
        if envelope.payload_bytes > self._max_payload_bytes:
            raise CodecError(f"payload of {envelope.payload_bytes} bytes, limit {self._max_payload_bytes}")
        if envelope.chunk_bytes and envelope.payload_bytes // envelope.chunk_bytes > MAX_CHUNKS:
            what = f"payload of {envelope.payload_bytes} bytes in chunks of {envelope.chunk_bytes}"
            raise CodecError(f"{what}, limit {MAX_CHUNKS} chunks")

    def _check_specs(self, message: Any, specs: Sequence[ArraySpec], envelope: Envelope) -> None:
        kind = type(message)
        announced = [(spec.name, spec.dtype) for spec in specs]
        if announced != self._declared[kind]:
            raise CodecError(f"{kind.__name__}: arrays {announced}, declared {self._declared[kind]}")
        for spec in specs:
            # Python integers: a hostile shape must not overflow, nor hide behind a zero.
            span = math.prod(max(1, extent) for extent in spec.shape) * np.dtype(spec.dtype).itemsize
            if len(spec.shape) > MAX_DIMENSIONS or min(spec.shape, default=0) < 0 or span > self._max_payload_bytes:
                raise CodecError(f"{kind.__name__}.{spec.name}: absurd shape {spec.shape}")
        total = sum(spec.num_bytes for spec in specs)
        if total != envelope.payload_bytes:
            raise CodecError(f"{kind.__name__}: shapes add up to {total} bytes, envelope says {envelope.payload_bytes}")


def pack_trailer(crcs: Sequence[int]) -> bytes:
    """The sender's chunk CRCs as bytes."""
    return np.array(crcs, TRAILER_DTYPE).tobytes()


def _cuts(num_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """(start, stop) of the chunks of one array; an empty array has none."""
    step = chunk_bytes or max(1, num_bytes)
    return [(start, min(start + step, num_bytes)) for start in range(0, num_bytes, step)]


def _layout(specs: Sequence[ArraySpec]) -> tuple[list[int], int]:
    """Aligned offset of each array in one block, and the size of the block."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _header_crc(envelope: bytes | memoryview, header: bytes | memoryview) -> int:
    """CRC of the envelope without its own last field, then the header."""
    return crc32c(header, crc32c(envelope[:-4]))


def _chunk_crc(header_crc: int, index: int, chunk: memoryview) -> int:
    return crc32c(chunk, (header_crc + index) & 0xFFFFFFFF)
