"""Token F1 of answers, as the code released with CacheBlend counts it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import evaluate

from blend.eval.metrics.text import words
from blend.eval.metrics.wrapping import info, mean

_CITATION = """\
@inproceedings{yao2025cacheblend,
  title = {{CacheBlend}: Fast Large Language Model Serving for {RAG} with Cached Knowledge Fusion},
  author = {Yao, Jiayi and Li, Hanchen and Liu, Yuhan and Ray, Siddhant and Cheng, Yihua and Zhang, Qizheng and Du,
    Kuntai and Lu, Shan and Jiang, Junchen},
  booktitle = {Proceedings of EuroSys},
  year = {2025},
}
"""


class TokenF1(evaluate.Metric):  # type: ignore[misc]  # the library has no types
    """Token F1 of answers, as the code released with CacheBlend counts it."""

    def _info(self) -> Any:
        return info("token_f1", _CITATION)

    def _compute(
        self,
        predictions: Sequence[str],
        references: Sequence[str | Sequence[str]],
        tokenizer: Callable[[str], Sequence[Hashable]] = words,
    ) -> dict[str, float]:
        """Count tokens as ``tokenizer`` makes them, without special tokens; else the words between white space."""
        return mean("token_f1", predictions, references, tokenizer)
