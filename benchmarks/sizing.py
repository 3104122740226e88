"""How much KV there is, and what it takes to move it: the arithmetic of docs/sizing.md.

    python benchmarks/sizing.py                                  the tables of that page
    python benchmarks/sizing.py --model llama-3.1-8b --tokens 20000000 --cached 8000 --ttft 0.5 --prefill 5000

With ``--model`` it works out one deployment: what to store, and the bandwidth that a time to first token needs. Nothing
is measured; the model's own speed of prefill is to be given. Prints tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass

from blend.store.key import PLAIN, ObjectKey
from blend.store.layout import ITEMSIZE, Header

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
CHUNK_TOKENS = 256


@dataclass(frozen=True)
class Model:
    """What a model's configuration says about its KV: ``num_hidden_layers``, ``num_key_value_heads``, ``head_dim``."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int

    def token_nbytes(self, dtype: str = "bfloat16") -> int:
        """Bytes of keys and values of one token: 2 x layers x KV heads x head dimension x bytes of a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * ITEMSIZE[dtype]

    def object_nbytes(self, tokens: int = CHUNK_TOKENS, dtype: str = "bfloat16") -> int:
        """Bytes of one stored chunk, its header included."""
        shape = {"layers": self.layers, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "dtype": dtype}
        key, ids = ObjectKey("0" * 40, PLAIN), (0,) * tokens
        return Header(key, bytes(32), ids, **shape, generation=bytes(16)).object_nbytes  # type: ignore[arg-type]


MODELS = (
    Model("SmolLM2-135M", 30, 3, 64),
    Model("Llama-3.2-1B", 16, 8, 64),
    Model("Qwen2.5-7B", 28, 4, 128),
    Model("Qwen3-0.6B", 28, 8, 128),
    Model("Llama-3.1-8B", 32, 8, 128),
    Model("Mistral-7B-v0.3", 32, 8, 128),
    Model("Qwen3-8B", 36, 8, 128),
    Model("Qwen3-32B", 64, 8, 128),
    Model("Llama-3.1-70B", 80, 8, 128),
    Model("Gemma-2-9B", 42, 8, 256),
    Model("Llama-2-7B", 32, 32, 128),
)
PREFILLS = (500, 5_000, 20_000, 50_000)
"""Tokens a second of full prefill: columns of the table of break-even bandwidths."""


def break_even(token_nbytes: int, prefill: float, ratio: float = 0.15) -> float:
    """Bytes a second from which on loading a cached token is faster than computing it.

    A reused token costs ``token_nbytes / bandwidth`` where a computed one costs ``1 / prefill``; of the cached ones the
    share ``ratio`` is computed all the same. Loading and computing overlap layer by layer, which this leaves out: it
    asks for more than is needed.
    """
    return token_nbytes * prefill / (1 - ratio)


def bandwidth_for(cached: int, token_nbytes: int, ttft: float, prefill: float, computed: int) -> float | None:
    """Bytes a second that bring ``cached`` tokens in while ``computed`` ones are computed, all within ``ttft`` seconds.

    ``None`` where computing alone takes longer.
    """
    left = ttft - computed / prefill
    return cached * token_nbytes / left if left > 0 else None


def size(nbytes: float) -> str:
    """Bytes in the unit that suits them."""
    for unit, scale in (("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes:.0f} B"


def kv_table() -> str:
    """The table of KV by model, in Markdown."""
    head = "| Model | Layers | KV heads | Head dim | KV a token, 16 bit | Chunk of 256 tokens | 1 million tokens |"
    rows = [head, "|---|---|---|---|---|---|---|"]
    for model in MODELS:
        chunk = model.object_nbytes()
        million = size(-(-1_000_000 // CHUNK_TOKENS) * chunk)
        cells = (model.name, model.layers, model.kv_heads, model.head_dim, size(model.token_nbytes()), size(chunk))
        rows.append(f"| {' | '.join(map(str, cells))} | {million} |")
    return "\n".join(rows)


def break_even_table() -> str:
    """The table of break-even bandwidths by model and speed of prefill, in Markdown."""
    head = " | ".join(f"{prefill:,} tokens/s" for prefill in PREFILLS)
    rows = [f"| Model, 16 bit | {head} |", "|---|" + "---|" * len(PREFILLS)]
    for model in MODELS:
        cells = " | ".join(f"{size(break_even(model.token_nbytes(), prefill))}/s" for prefill in PREFILLS)
        rows.append(f"| {model.name} | {cells} |")
    return "\n".join(rows)


def deployment(
    model: Model, tokens: int, cached: int, fresh: int, ratio: float, ttft: float, prefill: float
) -> dict[str, float | str | None]:
    """What one deployment needs.

    Args:
        tokens: of all documents.
        cached: of a prompt, those out of the store.
        fresh: of a prompt, the others: template and question.
        ratio: the share of the cached ones that is computed.
        ttft: seconds to the first token.
        prefill: tokens a second of a full prefill.
    """
    chunks = -(-tokens // CHUNK_TOKENS)
    computed = fresh + round(ratio * cached)
    needed = bandwidth_for(cached, model.token_nbytes(), ttft, prefill, computed)
    return {
        "model": model.name,
        "kv_token_bytes": model.token_nbytes(),
        "chunks": chunks,
        "stored_bytes": chunks * model.object_nbytes(),
        "request_bytes": cached * model.token_nbytes(),
        "full_seconds": (cached + fresh) / prefill,
        "computed_seconds": computed / prefill,
        "bandwidth_bytes_s": needed,
        "break_even_bytes_s": break_even(model.token_nbytes(), prefill, ratio),
        "ingest_seconds": tokens / prefill,
    }


def _shown(found: dict[str, float | str | None]) -> list[str]:
    lines = []
    for name, value in found.items():
        if isinstance(value, (int, float)) and "bytes" in name:
            shown = size(value) + ("/s" if name.endswith("_s") else "")
        else:
            shown = "not reachable: computing alone takes longer" if value is None else f"{value}"
        lines.append(f"{name:22} {shown}")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables, or one deployment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    by_name = {model.name.lower(): model for model in MODELS}
    parser.add_argument("--model", choices=sorted(by_name))
    parser.add_argument("--tokens", type=int, default=20_000_000, help="of all documents")
    parser.add_argument("--cached", type=int, default=8_000, help="tokens of a prompt out of the store")
    parser.add_argument("--fresh", type=int, default=100, help="the others: template and question")
    parser.add_argument("--ratio", type=float, default=0.15, help="share of the cached tokens that is computed")
    parser.add_argument("--ttft", type=float, default=0.5, metavar="SECONDS")
    parser.add_argument("--prefill", type=float, default=5_000.0, metavar="TOKENS", help="a second, at full prefill")
    given = parser.parse_args(argv)
    if given.model is None:
        print(f"{kv_table()}\n\n{break_even_table()}\n")
        print(json.dumps({model.name: model.token_nbytes() for model in MODELS}))
        return
    model = by_name[given.model]
    found = deployment(model, given.tokens, given.cached, given.fresh, given.ratio, given.ttft, given.prefill)
    print("\n".join(_shown(found)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
