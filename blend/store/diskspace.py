"""What the disk tier knows of its directory, and the room in it that it shares with other processes."""

from __future__ import annotations

import logging
import time
from collections import Counter

from blend.errors import ResourceExhausted, StoreError
from blend.store.directory import Contents, StoreDirectory
from blend.store.diskfile import StoredFile
from blend.store.diskroom import DiskRoom
from blend.store.fileio import FileIO, describe
from blend.store.key import ObjectKey
from blend.store.ledger import Ledger

_log = logging.getLogger(__name__)
_SETTLED_NS = 50_000_000
"""How old a directory's time of change must be for a later change to show: the kernel's clock ticks in 1 to 10 ms."""


class DiskSpace:
    """The files of a directory as one process knows them: its ledger is a copy, the directory is the truth.

    Its own ``lock`` guards the ledger. Whoever takes the budget too takes that first. ``OSError`` from any method is
    the directory's; what had been begun is undone.

    Args:
        ledger: for the objects that this process has seen; empty, with the budget of all processes.
        directory: the store's directory.
        io: the system calls.
    """

    def __init__(self, ledger: Ledger[StoredFile], directory: StoreDirectory, io: FileIO) -> None:
        self.directory = directory
        self.ledger = ledger
        self._room = DiskRoom(ledger, directory, io)
        self.lock = self._room.lock
        # For each fan-out directory, when all its names were last taken over: how many objects had been put by then,
        # and its time of change.
        self._seen: dict[str, tuple[int | None, int | None]] = {}
        self._measured = False
        self._budget = self._room.open(self._measure)
        if not self._measured:
            self._take_over(self._budget.peek_puts())
        try:
            with self._budget.held():
                self._room.enforce_quotas()
                self._room.make_room(0)
        except ResourceExhausted as error:
            _log.warning("other processes hold more than the budget: %s", error)

    @property
    def quarantined(self) -> int:
        """How many corrupt files are set aside."""
        return len(self._room.quarantine)

    @property
    def used(self) -> int:
        """Bytes that all processes have spent, what this one removed and still reads included."""
        with self._budget.held():
            self._room.refund_departed()
            return self._budget.used

    @property
    def shares(self) -> dict[str, int]:
        """Those bytes by tenant tag."""
        with self._budget.held():
            self._room.refund_departed()
            return self._budget.shares()

    def look(self, key: ObjectKey) -> StoredFile | None:
        """Return an object if its file is there now, whoever put it there."""
        with self.lock:  # also while looking: what this process does to the file meanwhile is not half seen
            held = self.ledger.find(key)
            if key in self._room.moving:
                return held
            size = self.directory.find(key)
            if size is None:
                if held is not None:
                    self._lose(held)
                return None
            if held is None or (held.nbytes != size and not held.pinned):
                held = self._meet(held, key, size)
            return held

    def lost(self, held: StoredFile) -> None:
        """Forget an object whose file has turned out to be gone."""
        with self.lock:
            if self.ledger.find(held.key) is held:
                self._lose(held)

    def variants(self, content: str) -> tuple[str, ...]:
        """Return the variants of a content key whose files are there now."""
        self._refresh(content[:2])
        with self.lock:
            known = self.ledger.variants(content)
        return tuple(name for name in known if self.look(ObjectKey(content, name)) is not None)

    def keys(self) -> list[ObjectKey]:
        """Return the keys of all objects; among them may be some that another process has removed."""
        puts = self._budget.peek_puts()
        if puts is None or puts != self._budget.seen:
            self._take_over(puts)
        with self.lock:
            return self.ledger.keys()

    def sizes(self) -> list[tuple[ObjectKey, int]]:
        """Return the keys and bytes of all objects whose files are there now."""
        self._take_over(self._budget.peek_puts())
        with self.lock:
            return [(held.key, held.nbytes) for held in self.ledger.objects()]

    def reserve(self, key: ObjectKey, nbytes: int) -> tuple[int, str]:
        """Make room for ``nbytes`` and return descriptor and path of a file of that length.

        Raises:
            ResourceExhausted: there is no room, even without everything that may be evicted.
        """
        self.ledger.limits.require_fits(key, nbytes)
        with self._budget.held():
            self._room.make_own_room(key.namespace, nbytes)
            self._room.make_room(nbytes)
            self._budget.spend(key.tenant, nbytes)
            try:
                made = self.directory.create_temporary(key, nbytes)
            except BaseException:
                self._budget.refund({key.tenant: nbytes})
                raise
            with self.lock:
                self.ledger.count_reserved(key, nbytes)
        return made

    def cancel(self, key: ObjectKey, fd: int, path: str, nbytes: int) -> None:
        """Give a reservation and its file back. Never raises: what cannot be removed is emptied."""
        try:
            with self._budget.held():
                if self._room.discard_or_empty(fd, path):
                    self._budget.refund({key.tenant: nbytes})
                else:
                    self._budget.doubt()
        except OSError as error:
            _log.warning("%s: %s; the directory is measured again", self.ledger.tier, describe(error))
            self._room.discard_or_empty(fd, path)
            self._budget.doubt()
        with self.lock:
            self.ledger.cancel(key, nbytes)

    def publish(self, key: ObjectKey, nbytes: int, temporary: str) -> bool:
        """Make a finished file the object; return False when one is there, in which case nothing has changed."""
        with self._budget.held():
            with self.lock:
                while key in self._room.moving:
                    self.lock.wait()
            if self.look(key) is not None:
                return False
            with self.lock:
                self._room.moving.add(key)
            try:
                self.directory.publish(temporary, key)
                # Counted after it can be seen: who lists the names after reading the number has them all.
                self._budget.count_put()
            except OSError:
                self._room.erase(self.directory.path_of(key))
                self._room.moved([key])
                raise
        try:
            self.directory.sync_folder(key)
            with self.lock:
                self.ledger.settle(StoredFile(key, nbytes))
        except OSError:
            self._room.erase(self.directory.path_of(key))
            self._budget.doubt()  # another process may have removed it first, and paid for it
            raise
        finally:
            self._room.moved([key])
        return True

    def remove(self, key: ObjectKey) -> bool:
        """Remove an object's file; return whether it was there, or was thought to be."""
        with self.lock:
            known = self.ledger.find(key) is not None
        with self._budget.held():
            held = self.look(key)
            if held is None:
                return known
            with self.lock:
                if self.ledger.find(key) is not held or key in self._room.moving:
                    return False
                self.ledger.put_aside(held)
                self._room.moving.add(key)
            try:
                gone = self.directory.discard(self.directory.path_of(key))
                self._room.departed(held, gone)
            except OSError:
                with self.lock:
                    self.ledger.bring_back(held)
                raise
            finally:
                self._room.moved([key])
        if gone:
            self.directory.sync_folder(key)
        return True

    def set_aside(self, held: StoredFile) -> None:
        """Move a corrupt object's file out of the way, unless somebody else has; if that fails it stays an object."""
        with self.lock:
            if self.ledger.find(held.key) is not held or held.key in self._room.moving:
                return
            self.ledger.put_aside(held)
            self._room.moving.add(held.key)
        try:
            moved = self.directory.set_aside(held.key)
            with self.lock:
                self._room.quarantine.append(StoredFile(held.key, held.nbytes, moved))
        except FileNotFoundError:
            with self.lock:
                self.ledger.drop_aside(held)
            self._budget.doubt()
        except OSError as failure:
            _log.warning("%s cannot be moved away: %s", held.key, describe(failure))
            with self.lock:
                self.ledger.bring_back(held)
        finally:
            self._room.moved([held.key])

    def check(self) -> None:
        """Raise :class:`StoreError` unless ledger, files and the shared record agree."""
        with self._budget.held():
            self._room.refund_departed()
            with self.lock:
                self.ledger.check()
                known = self.ledger.objects()
            for held in known:
                found = self.directory.find(held.key)
                if found == held.nbytes:
                    continue
                with self.lock:
                    if self.ledger.find(held.key) is not held:
                        continue
                    if found is None and not self._budget.alone:
                        self._lose(held)
                    else:
                        raise StoreError(
                            f"{self.ledger.tier}: {held.key}: ledger says {held.nbytes} bytes, disk says {found}"
                        )
            present, recorded = self.directory.scan().nbytes, self._budget.used
            if present > recorded:
                raise StoreError(f"{self.ledger.tier}: ledger says {recorded} bytes, the directory holds {present}")

    def close(self) -> None:
        """End the session and forget every object."""
        try:
            with self._budget.held():
                self._budget.refund(self._room.hidden())
                with self.lock:
                    self.ledger.clear()
        except OSError as error:
            _log.warning("%s: closing: %s", self.ledger.tier, describe(error))
            with self.lock:
                self.ledger.clear()
        self._budget.close()

    def _meet(self, known: StoredFile | None, key: ObjectKey, size: int) -> StoredFile:
        """Take over an object that another process has put."""
        if known is not None:
            self.ledger.forget(known)
        held = StoredFile(key, size)
        self.ledger.adopt(held)
        if self._budget.alone:
            self._budget.doubt()
        return held

    def _lose(self, held: StoredFile) -> None:
        """Forget an object that another process has removed, and paid back."""
        self.ledger.forget(held)
        if self._budget.alone:
            self._budget.doubt()

    def _refresh(self, prefix: str) -> None:
        """Take over the names in a fan-out directory, if any can have come since that was last done."""
        puts = self._budget.peek_puts()
        if puts is not None and puts == self._budget.seen:
            return
        changed = self.directory.changed_at(prefix)
        with self.lock:
            seen_puts, seen_changed = self._seen.get(prefix, (None, None))
        if (puts is not None and puts == seen_puts) or changed == seen_changed:
            return
        began = time.time_ns()
        keys = self.directory.list_folder(prefix)
        with self.lock:
            unknown = [key for key in keys if key not in self.ledger]
        for key in unknown:
            self.look(key)
        with self.lock:
            self._seen[prefix] = (puts, changed if changed + _SETTLED_NS < began else None)

    def _take_over(self, puts: int | None) -> None:
        """Take over all names; ``puts`` is the number of objects put that was read before."""
        self._reconcile(self.directory.scan())
        self._budget.seen = puts

    def _measure(self) -> Counter[str]:
        contents = self.directory.scan()
        self._reconcile(contents)
        self._measured = True
        return contents.shares

    def _reconcile(self, contents: Contents) -> None:
        with self.lock:
            present = {key: size for _, key, size in contents.objects}
            for held in self.ledger.objects():
                if held.key not in present and held.key not in self._room.moving:
                    self.ledger.forget(held)
            for key, size in present.items():
                if key not in self.ledger and key not in self._room.moving:
                    self.ledger.adopt(StoredFile(key, size))
            for scrap in self._room.quarantine:
                self.ledger.drop_aside(scrap)
            self._room.quarantine = [StoredFile(key, size, path) for _, path, key, size in contents.quarantined]
            for scrap in self._room.quarantine:
                self.ledger.count_aside(scrap)
