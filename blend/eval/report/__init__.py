"""Results of evaluations as one self-contained HTML page."""

from blend.eval.report.page import render

__all__ = ["render"]
