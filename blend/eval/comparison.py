"""Two results of the same prompts, paired by question."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from blend.errors import InvalidInput
from blend.eval.metrics import METRICS
from blend.eval.plan import Planned
from blend.eval.summary import correct, groups, pairs
from blend.eval.values import Against, Results, Row
from blend.names import unknown

_MUST_MATCH = {"model": "models", "dtype": "dtypes", "dataset": "data", "prompts": "prompts"}
_MUST_BE_SET_ALIKE = ("max_new_tokens",)


@dataclass(frozen=True)
class Compared:
    """A row that both results have, and in each metric by how much ``b`` differs from ``a``: ``b − a``."""

    a: Row
    b: Row
    differences: Mapping[str, Against]

    @property
    def name(self) -> str:
        """What the row is called."""
        return name_of(self.a)


def name_of(row: Row) -> str:
    """Return what a row is called: its method and ratio, and what was varied."""
    varied = " ".join(str(part) for part in (row.condition, row.level) if part not in ("", None))
    return f"{Planned(row.method, row.ratio)}" + (f" ({varied})" if varied else "")


def check(a: Results, b: Results) -> None:
    """Refuse results that say nothing about each other.

    Raises:
        InvalidInput: they are of different models, dtypes, data, prompts or lengths of answers; the message says of
            which.
    """
    differ = [
        f"{what} ({getattr(a.identity, name)[:16]} and {getattr(b.identity, name)[:16]})"
        for name, what in _MUST_MATCH.items()
        if getattr(a.identity, name) != getattr(b.identity, name)
    ]
    differ += [
        f"{name} ({a.settings.get(name)} and {b.settings.get(name)})"
        for name in _MUST_BE_SET_ALIKE
        if a.settings.get(name) != b.settings.get(name)
    ]
    if differ:
        raise InvalidInput("compare", "different " + ", ".join(differ), "results of the same model, dtype and prompts")
    for name, results in (("A", a), ("B", b)):
        if not results.records:
            raise InvalidInput(name, f"no answers (kind {results.kind})", "results of run, sweep or robustness")


def only_in(
    one: Results, other: Results, *, methods: Collection[str] = (), ratios: Collection[float] = ()
) -> list[Row]:
    """Return the rows of ``one`` that ``other`` has not, of the methods and ratios that :func:`compare` is given."""
    theirs = {row.key for row in other.rows}
    return [row for row in one.rows if row.key not in theirs and _wanted(row, methods, ratios)]


def _wanted(row: Row, methods: Collection[str], ratios: Collection[float]) -> bool:
    return (not methods or row.method in methods) and (not ratios or row.ratio is None or row.ratio in ratios)


def compare(
    a: Results, b: Results, *, methods: Collection[str] = (), ratios: Collection[float] = ()
) -> tuple[Compared, ...]:
    """Compare the rows that two results share, or those of some methods and ratios; p-values are Holm-corrected.

    Args:
        methods, ratios: what is compared; all that both have if empty. Ratios narrow methods that have one.

    Raises:
        InvalidInput: as :func:`check`; or there is nothing that both have; or a method or a ratio that not both have.
    """
    check(a, b)
    left, right = groups(a.records), groups(b.records)
    theirs = {row.key: row for row in b.rows}
    shared = [(row, theirs[row.key]) for row in a.rows if row.key in theirs and row.key in left and row.key in right]
    known = list(dict.fromkeys(row.method for row, _ in shared))
    for name in methods:
        if name not in known:
            raise unknown("methods of both", name, known)
    wanted = [(ours, other) for ours, other in shared if _wanted(ours, methods, ratios)]
    if not wanted:
        raise InvalidInput("compare", "nothing that both have", "results that share a method at a ratio")
    for ratio in ratios:
        if ratio not in {row.ratio for row, _ in wanted}:
            there = sorted({row.ratio for row, _ in shared if row.ratio is not None and _wanted(row, methods, ())})
            raise InvalidInput("ratios of both", ratio, ", ".join(f"{one:g}" for one in there) or "none")
    found: list[dict[str, Against]] = []
    for ours, other in wanted:
        differences: dict[str, Against] = {}
        for name in METRICS:
            both = pairs(right[other.key], left[ours.key], name)
            if both.questions:
                tested = both.paired(b.seed)
                differences[name] = Against("A", tested.difference, tested.p, tested.p, noise=True)
        found.append(differences)
    corrected = correct(found)
    return tuple(Compared(*rows, differences) for rows, differences in zip(wanted, corrected, strict=True))
