"""Bringing what a lease reads from a slower tier into the fastest one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from blend.errors import Closed, ResourceExhausted, StoreError
from blend.store.base import Lease, Tier, Writer
from blend.store.layout import Header, encode

_log = logging.getLogger(__name__)


class Promotion:
    """One object on its way to a faster tier, by the lease that reads it.

    It never fails its reader: no room is fine, a fault is told to ``on_fault`` (name of the tier, error). Once it is
    ``over`` it stores nothing any more.
    """

    def __init__(self, target: Tier, on_fault: Callable[[str, Exception], None]) -> None:
        self.over = False
        self._target = target
        self._on_fault = on_fault
        # Held while an object is committed, so that a cancellation comes before that or after it.
        self._lock = threading.Lock()
        self._layers: dict[int, memoryview] = {}

    def read_through(self, lease: Lease) -> Lease | None:
        """Read all layers straight into the faster tier; return a lease there, or ``None`` if it does not take them.

        Raises:
            StoreError: ``lease`` cannot be read.
        """
        header, failed = lease.header, False

        def source(into: memoryview) -> None:
            nonlocal failed
            failed = True
            lease.payload(into)
            failed = False

        if self.over:
            return None
        try:
            with self._target.start(header.key, header.object_nbytes) as writer:
                writer.write(0, encode(header))
                writer.fill(header.header_nbytes, header.payload_nbytes, source)
                self._commit(writer)
            return self._target.get(header.key)
        except (ResourceExhausted, Closed) as error:
            _log.debug("%s is not promoted: %s", header.key, error)
        except StoreError as error:
            if failed:
                raise
            self._on_fault(self._target.name, error)
        return None

    def offer(self, header: Header, layer: int, view: memoryview) -> None:
        """Take one verified layer that was read; with the last one missing, store the object."""
        with self._lock:
            if self.over:
                return
            self._layers[layer] = view
            if len(self._layers) < header.layers:
                return
            layers, self._layers = self._layers, {}
        try:
            with self._target.start(header.key, header.object_nbytes) as writer:
                writer.write(0, encode(header))
                for number, part in layers.items():
                    writer.write(header.layer_range(number)[0], part)
                self._commit(writer)
        except (ResourceExhausted, Closed) as error:
            _log.debug("%s is not promoted: %s", header.key, error)
        except StoreError as error:
            self._on_fault(self._target.name, error)

    def cancel(self) -> None:
        """Store nothing from now on; safe to call again."""
        with self._lock:
            self.over = True
            self._layers.clear()

    def _commit(self, writer: Writer) -> None:
        with self._lock:
            if not self.over:
                self.over = True
                writer.commit()
