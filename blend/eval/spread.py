"""How far answers move when nothing but the order of the passages changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import pstdev

from blend.eval.stats import Estimate, bootstrap
from blend.eval.values import Record

SPREAD = "spread_"
"""What the names of spreads begin with."""

ANSWERS = f"{SPREAD}answers"


def spread(records: Sequence[Record], *, seed: int = 0) -> dict[str, Estimate]:
    """Return the standard deviation of each metric over the orders of a question, as ``spread_NAME``: mean over them.

    Full prefill's own is what that of other methods is to be held against. :data:`ANSWERS` is the number of different
    answers to a question over its orders, both less one: 0 where the order changes nothing, 1 where each order has an
    answer of its own. Questions of which only one order was measured are left out; without others, nothing is returned.

    Args:
        records: of one method at one ratio.
        seed: of the intervals.
    """
    by_question: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_question[record.question].append(record)
    values: dict[str, list[float]] = defaultdict(list)
    for found in by_question.values():
        if len(found) < 2:
            continue
        for name in found[0].metrics:
            values[f"{SPREAD}{name}"].append(pstdev([record.metrics[name] for record in found]))
        values[ANSWERS].append((len({record.answer for record in found}) - 1) / (len(found) - 1))
    return {name: bootstrap(numbers, seed=seed) for name, numbers in values.items()}
