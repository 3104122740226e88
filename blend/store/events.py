"""Residency events: a node says what its tiers come to hold and lose, and an index of many nodes listens.

A message has three frames, as vLLM's KV events have: topic, sequence number (8 bytes, big-endian, from 0 without gaps),
and a payload in msgpack, here ``[time, node, run, [[kind, key, tier, bytes], …]]``. ``run`` is drawn anew whenever a
node starts. The last messages can be asked for again: to the replay socket go an empty frame and a sequence number;
from there on come an empty frame, sequence number and payload, and at last sequence number -1.

Events are hints. One that is lost, doubled, late or wrong costs a look-up or a detour, never an answer.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgpack
import zmq

from blend.config import MAX_NODE_NAME, RESIDENCY_LOOPBACK, ResidencySource
from blend.errors import InvalidInput, TierUnavailable
from blend.store.key import ObjectKey
from blend.store.residency import Event, ResidencyIndex

TOPIC = b"blend.residency"
END = (-1).to_bytes(8, "big", signed=True)
_BATCH = 256
_MAX_MESSAGE_NBYTES = 1 << 20
_POLL_MS = 100
_log = logging.getLogger(__name__)


def pack(moment: float, node: str, run: str, events: Sequence[Event]) -> bytes:
    """Return the payload of a message."""
    rows = [[event.kind, str(event.key), event.tier, event.nbytes] for event in events]
    return bytes(msgpack.packb([moment, node, run, rows]))


def unpack(payload: bytes) -> tuple[str, str, list[Event]]:
    """Return node, run and events of a message's payload.

    Raises:
        InvalidInput: it is not well-formed.
    """
    if len(payload) > _MAX_MESSAGE_NBYTES:
        raise InvalidInput("events", f"{len(payload)} bytes", f"at most {_MAX_MESSAGE_NBYTES} bytes")
    try:
        _, node, run, rows = msgpack.unpackb(payload)
        events = [Event(kind, ObjectKey.parse(key), tier, nbytes) for kind, key, tier, nbytes in rows]
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise InvalidInput("events", payload[:64], "[time, node, run, [[kind, key, tier, bytes], ...]]") from error
    for text in (node, run, *(event.tier for event in events)):
        if not isinstance(text, str) or not 0 < len(text) <= MAX_NODE_NAME:
            raise InvalidInput("events", text, f"names of 1 to {MAX_NODE_NAME} characters")
    for event in events:
        if event.kind not in ("stored", "removed") or type(event.nbytes) is not int or event.nbytes < 0:
            raise InvalidInput("events", event, "stored or removed, and a number of bytes")
    return node, run, events


class ResidencyPublisher:
    """Publishes what a node's tiers tell it. A context manager; also a :class:`ResidencyObserver`.

    Telling it costs a place in a bounded queue and never waits: when the queue is full, the event is dropped and
    counted in ``dropped``.

    Args:
        node: this node's name, as the router knows it.
        address: where to publish; port ``*`` takes a free one.
        replay_address: where the last messages can be asked for.
        replay: how many messages are kept for that.
        waiting: how many events may wait to be sent.

    Raises:
        InvalidInput: ``node`` is no name of 1 to 256 characters.
        TierUnavailable: an address cannot be bound.
    """

    def __init__(
        self,
        node: str,
        address: str = RESIDENCY_LOOPBACK,
        replay_address: str = RESIDENCY_LOOPBACK,
        replay: int = 10_000,
        waiting: int = 100_000,
    ) -> None:
        if not isinstance(node, str) or not 0 < len(node) <= MAX_NODE_NAME:
            raise InvalidInput("node", node, f"a name of 1 to {MAX_NODE_NAME} characters")
        self.node = node
        self.run = os.urandom(8).hex()
        self.dropped = 0
        self._queue: queue.Queue[Event] = queue.Queue(waiting)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=replay)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._context = zmq.Context()
        publish = self._bind(zmq.PUB, address)
        answer = self._bind(zmq.ROUTER, replay_address)
        self.address = publish.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_address = answer.getsockopt_string(zmq.LAST_ENDPOINT)
        self._threads = [
            threading.Thread(target=self._publish, args=(publish,), name="blend-events", daemon=True),
            threading.Thread(target=self._answer, args=(answer,), name="blend-events-replay", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def on_stored(self, key: ObjectKey, tier: str, nbytes: int) -> None:
        """Publish that an object of ``nbytes`` can be read in ``tier``."""
        self._tell(Event("stored", key, tier, nbytes))

    def on_removed(self, key: ObjectKey, tier: str) -> None:
        """Publish that an object has left ``tier``."""
        self._tell(Event("removed", key, tier))

    def close(self) -> None:
        """Send what is waiting and let go of both sockets; safe to call again."""
        if self._closed.is_set():
            return
        self._closed.set()
        for thread in self._threads:
            thread.join()
        self._context.term()

    def __enter__(self) -> ResidencyPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 200
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise TierUnavailable(f"residency events: {address} cannot be bound: {error}") from error
        return socket

    def _tell(self, event: Event) -> None:
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self.dropped += 1

    def _publish(self, socket: zmq.Socket[bytes]) -> None:
        number = 0
        with socket:
            while not (self._closed.is_set() and self._queue.empty()):
                events = self._take()
                if not events:
                    continue
                payload = pack(time.time(), self.node, self.run, events)
                with self._lock:
                    self._sent.append((number, payload))
                socket.send_multipart([TOPIC, number.to_bytes(8, "big"), payload])
                number += 1

    def _take(self) -> list[Event]:
        events: list[Event] = []
        try:
            events.append(self._queue.get(timeout=_POLL_MS / 1e3))
            while len(events) < _BATCH:
                events.append(self._queue.get_nowait())
        except queue.Empty:
            return events
        return events

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        with socket:
            while not self._closed.is_set():
                if not socket.poll(_POLL_MS):
                    continue
                frames = socket.recv_multipart()
                if len(frames) != 3 or len(frames[2]) != 8:
                    _log.warning("residency events: a request for a replay of %d frames is ignored", len(frames))
                    continue
                start = int.from_bytes(frames[2], "big")
                with self._lock:
                    wanted = [message for message in self._sent if message[0] >= start]
                for number, payload in wanted:
                    socket.send_multipart([frames[0], b"", number.to_bytes(8, "big"), payload])
                socket.send_multipart([frames[0], b"", END, b""])


@dataclass
class _Progress:
    """How far a source has been heard: its node's run, and the sequence number that comes next."""

    node: str = ""
    run: str = ""
    expected: int = 0


class ResidencySubscriber:
    """Keeps an index by what several nodes publish. A context manager.

    It asks every source for its last messages first, and again whenever some are missing. When a node has started
    again, what it held before is forgotten.

    Args:
        index: what is kept.
        sources: the nodes.
        on_event: told node and events after the index has taken them; must be quick.

    Raises:
        TierUnavailable: an address cannot be listened to.
    """

    def __init__(
        self,
        index: ResidencyIndex,
        sources: Sequence[ResidencySource],
        on_event: Callable[[str, Sequence[Event]], None] | None = None,
    ) -> None:
        self.index = index
        self.malformed = 0
        self.gaps = 0
        self._on_event = on_event
        self._closed = threading.Event()
        self._context = zmq.Context()
        # By socket: how far its source has been heard, and for one of live messages where to ask for earlier ones.
        self._heard: dict[zmq.Socket[bytes], tuple[_Progress, zmq.Socket[bytes] | None]] = {}
        for source in sources:
            self._hear(source)
        self._thread = threading.Thread(target=self._listen, name="blend-events-index", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; safe to call again."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self._context.term()

    def __enter__(self) -> ResidencySubscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hear(self, source: ResidencySource) -> None:
        progress, replay = _Progress(), None
        if source.replay_address is not None:
            replay = self._connect(zmq.DEALER, source.replay_address)
            replay.send_multipart([b"", bytes(8)], zmq.DONTWAIT)
            self._heard[replay] = progress, None
        self._heard[self._connect(zmq.SUB, source.address)] = progress, replay

    def _listen(self) -> None:
        poller = zmq.Poller()
        for socket in self._heard:
            poller.register(socket, zmq.POLLIN)
        try:
            while not self._closed.is_set():
                for socket, _ in poller.poll(_POLL_MS):
                    self._take(socket.recv_multipart(), *self._heard[socket])
        finally:
            self._context.destroy(linger=0)

    def _connect(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * _MAX_MESSAGE_NBYTES)
        if kind == zmq.SUB:
            socket.subscribe(TOPIC)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise TierUnavailable(f"residency events: {address} cannot be listened to: {error}") from error
        return socket

    def _take(self, frames: list[bytes], progress: _Progress, replay: zmq.Socket[bytes] | None) -> None:
        """Take a live or a repeated message; ask for what is missing before it."""
        if len(frames) != 3 or len(frames[1]) != 8:
            self.malformed += 1
            return
        if frames[1] == END:
            return
        number = int.from_bytes(frames[1], "big")
        try:
            node, run, events = unpack(frames[2])
        except InvalidInput as error:
            self.malformed += 1
            _log.warning("residency events: message %d is ignored: %s", number, error)
            return
        if (node, run) != (progress.node, progress.run):
            if progress.node:
                self.index.drop(progress.node)
            progress.node, progress.run, progress.expected = node, run, 0
        if number > progress.expected and replay is not None:
            self.gaps += 1
            try:
                replay.send_multipart([b"", progress.expected.to_bytes(8, "big")], zmq.DONTWAIT)
            except zmq.Again:
                _log.debug("residency events: %s cannot be asked for what is missing", node)
        # A repeated message may be older than what has been heard since. What follows it is repeated too, so that the
        # index comes out right but for what was said while the answer was on its way.
        progress.expected = max(progress.expected, number + 1)
        self.index.apply(node, events)
        if self._on_event is not None:
            self._on_event(node, events)
