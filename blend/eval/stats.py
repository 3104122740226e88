"""What a sample of questions shows: intervals, paired differences, and tests that know how many there were.

Values that belong to one question (its orders, say) are one cluster: they are drawn together, and their signs turn
together, for they are not independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from blend.errors import InvalidInput

Floats: TypeAlias = npt.NDArray[np.float64]

LEVEL = 0.95
"""How often an interval of :func:`bootstrap` is meant to hold the true mean."""

FEWEST = 6
"""Questions below which no difference is told from noise: the signs of five cannot give a p below 2 / 2⁵ > 0.05."""

_FLIPS = 20_000  # sign patterns drawn, where there are more than can all be tried
_EXACT = 14  # clusters whose 2¹³ patterns (half of them mirror the others) are all tried
_BLOCK = 1 << 20  # random numbers held at once


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95% interval over ``count`` questions. That of one question has no width, and is not shown."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} {self.interval}".rstrip()

    @property
    def interval(self) -> str:
        """The interval as tables show it; empty for a single question."""
        return f"[{self.low:.3f}, {self.high:.3f}]" if self.count > 1 else ""


@dataclass(frozen=True)
class Paired:
    """A mean difference over the same questions, and ``p``, two-sided, of there being none."""

    difference: Estimate
    p: float


def bootstrap(
    values: Sequence[float], clusters: Sequence[Hashable] | None = None, *, samples: int = 2000, seed: int = 0
) -> Estimate:
    """Return the mean of all values with its percentile-bootstrap 95% interval, clustered by question.

    Whole clusters are drawn with replacement, as many as there are, ``samples`` times (Efron 1979; for clusters Field
    and Welsh 2007). The interval of a single cluster has no width: it says nothing of other questions.

    Args:
        values: finite numbers, one or more.
        clusters: the question that each value belongs to; by default each is a question of its own.
        samples: how many times they are drawn.
        seed: of the draws; the same input and seed give the same interval.

    Raises:
        InvalidInput: no values, one that is not finite, or not one cluster a value.
    """
    data = _finite("values", values)
    return _interval(*_by_cluster(data, clusters), samples, seed)


def paired(
    a: Sequence[float],
    b: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    samples: int = 2000,
    seed: int = 0,
) -> Paired:
    """Compare two measurements of the same questions: the mean of ``a - b``, its interval, and a paired test.

    The interval is :func:`bootstrap`'s of the differences. The test turns the signs of whole clusters (Fisher 1935):
    all patterns where at most 14 clusters differ at all, else 20,000 drawn ones, and then ``p`` is ``(1 + as far) / (1
    + drawn)``.

    Raises:
        InvalidInput: as :func:`bootstrap`, or ``a`` and ``b`` are not of one length.
    """
    left, right = _finite("a", a), _finite("b", b)
    if len(left) != len(right):
        raise InvalidInput("b", f"{len(right)} values", f"as many as a has ({len(left)})")
    with np.errstate(over="ignore"):  # refused below
        differences = left - right
    sums, counts = _by_cluster(_finite("a - b", differences), clusters)
    return Paired(_interval(sums, counts, samples, seed), _sign_flip(sums, seed))


def ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    samples: int = 2000,
    seed: int = 0,
) -> Estimate | None:
    """Return the ratio of two means over the same questions, with its interval as in :func:`bootstrap`.

    Numerator and denominator are drawn together. ``None`` where the denominators' mean may be chance (:func:`noise`):
    a ratio to it would say nothing.

    Raises:
        InvalidInput: as :func:`bootstrap`, or the two are not of one length.
    """
    above, below = _finite("numerators", numerators), _finite("denominators", denominators)
    if len(above) != len(below):
        raise InvalidInput("denominators", f"{len(below)} values", f"as many as there are numerators ({len(above)})")
    if noise(bootstrap(denominators, clusters, samples=samples, seed=seed)):
        return None
    sums, weights = _by_cluster(above, clusters)[0], _by_cluster(below, clusters)[0]
    with np.errstate(divide="ignore", invalid="ignore"):  # refused below
        found = _interval(sums, weights, samples, seed)
    return found if math.isfinite(found.low) and math.isfinite(found.high) else None


def holm(ps: Sequence[float]) -> list[float]:
    """Return p-values corrected for being several tests (Holm 1979), in the order given.

    Each is at least what it was, at most 1, and their ranking stays.

    Raises:
        InvalidInput: a p-value outside 0 to 1, or not a number.
    """
    for i, p in enumerate(ps):
        if not 0 <= p <= 1:
            raise InvalidInput(f"p-value {i}", p, "0 to 1")
    corrected = [0.0] * len(ps)
    least = 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        least = max(least, min(1.0, (len(ps) - rank) * ps[i]))
        corrected[i] = least
    return corrected


def non_inferior(difference: Estimate, margin: float, better: Literal["higher", "lower"]) -> bool:
    """Return whether ``a`` is shown to be worse than ``b`` by ``margin`` at most, from the estimate of ``a - b``.

    That is so where the whole interval lies on the right side of the margin (one-sided at 2.5%), over :data:`FEWEST`
    questions or more. The margin has the metric's unit, and is to be declared before anything is measured.

    Raises:
        InvalidInput: a margin that is negative or not finite.
    """
    if not (math.isfinite(margin) and margin >= 0):
        raise InvalidInput("margin", margin, "0 or more, in the metric's unit")
    within = difference.low >= -margin if better == "higher" else difference.high <= margin
    return difference.count >= FEWEST and within


def noise(difference: Estimate) -> bool:
    """Return whether a difference may be chance: its interval holds 0, or it has too few questions (:data:`FEWEST`)."""
    return difference.count < FEWEST or difference.low <= 0 <= difference.high


def _finite(name: str, values: Sequence[float] | Floats) -> Floats:
    try:
        data = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(name, str(error), "finite numbers") from error
    if data.ndim != 1 or not len(data):
        raise InvalidInput(name, "none" if not data.size else f"{data.ndim} dimensions", "one number or more")
    wrong = np.flatnonzero(~np.isfinite(data))
    if len(wrong):
        raise InvalidInput(f"{name}[{wrong[0]}]", float(data[wrong[0]]), "a finite number")
    return data


def _by_cluster(data: Floats, clusters: Sequence[Hashable] | None) -> tuple[Floats, Floats]:
    """Return each cluster's sum and number of values, in the order in which clusters come up."""
    if clusters is None:
        return data, np.ones(len(data))
    if len(clusters) != len(data):
        raise InvalidInput("clusters", f"{len(clusters)} clusters", f"one for each of the {len(data)} values")
    index: dict[Hashable, int] = {}
    places = np.array([index.setdefault(cluster, len(index)) for cluster in clusters])
    sums: Floats = np.bincount(places, data).astype(np.float64)
    return sums, np.bincount(places).astype(np.float64)


def _interval(sums: Floats, counts: Floats, samples: int, seed: int) -> Estimate:
    if samples < 1:
        raise InvalidInput("samples", samples, "1 or more")
    if seed < 0:
        raise InvalidInput("seed", seed, "0 or more")
    clusters = len(sums)
    if not math.isfinite(clusters * float(np.abs(sums).max())):  # what the worst draw sums to
        raise InvalidInput("values", "a sum beyond a float's range", "numbers whose sum is finite")

    def draw(random: np.random.Generator, size: int) -> Floats:
        picks = random.integers(0, clusters, (size, clusters))
        drawn: Floats = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
        return drawn

    means = np.concatenate(list(_blocks(draw, samples, clusters, seed)))
    low, high = np.quantile(means, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    mean = float(sums.sum() / counts.sum())
    # Where all values are the same, rounding alone could put the mean outside.
    return Estimate(mean, min(mean, float(low)), max(mean, float(high)), clusters)


def _sign_flip(sums: Floats, seed: int) -> float:
    """Return the share of sign patterns that take the clusters' sum as far from 0 as it is, both ways."""
    sums = sums[sums != 0]  # the sign of nothing changes nothing
    if not len(sums):
        return 1.0
    far = abs(float(sums.sum())) - 1e-12 * float(np.abs(sums).sum())  # sums in another order round otherwise
    if len(sums) <= _EXACT:
        patterns = np.arange(1 << (len(sums) - 1))[:, None] >> np.arange(len(sums)) & 1
        return float(np.mean(np.abs((1 - 2 * patterns) @ sums) >= far))

    def draw(random: np.random.Generator, size: int) -> Floats:
        flips = random.integers(0, 2, (size, len(sums)), dtype=np.int8)
        turned: Floats = sums.sum() - 2 * (flips @ sums)
        return turned

    hits = sum(int((np.abs(turned) >= far).sum()) for turned in _blocks(draw, _FLIPS, len(sums), seed))
    return (1 + hits) / (1 + _FLIPS)


def _blocks(
    draw: Callable[[np.random.Generator, int], Floats], samples: int, width: int, seed: int
) -> Iterator[Floats]:
    """Draw ``samples`` rows of ``width`` random numbers, no more of them at once than memory is meant for."""
    random = np.random.default_rng(seed)
    step = max(1, _BLOCK // width)
    for start in range(0, samples, step):
        yield draw(random, min(step, samples - start))
