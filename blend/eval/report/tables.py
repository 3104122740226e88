"""The page's tables: every row with its interval, every difference in words, and where results come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from blend.eval.report.breakeven import streams
from blend.eval.report.series import Line, Section, finite, level, measured, name
from blend.eval.report.text import metric
from blend.eval.report.times import PARTS, REST, of_lines, title
from blend.eval.stats import FEWEST, Estimate
from blend.eval.values import Against, Perf
from blend.page.text import MISSING, number

_MOST_WARNINGS = 20


@dataclass(frozen=True)
class Column:
    """A column's title, and what its cells hold: numbers, names, which are not broken into lines, or prose."""

    title: str
    kind: Literal["number", "name", "prose"] = "number"


@dataclass(frozen=True)
class Table:
    """Rows of texts under columns; the first cell names its row."""

    title: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


def measurements(section: Section) -> tuple[Table, ...]:
    """Return all tables of what was measured that have a row."""
    found = (
        values(section),
        differences(section),
        times(section.lines),
        *(table for results in section.results if results.perf for table in performance(results.perf)),
        warnings(section),
    )
    return tuple(table for table in found if table.rows)


def values(section: Section) -> Table:
    """Return all rows with what they cost and every metric with its interval."""
    first, others = measured(name_ for line in section.lines for name_ in line.row.metrics)
    varied = _varied(section.lines)
    columns = [
        *_columns_of(varied),
        *map(Column, ("questions", "selected", "charged", "TTFT p50, ms", "TTFT p95, ms")),
        *(Column(_titled(name_)) for name_ in (*first, *others)),
    ]
    rows = [
        (
            *_cells_of(line, varied),
            str(line.row.questions),
            number(finite(line.row.selected)),
            number(finite(line.row.charged)),
            number(line.ttft("p50"), 1),
            number(line.ttft("p95"), 1),
            *(_estimate(line, name_) for name_ in (*first, *others)),
        )
        for line in section.lines
    ]
    caption = (
        "Means with 95% intervals. Selected and charged are shares of the cached tokens; charged counts probes too."
    )
    return Table("All rows", f"{caption} {_sizes(section)}", tuple(columns), tuple(rows))


def differences(section: Section) -> Table:
    """Return every difference from a baseline, and what it means in words."""
    varied = _varied(section.lines)
    columns = (
        *_columns_of(varied),
        Column("metric", "name"),
        Column("baseline", "name"),
        Column("difference"),
        Column("p"),
        Column("p, Holm"),
        Column("in words", "prose"),
    )
    rows = [
        (
            *_cells_of(line, varied),
            metric(name_).title,
            against.baseline,
            _interval(against.difference),
            number(finite(against.p)),
            number(finite(against.p_holm)),
            verdict(line, name_, against, _margin(section, line, name_)),
        )
        for line, name_, against in compared(section.lines)
    ]
    caption = "Paired by question, method − baseline; p-values corrected by Holm for all tests of one result."
    return Table("Differences", f"{caption} {_sizes(section)}", columns, tuple(rows))


def compared(lines: Iterable[Line]) -> Iterator[tuple[Line, str, Against]]:
    """Yield each row's differences, metric by metric."""
    for line in lines:
        first, others = measured(line.row.against)
        for name_ in (*first, *others):
            yield line, name_, line.row.against[name_]


def verdict(line: Line, name_: str, against: Against, margin: float | None) -> str:
    """Return in words whether a difference is more than noise, which way it goes, and whether it keeps its margin."""
    difference = against.difference
    if difference.count < FEWEST:
        said = f"inside the noise: fewer than {FEWEST} questions tell nothing"
    elif against.noise:
        said = "inside the noise"
    else:
        said = direction(name_, against)
    kept = line.row.non_inferior.get(name_)
    if kept is None:
        return said
    within = "the declared margin" if margin is None else f"the declared margin of {margin:g}"
    return f"{said}; {'shown' if kept else 'not shown'} to be within {within} of full prefill"


def direction(name_: str, against: Against) -> str:
    """Return which way a difference goes."""
    better = (against.difference.mean > 0) == (metric(name_).better == "higher")
    return f"{'better' if better else 'worse'} than {against.baseline}"


def times(lines: Sequence[Line]) -> Table:
    """Return the parts of each row's TTFT."""
    found = [(line, bar.parts()) for line, bar in zip(lines, of_lines(lines), strict=True)]
    parts = list(dict.fromkeys([*PARTS, *sorted({part for _, own in found for part in own} - {REST}), REST]))
    varied = _varied(lines)
    columns = (*_columns_of(varied), *map(Column, parts))
    rows = [(*_cells_of(line, varied), *(number(own.get(part), 1) for part in parts)) for line, own in found if own]
    return Table("Parts of TTFT", "Means, ms.", columns, tuple(rows))


def performance(perf: Perf) -> Iterator[Table]:
    """Yield the points of all experiments, and where blending begins to pay."""
    details = sorted({key for point in perf.points for key in point.detail})
    columns = (
        Column("experiment", "name"),
        Column("at", "name"),
        Column("method", "name"),
        *map(Column, ("requests", "TTFT p50, ms", "TTFT p95, ms", "requests a second", *details)),
    )
    rows = [
        (
            title(point.experiment),
            level(point.x),
            name(point.method, point.ratio),
            str(point.requests),
            number(finite(point.ttft_p50), 1),
            number(finite(point.ttft_p95), 1),
            number(finite(point.throughput), 2),
            *(said(point.detail[key]) if key in point.detail else MISSING for key in details),
        )
        for point in perf.points
    ]
    yield Table("Performance", "Every measured point.", columns, tuple(rows))
    if perf.break_even is not None:
        yield from break_even(perf.break_even)


def break_even(found: Mapping[str, object]) -> Iterator[Table]:
    """Yield what was played, and each stream of each plan."""
    yield pairs("Break-even", "What was played.", {k: v for k, v in found.items() if not isinstance(v, (list, tuple))})
    played = [(label, stream) for label, _, own in streams(found) for stream in own]
    keys = sorted({key for _, stream in played for key in stream}, key=lambda key: (key != "skew", key))
    columns = (Column("method", "name"), *(Column(key.replace("_", " ")) for key in keys))
    rows = tuple((label, *(said(stream.get(key)) for key in keys)) for label, stream in played)
    caption = (
        "Streams of questions played over measured times: means in ms, and after how many requests the chunks, "
        "computed beforehand, have paid for themselves (a dash: not within the stream)."
    )
    yield Table("Break-even, stream by stream", caption, columns, rows)


def warnings(section: Section) -> Table:
    """Return what reports warned of, most frequent first."""
    counted = Counter((record.method, text) for record in section.records for text in record.warnings)
    most = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    rows = [(method, text, str(count)) for (method, text), count in most[:_MOST_WARNINGS]]
    left = f" {len(most) - _MOST_WARNINGS} rarer ones are left out." if len(most) > _MOST_WARNINGS else ""
    columns = (Column("method", "name"), Column("warning", "prose"), Column("answers"))
    return Table("Warnings", f"What the reports of single answers warned of.{left}", columns, tuple(rows))


def origin(section: Section) -> tuple[Table, ...]:
    """Return the settings of each result, and the identity and environment that all of the section share."""
    shared = section.results[0]
    settings = [
        pairs(f"Settings of result {i}" if len(section.results) > 1 else "Settings", "", results.settings)
        for i, results in enumerate(section.results, 1)
    ]
    identity = "Results of another model, dtype, data or prompts are never compared with these."
    return (
        *settings,
        pairs("Identity", identity, asdict(shared.identity)),
        pairs("Versions and machine", "", asdict(shared.environment)),
    )


def pairs(title: str, caption: str, found: Mapping[str, object]) -> Table:
    """Return names and values as a table."""
    rows = tuple((key.replace("_", " "), said(value)) for key, value in sorted(found.items()))
    return Table(title, caption, (Column("name", "name"), Column("value", "prose")), rows)


def said(value: object) -> str:
    """Return any value of a JSON document as people read it."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {said(value[key])}" for key in sorted(value)) or MISSING
    if isinstance(value, (list, tuple)):
        return ", ".join(map(said, value)) or MISSING
    return str(value)


def _varied(lines: Iterable[Line]) -> bool:
    """Whether rows have to say under which condition they were measured."""
    return any(line.where for line in lines)


def _columns_of(varied: bool) -> tuple[Column, ...]:
    """The columns that say which line a row is of."""
    return (Column("method", "name"), *((Column("condition", "name"),) if varied else ()))


def _cells_of(line: Line, varied: bool) -> tuple[str, ...]:
    """What these columns hold for a line."""
    return (line.label, *((line.where or "as given",) if varied else ()))


def _titled(name_: str) -> str:
    known = metric(name_)
    return f"{known.title}{', ' + known.unit if known.unit else ''} ({'↑' if known.better == 'higher' else '↓'})"


def _estimate(line: Line, name_: str) -> str:
    found = line.estimate(name_)
    return MISSING if found is None else _interval(found)


def _interval(found: Estimate) -> str:
    return f"{number(found.mean)} [{number(found.low)}, {number(found.high)}]"


def _sizes(section: Section) -> str:
    sizes = sorted({(results.questions, results.seed) for results in section.results})
    return "; ".join(f"{questions} questions, seed {seed}" for questions, seed in sizes) + "."


def _margin(section: Section, line: Line, name_: str) -> float | None:
    for results in section.results:
        margins = results.settings.get("margins")
        if any(row is line.row for row in results.rows) and isinstance(margins, Mapping):
            margin = margins.get(name_)
            return float(margin) if isinstance(margin, (int, float)) else None
    return None
