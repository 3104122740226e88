"""SQuAD exact match of answers."""

from blend.eval.metrics import wrapping


class Em(wrapping.TextMetric):
    """SQuAD exact match of answers."""

    metric = "em"
    citation_of = wrapping.SQUAD
