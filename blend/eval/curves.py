"""Times that were measured at some sizes, as curves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from blend.errors import InvalidInput
from blend.recompute.calibration import Curve
from blend.recompute.cost import PassCost, Work


def fit(sizes: Sequence[int], milliseconds: Sequence[float], *, square: bool = True) -> Curve:
    """Return the curve through measured times with the least relative error, none of its terms negative.

    A term more is used only where there is a size more: of a single size the time is taken to be in proportion.

    Args:
        sizes: tokens or bytes, above 0.
        milliseconds: what each took, above 0.
        square: whether time may grow with the square of the size, as attention's does.

    Raises:
        InvalidInput: no measurement, or one that is not above 0.
    """
    if not sizes or len(sizes) != len(milliseconds):
        raise InvalidInput("sizes", f"{len(sizes)} for {len(milliseconds)} times", "one for each time, at least one")
    if min(sizes) <= 0 or min(milliseconds) <= 0:
        raise InvalidInput("sizes, milliseconds", min(*sizes, *milliseconds), "numbers above 0")
    largest = max(sizes)
    share = np.asarray(sizes, dtype=np.float64) / largest  # as bytes their squares would drown the other terms
    times = np.asarray(milliseconds, dtype=np.float64)
    powers = [1, 0, 2][: min(3 if square else 2, len(set(sizes)))]
    terms, _ = nnls(np.stack([share**p for p in powers], axis=1) / times[:, None], np.ones_like(times))
    found = dict(zip(powers, terms.tolist(), strict=True))
    return Curve(
        base=found.get(0, 0.0),
        linear=found[1] / largest,
        square=found.get(2, 0.0) / largest**2,
        fewest=min(sizes),
        most=largest,
    )


def fit_passes(passes: Sequence[tuple[Work, float]]) -> PassCost:
    """Return what passes cost, with the least relative error, none of its terms negative.

    Passes of full and of blended prefills are wanted: with full ones alone, rows and keys cannot be told apart well.

    Args:
        passes: the work of each, and the milliseconds that it took, above 0.

    Raises:
        InvalidInput: no pass, or one without rows or time.
    """
    if not passes or min(min(work.rows, ms) for work, ms in passes) <= 0:
        raise InvalidInput("passes", len(passes), "at least one, of rows and milliseconds above 0")
    work = np.asarray([one for one, _ in passes], dtype=np.float64)
    times = np.asarray([ms for _, ms in passes], dtype=np.float64)
    most = work.max(axis=0)
    columns = [*(work / most).T, np.ones_like(times)][: len(np.unique(work, axis=0))]
    terms, _ = nnls(np.stack(columns, axis=1) / times[:, None], np.ones_like(times))
    per_row, per_key, base = [*terms.tolist(), 0.0, 0.0][:3]
    return PassCost(base, float(per_row / most[0]), float(per_key / most[1]), int(work[:, 0].min()), int(most[0]))
