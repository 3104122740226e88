"""SQuAD F1 of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

from blend.eval.metrics.wrapping import info, mean

_CITATION = """\
@inproceedings{rajpurkar2016squad,
  title = {{SQuAD}: 100,000+ Questions for Machine Comprehension of Text},
  author = {Rajpurkar, Pranav and Zhang, Jian and Lopyrev, Konstantin and Liang, Percy},
  booktitle = {Proceedings of EMNLP},
  year = {2016},
}
"""


class SquadF1(evaluate.Metric):  # type: ignore[misc]  # the library has no types
    """SQuAD F1 of answers."""

    def _info(self) -> Any:
        return info("squad_f1", _CITATION)

    def _compute(self, predictions: Sequence[str], references: Sequence[str | Sequence[str]]) -> dict[str, float]:
        return mean("squad_f1", predictions, references)
