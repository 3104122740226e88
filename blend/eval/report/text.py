"""Metrics as the page names them."""

from __future__ import annotations

from blend.eval.metrics.registry import METRICS, Metric


def metric(name: str) -> Metric:
    """Return what is known of a metric, also of one that the registry lacks: recoveries, spreads, and other names."""
    if name in METRICS:
        return METRICS[name]
    kind, _, of = name.partition("_")
    if kind == "recovery" and of:
        told = "(method − reuse) / (full − reuse): 1 is full prefill."
        return Metric(name, f"Recovery of {metric(of).title}", "higher", "", told)
    if kind == "spread" and of:
        told = "Standard deviation over the orders of one question's passages."
        return Metric(name, f"Spread of {metric(of).title}", "lower", "", told)
    lower = name.endswith(("_error", "_kl"))
    return Metric(name, name.replace("_", " ").capitalize(), "lower" if lower else "higher", "", "")
