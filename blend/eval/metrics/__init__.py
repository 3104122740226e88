"""Metrics: of an answer against its references, and of a prefill against full prefill of the same prompt.

Those of text are plain functions, and shipped as modules for the library ``evaluate`` too, which load without network:
``evaluate.load(str(module_path("f1")))``. Nothing here imports that library.
"""

from blend.eval.metrics.model import identical, kl_rows, top1_rows
from blend.eval.metrics.registry import METRICS, Metric, module_path, text_scores

__all__ = ["METRICS", "Metric", "identical", "kl_rows", "module_path", "text_scores", "top1_rows"]
