"""What was measured of a model once: the loss by method and ratio, for ``auto`` to choose by, and times."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from blend.errors import InvalidConfig
from blend.recompute.select import methods
from blend.types import PLAIN_METHODS

FILE_NAME = "blend_calibration.json"
"""What a calibration is called in a model's directory, beside its weights."""

VERSION = 2
_READABLE = (1, 2)  # version 1 has neither curves nor what was measured along the answer


def selecting() -> tuple[str, ...]:
    """Return the methods that a calibration holds points of: those that select, for they have a ratio."""
    return tuple(name for name in methods() if name not in ("auto", *PLAIN_METHODS))


@dataclass(frozen=True)
class Point:
    """One measured setting: mean first-token KL(full ‖ method) in nats, its 95% interval, top-1 agreement.

    ``answer_kl`` is the mean KL along full prefill's greedy answer, teacher-forced; ``top1`` is the share of that
    answer's tokens that both rank first. What files of version 1 do not hold is ``None``.

    Raises:
        InvalidConfig: a method that selects nothing, or a number that is none, or out of its range.
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

    def __post_init__(self) -> None:
        if self.method not in selecting():
            raise InvalidConfig("point: method", self.method, ", ".join(selecting()))
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "method" or (value is None and f.default is None):
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
        machine: where the curves were measured, as :func:`blend.recompute.machine.describe` tells it.
        prefill: milliseconds of full prefill by tokens.
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
    prefill: Curve | None = None
    loads: Mapping[str, Curve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("model", "data", "machine"):
            if not isinstance(getattr(self, name), str):
                raise InvalidConfig(name, getattr(self, name), "a text")
        if type(self.questions) is not int or self.questions < 1:
            raise InvalidConfig("questions", self.questions, "a whole number of 1 or more")

    def choose(self, max_charged: float, max_kl: float | None) -> Point | None:
        """Return the point to run, or ``None`` when none fits.

        With a quality target that is the one with the least charge whose mean KL meets it; without one, the largest
        ratio of the default method. Either way its charge may not exceed ``max_charged``.
        """
        affordable = [p for p in self.points if p.charged <= max_charged]
        if max_kl is None:
            known = [p for p in affordable if p.method == self.default.method]
            return max(known, key=lambda p: p.ratio, default=None)
        good = [p for p in affordable if p.kl <= max_kl]
        return min(good, key=lambda p: (p.charged, p.kl), default=None)

    def prefill_on(self, machine: str) -> Curve | None:
        """Return the prefill curve if it was measured on such a machine, for times of another one say nothing here."""
        return self.prefill if self.machine == machine else None

    def as_dict(self) -> dict[str, Any]:
        """Return what a calibration file holds, which :func:`parse` reads."""
        return {
            "version": VERSION,
            "model": self.model,
            "data": self.data,
            "questions": self.questions,
            "default": {"method": self.default.method, "ratio": self.default.ratio},
            "points": [asdict(point) for point in self.points],
            "machine": self.machine,
            "prefill": None if self.prefill is None else asdict(self.prefill),
            "loads": {tier: asdict(curve) for tier, curve in self.loads.items()},
        }


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
        default = next(p for p in points if (p.method, p.ratio) == (raw["default"]["method"], raw["default"]["ratio"]))
        curve = raw.get("prefill")
        return Calibration(
            model=raw["model"],
            data=raw["data"],
            questions=raw["questions"],
            default=default,
            points=points,
            machine=raw.get("machine", ""),
            prefill=None if curve is None else Curve(**curve),
            loads={tier: Curve(**one) for tier, one in raw.get("loads", {}).items()},
        )
    except InvalidConfig as error:
        raise InvalidConfig(f"{where}: {error.field}", error.value, error.allowed) from error
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, RecursionError) as error:
        raise InvalidConfig(where, f"{type(error).__name__}: {error}", "a calibration file") from error


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
