"""One layer of a request's stored chunks onto its canvas or into its blocks: dequantized, keys turned, scattered.

All chunks go in one launch. Each stored byte is read once and each number written once: keys are turned between the
two, in float32, by their chunk's constant angle, whose cosines and sines come from the host.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blend.errors import InvalidInput
from blend.recompute.kernels.checks import check_like, check_numbers, check_positions, padded
from blend.recompute.kernels.launch import launch
from blend.recompute.kernels.memory import check_rows
from blend.recompute.kernels.stored import QUANTIZED, TILE, Stored, Turns


@triton.jit
def _numbers(source: tl.tensor, held: tl.tensor, scale: tl.tensor, FLOAT8: tl.constexpr, SCALED: tl.constexpr) -> Any:
    """What ``source`` points to, in float32.

    An 8-bit float (1, 4 and 3 bits) is a half-precision one with its exponent shifted: by bits, since not all
    devices convert it.
    """
    raw = tl.load(source, mask=held, other=0)
    if FLOAT8:
        bits = ((raw & 0x80).to(tl.uint16) << 8) | ((raw & 0x7F).to(tl.uint16) << 7)
        found = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        found = tl.where((raw & 0x7F) == 0x7F, float("nan"), found)
    else:
        found = raw.to(tl.float32)
    if SCALED:
        found = found * scale[:, None]
    return found


@triton.jit
def _turn(
    source: tl.tensor,
    target: tl.tensor,
    valid: tl.tensor,
    scale: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    PAIRS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FLOAT8: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """Turn rows of D numbers at ``source`` ``[BLOCK_T, 1]`` to ``target`` ``[BLOCK_T, 1]``.

    The ``PAIRS`` pairs turn by ``cos`` and ``sin``; dimensions from ``2 * PAIRS`` on stay as they are.
    """
    kind = target.dtype.element_ty
    pair = tl.arange(0, BLOCK_P)
    c = tl.load(cos + pair, mask=pair < PAIRS, other=1.0)[None, :]
    s = tl.load(sin + pair, mask=pair < PAIRS, other=0.0)[None, :]
    if INTERLEAVED:
        # Both members in one access, side by side as they lie.
        both = tl.arange(0, 2 * BLOCK_P)
        held = valid[:, None] & (both < 2 * PAIRS)[None, :]
        found = _numbers(source + both[None, :], held, scale, FLOAT8, SCALED)
        x, y = tl.split(tl.reshape(found, [found.shape[0], BLOCK_P, 2]))
        turned = tl.reshape(tl.join(x * c - y * s, y * c + x * s), [found.shape[0], 2 * BLOCK_P])
        tl.store(target + both[None, :], turned.to(kind), mask=held)
    else:
        held = valid[:, None] & (pair < PAIRS)[None, :]
        x = _numbers(source + pair[None, :], held, scale, FLOAT8, SCALED)
        y = _numbers(source + pair[None, :] + PAIRS, held, scale, FLOAT8, SCALED)
        tl.store(target + pair[None, :], (x * c - y * s).to(kind), mask=held)
        tl.store(target + pair[None, :] + PAIRS, (y * c + x * s).to(kind), mask=held)
    if HEAD_DIM > 2 * PAIRS:
        rest = 2 * PAIRS + tl.arange(0, BLOCK_REST)
        held = valid[:, None] & (rest < HEAD_DIM)[None, :]
        tl.store(
            target + rest[None, :],
            _numbers(source + rest[None, :], held, scale, FLOAT8, SCALED).to(kind),
            mask=held,
        )


@triton.jit(do_not_specialize=["layer"])
def _assemble(
    payload: tl.tensor,
    scales: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    table: tl.tensor,
    tiles: tl.tensor,
    slots: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    layer: tl.tensor,
    page: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ALIGN: tl.constexpr,
    PAGED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FLOAT8: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """``BLOCK_T`` tokens of one chunk and one KV head, keys and values: grid ``(tiles, KVH)``."""
    head = tl.program_id(1).to(tl.int64)
    tile = tiles + tl.program_id(0) * 2
    chunk = tl.load(tile)
    entry = table + chunk * 11
    token = tl.load(tile + 1) + tl.arange(0, BLOCK_T)
    valid = token < tl.load(entry + 9)
    slot = tl.load(slots + tl.load(entry + 10) + token, mask=valid, other=-1)
    valid = valid & (slot >= 0)
    slot = tl.where(valid, slot, 0)
    if PAGED:
        place = (slot // page) * block_stride + (slot % page) * token_stride
    else:
        place = slot * token_stride
    place = (place + head * head_stride)[:, None]

    start = tl.load(entry) + tl.load(entry + 1) * layer + tl.load(entry + 3) * head
    source = payload + tl.multiple_of(start, ALIGN) + token[:, None] * HEAD_DIM
    part = tl.multiple_of(tl.load(entry + 2), ALIGN)
    key_scale = tl.full([BLOCK_T], 1.0, tl.float32)
    value_scale = key_scale
    if SCALED:
        scale = scales + tl.load(entry + 4) + tl.load(entry + 5) * layer + tl.load(entry + 7) * head
        scale += token * tl.load(entry + 8)
        key_scale = tl.load(scale, mask=valid, other=0.0)
        value_scale = tl.load(scale + tl.load(entry + 6), mask=valid, other=0.0)

    dims = tl.arange(0, BLOCK_D)
    held = valid[:, None] & (dims < HEAD_DIM)[None, :]
    numbers = _numbers(source + part + dims[None, :], held, value_scale, FLOAT8, SCALED)
    tl.store(value + place + dims[None, :], numbers.to(value.dtype.element_ty), mask=held)
    if PAIRS > 0:
        _turn(
            source, key + place, valid, key_scale, cos + chunk * PAIRS, sin + chunk * PAIRS,
            PAIRS, BLOCK_P, HEAD_DIM, BLOCK_REST, INTERLEAVED, FLOAT8, SCALED,
        )  # fmt: skip
    else:
        numbers = _numbers(source + dims[None, :], held, key_scale, FLOAT8, SCALED)
        tl.store(key + place + dims[None, :], numbers.to(key.dtype.element_ty), mask=held)


def assemble(stored: Stored, layer: int, key: Tensor, value: Tensor, slots: Tensor, turns: Turns | None) -> None:
    """See :func:`blend.recompute.kernels.reference.assemble`."""
    check_target(stored, layer, key, value, slots, turns)
    paged = key.ndim == 4
    head_dim = key.shape[-1]
    kv_heads = key.shape[-2] if paged else key.shape[0]
    block, token, head = key.stride()[:3] if paged else (0, key.stride(1), key.stride(0))
    pairs = 0 if turns is None else turns.cos.shape[1]
    payload = stored.payloads[0]
    float8 = payload.dtype == torch.float8_e4m3fn
    # With four warps the widest heads do not fit the registers, nor does what becomes four times as long on its way.
    crowded = head_dim > 128 or (head_dim > 64 and float8 and key.dtype == torch.float32)
    cos, sin = (slots, slots) if turns is None else (turns.cos, turns.sin)
    launch(
        _assemble,
        (len(stored.tiles), kv_heads),
        payload.view(torch.uint8) if float8 else payload,
        slots if stored.scales is None else stored.scales[0],
        key,
        value,
        stored.table,
        stored.tiles,
        slots,
        cos,
        sin,
        layer,
        key.shape[1] if paged else 1,
        block,
        token,
        head,
        HEAD_DIM=head_dim,
        BLOCK_D=padded(head_dim),
        BLOCK_T=TILE,
        PAIRS=pairs,
        BLOCK_P=1 << (max(pairs, 1) - 1).bit_length(),
        BLOCK_REST=1 << max(head_dim - 2 * pairs - 1, 0).bit_length(),
        ALIGN=16 // payload.element_size(),
        PAGED=paged,
        INTERLEAVED=turns is not None and turns.pairing == "interleaved",
        FLOAT8=float8,
        SCALED=stored.scales is not None,
        num_warps=8 if crowded else 4,
    )


def check_target(stored: Stored, layer: int, key: Tensor, value: Tensor, slots: Tensor, turns: Turns | None) -> None:
    """Refuse a layer, a canvas or blocks, slots or turns that do not fit the chunks."""
    first = stored.payloads[0]
    check_numbers("key", key, 4 if key.ndim == 4 else 3)
    check_like("value", value, key, *range(key.ndim))
    if key.stride() != value.stride():
        raise InvalidInput("value.strides", value.stride(), f"those of the keys, {key.stride()}")
    check_rows("key", key, dense=False)
    check_rows("value", value, dense=False)
    kv_heads = key.shape[-2] if key.ndim == 4 else key.shape[0]
    if (kv_heads, key.shape[-1], key.device) != (first.shape[2], first.shape[4], first.device):
        raise InvalidInput("key", tuple(key.shape), f"KVH {first.shape[2]} and D {first.shape[4]} on {first.device}")
    if first.dtype not in (*QUANTIZED, key.dtype):
        raise InvalidInput("payload.dtype", first.dtype, f"{key.dtype}, or {' or '.join(map(str, QUANTIZED))}")
    if not 0 <= layer < first.shape[0]:
        raise InvalidInput("layer", layer, f"0 to {first.shape[0] - 1}")
    check_positions("slots", slots, stored.total, first.device)
    if turns is not None:
        pairs = turns.cos.shape[-1]
        for table in (turns.cos, turns.sin):
            if (tuple(table.shape), table.dtype, table.device) != (
                (len(stored.tokens), pairs),
                torch.float32,
                first.device,
            ) or not table.is_contiguous():
                raise InvalidInput("turns", (tuple(table.shape), table.dtype), "[C, P] float32 on the chunks' device")
        if not 1 <= pairs <= key.shape[-1] // 2:
            raise InvalidInput("turns", pairs, f"1 to {key.shape[-1] // 2} pairs")
