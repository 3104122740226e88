"""SQuAD exact match of answers."""

from blend.eval.metrics import wrapping


class SquadEm(wrapping.TextMetric):
    """SQuAD exact match of answers."""

    metric = "squad_em"
    citation_of = wrapping.SQUAD
