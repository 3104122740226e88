"""One model's chunks on their way into the store, and which variants of a chunk stay there."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from blend.errors import Closed, StoreError
from blend.store import Header, ObjectKey, Stored, TieredStore
from blend.store.buffers import Buffer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Write:
    """The events of a write, and the content keys that the object was encoded behind."""

    events: Stored
    neighbours: tuple[str, ...]


class Writes:
    """Objects that are being written. To be used by one thread at a time.

    Args:
        store: where they go.
    """

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._writes: dict[ObjectKey, _Write] = {}

    def under_way(self, key: ObjectKey) -> Stored | None:
        """Return the events of a write that is not over yet."""
        self._writes = {k: write for k, write in self._writes.items() if not write.events.durable.done()}
        write = self._writes.get(key)
        return None if write is None else write.events

    def put(self, header: Header, payload: Buffer) -> Stored:
        """Give an object to the store; returns the events of that.

        Once a conditioned variant is stored, the chunk's other ones are removed: a look-up is to have one to choose.

        Raises:
            InvalidInput, ObjectCorrupt: as for any tier.
        """
        key, events = header.key, self._store.put_async(header, payload)
        self._writes[key] = _Write(events, header.neighbours)
        if key.conditioned:
            others = [k for k in self._writes if k.content == key.content and k.conditioned and k != key]
            readable = events.readable.exception() is None  # that is known by now
            stored = events.readable if readable else events.durable
            stored.add_done_callback(partial(self._replace, key, others))
            if readable:
                for k in others:
                    self.forget(k)
        return events

    def _replace(self, key: ObjectKey, others: Iterable[ObjectKey], stored: Future[bool]) -> None:
        """Remove ``others``, and all variants that are known, for ``key`` if that was stored."""
        try:
            if stored.exception() is None and self._store.contains(key):
                known = (ObjectKey(key.content, name) for name in self._store.recall(key.content))
                for k in {*others, *known}:
                    if k.conditioned and k != key:
                        self._store.remove(k)
        except (StoreError, Closed) as error:
            _log.warning("another variant of %s may still be stored: %s", key, str(error))

    def of(self, contents: Collection[str]) -> list[ObjectKey]:
        """Return the objects of these content keys, and those that were encoded behind one of them."""
        gone = frozenset(contents)
        return [k for k, write in self._writes.items() if not gone.isdisjoint((k.content, *write.neighbours))]

    def forget(self, key: ObjectKey) -> None:
        """Take an object that is being removed off the list."""
        self._writes.pop(key, None)

    def disown(self, tag: str) -> None:
        """Take all objects of a tenant or namespace off the list."""
        self._writes = {k: write for k, write in self._writes.items() if not k.within(tag)}

    def namespaces(self) -> set[str]:
        """Return the tags of the namespaces that objects belong to."""
        return {k.namespace for k in self._writes}
