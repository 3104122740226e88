"""Rouge-L of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

from blend.eval.metrics.wrapping import info, mean

_CITATION = """\
@inproceedings{lin2004rouge,
  title = {{ROUGE}: A Package for Automatic Evaluation of Summaries},
  author = {Lin, Chin-Yew},
  booktitle = {Text Summarization Branches Out},
  year = {2004},
}
"""


class RougeL(evaluate.Metric):  # type: ignore[misc]  # the library has no types
    """Rouge-L of answers."""

    def _info(self) -> Any:
        return info("rouge_l", _CITATION)

    def _compute(self, predictions: Sequence[str], references: Sequence[str | Sequence[str]]) -> dict[str, float]:
        return mean("rouge_l", predictions, references)
