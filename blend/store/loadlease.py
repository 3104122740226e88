"""A lease on an object that is still being read."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from blend.errors import Closed, ResourceExhausted, StoreError, TierUnavailable
from blend.store.base import Lease, Tier, Writer, given
from blend.store.buffers import allocate
from blend.store.layout import encode
from blend.store.promotion import Gate

_log = logging.getLogger(__name__)


def _left(deadline: float) -> float | None:
    """Return the seconds until a deadline of the monotonic clock; ``None`` means that there is none."""
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())


class LoadingLease(Lease):
    """A lease on an object that is still being read. Layers come in order; each is verified before it is handed out.

    :meth:`layers` waits for what it returns. It raises :class:`StoreError` if that cannot be read or is not there in
    time, and :class:`Closed` if the store closes before. A view that was handed out stays good.
    """

    def __init__(
        self, inner: Lease, target: Tier | None, gate: Gate, on_fault: Callable[[str, Exception], None]
    ) -> None:
        super().__init__(inner.header, inner.tier)
        self.fault: StoreError | ResourceExhausted | Closed | None = None
        self._inner = inner
        self._target = target
        self._gate = gate
        self._on_fault = on_fault
        self._ready = threading.Condition()
        self._layers = 0
        self._ended = False
        self._writer: Writer | None = None
        self._whole: memoryview | None = None
        self._room: memoryview | None = None
        self.deadline = math.inf

    @property
    def complete(self) -> bool:
        """Whether every layer is there."""
        return self._layers == self.header.layers

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.complete or self.fault is not None or self._ended

    def layers(self, first: int, count: int, into: memoryview | None = None) -> memoryview:
        offset, nbytes = self.header.layer_range(first, count)
        return self._wait(first + count, offset - self.header.header_nbytes, nbytes, into)

    def wait(self, deadline: float, layers: int | None = None) -> bool:
        """Wait until so many layers are there (``None``: all), nothing more will come, or it is ``deadline``.

        That is a reading of the monotonic clock. Returns whether they are there.
        """
        wanted = self.header.layers if layers is None else layers
        with self._ready:
            self._ready.wait_for(lambda: self._layers >= wanted or self.over, _left(deadline))
            return self._layers >= wanted

    def release(self) -> None:
        with self._ready:
            self._ended = True
            self._whole = None
            self._ready.notify_all()

    def renew(self) -> None:
        if not self.complete:
            self._inner.renew()

    def keep(self) -> None:
        """Renew the lease that is read from, whose time must not end before its object is here."""
        if not self.over:
            self._inner.renew()

    @property
    def seconds_left(self) -> float:
        if self._ended:
            return 0.0
        return math.inf if self.complete else self._inner.seconds_left

    def fail(self, error: StoreError | ResourceExhausted | Closed) -> None:
        """Let nothing more come, for a reason that readers are told."""
        with self._ready:
            if not self.over:
                self.fault = error
            self._ready.notify_all()

    def begin(self) -> None:
        """Make room for the object: in the fastest tier, else in memory of its own."""
        header = self.header
        if self._target is not None and not self._gate.shut:
            try:
                if self._found(self._target):
                    return
                writer = self._target.start(header.key, header.object_nbytes)
                writer.write(0, encode(header))
                whole = writer.peek(header.header_nbytes, header.payload_nbytes)
                if whole is not None:
                    self._writer = writer
                    self._show(whole, 0)
                    return
                writer.revoke()
            except ResourceExhausted as error:
                _log.debug("%s is not promoted: %s", header.key, str(error))
            except StoreError as error:
                self._on_fault(self._target.name, error)
        self._room = allocate(header.payload_nbytes).data
        self._show(self._room.toreadonly(), 0)

    def _found(self, target: Tier) -> bool:
        """Take the object from the fastest tier, if another load has brought it there meanwhile."""
        held = target.get(self.header.key)
        if held is None or held.header != self.header:
            return False
        self.tier = target.name
        with held:
            self._show(held.payload(), self.header.layers)
        return True

    def _show(self, whole: memoryview | None, layers: int) -> None:
        with self._ready:
            self._whole = None if self._ended else whole
            self._layers = layers
            self._ready.notify_all()

    def expect(self, first: int, count: int) -> None:
        count = self._there_are(first, count)
        if count > 0 and not self.over:
            self._inner.expect(first, count)

    def read(self, first: int, count: int) -> None:
        """Read so many layers, the next ones, or what there is of them, unless nothing more is to come."""
        count = self._there_are(first, count)
        if count <= 0 or self.over:
            return
        offset, nbytes = self.header.layer_range(first, count)
        if self._writer is not None:
            self._writer.fill(offset, nbytes, lambda into: self._inner.layers(first, count, into))
        else:
            assert self._room is not None
            start = offset - self.header.header_nbytes
            self._inner.layers(first, count, self._room[start : start + nbytes])
        with self._ready:
            self._layers = first + count
            self._ready.notify_all()

    def _there_are(self, first: int, count: int) -> int:
        return min(count, self.header.layers - first)

    def end(self) -> None:
        """Store what was read in the fastest tier, if it is whole, and let go of the rest."""
        self._room = None
        self._inner.release()
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            with writer:
                if self.complete:
                    self._gate.commit(writer)
        except (StoreError, Closed) as error:
            self._on_fault(self._target.name if self._target is not None else self.tier, error)

    def _wait(self, layers: int, start: int, nbytes: int, into: memoryview | None) -> memoryview:
        with self._ready:
            there = self._ready.wait_for(lambda: self._layers >= layers or self.over, _left(self.deadline))
            if self._ended:
                raise self._released()
            if self._layers < layers:
                if self.fault is not None:
                    # A new one: each time that this one is raised it would keep the frames, and they this lease.
                    raise type(self.fault)(str(self.fault))
                assert not there
                raise TierUnavailable(f"{self.header.key}: {self.tier} has not given layer {layers - 1} in time")
            whole = self._whole
        assert whole is not None
        return given(whole[start : start + nbytes], into)
