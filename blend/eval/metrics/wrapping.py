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


SQUAD = """\
@inproceedings{rajpurkar2016squad,
  title = {{SQuAD}: 100,000+ Questions for Machine Comprehension of Text},
  author = {Rajpurkar, Pranav and Zhang, Jian and Lopyrev, Konstantin and Liang, Percy},
  booktitle = {Proceedings of EMNLP},
  year = {2016},
}
"""

ROUGE = """\
@inproceedings{lin2004rouge,
  title = {{ROUGE}: A Package for Automatic Evaluation of Summaries},
  author = {Lin, Chin-Yew},
  booktitle = {Text Summarization Branches Out},
  year = {2004},
}
"""

CACHEBLEND = """\
@inproceedings{yao2025cacheblend,
  title = {{CacheBlend}: Fast Large Language Model Serving for {RAG} with Cached Knowledge Fusion},
  author = {Yao, Jiayi and Li, Hanchen and Liu, Yuhan and Ray, Siddhant and Cheng, Yihua and Zhang, Qizheng and Du,
    Kuntai and Lu, Shan and Jiang, Junchen},
  booktitle = {Proceedings of EuroSys},
  year = {2025},
}
"""


class TextMetric(evaluate.Metric):  # type: ignore[misc]  # the library has no types
    """A text metric as the library wants it: the mean over questions, under the metric's name.

    A module must not import this class by name: the library takes the first metric that it finds in it.

    Attributes:
        metric: its name in :data:`METRICS`.
        citation_of: BibTeX of the publication that defines it.
    """

    metric: str
    citation_of: str

    def _info(self) -> Any:
        answer = datasets.Value("string")
        return evaluate.MetricInfo(
            description=METRICS[self.metric].description,
            citation=self.citation_of,
            inputs_description=_INPUTS.format(name=self.metric),
            features=[
                datasets.Features({"predictions": answer, "references": datasets.List(answer)}),
                datasets.Features({"predictions": answer, "references": answer}),
            ],
        )

    def _compute(
        self,
        predictions: Sequence[str],
        references: Sequence[str | Sequence[str]],
        tokenizer: text.Tokenizer = text.words,
    ) -> dict[str, float]:
        """Return the mean score of the answers; ``tokenizer`` as for :func:`text_scores`.

        Raises:
            InvalidInput: no answers, or an answer without references.
        """
        if not predictions:
            raise InvalidInput("predictions", predictions, "one answer or more")
        scores = [
            text_scores(
                answer, [accepted] if isinstance(accepted, str) else accepted, [self.metric], tokenizer=tokenizer
            )
            for answer, accepted in zip(predictions, references, strict=True)
        ]
        return {self.metric: sum(score[self.metric] for score in scores) / len(scores)}
