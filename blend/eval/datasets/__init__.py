"""Questions with passages: from files of known formats, the hub, the demo corpus, or made up."""

from __future__ import annotations

from blend.eval.datasets.loading import NAMES, load
from blend.eval.datasets.questions import Dataset, Example, Passage
from blend.eval.datasets.retrieval import EmbeddingRetriever, Retriever

__all__ = ["NAMES", "Dataset", "EmbeddingRetriever", "Example", "Passage", "Retriever", "load"]
