"""What the benchmarks of prefill work on: prompts, an engine whose tiers hold every chunk of them, and the machine."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from blend import Chunk, Engine, EngineConfig, Plan, Prompt, RagConfig, Report, StoreConfig
from blend.config import GiB
from blend.rag.chunking import render_chunk
from blend.rag.prompt import PromptBuilder
from blend.types import PLAIN_METHODS


def engine(model: str, dtype: str, threads: int | None, store: Path) -> Engine:
    """An engine whose two tiers hold everything that a benchmark of prefill computes."""
    tiers = StoreConfig(host_bytes=8 * GiB, disk_bytes=64 * GiB, directory=store)
    return Engine(EngineConfig(model, dtype=dtype, threads=threads, recompute_misses=False, store=tiers))


def plan(method: str, ratio: float) -> Plan:
    """The plan of this method; those that select nothing take no ratio."""
    return Plan(method) if method in ("auto", *PLAIN_METHODS) else Plan(method, ratio)


def prompts(engine: Engine, data: Path, count: int, passages: int | None) -> list[Prompt]:
    """Prompts of the first ``count`` questions: each of so many passages (all) a chunk, tokenized on its own."""
    builder, made = _builder(engine), []
    for row in _rows(data)[:count]:
        texts = [render_chunk(c.get("title") or "", c["text"]) for c in row["ctxs"][:passages]]
        made.append(builder.build([Chunk(engine.tokenize(t)) for t in texts], row["question"]))
    return made


def sized_prompts(engine: Engine, data: Path, lengths: Sequence[int]) -> list[Prompt]:
    """A prompt of exactly so many tokens for each of ``lengths``, under the data's first question.

    Its passages are those of many questions, none of them twice, in the same order for every length; the last one is
    cut.
    """
    rows = _rows(data)
    builder, question = _builder(engine), rows[0]["question"]
    around = len(builder.build([], question))
    if min(lengths) <= around:
        raise SystemExit(f"a prompt of {min(lengths)} tokens has no room for passages: the question takes {around}")
    chunks: list[Chunk] = []
    texts = _mixed(rows)
    missing = max(lengths) - around
    while missing > 0:
        text = next(texts, None)
        if text is None:
            raise SystemExit(f"{data} has too few passages for {max(lengths)} tokens: {missing} are missing")
        chunks.append(Chunk(engine.tokenize(text)))
        missing -= len(chunks[-1])
    return [builder.build(_cut(chunks, length - around), question) for length in lengths]


def _rows(data: Path) -> list[dict[str, Any]]:
    rows = json.loads(data.read_text("utf-8"))
    if not isinstance(rows, list) or not rows:
        raise SystemExit(f"{data} holds no list of questions")
    return rows


def _builder(engine: Engine) -> PromptBuilder:
    rag = RagConfig()
    return PromptBuilder(engine.tokenizer, system=rag.system, answer_prefix=rag.answer_prefix)


def _mixed(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Every distinct passage: the first one of each question, then the second one of each, and so on."""
    turns = zip_longest(*(row["ctxs"] for row in rows))
    texts = (render_chunk(c.get("title") or "", c["text"]) for turn in turns for c in turn if c is not None)
    return iter(dict.fromkeys(texts))


def _cut(chunks: Sequence[Chunk], tokens: int) -> list[Chunk]:
    """The first ``tokens`` tokens of these chunks."""
    kept: list[Chunk] = []
    for chunk in chunks:
        if tokens > 0:
            kept.append(Chunk(chunk.token_ids[:tokens]))
            tokens -= len(chunk)
    return kept


def chunks_of(prompt: Prompt) -> list[Chunk]:
    """The prompt's chunks, in order."""
    return [segment for segment in prompt.segments if isinstance(segment, Chunk)]


def fresh_rows(report: Report) -> float:
    """Rows that the request computed: mandatory and selected ones, and those of the method's probe.

    A probe that ends in an early layer counts as the rows that cost as much in all layers.
    """
    return report.mandatory + report.selected + (report.charged_ratio - report.selected_ratio) * report.cached


def warm_up(engine: Engine) -> None:
    """Run every code path once on a short prompt that shares nothing with the data."""
    chunks = [Chunk(range(200, 300)), Chunk(range(300, 400))]
    engine.precompute(chunks)
    prompt = PromptBuilder(engine.tokenizer, system="", answer_prefix="").build(chunks, "?")
    for method in ("full", "query", "deviation"):
        engine.prefill(prompt, Plan(method))
    engine.forget(chunks)


def drop_pages(directory: Path) -> None:
    """Ask the kernel to forget the files under ``directory``, so that reads go to the device."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def leave_on_disk(engine: Engine, directory: Path) -> None:
    """Empty the host tier and the page cache, so that every object comes from the device."""
    engine.store.wait_idle()
    (host,) = [tier for tier in engine.store.tiers if tier.name == "host"]
    for key in list(host.keys()):
        host.remove(key)
    drop_pages(directory)


def check_served(served: set[str], tier: str, method: str) -> None:
    """Stop the benchmark if chunks came from elsewhere than from ``tier``."""
    if served != {tier} and method not in ("full", "prefix"):
        raise SystemExit(f"chunks were served from {served} and not from {tier}: this measures something else")


def tiers_of(report: Report) -> set[str]:
    """The tiers that served the request's chunks; ``None`` for chunks that none did."""
    return {str(chunk.tier) for chunk in report.chunks}


def machine() -> dict[str, Any]:
    """The machine's name for tables: processor, threads, versions."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    capability = torch.backends.cpu.get_cpu_capability()
    return {"cpu": name, "capability": capability, "threads": torch.get_num_threads(), "torch": torch.__version__}
