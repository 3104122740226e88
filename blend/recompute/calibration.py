"""What was measured of a model once: the loss by method and ratio, for ``auto`` to choose by, and times."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from blend.errors import InvalidConfig
from blend.recompute.cost import PassCost
from blend.recompute.select import methods
from blend.types import PLAIN_METHODS

FILE_NAME = "blend_calibration.json"
"""What a calibration is called in a model's directory, beside its weights."""

VERSION = 3
_READABLE = (1, 2, 3)
"""Version 1 has neither times nor what was measured along the answer; 2 has times of full prefill alone; in both all
chunks are plain."""

StoredVariant = Literal["plain", "conditioned"]
"""How the chunks were stored that a point was measured with."""


def selecting() -> tuple[str, ...]:
    """Return the methods that a calibration holds points of: those that select, for they have a ratio."""
    return tuple(name for name in methods() if name not in ("auto", *PLAIN_METHODS))


@dataclass(frozen=True)
class Point:
    """One measured setting: mean first-token KL(full ‖ method) in nats, its 95% interval, top-1 agreement.

    ``answer_kl`` is the mean KL along full prefill's greedy answer, teacher-forced; ``top1`` is the share of that
    answer's tokens that both rank first. What files of version 1 do not hold is ``None``. ``charged`` is the mean
    charged share, and ``variant`` how the chunks were stored.

    Raises:
        InvalidConfig: a method that selects nothing, no such variant, or a number that is none, or out of its range.
    """

    method: str
    ratio: float
    charged: float
    kl: float
    kl_low: float
    kl_high: float
    top1: float
    top1_low: float | None = None
    top1_high: float | None = None
    answer_kl: float | None = None
    answer_kl_low: float | None = None
    answer_kl_high: float | None = None
    variant: StoredVariant = "plain"

    def __post_init__(self) -> None:
        for name, known in (("method", selecting()), ("variant", get_args(StoredVariant))):
            if getattr(self, name) not in known:
                raise InvalidConfig(f"point: {name}", getattr(self, name), ", ".join(known))
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("method", "variant") or (value is None and f.default is None):
                continue
            most = 1.0 if f.name.startswith(("ratio", "top1")) else math.inf
            if not _is_number(value) or value > most:
                allowed = "a number of 0 or more" if most == math.inf else "a number from 0 to 1"
                raise InvalidConfig(f"point: {f.name}", value, allowed)


@dataclass(frozen=True)
class Curve:
    """Milliseconds by size: ``base + linear × n + square × n²``, fitted to sizes from ``fewest`` to ``most``."""

    base: float
    linear: float
    square: float
    fewest: int
    most: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not _is_number(value):
                raise InvalidConfig(f"curve: {name}", value, "a number of 0 or more")

    def ms(self, size: float) -> float:
        """Return the milliseconds of ``size`` tokens or bytes; outside the fitted sizes a guess."""
        return self.base + self.linear * size + self.square * size * size


@dataclass(frozen=True)
class Calibration:
    """A model's calibration.

    Args:
        default: the point whose method ``auto`` takes when no quality target is given.
        machine: where times were measured, as :func:`blend.recompute.machine.describe` tells it.
        passes: what a pass takes, in milliseconds.
        loads: milliseconds of loading a prompt's chunks by bytes, for each tier by name.

    Raises:
        InvalidConfig: ``model``, ``data`` or ``machine`` is no text, or ``questions`` no number of 1 or more.
    """

    model: str
    data: str
    questions: int
    default: Point
    points: tuple[Point, ...]
    machine: str = ""
    passes: PassCost | None = None
    loads: Mapping[str, Curve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("model", "data", "machine"):
            if not isinstance(getattr(self, name), str):
                raise InvalidConfig(name, getattr(self, name), "a text")
        if type(self.questions) is not int or self.questions < 1:
            raise InvalidConfig("questions", self.questions, "a whole number of 1 or more")

    def meeting(self, max_charged: float, max_kl: float | None, variant: StoredVariant) -> tuple[Point, ...]:
        """Return the points that may run over chunks of a variant, least charge first.

        With a quality target these are all whose mean KL keeps it on unseen data, which is what the upper end of its
        95% interval says; without one, the largest ratio of the default method that is affordable. Either way the
        charge may not exceed ``max_charged``.

        Plain points stand in where conditioned ones are wanted and there are none, for such chunks lose less; the
        other way round they would promise too much.
        """
        known = self._of(variant)
        affordable = [point for point in known if point.charged <= max_charged]
        if max_kl is None:
            method = self._method(known)
            affordable = [point for point in affordable if point.method == method]
            return tuple(sorted(affordable, key=lambda point: point.ratio)[-1:])
        good = [point for point in affordable if point.kl_high <= max_kl]
        return tuple(sorted(good, key=lambda point: (point.charged, point.kl)))

    def choose(self, max_charged: float, max_kl: float | None, variant: StoredVariant) -> Point | None:
        """Return the first of :meth:`meeting`, or ``None`` when none fits."""
        return next(iter(self.meeting(max_charged, max_kl, variant)), None)

    def _of(self, variant: StoredVariant) -> list[Point]:
        known = [point for point in self.points if point.variant == variant]
        return known or [point for point in self.points if variant == "conditioned" and point.variant == "plain"]

    def _method(self, known: Sequence[Point]) -> str:
        """The default's method, or of points without any of it the best one's at its ratio."""
        found = [point for point in known if point.method == self.default.method] or known
        nearest = min(found, key=lambda point: (abs(point.ratio - self.default.ratio), point.kl), default=self.default)
        return nearest.method

    def as_dict(self) -> dict[str, Any]:
        """Return what a calibration file holds, which :func:`parse` reads."""
        return {
            "version": VERSION,
            "model": self.model,
            "data": self.data,
            "questions": self.questions,
            "default": _key(self.default),
            "points": [asdict(point) for point in self.points],
            "machine": self.machine,
            "passes": None if self.passes is None else asdict(self.passes),
            "loads": {tier: asdict(curve) for tier, curve in self.loads.items()},
        }


def _key(point: Point) -> dict[str, Any]:
    """What tells a point from the others."""
    return {"method": point.method, "ratio": point.ratio, "variant": point.variant}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def parse(text: str | bytes, where: str) -> Calibration:
    """Return the calibration written in ``text``; ``where`` names its origin in errors.

    Raises:
        InvalidConfig: not JSON, a field is missing, or it is of a version that this one cannot read.
    """
    try:
        raw: dict[str, Any] = json.loads(text)
        if type(raw["version"]) is not int or raw["version"] not in _READABLE:
            raise InvalidConfig("version", raw["version"], f"version {' or '.join(map(str, _READABLE))}")
        points = tuple(Point(**p) for p in raw["points"])
        named = {"variant": "plain", **raw["default"]}
        default = next(p for p in points if all(named[name] == value for name, value in _key(p).items()))
        return Calibration(
            model=raw["model"],
            data=raw["data"],
            questions=raw["questions"],
            default=default,
            points=points,
            machine=raw.get("machine", ""),
            passes=_passes(raw),
            loads={tier: Curve(**one) for tier, one in raw.get("loads", {}).items()},
        )
    except InvalidConfig as error:
        raise InvalidConfig(f"{where}: {error.field}", error.value, error.allowed) from error
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, RecursionError) as error:
        raise InvalidConfig(where, f"{type(error).__name__}: {error}", "a calibration file") from error


def _passes(raw: Mapping[str, Any]) -> PassCost | None:
    if raw["version"] == VERSION:
        return None if raw["passes"] is None else PassCost(**raw["passes"])
    if raw.get("prefill") is None:
        return None
    # The curve of full prefills alone: n rows read n (n + 1) / 2 keys.
    full = Curve(**raw["prefill"])
    return PassCost(full.base, max(0.0, full.linear - full.square), 2 * full.square, full.fewest, full.most)


def load(model: str, directory: Path) -> Calibration | None:
    """Return the calibration of a model: :data:`FILE_NAME` beside its weights, else the one that ships.

    ``model`` is the name that the model was asked for by. ``None`` when there is neither.
    """
    beside = directory / FILE_NAME
    if beside.is_file():
        return parse(beside.read_bytes(), str(beside))
    if "/" in model or model.startswith("."):
        return None
    shipped = resources.files("blend.recompute") / "calibrations" / f"{model}.json"
    return parse(shipped.read_bytes(), shipped.name) if shipped.is_file() else None
