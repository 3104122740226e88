"""Token F1 of answers, as the code released with CacheBlend counts it."""

from blend.eval.metrics import wrapping


class TokenF1(wrapping.TextMetric):
    """Token F1 of answers, as the code released with CacheBlend counts it. Takes ``tokenizer=`` in :meth:`compute`."""

    metric = "token_f1"
    citation_of = wrapping.CACHEBLEND
