"""The bytes of a stored object: a checked header, then one layer after another.

::

    offset   bytes  field
         0       8  magic
         8       4  format version
        12       4  header length, padding included; the payload starts there, at a multiple of 4096
        16       8  xxh3_64 of the header without these 8 bytes
        24      32  namespace digest
        56      16  generation of the process that wrote it
        72      20  content key
        92       9  variant: 0 and 8 zero bytes (plain), or 1 and 8 bytes (conditioned)
       101      16  dtype name, ASCII, zero-padded
       117      24  layers, kv_heads, tokens, head_dim, position, neighbours (4 bytes each)
       141       8  payload length
       149       4  sensitivity length
       153          token ids (4 bytes each), neighbours' content keys (20 bytes each), one xxh3_64 a layer
                    (8 bytes each), sensitivity (float16, ``[layers, tokens]``, or nothing), zeros up to the header
                    length

All numbers are little-endian, and unsigned but for those of the sensitivity. A layer is ``[2, kv_heads, tokens,
head_dim]``, K before V, so that layer ``l`` is one ranged read and the whole payload one sequential read. Bytes that
come from a tier are untrusted: sizes are capped and bounds are checked before use.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import xxhash

from blend.errors import InvalidInput, ObjectCorrupt
from blend.store.buffers import Buffer, flat
from blend.store.key import CONTENT_NBYTES, PLAIN, ObjectKey, conditioned_variant

MAGIC = b"\x89blendKV"
LAYOUT_VERSION = 3
"""Version of the object layout and of content keys; KV of one version is never read as another's."""
ALIGNMENT = 4096
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one element, by dtype name."""
LIMITS = {"layers": 4096, "kv_heads": 4096, "tokens": 1 << 20, "head_dim": 1 << 16}
"""Largest shape that an object may have."""
MAX_NEIGHBOURS = 1024
MAX_PAYLOAD_NBYTES = 1 << 40
MAX_HEADER_NBYTES = 8 << 20

_PREFIX = struct.Struct("<8sIIQ")
_FIXED = struct.Struct("<8sIIQ32s16s20sB8s16sIIIIIIQI")
_CHECKSUM = slice(16, 24)
_INFINITY = 0x7C00
"""Bits of a float16: those of all finite numbers without a sign are below."""


def new_generation() -> bytes:
    """Return 16 random bytes. A writer draws them once and puts them into its headers, so that a reader can tell
    its objects from those of any other writer or of an earlier run."""
    return os.urandom(16)


def checksum(data: Buffer) -> int:
    """Return the xxh3_64 of ``data`` as an unsigned 64-bit integer."""
    return xxhash.xxh3_64_intdigest(flat("data", data))


@dataclass(frozen=True)
class Header:
    """What an object says about itself.

    Args:
        key: the object's key.
        namespace: the 32-byte digest of its namespace.
        token_ids: the chunk's tokens, for comparison after a key has matched.
        layers, kv_heads, head_dim: shape of the KV; with the tokens, a layer is ``[2, kv_heads, tokens, head_dim]``.
        dtype: ``float32``, ``float16`` or ``bfloat16``.
        generation: 16 random bytes of the writer (:func:`new_generation`).
        position: where the chunk's first token stood when its KV was computed; of what is a mean over several contexts,
            where its keys were turned to.
        neighbours: content keys that a conditioned variant was computed behind, in order; none for ``plain``.
        checksums: one :func:`checksum` a layer; none until :meth:`sealed` has worked them out.
        sensitivity: how much what stands before a token changes its values: float16, little-endian, of
            :attr:`sensitivity_shape`, finite and not negative; or nothing, where that is not known.

    Raises:
        InvalidInput: a value is out of range, or two of them disagree.
    """

    key: ObjectKey
    namespace: bytes = field(repr=False)
    token_ids: tuple[int, ...] = field(repr=False)
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    generation: bytes = field(repr=False)
    position: int = 0
    neighbours: tuple[str, ...] = ()
    checksums: tuple[int, ...] = field(default=(), repr=False)
    sensitivity: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.key, ObjectKey):
            raise InvalidInput("key", self.key, "an ObjectKey")
        _check_bytes("namespace", self.namespace, 32)
        _check_bytes("generation", self.generation, 16)
        for (name, limit), size in zip(LIMITS.items(), self.shape, strict=True):
            _check_integers(name, (size,), 1, limit)
        if not isinstance(self.dtype, str) or self.dtype not in ITEMSIZE:
            raise InvalidInput("dtype", self.dtype, ", ".join(ITEMSIZE))
        if self.payload_nbytes > MAX_PAYLOAD_NBYTES:
            raise InvalidInput("payload length", self.payload_nbytes, f"at most {MAX_PAYLOAD_NBYTES} bytes")
        _check_integers("token_ids", self.token_ids, 0, 0xFFFFFFFF)
        _check_integers("position", (self.position,), 0, 0xFFFFFFFF)
        _check_integers("number of neighbours", (len(self.neighbours),), 0, MAX_NEIGHBOURS)
        variant = conditioned_variant(self.neighbours) if self.neighbours else PLAIN
        if self.key.variant != variant:
            raise InvalidInput("key.variant", self.key.variant, f"{variant!r}, as its neighbours say")
        if len(self.checksums) not in (0, self.layers):
            raise InvalidInput("checksums", f"{len(self.checksums)} checksums", f"{self.layers}, one a layer")
        _check_integers("checksums", self.checksums, 0, 0xFFFFFFFFFFFFFFFF)
        self._check_sensitivity()

    def _check_sensitivity(self) -> None:
        _check_bytes("sensitivity", self.sensitivity, 2 * math.prod(self.sensitivity_shape) if self.sensitivity else 0)
        if not self.sensitivity:
            return
        if self.header_nbytes > MAX_HEADER_NBYTES:
            allowed = f"what leaves the header {MAX_HEADER_NBYTES} bytes at most"
            raise InvalidInput("sensitivity", f"{len(self.sensitivity)} bytes", allowed)
        bits = np.frombuffer(self.sensitivity, "<u2")
        if bits.max() >= _INFINITY:
            wrong = np.frombuffer(self.sensitivity, "<f2")[bits.argmax()]
            raise InvalidInput("sensitivity", float(wrong), "finite numbers, 0 or more")

    def sealed(self, payload: Buffer) -> Header:
        """Return this header with the checksums of ``payload``, ``[layers, 2, kv_heads, tokens, head_dim]`` as bytes.

        Raises:
            InvalidInput: the payload's length is not that of the shape.
        """
        view, nbytes = self.check_payload(payload), self.layer_nbytes
        return replace(self, checksums=tuple(checksum(view[at : at + nbytes]) for at in range(0, len(view), nbytes)))

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(layers, kv_heads, tokens, head_dim)``."""
        return self.layers, self.kv_heads, self.tokens, self.head_dim

    @property
    def sensitivity_shape(self) -> tuple[int, int]:
        """``(layers, tokens)``: the shape of the sensitivity, where there is one."""
        return self.layers, self.tokens

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer, ``[2, kv_heads, tokens, head_dim]``."""
        return 2 * self.kv_heads * self.tokens * self.head_dim * ITEMSIZE[self.dtype]

    @property
    def payload_nbytes(self) -> int:
        """Bytes of all layers."""
        return self.layers * self.layer_nbytes

    @property
    def header_nbytes(self) -> int:
        """Bytes before the payload, a multiple of 4096."""
        used = _FIXED.size + 4 * self.tokens + CONTENT_NBYTES * len(self.neighbours) + 8 * self.layers
        used += len(self.sensitivity)
        return -(-used // ALIGNMENT) * ALIGNMENT

    @property
    def object_nbytes(self) -> int:
        """Bytes of the whole object, header and payload."""
        return self.header_nbytes + self.payload_nbytes

    def layer_range(self, first: int, count: int = 1) -> tuple[int, int]:
        """Return ``(offset, nbytes)`` of ``count`` layers, from ``first`` on, within the object.

        Raises:
            InvalidInput: there are no such layers.
        """
        _check_integers("layer", (first,), 0, self.layers - 1)
        _check_integers("number of layers", (count,), 1, self.layers - first)
        return self.header_nbytes + first * self.layer_nbytes, count * self.layer_nbytes

    def check_payload(self, payload: Buffer) -> memoryview:
        """Return ``payload`` as a flat view; raise :class:`InvalidInput` unless it has ``payload_nbytes``."""
        view = flat("payload", payload)
        if len(view) != self.payload_nbytes:
            raise InvalidInput("payload", f"{len(view)} bytes", f"{self.payload_nbytes} bytes, as the shape says")
        return view

    def pieces(self, data: memoryview, first: int, nbytes: int) -> Iterator[tuple[int, memoryview]]:
        """Yield ``data``, whole layers from ``first`` on, in parts of about ``nbytes``, at least one layer each.

        With each part comes the number of its first layer.
        """
        step = max(nbytes // self.layer_nbytes, 1) * self.layer_nbytes
        for at in range(0, len(data), step):
            yield first + at // self.layer_nbytes, data[at : at + step]

    def verify(self, data: Buffer, first: int = 0) -> None:
        """Raise :class:`ObjectCorrupt` unless ``data`` is whole layers, one or more, as stored from ``first`` on."""
        nbytes = flat("data", data).nbytes
        count = nbytes // self.layer_nbytes
        if not nbytes or nbytes % self.layer_nbytes or not 0 <= first <= self.layers - count:
            raise ObjectCorrupt(f"{nbytes} bytes are no layers from layer {first} of {self.layers} on")
        for layer, part in self.pieces(flat("data", data), first, 0):
            if checksum(part) != self.checksums[layer]:
                raise ObjectCorrupt(f"layer {layer} fails its checksum")


def _check_integers(name: str, values: Sequence[object], low: int, high: int) -> None:
    if len(values) > 8 and set(map(type, values)) == {int}:  # token ids: a few calls over all of them
        values = (min(values), max(values))  # type: ignore[type-var]
    for value in values:
        if type(value) is not int or not low <= value <= high:
            raise InvalidInput(name, value, f"integers from {low} to {high}")


def _check_bytes(name: str, value: object, length: int) -> None:
    if not isinstance(value, bytes) or len(value) != length:
        raise InvalidInput(name, value, f"{length} bytes")


def _header_checksum(view: memoryview) -> int:
    state = xxhash.xxh3_64(view[: _CHECKSUM.start])
    state.update(view[_CHECKSUM.stop :])
    return state.intdigest()


def encode(header: Header) -> bytes:
    """Return the ``header.header_nbytes`` bytes that stand before the payload.

    Raises:
        InvalidInput: the header has no checksums yet.
    """
    if not header.checksums:
        raise InvalidInput("checksums", "none", "one a layer: Header.sealed(payload) works them out")
    conditioned = header.key.conditioned
    raw = bytearray(header.header_nbytes)
    _FIXED.pack_into(
        raw,
        0,
        MAGIC,
        LAYOUT_VERSION,
        header.header_nbytes,
        0,
        header.namespace,
        header.generation,
        bytes.fromhex(header.key.content),
        int(conditioned),
        bytes.fromhex(header.key.variant[1:]) if conditioned else bytes(8),
        header.dtype.encode(),
        *header.shape,
        header.position,
        len(header.neighbours),
        header.payload_nbytes,
        len(header.sensitivity),
    )
    tail = struct.pack(f"<{header.tokens}I", *header.token_ids)
    tail += b"".join(bytes.fromhex(neighbour) for neighbour in header.neighbours)
    tail += struct.pack(f"<{header.layers}Q", *header.checksums) + header.sensitivity
    raw[_FIXED.size : _FIXED.size + len(tail)] = tail
    raw[_CHECKSUM] = struct.pack("<Q", _header_checksum(memoryview(raw)))
    return bytes(raw)


def peek(data: Buffer) -> int:
    """Return the length of the header that ``data`` begins with; 24 bytes of it are enough.

    Raises:
        ObjectCorrupt: not the beginning of an object, or of one that this version reads.
    """
    view = flat("header", data)
    if len(view) < _PREFIX.size:
        raise ObjectCorrupt(f"header length: {len(view)} bytes, at least {_PREFIX.size} are needed")
    magic, version, nbytes, _ = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise ObjectCorrupt(f"magic: {magic!r}, expected {MAGIC!r}")
    if version != LAYOUT_VERSION:
        raise ObjectCorrupt(f"format version: {version}; this build reads version {LAYOUT_VERSION}")
    if not ALIGNMENT <= nbytes <= MAX_HEADER_NBYTES or nbytes % ALIGNMENT:
        raise ObjectCorrupt(f"header length: {nbytes}, expected a multiple of {ALIGNMENT} up to {MAX_HEADER_NBYTES}")
    return int(nbytes)


def decode(data: Buffer) -> Header:
    """Return the header that ``data`` begins with. The payload need not be there.

    Raises:
        ObjectCorrupt: a field is out of range or fails its check; the message begins with the field's name.
    """
    view = flat("header", data)
    length = peek(view)
    if len(view) < length:
        raise ObjectCorrupt(f"header length: {length}, but only {len(view)} bytes are there")
    view = view[:length]
    (_, _, _, stored, namespace, generation, content, kind, digest, dtype, *numbers) = _FIXED.unpack_from(view)
    if stored != _header_checksum(view):
        raise ObjectCorrupt(f"header checksum: stored {stored:#018x}, computed {_header_checksum(view):#018x}")
    layers, kv_heads, tokens, head_dim, position, count, payload_nbytes, sensitivity_nbytes = numbers
    if kind not in (0, 1) or (kind == 0 and digest != bytes(8)):
        raise ObjectCorrupt(f"variant: kind {kind}, expected 0 (plain) or 1 (conditioned)")
    neighbours_at = _FIXED.size + 4 * tokens
    checksums_at = neighbours_at + CONTENT_NBYTES * count
    sensitivity_at = checksums_at + 8 * layers
    end = sensitivity_at + sensitivity_nbytes
    if -(-end // ALIGNMENT) * ALIGNMENT != length:
        raise ObjectCorrupt(
            f"header length: {length} does not fit {tokens} tokens, {count} neighbours, {layers} layers, and"
            f" {sensitivity_nbytes} bytes of sensitivity"
        )
    keys = [bytes(view[at : at + CONTENT_NBYTES]).hex() for at in range(neighbours_at, checksums_at, CONTENT_NBYTES)]
    try:
        header = Header(
            key=ObjectKey(content.hex(), "c" + digest.hex() if kind else PLAIN),
            namespace=namespace,
            token_ids=tuple(np.frombuffer(view, "<u4", tokens, _FIXED.size).tolist()),
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype.rstrip(b"\0").decode("ascii"),
            checksums=tuple(np.frombuffer(view, "<u8", layers, checksums_at).tolist()),
            position=position,
            neighbours=tuple(keys),
            generation=generation,
            sensitivity=bytes(view[sensitivity_at:end]),
        )
    except InvalidInput as error:
        raise ObjectCorrupt(str(error)) from error
    except UnicodeDecodeError as error:
        raise ObjectCorrupt(f"dtype: {dtype!r}, expected a name in ASCII") from error
    if bytes(view[end:]) != bytes(length - end):
        raise ObjectCorrupt("padding: not zero")
    if header.payload_nbytes != payload_nbytes:
        raise ObjectCorrupt(f"payload length: {payload_nbytes}, but the shape says {header.payload_nbytes}")
    return header


def check_identity(header: Header, key: ObjectKey, nbytes: int) -> None:
    """Raise :class:`ObjectCorrupt` unless ``header`` is that of the object ``key``, ``nbytes`` long."""
    if header.key != key:
        raise ObjectCorrupt(f"key: {key} was asked for, the header names {header.key}")
    if header.object_nbytes != nbytes:
        raise ObjectCorrupt(f"size: {nbytes} bytes, the header says {header.object_nbytes}")
