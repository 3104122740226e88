"""This process's place in a Mooncake store: joined in the background, watched, and left when nobody reads any more."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

import numpy as np

from blend.config import MooncakeConfig
from blend.errors import Closed, InvalidInput, TierUnavailable
from blend.store.breaker import Breaker
from blend.store.health import sickness, unreachable
from blend.store.staging import Staging

_log = logging.getLogger(__name__)
_SETUP_PAUSE_SECONDS = 1.0


class Link:
    """Owns the library's client. Where there is no master, joining takes 90 seconds and holds the interpreter's lock
    all the while. So it is done only when the health page says that all is well and the RPC port takes connections,
    and on a thread of its own; until then the breaker is open.

    A second thread watches the health page, ends sessions, and closes the client in the end.

    Args:
        config: where and how.
        make: returns a new, unjoined client of the library.
        staging: memory to register with every client.
        breaker: is told what the health page says.
    """

    def __init__(
        self, config: MooncakeConfig, make: Callable[[], Any], staging: Staging, breaker: Breaker, name: str
    ) -> None:
        self.config = config
        self.name = name
        self._make = make
        self._staging = staging
        self._breaker = breaker
        self._lock = threading.Lock()
        self._client: Any = None
        self._joined = threading.Event()
        self._setup: threading.Thread | None = None
        self._setup_after = 0.0
        self._retained = 0
        self._closing = False
        self._ended = threading.Event()
        self._last: Callable[[], bool] = lambda: True
        # With its views: memory outlives its registration.
        self._registered: dict[tuple[int, int], memoryview] = {}
        # Put to by finalizers, which may run in any thread at any time: this queue alone is safe for that.
        self._events: SimpleQueue[tuple[str, bool]] = SimpleQueue()
        breaker.health("joining the store")
        self._monitor = threading.Thread(target=self._watch, name=f"{name}-monitor", daemon=True)
        self._monitor.start()
        if config.connect_seconds:
            self._joined.wait(config.connect_seconds)

    def client(self) -> Any:
        """Return the joined client.

        Raises:
            TierUnavailable: there is none.
        """
        client = self._client
        if client is None:
            raise TierUnavailable(f"{self.name}: down: not joined to the master at {self.config.master}")
        return client

    def register(self, memory: memoryview) -> None:
        """Register memory with the library; where the store is not joined yet, when it is.

        Memory that is refused then counts as not registered, which is logged.

        Raises:
            TierUnavailable: the library refuses it now.
        """
        span = address_of(memory), len(memory)
        with self._lock:
            if self._client is not None:
                self._register(self._client, *span)
            self._registered[span] = memory

    def unregister(self, memory: memoryview) -> None:
        """Take a registration back.

        Raises:
            InvalidInput: there is none of this memory.
        """
        address, nbytes = address_of(memory), len(memory)
        with self._lock:
            if self._registered.pop((address, nbytes), None) is None:
                raise InvalidInput("memory", f"{nbytes} bytes at {address:#x}", "memory that has been registered")
            if self._client is not None and (code := self._client.unregister_buffer(address)):
                _log.warning("%s: unregistering %d bytes gave %d", self.name, nbytes, code)

    def covers(self, view: memoryview) -> bool:
        """Return whether all of this memory has been registered."""
        address, nbytes = address_of(view), len(view)
        spans = [*self._registered, (self._staging.address, self._staging.capacity)]
        return any(start <= address and address + nbytes <= start + size for start, size in spans)

    def retain(self) -> None:
        """Keep the client until :meth:`release` has been called as often, even when it is closed meanwhile."""
        with self._lock:
            if self._closing:
                raise Closed(f"{self.name}: the tier has been closed")
            self._retained += 1

    def release(self, session: str) -> None:
        """Undo one :meth:`retain` and end the read session of that name. May run in a finalizer."""
        self._events.put((session, True))

    def end_session(self, session: str) -> None:
        """End a read session."""
        self._events.put((session, False))

    def close(self, last: Callable[[], bool]) -> None:
        """Leave the store once nothing is retained, when ``last`` returns True. Waits for that if nothing is.

        A client that calls are stuck in is not closed under them; it goes when they return.
        """
        with self._lock:
            self._closing = True
            self._last = last
            waits = not self._retained
        self._events.put(("", False))
        if waits:
            self._ended.wait(self.config.deadline_seconds + 2 * self.config.health_seconds)

    def _watch(self) -> None:
        next_look = monotonic()
        while not (self._closing and not self._retained):
            if monotonic() >= next_look:
                self._look()
                next_look = monotonic() + self.config.health_seconds
            self._drain(max(next_look - monotonic(), 0.0))
        self._leave()

    def _look(self) -> None:
        sick = sickness(self.config.health_address, self.config.health_seconds)
        if self._client is None and not sick:
            sick = unreachable(self.config.master, self.config.health_seconds)
        if self._client is not None:
            self._breaker.health(sick)
            return
        waiting = self._setup is not None and self._setup.is_alive()
        self._breaker.health(sick or f"joining the master at {self.config.master}")
        if not sick and not waiting and monotonic() >= self._setup_after and not self._closing:
            self._setup = threading.Thread(target=self._join, name=f"{self.name}-setup", daemon=True)
            self._setup.start()

    def _join(self) -> None:
        config = self.config
        try:
            client = self._make()
            code = client.setup(
                config.hostname,
                "P2PHANDSHAKE",
                config.segment_bytes,
                config.local_buffer_bytes,
                config.protocol,
                config.devices,
                config.master,
            )
            if code:
                raise TierUnavailable(f"setup gave {code}")
            with self._lock:
                self._register(client, self._staging.address, self._staging.capacity)
                for address, nbytes in list(self._registered):
                    try:
                        self._register(client, address, nbytes)
                    except TierUnavailable as error:
                        _log.warning("%s; what lies there is copied", error)
                        del self._registered[address, nbytes]
                if not self._closing:
                    self._client, client = client, None
            if client is not None:  # closed while it was joining
                client.close()
                return
        except Exception as error:  # noqa: BLE001 - whatever the library raises, it is tried again
            _log.warning("%s: joining the master at %s failed: %s", self.name, config.master, error)
            self._breaker.health(f"joining the master at {config.master} failed: {error}")
            self._setup_after = monotonic() + _SETUP_PAUSE_SECONDS
            return
        self._breaker.health("")
        self._joined.set()

    def _register(self, client: Any, address: int, nbytes: int) -> None:
        if code := client.register_buffer(address, nbytes):
            raise TierUnavailable(f"{self.name}: the library registers no {nbytes} bytes for transfers: {code}")

    def _drain(self, seconds: float) -> None:
        """Take what has come within ``seconds``: sessions to end, and how many users are gone."""
        sessions, gone = set(), 0
        try:
            event = self._events.get(timeout=seconds)
            while True:
                sessions.add(event[0])
                gone += event[1]
                event = self._events.get_nowait()
        except Empty:
            sessions.discard("")
        with self._lock:
            self._retained -= gone
        if sessions and self._client is not None:
            self._client.batch_get_session_end(list(sessions))

    def _leave(self) -> None:
        idle = self._last()
        with self._lock:
            client, self._client = self._client, None
        if client is not None and idle:
            client.close()
            self._registered.clear()
        elif client is not None:
            _log.warning("%s: left with calls to the store that have not returned", self.name)
        self._ended.set()


def address_of(view: memoryview) -> int:
    """Return where the bytes of a view are."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)
