"""Two questions over the same chunks in vLLM's ``LLM``, with blend's connector: each chunk is computed once.

    pip install 'blendkv[vllm]'
    python examples/vllm_offline.py

The chunks' KV is kept in a directory (``--store``), so that a second run finds them there, and so does
``blend.Engine`` on the same directory, for the same model and dtype.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from blend import Chunk, Plan
from blend.config import RagConfig, cache_dir
from blend.connector.client import build_prompt
from blend.model.source import resolve
from blend.model.tokenizer import Tokenizer
from blend.rag import PromptBuilder

# A forked engine would inherit what this process has imported. vLLM reads this when it is imported.
os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")

PASSAGES = (
    "At the northern tip of the island stands the lighthouse known as the Anvil Light. The tower is 38 metres tall and "
    "painted in two broad bands, white below and black above. Its lamp was first lit on 3 October 1794.\n\n",
    "The light shows two white flashes every 15 seconds and can be seen for 21 nautical miles in clear air. Sailors in "
    "the Quern Strait use it together with the red lamp on the north mole to stay clear of the Teeth.\n\n",
    "A spiral staircase of 177 steps leads to the lamp room. Visitors may climb it on Sunday afternoons between April "
    "and September, in groups of no more than eight, because the gallery at the top is narrow.\n\n",
)
QUESTIONS = ("How many steps lead to the lamp room?", "How far can the light be seen?")


def start(model: Path, store: str, dtype: str) -> Any:
    """Start vLLM on a model directory, with the connector and a way to its worker's store."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="BlendConnector",
        kv_connector_module_path="blend.connector.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"model": "smollm2-135m", "store": {"directory": store}},
    )
    return LLM(
        model=str(model),
        dtype=dtype,
        enforce_eager=True,  # starts sooner; leave it out to have the model compiled
        max_model_len=2048,
        kv_cache_memory_bytes=1 << 29,
        kv_transfer_config=transfer,
        worker_extension_cls="blend.connector.vllm.extension.ChunkCalls",
    )


def precompute(llm: Any, chunks: Sequence[Chunk]) -> int:
    """Have the worker encode and store the chunks that it has not; returns how many these were."""
    computed = 0
    for chunk in chunks:
        (answer,) = llm.collective_rpc("blend_encode", args=(list(chunk.token_ids), "default"))
        computed += answer["value"][0]
    return computed


def ask(llm: Any, builder: PromptBuilder, chunks: Sequence[Chunk], question: str) -> None:
    """Ask over the chunks, and print the answer with what it took."""
    from vllm import SamplingParams

    made = build_prompt(builder.build(chunks, question).segments, Plan("query", ratio=0.15))
    params = SamplingParams(temperature=0, max_tokens=24, extra_args={"kv_transfer_params": made["kv_transfer_params"]})
    begun = perf_counter()
    (output,) = llm.generate({"prompt_token_ids": made["prompt_token_ids"]}, params, use_tqdm=False)
    seconds = perf_counter() - begun
    print(f"\n{question}\n{output.outputs[0].text.strip()}")
    show((output.kv_transfer_params or {}).get("blend"), len(made["prompt_token_ids"]), seconds)


def show(report: Mapping[str, Any] | None, tokens: int, seconds: float) -> None:
    """Print a request's report in one line."""
    if report is None:
        print(f"{seconds:.2f} s, nothing was blended")
        return
    where = Counter(chunk.get("tier") or chunk["outcome"] for chunk in report["chunks"])
    spent = ", ".join(f"{name} {report[f'{name}_ms']:.0f}" for name in ("load", "select", "recompute"))
    print(
        f"{seconds:.2f} s | {report['method']}, charged {report['charged_ratio']:.3f} | "
        f"{report['cached']} of {tokens} tokens from the store | "
        f"chunks: {', '.join(f'{count} {name}' for name, count in where.items())} | ms: {spent}"
    )


def main() -> None:
    """Start vLLM, store the chunks, ask two questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default=str(cache_dir() / "store"), help="where KV is kept (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: %(default)s)")
    arguments = parser.parse_args()

    model = resolve("smollm2-135m")
    tokenizer = Tokenizer.from_directory(model)
    builder = PromptBuilder(tokenizer, RagConfig.system, RagConfig.answer_prefix)
    chunks = [Chunk(tokenizer.encode(text)) for text in PASSAGES]
    llm = start(model, arguments.store, arguments.dtype)
    print(f"{precompute(llm, chunks)} of {len(chunks)} chunks were computed, the others were stored already")
    for question in QUESTIONS:
        ask(llm, builder, chunks, question)
    llm.collective_rpc("blend_close")  # vLLM gives its worker little time at its end


if __name__ == "__main__":  # a process that is spawned imports this file
    main()
