"""SQuAD F1 of answers."""

from blend.eval.metrics import wrapping


class F1(wrapping.TextMetric):
    """SQuAD F1 of answers."""

    metric = "f1"
    citation_of = wrapping.SQUAD
