"""How close compared requests were to full prefill, and whether ``auto`` may go on blending."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Mapping
from datetime import datetime, timezone
from statistics import fmean, stdev

from blend.config import ShadowConfig
from blend.shadow.record import Trip, TripRecord
from blend.stats import MethodQuality
from blend.types import Comparison

_log = logging.getLogger(__name__)

KL_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Upper bounds, in nats, of the buckets that KLs are counted in."""

_Z95 = 1.645


class Quality:
    """Keeps the last comparisons of each method, and stops ``auto`` where its own are too far from full prefill.

    What counts is the mean of the window, as for calibrations and :attr:`blend.types.Plan.max_kl`: a lower confidence
    bound would wait for proof while answers are bad, an upper one would stop at any few values, for KLs have long
    tails. Requests that name a method, or limits of their own, do not stop ``auto``: theirs is a loss that somebody
    chose. A KL that is no number stops it whatever the method, for that is a fault.

    Once stopped, ``auto`` runs full prefill until :meth:`reset`, also after a restart and under other settings: there
    is nothing of it to compare then, so quality cannot come back by itself. Thread-safe.

    Args:
        config: the threshold and the window.
        record: where a trip is kept.
    """

    def __init__(self, config: ShadowConfig, record: TripRecord) -> None:
        self._config = config
        self._record = record
        self._lock = threading.Lock()
        self._methods: dict[str, _Method] = {}
        self._broken = 0
        self._era = 0
        self._trip = record.read()
        if self._trip is not None:
            _log.warning("event=auto_stopped since=%s reason=%r", self._trip.since, self._trip.reason)

    @property
    def trip(self) -> Trip | None:
        """When and why ``auto`` was stopped, if it was."""
        return self._trip

    @property
    def stopped(self) -> str:
        """Why ``auto`` may not blend, for reports; empty where it may."""
        trip = self._trip
        return "" if trip is None else f"quality has stopped auto since {trip.since}: {trip.reason}"

    @property
    def broken(self) -> int:
        """Comparisons whose KL was no number."""
        with self._lock:
            return self._broken

    @property
    def era(self) -> int:
        """How often it was reset: what was answered before a reset does not count after it."""
        return self._era

    def methods(self) -> Mapping[str, MethodQuality]:
        """Return how close the requests of each method that plans named were."""
        with self._lock:
            return {name: method.quality() for name, method in self._methods.items()}

    def take(self, request_id: str, method: str, tokens: int, comparison: Comparison, era: int) -> None:
        """Take note of a request of so many tokens that was answered in an era, and of how it compared."""
        kl = comparison.first_token_kl
        _log.info(
            "event=compared request_id=%s method=%s tokens=%d kl=%.6f top1=%s full_ms=%.1f",
            *(request_id, method, tokens, kl, str(comparison.top1_agrees).lower(), comparison.full_ms),
        )
        with self._lock:
            if era != self._era:
                return
            why = self._count(method, kl, comparison.top1_agrees)
            if not why or self._trip is not None or self._config.max_kl is None:
                return
            self._trip = Trip(datetime.now(timezone.utc).isoformat(timespec="seconds"), why)
            self._record.write(self._trip)
        _log.error("event=auto_stopped request_id=%s reason=%r", request_id, why)

    def reset(self) -> Trip | None:
        """Let ``auto`` blend again, and forget the windows; returns what had stopped it.

        Raises:
            TierUnavailable: the record cannot be removed; all stays as it is.
        """
        with self._lock:
            self._record.remove()
            trip, self._trip = self._trip, None
            self._era += 1
            for method in self._methods.values():
                method.last.clear()
        if trip is not None:
            _log.warning("event=auto_reset since=%s reason=%r", trip.since, trip.reason)
        return trip

    def _count(self, name: str, kl: float, agrees: bool) -> str:
        """Count a comparison; returns why ``auto`` is to be stopped, if it is."""
        if not math.isfinite(kl):
            self._broken += 1
            return f"the KL of a request of {name} was {kl}"
        method = self._methods.setdefault(name, _Method(self._config.window))
        method.add(kl, agrees)
        found, most = method.quality(), self._config.max_kl
        if name != "auto" or most is None or found.window < self._config.least:
            return ""
        if found.mean_kl is None or found.mean_kl <= most:
            return ""
        return f"the mean KL of its last {found.window} compared requests, {found.mean_kl:.3f}, exceeds {most:g}"


class _Method:
    """The comparisons of one method: the last ones, and sums over all."""

    def __init__(self, window: int) -> None:
        self.last: deque[tuple[float, bool]] = deque(maxlen=window)
        self._compared = 0
        self._agreed = 0
        self._kl_sum = 0.0
        self._within = [0] * len(KL_BOUNDS)

    def add(self, kl: float, agrees: bool) -> None:
        self.last.append((kl, agrees))
        self._compared += 1
        self._agreed += agrees
        self._kl_sum += kl
        for number, bound in enumerate(KL_BOUNDS):
            self._within[number] += kl <= bound

    def quality(self) -> MethodQuality:
        kls = [kl for kl, _ in self.last]
        mean = fmean(kls) if kls else None
        spread = stdev(kls) / math.sqrt(len(kls)) if len(kls) > 1 else None
        return MethodQuality(
            compared=self._compared,
            agreed=self._agreed,
            kl_sum=self._kl_sum,
            kl_buckets=tuple(zip(KL_BOUNDS, self._within, strict=True)),
            window=len(kls),
            mean_kl=mean,
            upper_kl=None if mean is None or spread is None else mean + _Z95 * spread,
            last_kl=kls[-1] if kls else None,
            top1_agreement=fmean(agrees for _, agrees in self.last) if kls else None,
        )
