"""What was measured of a model once, so that ``auto`` can choose: the loss by method and ratio."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from blend.errors import InvalidConfig

VERSION = 1


@dataclass(frozen=True)
class Point:
    """One measured setting: mean first-token KL(full ‖ method) in nats, its 95% interval, top-1 agreement."""

    method: str
    ratio: float
    charged: float
    kl: float
    kl_low: float
    kl_high: float
    top1: float


@dataclass(frozen=True)
class Calibration:
    """A model's calibration. ``default`` names the method that ``auto`` takes when no quality target is given."""

    model: str
    data: str
    questions: int
    default: Point
    points: tuple[Point, ...]

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


def parse(text: str | bytes, where: str) -> Calibration:
    """Return the calibration written in ``text``; ``where`` names its origin in errors.

    Raises:
        InvalidConfig: not JSON, a field is missing, or it is of another version.
    """
    try:
        raw: dict[str, Any] = json.loads(text)
        if raw["version"] != VERSION:
            raise InvalidConfig(f"{where}: version", raw["version"], f"version {VERSION}")
        points = tuple(Point(**p) for p in raw["points"])
        default = next(p for p in points if (p.method, p.ratio) == (raw["default"]["method"], raw["default"]["ratio"]))
        return Calibration(raw["model"], raw["data"], raw["questions"], default, points)
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        if isinstance(error, InvalidConfig):
            raise
        raise InvalidConfig(where, f"{type(error).__name__}: {error}", "a calibration file") from error


def load(model: str, directory: Path) -> Calibration | None:
    """Return the calibration of a model: ``blend_calibration.json`` beside its weights, else the one that ships.

    ``model`` is the name that the model was asked for by. ``None`` when there is neither.
    """
    beside = directory / "blend_calibration.json"
    if beside.is_file():
        return parse(beside.read_bytes(), str(beside))
    if "/" in model or model.startswith("."):
        return None
    shipped = resources.files("blend.recompute") / "calibrations" / f"{model}.json"
    return parse(shipped.read_bytes(), shipped.name) if shipped.is_file() else None
