"""What the disk tier knows of its directory, and the room in it that it shares with other processes."""

from __future__ import annotations

import logging
import threading
import time

from blend.errors import ResourceExhausted, StoreError
from blend.store.budget import SharedBudget
from blend.store.directory import Contents, StoreDirectory
from blend.store.diskfile import StoredFile
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

    Attributes:
        quarantine: corrupt files that were set aside, oldest first.
    """

    def __init__(self, ledger: Ledger[StoredFile], directory: StoreDirectory, io: FileIO) -> None:
        self.directory = directory
        self.ledger = ledger
        self.quarantine: list[StoredFile] = []
        self.lock = threading.Condition(threading.Lock())
        self._io = io
        # Keys whose file is being renamed or unlinked here: in no ledger, and nobody else may touch their file.
        self._moving: set[ObjectKey] = set()
        # For each fan-out directory, when all its names were last taken over: how many objects had been put by then,
        # and its time of change.
        self._seen: dict[str, tuple[int | None, int | None]] = {}
        self._measured = False
        self._budget = SharedBudget(io, directory.path, self._measure, self._hidden)
        if not self._measured:
            self._take_over(self._budget.peek_puts())
        try:
            with self._budget.held():
                self._make_room(0)
        except ResourceExhausted as error:
            _log.warning("other processes hold more than the budget: %s", error)

    @property
    def used(self) -> int:
        """Bytes that all processes have spent, what this one removed and still reads included."""
        with self._budget.held():
            self._refund_departed()
            return self._budget.used

    def look(self, key: ObjectKey) -> StoredFile | None:
        """Return an object if its file is there now, whoever put it there."""
        with self.lock:  # also while looking: what this process does to the file meanwhile is not half seen
            held = self.ledger.find(key)
            if key in self._moving:
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

    def reserve(self, key: ObjectKey, nbytes: int) -> tuple[int, str]:
        """Make room for ``nbytes`` and return descriptor and path of a file of that length.

        Raises:
            ResourceExhausted: there is no room, even without everything that may be evicted.
        """
        self.ledger.require_fits(nbytes)
        with self._budget.held():
            self._make_room(nbytes)
            self._budget.spend(nbytes)
            try:
                made = self.directory.create_temporary(key, nbytes)
            except BaseException:
                self._budget.refund(nbytes)
                raise
            with self.lock:
                self.ledger.count_reserved(nbytes)
        return made

    def cancel(self, fd: int, path: str, nbytes: int) -> None:
        """Give a reservation and its file back. Never raises: what cannot be removed is emptied."""
        try:
            with self._budget.held():
                self._discard_or_empty(fd, path)
                self._budget.refund(nbytes)
        except OSError as error:
            _log.warning("%s: %s; the directory is measured again", self.ledger.tier, describe(error))
            self._discard_or_empty(fd, path)
            self._budget.doubt()
        with self.lock:
            self.ledger.cancel(nbytes)

    def publish(self, key: ObjectKey, nbytes: int, temporary: str) -> bool:
        """Make a finished file the object; return False when one is there, in which case nothing has changed."""
        with self._budget.held():
            with self.lock:
                while key in self._moving:
                    self.lock.wait()
            if self.look(key) is not None:
                return False
            with self.lock:
                self._moving.add(key)
            try:
                self.directory.publish(temporary, key)
                # Counted after it can be seen: who lists the names after reading the number has them all.
                self._budget.count_put()
            except OSError:
                self._erase(self.directory.path_of(key))
                self._moved([key])
                raise
        try:
            self.directory.sync_folder(key)
            with self.lock:
                self.ledger.settle(StoredFile(key, nbytes))
        except OSError:
            self._erase(self.directory.path_of(key))
            self._budget.doubt()  # another process may have removed it first, and paid for it
            raise
        finally:
            self._moved([key])
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
                if self.ledger.find(key) is not held or key in self._moving:
                    return False
                self.ledger.put_aside(held)
                self._moving.add(key)
            try:
                gone = self.directory.discard(self.directory.path_of(key))
                self._departed(held, gone)
            except OSError:
                with self.lock:
                    self.ledger.bring_back(held)
                raise
            finally:
                self._moved([key])
        if gone:
            self.directory.sync_folder(key)
        return True

    def set_aside(self, held: StoredFile) -> None:
        """Move a corrupt object's file out of the way, unless somebody else has; if that fails it stays an object."""
        with self.lock:
            if self.ledger.find(held.key) is not held or held.key in self._moving:
                return
            self.ledger.put_aside(held)
            self._moving.add(held.key)
        try:
            moved = self.directory.set_aside(held.key)
            with self.lock:
                self.quarantine.append(StoredFile(held.key, held.nbytes, moved))
        except FileNotFoundError:
            with self.lock:
                self.ledger.drop_aside(held.nbytes)
            self._budget.doubt()
        except OSError as failure:
            _log.warning("%s cannot be moved away: %s", held.key, describe(failure))
            with self.lock:
                self.ledger.bring_back(held)
        finally:
            self._moved([held.key])

    def check(self) -> None:
        """Raise :class:`StoreError` unless ledger, files and the shared record agree."""
        with self._budget.held():
            self._refund_departed()
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
                self._budget.refund(self._hidden())
                with self.lock:
                    self.ledger.clear()
        except OSError as error:
            _log.warning("%s: closing: %s", self.ledger.tier, describe(error))
            with self.lock:
                self.ledger.clear()
        self._budget.close()

    def _moved(self, keys: list[ObjectKey]) -> None:
        with self.lock:
            self._moving.difference_update(keys)
            self.lock.notify_all()

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

    def _measure(self) -> int:
        contents = self.directory.scan()
        self._reconcile(contents)
        self._measured = True
        return contents.nbytes

    def _hidden(self) -> int:
        """Return the bytes that this process removed and still reads."""
        with self.lock:
            return sum(held.nbytes for held in self.ledger.departing)

    def _reconcile(self, contents: Contents) -> None:
        with self.lock:
            present = {key: size for _, key, size in contents.objects}
            for held in self.ledger.objects():
                if held.key not in present and held.key not in self._moving:
                    self.ledger.forget(held)
            for key, size in present.items():
                if key not in self.ledger and key not in self._moving:
                    self.ledger.adopt(StoredFile(key, size))
            for scrap in self.quarantine:
                self.ledger.drop_aside(scrap.nbytes)
            self.quarantine = [StoredFile(key, size, path) for _, path, key, size in contents.quarantined]
            for scrap in self.quarantine:
                self.ledger.count_aside(scrap.nbytes)

    def _make_room(self, nbytes: int) -> None:
        """Evict until ``nbytes`` more fit; the files are gone before a byte of a new one is written."""
        self._refund_departed()
        recounted = False
        while True:
            needed, should = self.ledger.wanted(self._budget.used, nbytes)
            if not should:
                return
            recounted = self._budget.settle_deaths() or recounted
            needed, should = self.ledger.wanted(self._budget.used, nbytes)
            with self.lock:
                victims = self._victims(needed, should)
                keys = [held.key for held in victims or ()]
                self._moving.update(keys)
            if victims:
                self._unlink(victims, keys)
            elif not needed:
                return
            elif recounted:
                raise self.ledger.no_room(nbytes)
            else:
                self._budget.recount()
                recounted = True

    def _victims(self, needed: int, should: int) -> list[StoredFile] | None:
        """Take out whose files must go: what is quarantined first, then what is least recently used."""
        scrap: list[StoredFile] = []
        found = 0
        while self.quarantine and found < should:
            scrap.append(self.quarantine.pop(0))
            self.ledger.drop_aside(scrap[-1].nbytes)
            found += scrap[-1].nbytes
        more = self.ledger.evict(max(0, needed - found), max(0, should - found))
        if more is None:
            for held in scrap:
                self._restore(held)
            return None
        return scrap + more

    def _unlink(self, victims: list[StoredFile], keys: list[ObjectKey]) -> None:
        left = list(victims)
        freed = 0
        try:
            while left:
                if self.directory.discard(left[-1].aside or self.directory.path_of(left[-1].key)):
                    freed += left[-1].nbytes
                elif self._budget.alone:
                    self._budget.doubt()
                left.pop()
        except OSError:
            with self.lock:
                for held in left:
                    self._restore(held)
            raise
        finally:
            self._budget.refund(freed)
            self._moved(keys)

    def _restore(self, held: StoredFile) -> None:
        if held.aside is None:
            self.ledger.undo_eviction(held)
        else:
            self.quarantine.append(held)
            self.ledger.count_aside(held.nbytes)

    def _departed(self, held: StoredFile, gone: bool) -> None:
        """Count an object that was removed for as long as it is read, unless another process removed it first."""
        with self.lock:
            if gone:
                self.ledger.depart(held)
            else:
                self.ledger.drop_aside(held.nbytes)
        if gone:
            self._refund_departed()
        elif self._budget.alone:
            self._budget.doubt()

    def _refund_departed(self) -> None:
        with self.lock:
            gone = self.ledger.reap()
        if gone:
            self._budget.refund(gone)

    def _erase(self, path: str) -> None:
        """Remove a file after a failure; if that fails too, whoever looks for it finds a whole object."""
        try:
            self.directory.discard(path)
        except OSError as error:
            _log.warning("%s cannot be removed: %s", path, describe(error))
            self._budget.doubt()

    def _discard_or_empty(self, fd: int, path: str) -> None:
        try:
            self.directory.discard(path)
        except OSError as error:
            _log.warning("%s cannot be removed: %s", path, describe(error))
            self._empty(fd, path)

    def _empty(self, fd: int, path: str) -> None:
        try:
            self._io.truncate(fd, 0)
        except OSError as error:
            _log.warning("%s cannot be emptied: %s", path, describe(error))
            self._budget.doubt()
