"""What the ``evaluate`` modules beside this file share. The one place of the package that imports the library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from blend.errors import InvalidInput
from blend.eval.metrics import text
from blend.eval.metrics.registry import METRICS, text_scores

_INPUTS = """
Args:
    predictions: answers, one text a question.
    references: for each answer the accepted ones: a list of texts, or one text.
Returns:
    {name}: mean over the questions of the score of the reference that fits best, 0 to 1 (SQuAD's own scripts print
        percent).
Example:
    >>> metric = evaluate.load(str(module_path("{name}")))
    >>> metric.compute(predictions=["in 1888"], references=[["1888", "in 1888"]])
    {{'{name}': 1.0}}
"""


def info(name: str, citation: str) -> Any:
    """Return a text metric's ``evaluate.MetricInfo``: description, citation, inputs and features."""
    answer = datasets.Value("string")
    return evaluate.MetricInfo(
        description=METRICS[name].description,
        citation=citation,
        inputs_description=_INPUTS.format(name=name),
        features=[
            datasets.Features({"predictions": answer, "references": datasets.List(answer)}),
            datasets.Features({"predictions": answer, "references": answer}),
        ],
    )


def mean(
    name: str,
    predictions: Sequence[str],
    references: Sequence[str | Sequence[str]],
    tokenizer: text.Tokenizer = text.words,
) -> dict[str, float]:
    """Return the mean score of the answers, under the metric's name.

    Raises:
        InvalidInput: no answers, or an answer without references.
    """
    if not predictions:
        raise InvalidInput("predictions", predictions, "one answer or more")
    scores = [
        text_scores(answer, [accepted] if isinstance(accepted, str) else list(accepted), [name], tokenizer=tokenizer)
        for answer, accepted in zip(predictions, references, strict=True)
    ]
    return {name: sum(score[name] for score in scores) / len(scores)}
