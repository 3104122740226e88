"""Rouge-L of answers."""

from blend.eval.metrics import wrapping


class RougeL(wrapping.TextMetric):
    """Rouge-L of answers."""

    metric = "rouge_l"
    citation_of = wrapping.ROUGE
