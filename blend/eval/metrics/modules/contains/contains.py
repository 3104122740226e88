"""Whether answers contain a reference, whole words in SQuAD's normal form."""

from blend.eval.metrics import wrapping


class Contains(wrapping.TextMetric):
    """Whether answers contain a reference, whole words in SQuAD's normal form."""

    metric = "contains"
    citation_of = wrapping.SQUAD
