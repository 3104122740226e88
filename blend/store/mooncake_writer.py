"""An object on its way into a Mooncake store: in pieces while it is written, put as a whole when it is committed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blend.store.base import Writer
from blend.store.key import ObjectKey
from blend.store.layout import ALIGNMENT, check_identity, decode, peek
from blend.store.mooncake_client import MooncakeClient


class MooncakeWriter(Writer):
    """Keeps what is written in staging memory. Read-only views of registered memory are sent from where they are.

    Args:
        client: the store.
        key, nbytes: the object; its bytes have been reserved.
        publish: puts the object, given its parts in order; returns False when one of that key is there.
        cancel: gives the reservation back.
    """

    def __init__(
        self,
        client: MooncakeClient,
        key: ObjectKey,
        nbytes: int,
        publish: Callable[[ObjectKey, Sequence[memoryview]], bool],
        cancel: Callable[[int], None],
    ) -> None:
        super().__init__(key, nbytes)
        self._client = client
        self._publish = publish
        self._cancel = cancel
        self._pieces: list[tuple[int, memoryview]] = []

    def _write(self, offset: int, view: memoryview) -> None:
        if not len(view):
            return
        if not (view.readonly and self._client.covers(view)):
            source, view = view, self._client.take(len(view))
            view[:] = source
        self._pieces.append((offset, view))

    def _fill(self, offset: int, nbytes: int, source: Callable[[memoryview], object]) -> None:
        if nbytes:
            piece = self._client.take(nbytes)
            source(piece)
            self._pieces.append((offset, piece))

    def _commit(self) -> bool:
        parts = self._parts()
        check_identity(decode(parts[0]), self.key, self.nbytes)
        stored = self._publish(self.key, parts)
        if stored:
            self._pieces.clear()
        return stored

    def _revoke(self) -> None:
        self._pieces.clear()
        self._cancel(self.nbytes)

    def _parts(self) -> list[memoryview]:
        """Return the pieces in order; joined into one where some overlap, or the header is in several."""
        pieces = sorted(self._pieces, key=lambda piece: piece[0])
        ends = [offset + len(view) for offset, view in pieces]
        first = pieces[0][1]
        apart = [offset for offset, _ in pieces] == [0, *ends[:-1]]
        if apart and len(first) >= ALIGNMENT and len(first) >= peek(first):
            return [view for _, view in pieces]
        whole = self._client.take(self.nbytes)
        for offset, view in self._pieces:
            whole[offset : offset + len(view)] = view
        return [whole]
