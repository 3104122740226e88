"""Conditions that a comparison has to meet: ``kl<=0.03,f1_drop<=0.02``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blend.errors import InvalidInput
from blend.eval.comparison import Compared, name_of
from blend.eval.metrics import METRICS
from blend.eval.values import Results, Row
from blend.names import unknown

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_ALIASES = {"kl": "first_kl"}
_COSTS = ("charged", "ttft_p50", "ttft_p95")
_MACHINE = ("cpu", "threads", "device")
_DROP, _RISE = "_drop", "_rise"
_CONDITION = re.compile(r"\s*([A-Za-z0-9_]+)\s*(<=|>=|<|>)\s*(\S+)\s*")


def names() -> tuple[str, ...]:
    """Return what a condition may name: a value of B, how far B is below A (``_drop``), or above it (``_rise``)."""
    plain = (*_ALIASES, *METRICS, *_COSTS)
    return (*plain, *(n + _DROP for n in plain), *(n + _RISE for n in plain))


@dataclass(frozen=True)
class Gate:
    """One condition: the value called ``name`` stands in relation ``relation`` to ``bound``."""

    name: str
    relation: str
    bound: float

    def __str__(self) -> str:
        return f"{self.name}{self.relation}{self.bound:g}"


@dataclass(frozen=True)
class Verdict:
    """Whether a row meets a gate, and with what value (a mean over the questions, or a TTFT in ms)."""

    gate: Gate
    row: str
    value: float
    passed: bool


def parse(text: str) -> tuple[Gate, ...]:
    """Return the conditions in ``text``, with commas between them.

    Raises:
        InvalidInput: something is no condition, or names what there is not (with the nearest).
    """
    found = []
    for part in text.split(","):
        matched = _CONDITION.fullmatch(part)
        if matched is None:
            raise InvalidInput("gate", part.strip(), "NAME<=NUMBER (or >=, <, >) with commas between")
        name, relation, number = matched.groups()
        if name not in names():
            raise unknown("gate", name, names())
        try:
            bound = float(number)
        except ValueError:
            bound = math.nan
        if not math.isfinite(bound):
            raise InvalidInput(f"gate {name}", number, "a finite number")
        found.append(Gate(name, relation, bound))
    return tuple(found)


def check(gates: Sequence[Gate], a: Results, b: Results, *, left_out: Sequence[Row]) -> None:
    """Refuse gates that would say less than they seem to.

    Args:
        left_out: rows of A that B has not, so that no gate would look at them.

    Raises:
        InvalidInput: there are such rows, or a gate sets times of two machines against each other.
    """
    if gates and left_out:
        listed = ", ".join(name_of(row) for row in left_out)
        raise InvalidInput("gate", f"B without {listed}", "results with all that A has, or --methods and --ratios")
    moved = [name for name in _MACHINE if getattr(a.environment, name) != getattr(b.environment, name)]
    for gate in gates:
        if moved and gate.name.startswith("ttft") and gate.name.endswith((_DROP, _RISE)):
            raise InvalidInput(f"gate {gate}", f"results of different {', '.join(moved)}", "times of the same machine")


def judge(gates: Sequence[Gate], rows: Sequence[Compared]) -> list[Verdict]:
    """Return a verdict a gate and row. Means are judged, not intervals.

    Raises:
        InvalidInput: a gate names a metric that was not measured.
    """
    verdicts = []
    for gate in gates:
        for row in rows:
            value = _value(gate.name, row)
            verdicts.append(Verdict(gate, row.name, value, _OPERATORS[gate.relation](value, gate.bound)))
    return verdicts


def _value(name: str, row: Compared) -> float:
    plain, sign = name, 0
    for suffix, direction in ((_DROP, -1), (_RISE, 1)):
        if name.endswith(suffix):
            plain, sign = name.removesuffix(suffix), direction
    plain = _ALIASES.get(plain, plain)
    if plain in _COSTS:
        before, after = (_cost(plain, side) for side in (row.a, row.b))
        return sign * (after - before) if sign else after
    if plain not in row.differences:
        raise InvalidInput(f"gate {name}", f"no {plain} of {row.name}", ", ".join(row.differences))
    # 0.0 is added because minus nothing would be shown as -0
    return sign * row.differences[plain].difference.mean + 0.0 if sign else row.b.metrics[plain].mean


def _cost(name: str, row: Row) -> float:
    return row.charged if name == "charged" else row.ttft_ms[name.removeprefix("ttft_")]
