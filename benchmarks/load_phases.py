"""The parts of ``load.py``: what each puts a server under, and the figures of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bound import Rate, rate_of
from load_checks import differing, foreign
from load_clients import Ask, Load, Seen, drive
from load_server import Server, code, sampled
from made_up import sentences

from blend_server.proto.blend.v1 import blend_pb2 as pb

_STORY = "Then tell the whole story."
"""Asks for a long answer."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything: streams and their seconds, requests and tokens of each part."""

    streams: int = 64
    seconds: float = 180.0
    mostly_cached: int = 32
    decoding: int = 16
    decoded: int = 96
    soak: int = 2000
    overload: int = 500


@dataclass
class Figures:
    """Figures by name, and rows of the table: what, measured."""

    found: dict[str, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def check(self, part: str, seen: Sequence[Seen], expected: tuple[str, ...] = ("OK",)) -> list[Seen]:
        """Note calls that ended otherwise than they may; returns those that were answered."""
        self.errors += [f"{part}: {one.code}: {one.message}" for one in seen if one.code not in expected]
        answered = [one for one in seen if one.code == "OK"]
        if not answered:
            raise SystemExit(f"nothing was answered: {self.errors[-1]}")
        self.errors += [f"{part}: an answer without tokens" for one in answered if not one.stamps or not one.answer]
        return [one for one in answered if one.stamps and one.answer]


def questions(count: int, words: int, kind: str = "question") -> list[str]:
    """Different questions of about so many words, each with a code of its own."""
    return [
        f"{sentences(f'{kind} {n}', words) if words else ''} Which report tells of this? My code is "
        f"{code('question', n)}: repeat it.".strip()
        for n in range(count)
    ]


def streams(server: Server, sizes: Sizes, method: str, figures: Figures) -> tuple[list[Ask], dict[int, Seen], Any]:
    """Many streams at once, of which nine tenths of the tokens are cached, blended and at full prefill.

    Returns what was asked, the answers given alone, and the answers that differ from them.
    """
    asks = [Ask(question, 4, method, 16) for question in questions(sizes.streams, 38)]
    alone = figures.check("alone", drive(server.address, asks, Load(1, count=len(asks))))
    by_ask = {one.ask: one for one in alone}
    rate = _full_rate(server, figures)
    asked_long = [Ask(f"{ask.question} {_STORY}", 1, "reuse", sizes.decoded) for ask in asks]
    long = drive(server.address, asked_long, Load(sizes.streams, count=sizes.streams))
    decoded = _together(figures.check("decoding only", long), share=0.5)
    load = Load(sizes.streams, seconds=sizes.seconds)
    blended = figures.check("streams", drive(server.address, asks, load))
    full_asks = [Ask(ask.question, ask.k, "full", ask.tokens) for ask in asks]
    full = figures.check("streams, full", drive(server.address, full_asks, load))
    rows_s = sum(_rows_seconds(one.final(), rate) for one in blended) / len(blended)
    decode_s = (sum(len(one.stamps) for one in blended) / len(blended) - 1) / decoded.per_second
    per_second, full_per_second = _per_second(blended), _per_second(full)
    figures.found |= {
        "requests": len(blended),
        "cached": round(_cached(alone), 4),
        "prompt_tokens": round(median(one.final().report.tokens for one in alone)),
        "charged_ratio": round(median(one.final().report.charged_ratio for one in blended), 4),
        "per_second": round(per_second, 3),
        "full_per_second": round(full_per_second, 3),
        "streams_ratio": round(per_second / full_per_second, 3),
        "bound_per_second": round(1 / (rows_s + decode_s), 3),
        "bound_rows_s": round(rows_s, 4),
        "bound_decode_s": round(decode_s, 4),
        "of_bound": round(per_second * (rows_s + decode_s), 3),
        "ttft_p95_s": round(_percentile([one.ttft for one in blended], 95), 3),
        "full_ttft_p95_s": round(_percentile([one.ttft for one in full], 95), 3),
        "ttft_alone_s": round(median(one.ttft for one in alone), 4),
        "foreign": sum(len(foreign(one, asks[one.ask])) for one in blended),
    }
    figures.found["ttft_p95_ratio"] = round(figures.found["ttft_p95_s"] / figures.found["full_ttft_p95_s"], 3)
    return asks, by_ask, differing(blended, by_ask)


def mostly_cached(server: Server, sizes: Sizes, method: str, figures: Figures) -> None:
    """Requests of which nearly all is cached, for few tokens, against the same ones at full prefill."""
    asked = questions(sizes.mostly_cached, 0, "short")
    seconds = {}
    for name in (method, "full"):
        asks = [Ask(question, 8, name, 8) for question in asked]
        drive(server.address, asks, Load(1, count=1))
        seen = figures.check(f"mostly cached, {name}", drive(server.address, asks, Load(16, count=len(asks))))
        seconds[name] = max(one.ended for one in seen) - min(one.began for one in seen)
        if name == method:
            figures.found["mostly_cached"] = round(_cached(seen), 4)
    figures.found["mostly_cached_s"], figures.found["mostly_cached_full_s"] = (
        round(seconds[name], 2) for name in (method, "full")
    )
    figures.found["throughput_ratio"] = round(seconds["full"] / seconds[method], 3)


def decoding(server: Server, sizes: Sizes, method: str, figures: Figures) -> None:
    """Tokens a second of many streams that decode, over those of one alone."""
    asked = questions(2 * sizes.decoding, 8, "long")
    asks = [Ask(f"{question} {_STORY}", 2, method, sizes.decoded) for question in asked]
    alone = figures.check("decoding alone", drive(server.address, asks, Load(1, count=len(asks))))
    longest = sorted(alone, key=lambda one: -len(one.stamps))[: sizes.decoding]
    one_rate = median((len(one.stamps) - 1) / (one.stamps[-1] - one.stamps[0]) for one in longest)
    together = [asks[one.ask] for one in longest]
    load = Load(sizes.decoding, count=sizes.decoding)
    many = figures.check("decoding together", drive(server.address, together, load))
    decoded = _together(many)
    figures.found |= {
        "decode_alone_per_second": round(one_rate, 2),
        "decode_together_per_second": round(decoded.per_second, 2),
        "decode_tokens_counted": decoded.tokens,
        "decode_batch_gain": round(decoded.per_second / one_rate, 3),
        "decode_positions": max(one.final().usage.prompt_tokens + len(one.stamps) for one in many),
    }


def soak(server: Server, sizes: Sizes, method: str, figures: Figures) -> None:
    """Many small requests, some of them left at their first token: how the server's memory goes on."""
    asks = [Ask(question, 1, name, 2) for question in questions(16, 0, "soak") for name in (method, "full")]
    with sampled(server) as samples:
        seen = drive(server.address, asks, Load(8, count=sizes.soak, cancelled=20))
    figures.check("soak", [one for one in seen if one.code != "CANCELLED"])
    fifth = len(samples) // 5
    before, after = median(samples[fifth : 2 * fifth]), median(samples[-fifth:])
    figures.found |= {
        "soak_requests": len(seen),
        "soak_cancelled": sum(one.code == "CANCELLED" for one in seen),
        "soak_before_mib": round(before / 2**20, 1),
        "soak_after_mib": round(after / 2**20, 1),
        "soak_growth": round(after / before - 1, 4),
    }


def overload(server: Server, places: int, sizes: Sizes, method: str, figures: Figures) -> None:
    """Four times as many requests as a server with so many places can take."""
    asks = [Ask(question, 2, method, 8) for question in questions(4 * places, 8, "over")]
    drive(server.address, asks, Load(places, count=places))
    capacity = figures.check("capacity", drive(server.address, asks, Load(places, count=4 * places)))
    per_second = _per_second(capacity)
    load = Load(per_second=4 * per_second, count=sizes.overload)
    seen = drive(server.address, asks, load)
    refused = [one for one in seen if one.code == "RESOURCE_EXHAUSTED"]
    accepted = figures.check("overload", seen, ("OK", "RESOURCE_EXHAUSTED"))
    p95, base = (_percentile([one.ttft for one in of], 95) for of in (accepted, capacity))
    figures.found |= {
        "capacity_per_second": round(per_second, 3),
        "overload_accepted": len(accepted),
        "overload_refused": len(refused),
        "capacity_ttft_p95_s": round(base, 3),
        "overload_ttft_p95_s": round(p95, 3),
        "overload_ttft_ratio": round(p95 / base, 3),
        "refusal_p99_ms": round(_percentile([one.seconds for one in refused], 99) * 1e3, 1),
    }


@dataclass(frozen=True)
class Together:
    """Tokens that came while all of some streams decoded, and how many that is a second."""

    tokens: int
    per_second: float


def _together(seen: Sequence[Seen], share: float = 1.0) -> Together:
    """What came while streams decoded: all of them, or those, at least this share, that go on once all have begun."""
    begin = max(one.stamps[0] for one in seen)
    going = [one for one in seen if one.stamps[-1] > begin]
    if len(going) < max(1, share * len(seen)):
        raise SystemExit("some streams had ended before others decoded: ask for more tokens (--decoded)")
    end = min(one.stamps[-1] for one in going)
    tokens = sum(begin < stamp <= end for one in going for stamp in one.stamps)
    return Together(tokens, tokens / (end - begin))


def _per_second(seen: Sequence[Seen]) -> float:
    """Requests a second from the first one's beginning to the last one's end."""
    return len(seen) / (max(one.ended for one in seen) - min(one.began for one in seen))


def _percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else float("nan")


def _cached(seen: Sequence[Seen]) -> float:
    """The median share of a prompt's tokens that came out of the store."""
    return median(one.final().report.cached / one.final().report.tokens for one in seen)


def _full_rate(server: Server, figures: Figures) -> Rate:
    """Full prefill's own rate in this server, from prompts of two lengths, one at a time."""
    measured: dict[int, list[float]] = {}
    for k in (2, 6):
        asks = [Ask(question, k, "full", 1) for question in questions(4, 38, "rate")]
        for one in figures.check("rate", drive(server.address, asks, Load(1, count=len(asks)))):
            report = one.final().report
            measured.setdefault(report.tokens, []).append(report.timings.recompute_ms / 1e3)
    return rate_of(measured)


def _rows_seconds(answer: pb.FinalAnswer, rate: Rate) -> float:
    """Seconds of all rows that a request needs: mandatory, selected, and its probe's, which stand at the end."""
    report = answer.report
    rows = rate.seconds(list(report.recomputed_positions.positions))
    probed = (report.charged_ratio - report.selected_ratio) * report.cached
    return rows + probed * rate.seconds([report.tokens - 1])


PARTS: Mapping[str, Callable[..., Any]] = {
    "streams": streams,
    "cached": mostly_cached,
    "decoding": decoding,
    "soak": soak,
}
"""The parts that one server is put through, by name; :func:`overload` takes another."""
