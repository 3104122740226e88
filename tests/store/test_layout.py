from __future__ import annotations

import struct
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from blend.errors import InvalidInput, ObjectCorrupt
from blend.store import Header, ObjectKey, checksum, conditioned_variant, decode, encode, new_generation
from blend.store.layout import MAX_HEADER_NBYTES, peek
from tests.store.helpers import make

contents = st.binary(min_size=20, max_size=20).map(bytes.hex)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    token_ids = tuple(draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=2000)))
    neighbours = tuple(draw(st.lists(contents, max_size=4)))
    layers = draw(st.integers(1, 70))
    sensitivity = np.random.default_rng(layers).lognormal(size=(layers, len(token_ids))).astype("<f2").tobytes()
    return Header(
        key=ObjectKey(draw(contents), conditioned_variant(neighbours) if neighbours else "plain"),
        namespace=draw(st.binary(min_size=32, max_size=32)),
        token_ids=token_ids,
        layers=layers,
        kv_heads=draw(st.integers(1, 64)),
        head_dim=draw(st.integers(1, 512)),
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        generation=draw(st.binary(min_size=16, max_size=16)),
        position=draw(st.integers(0, 2**32 - 1)),
        neighbours=neighbours,
        checksums=tuple(draw(st.lists(st.integers(0, 2**64 - 1), min_size=layers, max_size=layers))),
        sensitivity=draw(st.sampled_from([b"", sensitivity])),
    )


@settings(max_examples=60, deadline=None)
@given(headers(), st.binary(max_size=100))
def test_a_header_comes_back_whatever_follows_it(header: Header, payload: bytes) -> None:
    raw = encode(header)
    assert len(raw) == header.header_nbytes == peek(raw[:24])
    assert len(raw) % 4096 == 0
    assert decode(raw + payload) == header
    assert encode(decode(raw)) == raw


@given(headers())
@settings(max_examples=20, deadline=None)
def test_layers_follow_each_other_to_the_end(header: Header) -> None:
    ranges = [header.layer_range(layer) for layer in range(header.layers)]
    assert ranges[0][0] == header.header_nbytes
    assert all(a + n == b for (a, n), (b, _) in pairwise(ranges))
    assert sum(ranges[-1]) == header.object_nbytes == header.header_nbytes + header.payload_nbytes
    layers, kv_heads, tokens, head_dim = header.shape
    itemsize = 4 if header.dtype == "float32" else 2
    assert header.layer_nbytes == 2 * kv_heads * tokens * head_dim * itemsize
    for wrong in (-1, layers):
        with pytest.raises(InvalidInput, match="layer"):
            header.layer_range(wrong)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_flipped_bit_of_a_header_goes_unnoticed(data: st.DataObject) -> None:
    neighbours = ["5" * 40] if data.draw(st.booleans()) else []
    header, _ = make(7, neighbours=neighbours, tokens=9, sensitive=data.draw(st.booleans()))
    raw = bytearray(encode(header))
    # The fields crowd at the front; the rest is padding.
    at = data.draw(st.one_of(st.integers(0, 300), st.integers(0, len(raw) - 1)))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ObjectCorrupt):
        decode(raw)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused(raw: bytes) -> None:
    for data in (raw, encode(make(1)[0])[:8] + raw, encode(make(1)[0])[:24] + raw.ljust(4096, b"\xff")):
        with pytest.raises(ObjectCorrupt):
            decode(data)


@pytest.mark.parametrize(
    ("offset", "fmt", "value", "field"),
    [
        (0, "8s", b"notblend", "magic"),
        (8, "I", 1, "format version: 1"),
        (12, "I", 4095, "header length"),
        (12, "I", 0, "header length"),
        (12, "I", 1 << 31, "header length"),
        (12, "I", 8192, "header length"),
        (92, "B", 2, "variant"),
        (92, "B", 1, "key.variant"),
        (93, "B", 1, "variant"),
        (101, "16s", b"float64", "dtype"),
        (101, "16s", b"\xff", "dtype"),
        (117, "I", 0, "layers"),
        (121, "I", 0, "kv_heads"),
        (121, "I", 1 << 31, "kv_heads"),
        (125, "I", 1 << 31, "header length"),
        (125, "I", 0, "tokens"),
        (129, "I", 1 << 20, "head_dim"),
        (137, "I", 1 << 31, "header length"),
        (141, "Q", 1 << 63, "payload length"),
        (149, "I", 1, "sensitivity"),
        (149, "I", 28, "sensitivity"),
        (149, "I", 1 << 31, "header length"),
        (149, "I", 8192, "header length"),
        (4095, "B", 1, "padding"),
    ],
)
def test_a_forged_field_is_named(offset: int, fmt: str, value: bytes | int, field: str) -> None:
    with pytest.raises(ObjectCorrupt, match=field):
        decode(forged(make(3)[0], offset, fmt, value))


def forged(header: Header, offset: int, fmt: str, value: bytes | float) -> bytes:
    """The header's own checksum is made to fit, so that only the field itself can give it away."""
    raw = bytearray(encode(header))
    struct.pack_into("<" + fmt, raw, offset, value)
    state = xxhash.xxh3_64(raw[:16])
    state.update(raw[24:])
    struct.pack_into("<Q", raw, 16, state.intdigest())
    return bytes(raw)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -0.0, -1.0, -(0.5**24)])
@pytest.mark.parametrize("last", [False, True])
def test_a_sensitivity_that_is_no_distance_is_refused(value: float, last: bool) -> None:
    header, _ = make(3, neighbours=["5" * 40], sensitive=True)
    at = 14 * 2 if last else 0
    wrong = bytearray(header.sensitivity)
    struct.pack_into("<e", wrong, at, value)
    with pytest.raises(InvalidInput, match=f"sensitivity.*{value}.*0 or more"):
        replace(header, sensitivity=bytes(wrong))
    end = 153 + 4 * header.tokens + 20 + 8 * header.layers
    with pytest.raises(ObjectCorrupt, match="sensitivity"):
        decode(forged(header, end + at, "e", value))


@pytest.mark.parametrize("length", [0, 2, 28, 32, 1 << 20])
def test_a_sensitivity_of_another_length_is_refused(length: int) -> None:
    header, _ = make(3, sensitive=True)
    with pytest.raises(ObjectCorrupt, match="sensitivity|header length|padding"):
        decode(forged(header, 149, "I", length))


def test_a_header_is_not_made_longer_than_any_is_read() -> None:
    layers, tokens = 4096, 1024
    header = replace(make(1)[0], token_ids=(7,) * tokens, layers=layers, checksums=())
    assert header.header_nbytes < MAX_HEADER_NBYTES
    with pytest.raises(InvalidInput, match="sensitivity.*8388608"):
        replace(header, sensitivity=bytes(2 * layers * tokens))


def test_a_sensitivity_lies_behind_the_checksums() -> None:
    plain, payload = make(1, tokens=900)
    header = replace(plain, sensitivity=np.arange(2700, dtype="<f2").tobytes())
    assert header.sensitivity_shape == (3, 900)
    assert header.sealed(payload) == header
    assert (plain.header_nbytes, header.header_nbytes) == (4096, 12288)
    found = np.frombuffer(encode(header), "<f2", 2700, 153 + 4 * 900 + 8 * 3)
    assert np.array_equal(found, np.arange(2700, dtype="<f2"))
    assert header.layer_range(0)[0] == 12288


def test_a_payload_of_another_length_is_refused() -> None:
    header, payload = make(1)
    for wrong in (payload[:-1], payload + b"\0", b""):
        with pytest.raises(InvalidInput, match="payload"):
            header.sealed(wrong)
    with pytest.raises(InvalidInput, match="contiguous"):
        header.sealed(np.zeros((2, header.payload_nbytes), np.uint8)[:, ::2])


def test_every_layer_has_its_own_checksum() -> None:
    header, payload = make(1)
    header.verify(payload)
    for layer in range(header.layers):
        wrong = bytearray(payload)
        wrong[layer * header.layer_nbytes] ^= 1
        with pytest.raises(ObjectCorrupt, match=f"layer {layer}"):
            header.verify(wrong)
    for wrong in (b"", payload[:-1], payload + payload):
        with pytest.raises(ObjectCorrupt, match="no layers"):
            header.verify(wrong)
    with pytest.raises(ObjectCorrupt, match="no layers"):
        header.verify(payload, 1)
    assert header.checksums[1] == checksum(payload[header.layer_nbytes : 2 * header.layer_nbytes])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("namespace", b"short"),
        ("generation", b""),
        ("token_ids", ()),
        ("token_ids", (2**32,)),
        ("token_ids", (-1,)),
        ("layers", 0),
        ("layers", True),
        ("kv_heads", 5000),
        ("head_dim", 2.0),
        ("dtype", "float8"),
        ("dtype", None),
        ("position", -1),
        ("neighbours", ("1" * 40,)),
        ("checksums", (1,)),
        ("checksums", (1, 2, 2**64)),
        ("sensitivity", None),
        ("sensitivity", b"12"),
        ("sensitivity", bytes(29)),
        ("sensitivity", bytearray(30)),
        ("sensitivity", bytearray()),
        ("key", "a" * 40 + ".plain"),
    ],
)
def test_wrong_values_are_refused_at_construction(field: str, value: object) -> None:
    with pytest.raises(InvalidInput):
        replace(make(1)[0], **{field: value})  # type: ignore[arg-type]


def test_a_header_without_checksums_is_not_written() -> None:
    with pytest.raises(InvalidInput, match="checksums"):
        encode(replace(make(1)[0], checksums=()))


def test_generations_differ() -> None:
    assert len({new_generation() for _ in range(10)}) == 10
