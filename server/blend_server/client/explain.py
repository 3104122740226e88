"""One answer as a page: what became of each token and chunk of its prompt, and where the time went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from blend.page import Map, render, token_map
from blend.page.text import clean, cleaned, number
from blend.types import Answer, ChunkReport, Report, Timings
from blend_server.client.show import ENDINGS, counted, milliseconds, size, variant
from blend_server.proto.blend.v1 import blend_pb2 as pb

MEANINGS: Mapping[str, str] = {
    "cached": "from the store, used as it was",
    "recomputed": "from the store, selected and computed afresh",
    "mandatory": "template and question, always computed",
    "missed": "of a chunk that was not there, computed",
    "unused": "of a chunk that the plan did not want, computed",
}
"""The states of tokens, and what they mean."""

_WITHOUT = {"miss": "missed", "failed": "missed", "unused": "unused"}
_STEPS = ("queue", "lookup", "fetch", "rotate", "select", "recompute")
_KINDS = {"lookup": "load", "fetch": "load", "rotate": "load", "select": "compute", "recompute": "compute"}


@dataclass(frozen=True)
class Explained:
    """An answer with all that a page says of it, as the server sent it; ``origin`` says which model and server."""

    question: str
    passages: pb.Passages
    prompt: pb.PromptTokens
    answer: Answer
    origin: str


@dataclass(frozen=True)
class Fact:
    """A figure, with what it has to be read with."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Bar:
    """A stretch of time. ``start`` and ``width`` are percentages of the whole scale."""

    name: str
    time: str
    kind: str
    start: float
    width: float


@dataclass(frozen=True)
class Row:
    """A passage of the prompt, and where its KV came from."""

    passage: str
    title: str
    score: str
    tokens: int
    served: str
    variant: str
    read: str
    why: str


def page(found: Explained) -> str:
    """Return the page: one file that asks for nothing else. Whatever the documents hold, it is shown as text."""
    report = cleaned(found.answer.report)
    rows = list(_rows(found, report))
    prompt = _map(found, report, rows)
    return render(
        "blend_server.client",
        "explain.html",
        title=" ".join(clean(found.question).split()),
        style="explain.css",
        answer=clean(found.answer.text.strip()),
        ending=ENDINGS[found.answer.finish_reason],
        facts=list(_facts(report)),
        mode=report.mode,
        reason=report.reason,
        warnings=report.warnings,
        bars=list(_bars(report, found.passages.retrieve_ms)),
        rows=rows,
        reasons=any(row.why for row in rows),
        tiers=_tiers(report),
        map=prompt,
        legend=[(state, MEANINGS[state], count) for state in MEANINGS if (count := prompt.states.get(state, 0))],
        origin=clean(found.origin),
    )


def _facts(report: Report) -> Iterator[Fact]:
    predicted = f"; {milliseconds(report.predicted_ms)} predicted" if report.predicted_ms > 0 else ""
    yield Fact("TTFT", milliseconds(report.timings.ttft), f"request to first token{predicted}")
    if report.full_ms > 0:
        yield Fact("full prefill", milliseconds(report.full_ms), _how(report))
        yield Fact("speed-up", f"{number(report.speedup, 2)} ×", "full prefill over TTFT")
    yield Fact("cached", f"{report.cached} of {report.tokens}", f"tokens; {report.mandatory} mandatory")
    if report.cached:
        ratios = f"{number(report.requested_ratio)} asked for, {number(report.selected_ratio)} selected"
        yield Fact("charged", number(report.charged_ratio), f"of the cached tokens; {ratios}")
    if (comparison := report.comparison) is not None:
        agrees = "the same" if comparison.top1_agrees else "another"
        expected = "" if report.predicted_kl is None else f"; {number(report.predicted_kl, 4)} predicted"
        note = f"nats; {agrees} most likely token{expected}"
        yield Fact("first-token KL", number(comparison.first_token_kl, 4), note)
    elif report.predicted_kl is not None:
        yield Fact("predicted KL", number(report.predicted_kl, 4), "nats, of the first token, by the calibration")


def _how(report: Report) -> str:
    return "measured" if report.comparison is not None else "estimated"


def _bars(report: Report, retrieve_ms: float) -> Iterator[Bar]:
    """Yield what the time to first token is made of, one after another, then the whole, then full prefill."""
    timings: Timings = report.timings
    steps = [("retrieve", "wait", retrieve_ms)]
    steps += [(name, _KINDS.get(name, "wait"), getattr(timings, name)) for name in _STEPS]
    spent = sum(ms for _, _, ms in steps)
    steps.append(("first token", "compute", max(timings.ttft - spent, 0.0)))  # what is left: its logits, other requests
    scale = max(spent, timings.ttft, report.full_ms) or 1.0
    at = 0.0
    for name, kind, ms in steps:
        yield _bar(name, kind, at, ms, scale)
        at += ms
    yield _bar("TTFT", "whole", 0.0, timings.ttft, scale)
    if report.full_ms > 0:
        yield _bar(f"full prefill, {_how(report)}", "full", 0.0, report.full_ms, scale)


def _bar(name: str, kind: str, start: float, ms: float, scale: float) -> Bar:
    time = f"{ms:.1f} ms" if ms < 10 else milliseconds(ms)
    return Bar(name, time, kind, round(100 * start / scale, 2), round(100 * ms / scale, 2))


def _rows(found: Explained, report: Report) -> Iterator[Row]:
    for passage, chunk in zip(found.passages.passages, report.chunks, strict=False):
        yield Row(
            clean(f"{passage.document_id} #{passage.ordinal}"),
            clean(passage.title),
            number(passage.score),
            chunk.tokens,
            _served(chunk),
            variant(chunk),
            size(chunk.nbytes) if chunk.nbytes else "",
            chunk.reason,
        )


def _served(chunk: ChunkReport) -> str:
    return chunk.tier or chunk.outcome  # only a hit has a tier


def _tiers(report: Report) -> str:
    """How many chunks each tier served, and how much was read: ``3 from host (4.1 MiB), 1 miss``."""
    read: dict[str, list[int]] = {}
    for chunk in report.chunks:
        read.setdefault(f"from {chunk.tier}" if chunk.tier else chunk.outcome, []).append(chunk.nbytes)
    parts = (f"{len(sizes)} {what}" + (f" ({size(sum(sizes))})" if sum(sizes) else "") for what, sizes in read.items())
    return f"{counted(len(report.chunks), 'chunk')}: {', '.join(parts)}"


def _map(found: Explained, report: Report, rows: list[Row]) -> Map:
    """The prompt's tokens, each with its state."""
    recomputed = set(report.recomputed_positions or ())
    states: list[str] = []
    spans: list[tuple[int, int]] = []
    outcomes = [chunk.outcome for chunk in report.chunks]
    for segment in found.prompt.segments:
        positions = range(segment.start, segment.start + segment.tokens)
        if segment.kind != pb.SEGMENT_KIND_CHUNK:
            states += ["mandatory"] * segment.tokens
            continue
        outcome = outcomes[len(spans)]
        spans.append((positions.start, positions.stop))
        if outcome == "hit":
            states += ["recomputed" if position in recomputed else "cached" for position in positions]
        else:
            states += [_WITHOUT[outcome]] * segment.tokens
    titles = [f"{row.passage}, {row.served}" for row in rows]
    return token_map([clean(text) for text in found.prompt.texts], states, spans, titles=titles)
