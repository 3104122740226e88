"""What ``blend-client`` prints for people."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from blend.types import ChunkReport, Finish, Report
from blend_server.plain import plain
from blend_server.proto.blend.v1 import blend_pb2 as pb

ENDINGS: Mapping[Finish, str] = {
    "stop": "",
    "length": "cut off at the most tokens asked for",
    "cancelled": "cancelled",
    "deadline": "cut off at the deadline",
}
"""How an answer ended, where that is worth a word."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def safe(text: str) -> str:
    """Text without control characters, which a terminal could take for commands; line ends and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def as_json(console: Console, values: Mapping[str, Any]) -> None:
    """Print JSON, in one line."""
    console.out(json.dumps(values), highlight=False)


def size(count: int) -> str:
    """A number of bytes, such as ``1.5 MiB``."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def counted(count: int, unit: str) -> str:
    """``1 chunk``, ``2 chunks``."""
    return f"{count} {unit}" if count == 1 else f"{count} {unit}s"


def reuse(reused: int, computed: int) -> str:
    """How many of the chunks of all documents were there before: ``3 of 5 chunks were reused, 2 computed.``"""
    were = "was" if 1 in (reused, reused + computed) else "were"
    return f"{reused} of {counted(reused + computed, 'chunk')} {were} reused, {computed} computed."


def milliseconds(value: float) -> str:
    """A duration, such as ``312 ms`` or ``1.84 s``."""
    return f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.2f} s"


def passages(console: Console, found: Iterable[pb.Passage], *, texts: bool) -> None:
    """Print which passages a prompt holds and how well they fit, on request with their text."""
    for passage in found:
        line = Text.assemble((f"{passage.score:.3f}  ", "dim"), safe(f"{passage.document_id} #{passage.ordinal}"))
        line.append(safe(f"  {passage.title}  {passage.tokens} tokens"), style="dim")
        if texts:
            line.append("\n" + safe(passage.text.strip()) + "\n", style="italic")
        console.print(line)


def report(console: Console, made: Report) -> None:
    """Print a report's line, and its warnings."""
    parts = [f"TTFT {milliseconds(made.timings.ttft)}"]
    if made.full_ms > 0:
        how = "" if made.comparison else " (estimated)"
        parts += [f"full prefill {milliseconds(made.full_ms)}{how}", f"speed-up {made.speedup:.2f}"]
    parts += [f"{made.mode}, charged {made.charged_ratio:.3f}", _where(made)]
    if made.comparison is not None:
        parts.append(f"first-token KL {made.comparison.first_token_kl:.4f}")
    console.print(Text(" | ".join(parts), style="dim"))
    _rows(console, [("warning", warning) for warning in made.warnings])


def details(console: Console, made: Report, retrieve_ms: float) -> None:
    """Print a whole report: what was reused, what was computed, how long it took, how close it is to full prefill.

    ``retrieve_ms``: how long it took to find the passages, which is part of the time to first token.
    """
    rows = [
        ("mode", f"{made.mode} ({made.reason})" if made.reason else made.mode),
        ("tokens", f"{made.tokens} in the prompt: {made.cached} cached, {made.mandatory} mandatory"),
        ("recomputed", _recomputed(made)),
        ("served", _chunks(made)),
        ("variants", ", ".join(variant(c) or c.outcome for c in made.chunks) or "none"),
        ("first token", _first_token(made)),
        ("spent on", _spent(made, retrieve_ms)),
    ]
    if (comparison := made.comparison) is not None:
        agrees = "the same" if comparison.top1_agrees else "another"
        expected = "" if made.predicted_kl is None else f" ({made.predicted_kl:.4f} predicted)"
        kl = f"KL {comparison.first_token_kl:.4f} nats{expected}"
        rows.append(("fidelity", f"{kl}, {agrees} most likely first token"))
    elif made.predicted_kl is not None:
        rows.append(("fidelity", f"KL {made.predicted_kl:.4f} nats predicted"))
    if made.recomputed_positions is not None:
        rows.append(("positions", ranges(made.recomputed_positions)))
    _rows(console, [*rows, *(("warning", warning) for warning in made.warnings)])


def _rows(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    for name, value in rows:
        console.print(Text.assemble((f"{name:<12} ", "dim"), safe(value)))


def _recomputed(made: Report) -> str:
    if made.cached == 0:
        return "nothing was reused"
    ratios = f"{made.requested_ratio:.3f} asked for, {made.selected_ratio:.3f} selected"
    return f"{made.selected} of the cached tokens: {ratios}, {made.charged_ratio:.3f} charged"


def _chunks(made: Report) -> str:
    read = sum(c.nbytes for c in made.chunks)
    return _where(made) + (f"; {size(read)} read" if read else "")


def _where(made: Report) -> str:
    """How many chunks each tier served, and what became of the others."""
    where = Counter(_place(c) for c in made.chunks)
    conditioned = Counter(_place(c) for c in made.chunks if variant(c) == "conditioned")
    parts = (
        f"{count} {name}" + (f" ({conditioned[name]} conditioned)" if conditioned[name] else "")
        for name, count in where.items()
    )
    return "chunks: " + (", ".join(parts) or "none")


def variant(chunk: ChunkReport) -> str:
    """``plain`` or ``conditioned``; nothing where none was loaded. Reports have the stored object's own name."""
    if not chunk.variant:
        return ""
    return "plain" if chunk.variant == "plain" else "conditioned"


def _place(chunk: ChunkReport) -> str:
    return chunk.tier or chunk.outcome  # only a hit has a tier


def _first_token(made: Report) -> str:
    said = milliseconds(made.timings.ttft)
    if made.predicted_ms > 0:
        said += f" ({milliseconds(made.predicted_ms)} predicted)"
    if made.full_ms <= 0 or (made.cached == 0 and made.comparison is None):
        return said
    how = "measured" if made.comparison else "estimated"
    return f"{said}; full prefill {milliseconds(made.full_ms)} ({how}), {made.speedup:.2f} times as long"


def _spent(made: Report, retrieve_ms: float) -> str:
    names = ("queue", "lookup", "fetch", "rotate", "select", "recompute")
    spent = [("retrieve", retrieve_ms), *((name, getattr(made.timings, name)) for name in names)]
    return ", ".join(f"{name} {milliseconds:.1f}" for name, milliseconds in spent) + " ms"


def ranges(positions: Iterable[int]) -> str:
    """Ascending positions with runs joined: ``3-7, 12``."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and position == runs[-1][1] + 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def stats(console: Console, found: pb.Stats) -> None:
    """Print the server's figures."""
    engine, corpus, queue, limits = found.engine, found.corpus, found.queue, found.limits
    documents = [counted(corpus.documents, "document"), counted(corpus.chunks, "chunk"), f"{corpus.tokens} tokens"]
    if corpus.outdated:
        documents.append(f"{counted(corpus.outdated, 'document')} outdated: left out of answers until processed again")
    if corpus.conditioned or corpus.to_condition:
        waiting = f"; {corpus.to_condition} to be encoded so (again)" if corpus.to_condition else ""
        documents.append(f"{counted(corpus.conditioned, 'chunk')} encoded behind neighbours{waiting}")
    tiers = [(f"tier {tier.name}", _tier(tier)) for tier in engine.tiers]
    sizes = f"document {size(limits.max_document_bytes)}, message {size(limits.max_message_bytes)}"
    rows = [
        ("server", f"{found.version}, up since {found.started_at.ToDatetime():%Y-%m-%d %H:%M:%S} UTC"),
        ("model", f"{engine.model}, {engine.layers} layers, {engine.dtype} on {engine.device}"),
        *_environment(found.environment),
        ("corpus", ", ".join(documents)),
        ("requests", f"{engine.requests} answered; {queue.requests} now, {queue.max_queue} may wait"),
        *_quality(plain(engine)["details"]),
        *tiers,
        ("limits", f"{sizes}, context {limits.context_tokens} tokens"),
    ]
    _rows(console, rows)


def _quality(details: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """What requests of ``auto`` lost that were run at full prefill, too; only administrators are told."""
    shadow = (details or {}).get("shadow")
    if not shadow:
        return []
    auto = shadow["methods"].get("auto", {"compared": 0, "mean_kl": None, "upper_kl": None})
    if not auto["compared"] and not shadow["tripped"]:
        return []
    said = f"auto: {auto['compared']:.0f} compared with full prefill"
    for name, kl in (("mean KL", auto["mean_kl"]), ("upper bound", auto["upper_kl"])):
        if kl is not None:
            said += f", {name} {kl:.4f}"
    stopped = f"stopped since {shadow['since']}: {shadow['reason']}" if shadow["tripped"] else "not stopped"
    return [("quality", f"{said}; {stopped}")]


def _environment(found: pb.Environment) -> list[tuple[str, str]]:
    """The version matrix, but for what other rows say."""
    if not found.blend:  # an older server tells none
        return []
    software = [("Python", found.python), ("torch", found.torch), ("transformers", found.transformers)]
    software += [(name, version) for name, version in (("vLLM", found.vllm), ("Mooncake", found.mooncake)) if version]
    shards = counted(found.tensor_parallel, "tensor-parallel shard")
    return [
        ("engine", f"{found.engine}, protocol {found.protocol}"),
        ("software", ", ".join(f"{name} {version}" for name, version in software)),
        ("machine", f"{found.cpu}, {counted(found.threads, 'thread')}, {found.platform}"),
        ("fingerprint", f"model {found.fingerprint}"),
        ("", f"tokenizer {found.tokenizer}"),
        ("KV", f"layout {found.layout_version}, {shards}, RoPE {found.rope}"),
    ]


def _tier(tier: pb.TierStats) -> str:
    if tier.down:
        return f"down: {tier.down}"
    # A tenant is not told of how many objects its bytes are, and may have no quota.
    objects = f"{counted(tier.objects, 'object')}, " if tier.objects or not tier.used_bytes else ""
    budget = f" of {size(tier.capacity_bytes)}" if tier.capacity_bytes else ""
    return f"{objects}{size(tier.used_bytes)}{budget}"
