"""Proof, when an engine starts, that its paged cache does what blending needs of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention

from blend.connector.vllm.decoder import EngineDecoder
from blend.connector.vllm.pages import Pages, runs_of
from blend.errors import ModelUnsupported
from blend.recompute.kernels import reference
from blend.recompute.kernels.batch import Batch
from blend.recompute.kernels.memory import Canvases

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@torch.inference_mode()
def check_layout(pages: Pages, decoder: EngineDecoder, attention: Mapping[str, Attention], config: VllmConfig) -> None:
    """A round trip: random keys and values are written to blocks of each layer, and read back through attention.

    The blocks are out of order, their last one is not full, and the rows that read are scattered runs over one block
    table, whose own keys and values are written on the way. To be called while no request holds a block; the blocks
    that are used are zeros again afterwards.

    Raises:
        ModelUnsupported: attention reads something else than was written.
    """
    length = pages.block_size * 2 + pages.block_size // 2
    blocks = [3, 1, 2]  # block 0 is vLLM's own
    held = torch.arange(length, device=decoder.device)
    rows = torch.tensor([1, 2, pages.block_size, pages.block_size + 1, length - 3, length - 1], device=decoder.device)
    metadata, slots = pages.metadata(rows, runs_of(rows), blocks)
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, count: int) -> Tensor:
        drawn = torch.randn(count, heads, decoder.head_dim, generator=generator)
        return drawn.to(decoder.device, decoder.dtype)

    for index, layer in enumerate(attention.values()):
        key, value = draw(decoder.kv_heads, length), draw(decoder.kv_heads, length)
        query = draw(decoder.heads, len(rows))
        stale = torch.where(torch.isin(held, rows)[:, None, None], -1, 1)
        slots_of_all = pages.slots(held, blocks)
        pages.write(index, slots_of_all, (key * stale).to(key.dtype), (value * stale).to(value.dtype))
        with set_forward_context(metadata, config, num_tokens=len(rows), slot_mapping=slots, skip_compiled=True):
            found = layer(query.flatten(1), key[rows].flatten(1), value[rows].flatten(1))
        wanted = _attend(decoder, index, rows, query, key, value)
        difference = float((found.view(wanted.shape).float() - wanted.float()).abs().max())
        if not difference <= _TOLERANCE[decoder.dtype]:
            raise ModelUnsupported(
                decoder.name,
                f"layer {index}: attention of {layer.attn_backend.get_name()} over what its blocks were given is off "
                f"by {difference:.1e}: this version lays its cache out in a way that is not known",
            )
        pages.write(index, slots_of_all, torch.zeros_like(key), torch.zeros_like(value))


def _attend(decoder: EngineDecoder, layer: int, rows: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same attention over a canvas, ``[R, H, D]``, by the reference kernel."""
    k, v = (stored.transpose(0, 1)[None].contiguous() for stored in (key, value))
    asked = decoder.asked[layer]
    out = reference.attend(
        query.transpose(0, 1),
        Canvases([k], [v]),
        0,
        Batch([rows]),
        scale=asked.scale,
        window=asked.window,
        softcap=asked.softcap,
    )
    return out.transpose(0, 1)
