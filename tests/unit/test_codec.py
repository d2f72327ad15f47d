"""The codec: what goes in comes out; bytes that do not fit end in a CodecError of one line, never in anything else."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from areal_hpc import codec as wire
from areal_hpc.codec import Codec, CodecError, Envelope, Frame, Message, Payload, SequenceCheck, pack_trailer

DTYPES = ("bool", "int8", "uint8", "int32", "int64", "uint16", "float16", "float32", "float64")


class Note(Message):
    step: int
    text: str = ""
    extra: dict[str, Any] = {}


class Pair(Message):
    ARRAYS: ClassVar[Mapping[str, str]] = {"tokens": "int32", "logprobs": "float32"}
    step: int


class Every(Message):
    ARRAYS: ClassVar[Mapping[str, str]] = {name: name for name in DTYPES}


class Foreign(Message):
    step: int


CODEC = Codec((Note, Pair, Every))
PAIR = {"tokens": np.array([7, 8, 9], np.int32), "logprobs": np.array([-0.5], np.float32)}


def encode(message: Message, arrays: Mapping[str, np.ndarray] | None = None, codec: Codec = CODEC) -> Frame:
    return codec.encode(message, arrays, source=3, sequence=5, attempt=2)


def transfer(frame: Frame, codec: Codec = CODEC) -> dict[str, np.ndarray]:
    """Arrays after a journey in chunks, as comm.py does it."""
    incoming = codec.decode_header(frame.header)
    payload = Payload(incoming)
    chunks = frame.chunks()
    assert [len(chunk) for chunk in chunks] == [len(chunk) for chunk in payload.chunks]
    for index, chunk in enumerate(chunks):
        payload.chunks[index][:] = chunk
        payload.arrived(index)
    return payload.finish(pack_trailer([frame.crc(index, chunk) for index, chunk in enumerate(chunks)]))


def sealed(envelope: Envelope, header: bytes) -> bytes:
    """A frame whose CRC is right whatever it says."""
    body = wire.ENVELOPE.pack(*envelope)[:-4]
    return body + struct.pack("<I", crc32c(header, crc32c(body))) + header


# ------------------------------------------------------------------------------------------------- what comes out
def test_message_and_envelope_survive():
    incoming, arrays = CODEC.decode(encode(Note(4, "behaviour", {"a": [1, 2.5, None]})).joined())
    assert incoming.message == Note(4, "behaviour", {"a": [1, 2.5, None]})
    envelope = incoming.envelope
    assert (envelope.source, envelope.sequence, envelope.attempt, envelope.payload_bytes) == (3, 5, 2, 0)
    assert arrays == {}


def test_the_bytes_are_the_documented_ones():
    frame = encode(Pair(1), PAIR).joined()
    magic, protocol, attempt, source, sequence, header_bytes, chunk_bytes, payload_bytes, crc = struct.unpack(
        "<4sIIIQIIQI", frame[:44]
    )
    assert (magic, protocol, attempt, source, sequence, chunk_bytes) == (b"AHPC", 1, 2, 3, 5, 0)
    header = frame[44 : 44 + header_bytes]
    assert msgspec.msgpack.decode(header) == [
        {"type": "Pair", "step": 1},
        [["tokens", "int32", [3]], ["logprobs", "float32", [1]]],
    ]
    assert crc == crc32c(frame[:40] + header)
    tokens, logprobs = struct.pack("<3i", 7, 8, 9), struct.pack("<f", -0.5)
    assert payload_bytes == 16
    trailer = struct.pack("<2I", crc32c(tokens, crc), crc32c(logprobs, crc + 1))
    assert frame[44 + header_bytes :] == tokens + logprobs + trailer


def test_crc_is_crc32c():
    assert crc32c(b"123456789") == 0xE3069283  # check value of CRC-32C (Castagnoli), RFC 3720


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_arrays_of_every_dtype_and_shape_survive_in_one_piece_and_in_chunks(data):
    shapes = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
    arrays = {name: data.draw(npst.arrays(name, shapes), name) for name in DTYPES}
    chunked = Codec((Every,), inline_bytes=0, chunk_bytes=data.draw(st.integers(1, 64), "chunk"))
    for out in (CODEC.decode(encode(Every(), arrays).joined())[1], transfer(encode(Every(), arrays, chunked), chunked)):
        assert list(out) == list(DTYPES)
        for name, array in arrays.items():
            assert out[name].dtype == array.dtype and out[name].shape == array.shape
            assert out[name].tobytes() == array.tobytes()
            assert out[name].flags.writeable and out[name].flags.aligned and out[name].flags.c_contiguous


def test_arrays_that_are_not_contiguous_are_sent_as_seen():
    grid = np.arange(24, dtype=np.int32).reshape(4, 6)
    arrays = {"tokens": grid[::2, ::-1], "logprobs": np.ones((2, 3), np.float32).T}
    out = CODEC.decode(encode(Pair(1), arrays).joined())[1]
    assert out["tokens"].tolist() == [[5, 4, 3, 2, 1, 0], [17, 16, 15, 14, 13, 12]]
    assert out["logprobs"].shape == (3, 2)


def test_a_contiguous_array_is_not_copied_on_its_way_out():
    frame = encode(Pair(1), PAIR)
    assert np.shares_memory(np.frombuffer(frame.buffers[0], np.int32), PAIR["tokens"])


def test_payload_above_the_inline_size_is_cut_per_array():
    codec = Codec((Pair,), inline_bytes=15, chunk_bytes=8)
    frame = encode(Pair(1), PAIR, codec)
    assert not frame.inline and [len(chunk) for chunk in frame.chunks()] == [8, 4, 4]
    assert encode(Pair(1), PAIR, Codec((Pair,), inline_bytes=16)).inline
    assert transfer(frame, codec)["tokens"].tolist() == [7, 8, 9]


# ------------------------------------------------------------------------------------------- refused when sending
@pytest.mark.parametrize(
    ("message", "arrays", "text"),
    [
        (Foreign(1), {}, "unknown message type Foreign; known: Note, Pair, Every"),
        (Note("one"), {}, "Note does not fit its schema: Expected `int`, got `str` - at `$[0].step`"),
        (Note(1, extra={"a": object()}), {}, "Note does not fit its schema: Encoding objects of type object"),
        (Note(2**80), {}, "Note does not fit its schema: "),
        (Note(1), {"tokens": PAIR["tokens"]}, "Note: arrays ['tokens'], declared []"),
        (Pair(1), {"tokens": PAIR["tokens"]}, "Pair: arrays ['tokens'], declared ['logprobs', 'tokens']"),
        (Pair(1), PAIR | {"tokens": np.ones(3)}, "Pair.tokens: dtype float64, declared int32"),
        (Pair(1), PAIR | {"tokens": np.ones(3, ">i4")}, "Pair.tokens: dtype >i4, declared int32"),
        (Pair(1), PAIR | {"tokens": np.array([{}, 1], object)}, "Pair.tokens: dtype object, declared int32"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_sender(message, arrays, text):
    with pytest.raises(CodecError) as error:
        encode(message, arrays)
    assert str(error.value).startswith(text)


def test_object_arrays_cannot_be_declared():
    class Bad(Message):
        ARRAYS: ClassVar[Mapping[str, str]] = {"anything": "object"}

    with pytest.raises(CodecError, match="Bad.anything: dtype object cannot travel"):
        Codec((Bad,))


def test_payload_limit_holds_on_both_sides():
    small = Codec((Pair,), max_payload_bytes=15)
    with pytest.raises(CodecError, match="payload of 16 bytes, limit 15"):
        encode(Pair(1), PAIR, small)
    with pytest.raises(CodecError, match="payload of 16 bytes, limit 15"):
        small.decode_header(encode(Pair(1), PAIR).header)


# ----------------------------------------------------------------------------------------- refused when receiving
@pytest.mark.fault("any byte of a message flipped", row=28)
def test_flipping_any_byte_of_a_frame_is_noticed():
    frame = encode(Pair(1), PAIR).joined()
    for position in range(len(frame)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(frame)
            damaged[position] ^= mask
            with pytest.raises(CodecError) as error:
                CODEC.decode(damaged)
            assert "\n" not in str(error.value)


def test_cutting_or_growing_a_frame_anywhere_is_noticed():
    frame = encode(Pair(1), PAIR).joined()
    for piece in [*(frame[:length] for length in range(len(frame))), frame + b"\0"]:
        with pytest.raises(CodecError):
            CODEC.decode(piece)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_raise_only_codec_errors(noise, begins_well):
    with pytest.raises(CodecError):
        CODEC.decode(encode(Note(1)).header[:8] + noise if begins_well else noise)


MSGPACK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
SHAPE = st.lists(st.integers(-2, 2**63), max_size=40)
SPEC = st.tuples(st.sampled_from(["tokens", "logprobs", "x"]), st.sampled_from(["int32", "float32", "object"]), SHAPE)


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=60),
        MSGPACK.map(msgspec.msgpack.encode),
        st.tuples(st.just({"type": "Pair", "step": 1}), st.lists(SPEC, max_size=3)).map(msgspec.msgpack.encode),
    ),
    st.integers(0, 2**40),
    st.integers(0, 2**32 - 1),
)
def test_hostile_headers_with_a_right_crc_raise_only_codec_errors(header, payload_bytes, chunk_bytes):
    envelope = Envelope(b"AHPC", 1, 2, 3, 5, len(header), chunk_bytes, payload_bytes, 0)
    try:
        incoming = CODEC.decode_header(sealed(envelope, header))
    except CodecError:
        return
    assert sum(spec.num_bytes for spec in incoming.specs) == payload_bytes


def test_deeply_nested_header_is_a_codec_error():
    header = b"\x92\x82\xa4type\xa4Note\xa4step" + b"\x91" * 100_000 + b"\x01"
    with pytest.raises(CodecError, match="schema"):
        CODEC.decode_header(sealed(Envelope(b"AHPC", 1, 0, 0, 0, len(header), 0, 0, 0), header))


HEADER = encode(Pair(1), PAIR).header[44:]
WELL = Envelope(b"AHPC", 1, 2, 3, 5, len(HEADER), 0, 16, 0)


@pytest.mark.parametrize(
    ("envelope", "header", "text"),
    [
        (WELL._replace(magic=b"HTTP"), HEADER, "bad magic b'HTTP', expected b'AHPC'"),
        (WELL._replace(protocol=2), HEADER, "protocol version 2, this code speaks 1"),
        (WELL._replace(header_bytes=2**31), HEADER, "header of 2147483648 bytes, limit 67108864"),
        (WELL._replace(header_bytes=len(HEADER) + 1), HEADER, f"truncated: {44 + len(HEADER)} bytes, "),
        (WELL._replace(payload_bytes=2**60), HEADER, "payload of 1152921504606846976 bytes, limit 17179869184"),
        (WELL._replace(payload_bytes=2**33, chunk_bytes=1), HEADER, "payload of 8589934592 bytes in chunks of 1, "),
        (WELL._replace(payload_bytes=17), HEADER, "Pair: shapes add up to 16 bytes, envelope says 17"),
        (WELL, HEADER.replace(b"\xa4Pair", b"\xa4Pear"), "header does not fit the schema: Invalid value 'Pear'"),
        (WELL, HEADER.replace(b"tokens", b"tokenz"), "Pair: arrays [('tokenz', 'int32'), ('logprobs', 'float32')], "),
        (WELL, HEADER.replace(b"\xa5int32", b"\xa5int64"), "Pair: arrays [('tokens', 'int64')"),
    ],
)
def test_what_differs_is_named_with_both_values(envelope, header, text):
    with pytest.raises(CodecError) as error:
        CODEC.decode_header(sealed(envelope, header))
    assert str(error.value).startswith(text)


def test_a_shape_cannot_hide_an_absurd_size_behind_a_zero():
    header = msgspec.msgpack.encode(
        ({"type": "Pair", "step": 1}, [("tokens", "int32", (2**62, 0)), ("logprobs", "float32", ())])
    )
    with pytest.raises(CodecError, match=r"Pair.tokens: absurd shape \(4611686018427387904, 0\)"):
        CODEC.decode_header(sealed(Envelope(b"AHPC", 1, 2, 3, 5, len(header), 0, 4, 0), header))


def test_chunks_of_another_message_or_another_place_do_not_pass():
    codec = Codec((Pair,), inline_bytes=0, chunk_bytes=4)
    arrays = {"tokens": np.array([1, 2], np.int32), "logprobs": np.zeros(0, np.float32)}
    first, second = encode(Pair(1), arrays, codec), encode(Pair(2), arrays, codec)
    trailer = pack_trailer([first.crc(index, chunk) for index, chunk in enumerate(first.chunks())])

    def receive(frame: Frame, order: list[int]) -> dict[str, np.ndarray]:
        payload = Payload(codec.decode_header(frame.header))
        for index, source in enumerate(order):
            payload.chunks[index][:] = first.chunks()[source]
            payload.arrived(index)
        return payload.finish(trailer)

    assert receive(first, [0, 1])["tokens"].tolist() == [1, 2]
    with pytest.raises(CodecError, match="CRC of payload chunk 0 of 2 differs: sent [0-9a-f]{8}, arrived [0-9a-f]{8}"):
        receive(first, [1, 0])
    with pytest.raises(CodecError, match="chunk 0 of 2"):
        receive(second, [0, 1])
    with pytest.raises(CodecError, match="trailer holds 1 chunk CRCs, the header announced 2"):
        Payload(codec.decode_header(first.header)).finish(trailer[:4])


# -------------------------------------------------------------------------------------------------- order of messages
def test_every_message_once_and_in_order_per_source():
    check = SequenceCheck(attempt=2)

    def accept(source: int, sequence: int, attempt: int = 2) -> bool:
        return check.accept(WELL._replace(source=source, sequence=sequence, attempt=attempt))

    assert [accept(3, 0), accept(3, 1), accept(4, 0)] == [True, True, True]
    assert [accept(3, 1), accept(3, 0), accept(3, 2)] == [False, False, True]
    assert [accept(3, 7, attempt=1), accept(4, 0, attempt=3)] == [False, False]
    assert (check.duplicates, check.stale) == (2, 2)
    with pytest.raises(CodecError, match="sequence gap: expected message 3, got 5; 2 lost"):
        accept(3, 5)
    with pytest.raises(CodecError, match="expected message 0, got 1"):
        accept(9, 1)
