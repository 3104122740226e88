"""Why a method ran, in one word: reports say it in sentences with numbers, of which a metric would have no end."""

from __future__ import annotations

_REASONS = (
    ("as asked", "asked"),
    ("calibrated mean KL", "calibrated"),
    ("an exact prefix", "exact_prefix"),
    ("this model has no calibration", "uncalibrated"),
    ("no calibrated setting", "too_costly"),
    ("no chunk was in the store", "nothing_stored"),
    ("choosing alone", "choosing_too_costly"),
    ("blending would save", "little_saved"),
    ("two chunks were lost", "chunks_lost"),
    ("quality has stopped auto", "quality"),
    ("vLLM did not blend", "not_blended"),
)

REASONS = (*(word for _, word in _REASONS), "other")
"""All words that there are."""


def short(reason: str) -> str:
    """Return the word for a report's reason; ``other`` for one that is not known here."""
    return next((word for begins, word in _REASONS if reason.startswith(begins)), "other")
