"""One HTML page from results: plots, token maps, tables, and where all of it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from blend import page
from blend.errors import InvalidInput
from blend.eval.report import quality, robustness, series, tables, times
from blend.eval.report.breakeven import break_even, streams
from blend.eval.report.drawing import Look, Plot, looks
from blend.eval.report.series import Section, measured, sections
from blend.eval.report.tables import Table
from blend.eval.report.text import metric
from blend.eval.stats import FEWEST
from blend.eval.values import Heatmap, PerfPoint, Results
from blend.page import Map
from blend.page.text import clean, cleaned

TITLE = "What blending keeps, and what it saves"
"""The title of a page that is given none."""


def render(results: Sequence[Results], *, title: str | None = None) -> str:
    """Return one self-contained HTML page: no external resource, and the same text for the same results.

    Results whose identity or environment differ stand in sections of their own: no plot or table mixes them.

    Args:
        results: one document or more.
        title: the page's; by default :data:`TITLE`. Models and data head their sections.

    Raises:
        InvalidInput: no results, a token map that is inconsistent, or matplotlib is not installed.
    """
    if not results:
        raise InvalidInput("results", "none", "one document or more")
    # What comes from data is cleaned on its way in, for matplotlib too refuses some of it, and escaped on its way out.
    results = [cleaned(one) for one in results]
    grouped = sections(results)
    look = looks(name for section in grouped for name in _named(section))
    shown = [_shown(f"s{i}", section, look) for i, section in enumerate(grouped, 1)]
    return page.render(
        "blend.eval.report",
        "page.html",
        title=TITLE if title is None else clean(title),
        style="plots.css",
        sections=shown,
    )


@dataclass(frozen=True)
class Group:
    """Plots under one heading: those shown at once, and those folded away."""

    title: str
    note: str
    first: tuple[Plot, ...]
    others: tuple[Plot, ...] = ()


@dataclass(frozen=True)
class Shown:
    """What the template reads of one section."""

    results: tuple[Results, ...]
    heading: str
    sentences: tuple[str, ...]
    groups: tuple[Group, ...]
    maps: tuple[tuple[str, str, Map], ...]
    tables: tuple[Table, ...]
    origin: tuple[Table, ...]


def _shown(key: str, section: Section, look: Mapping[str, Look]) -> Shown:
    """Draw a section; ``key`` begins the ids of its drawings."""
    return Shown(
        section.results,
        _heading(section.results[0]),
        tuple(_sentences(section)),
        tuple(group for group in _groups(key, section, look) if group.first),
        tuple(_mapped(results.heatmap) for results in section.results if results.heatmap is not None),
        tables.measurements(section),
        tables.origin(section),
    )


def _mapped(found: Heatmap) -> tuple[str, str, Map]:
    """A prompt's question, its method, and its tokens."""
    mapped = page.token_map(found.tokens, found.state, found.chunks, scores=found.scores)
    return found.question, series.name(found.method, found.ratio), mapped


def _heading(results: Results) -> str:
    identity = results.identity
    return f"{identity.name}, {identity.dtype}, on {Path(str(results.settings.get('dataset', 'unnamed data'))).name}"


def _groups(key: str, section: Section, look: Mapping[str, Look]) -> Iterator[Group]:
    """Yield all plots of a section, group by group; a group may come out empty."""
    first, others = measured(name for line in section.plain for name in line.row.metrics)
    for title, note, draw in (
        (
            "Quality against charged ratio",
            "Means with 95% intervals. The charge counts every freshly computed cached token, probes included. "
            "Level lines are methods that have no ratio; the band is the interval of full prefill.",
            quality.against_charged,
        ),
        (
            "Quality against TTFT",
            "Means with 95% intervals, at the median time to the first token. Ringed: the Pareto front, which no other "
            "point beats in both.",
            quality.against_ttft,
        ),
    ):
        stem = f"{key}-{draw.__name__}"
        yield Group(
            title,
            note,
            _drawn(draw(f"{stem}-{i}", name, section.plain, look) for i, name in enumerate(first)),
            _drawn(draw(f"{stem}-{i}", name, section.plain, look) for i, name in enumerate(others, len(first))),
        )
    yield Group(
        "Time to the first token",
        "Bars are means of the parts; the mark is the median of the whole.",
        _drawn([times.breakdown(f"{key}-breakdown", "What TTFT is made of", times.of_lines(section.plain))]),
    )
    yield _robustness(f"{key}-robustness", section, look)
    yield from _performance(f"{key}-performance", section, look)


def _robustness(key: str, section: Section, look: Mapping[str, Look]) -> Group:
    records = [record for record in section.records if record.condition]
    first, _ = measured(name for record in records for name in record.metrics)
    number = count()

    def boxes(names: Iterable[str]) -> Iterator[Plot | None]:
        for name in names:
            for condition in robustness.conditions(records):
                yield robustness.by_level(f"{key}-{next(number)}", condition, name, records, look)
            yield robustness.between_orders(f"{key}-{next(number)}", name, records, look)

    # Every metric is in the tables; boxes of all of them, at all levels, would be too many to look through.
    note = "Boxes from quartile to quartile, the median as a bar, the mean as a diamond, over questions and orders."
    return Group("Robustness", note, _drawn(boxes(first[:2])), _drawn(boxes(first[2:])))


def _performance(key: str, section: Section, look: Mapping[str, Look]) -> Iterator[Group]:
    found = [results.perf for results in section.results if results.perf is not None]
    kinds: dict[str, list[PerfPoint]] = {}
    for point in (point for perf in found for point in perf.points):
        kinds.setdefault(point.experiment, []).append(point)
    yield Group(
        "Performance",
        "Medians; whiskers reach to the 95th percentile.",
        _drawn(times.experiment(f"{key}-{i}", kind, points, look) for i, (kind, points) in enumerate(kinds.items())),
        _drawn(
            times.breakdown(f"{key}-parts-{i}", f"{times.title(kind)}: what TTFT is made of", times.of_points(points))
            for i, (kind, points) in enumerate(kinds.items())
        ),
    )
    number = count()
    yield Group(
        "Break-even",
        "Means over streams of questions, played over measured times: the more skewed a stream, the more often whole "
        "prompts come again, and the better an exact prefix cache, here an ideal one, does.",
        tuple(
            break_even(f"{key}-even-{next(number)}", label, method, played, look)
            for perf in found
            for label, method, played in streams(perf.break_even or {})
        ),
    )


def _sentences(section: Section) -> Iterator[str]:
    """Yield what the differences say, in words."""
    few = min(results.questions for results in section.results)
    if few < FEWEST:
        yield f"With fewer than {FEWEST} questions ({few} here) no difference is told from noise."
    every = list(tables.compared(section.plain))
    if not every:
        return
    noise = sum(against.noise for _, _, against in every)
    yield (
        f"Of {len(every)} differences from a baseline, {noise} {'is' if noise == 1 else 'are'} inside the noise: "
        "they do not show that one method is better than the other."
    )
    clear: dict[tuple[str, str], list[str]] = {}
    for line, name, against in every:
        if not against.noise:
            said = (line.label, tables.direction(name, against))
            clear.setdefault(said, []).append(metric(name).title)
    if clear:
        found = (f"{label} is {way} in {', '.join(names)}" for (label, way), names in clear.items())
        yield f"Outside the noise: {'; '.join(found)}."


def _drawn(plots: Iterable[Plot | None]) -> tuple[Plot, ...]:
    return tuple(plot for plot in plots if plot is not None)


def _named(section: Section) -> Iterator[str]:
    """Yield the names that are told apart by their look: series, and methods."""
    yield from (line.series for line in section.lines)
    yield from (record.method for record in section.records)
    for perf in (results.perf for results in section.results if results.perf is not None):
        yield from (point.method for point in perf.points)
        yield from (method for _, method, _ in streams(perf.break_even or {}))
