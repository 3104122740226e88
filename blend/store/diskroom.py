"""The room in a directory that several processes share: what goes for it, and what that pays."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from blend.errors import ResourceExhausted
from blend.store.budget import SharedBudget
from blend.store.directory import StoreDirectory
from blend.store.diskfile import StoredFile
from blend.store.fileio import FileIO, describe
from blend.store.key import ObjectKey, tenant_of
from blend.store.ledger import Ledger, by_tenant

_log = logging.getLogger(__name__)


class DiskRoom:
    """Removes files and takes their bytes off the budget of all processes. ``OSError`` from any method is the
    directory's.

    Args:
        ledger: the objects that this process has seen.
        directory: the store's directory.
        io: the system calls.

    Attributes:
        lock: guards the ledger and the two below; told when keys leave ``moving``. Taken after the budget.
        quarantine: corrupt files that were set aside, oldest first.
        moving: keys whose file is being renamed or unlinked here: in no ledger, and nobody else may touch their file.
        budget: what all processes have spent, once it has been opened.
    """

    budget: SharedBudget

    def __init__(self, ledger: Ledger[StoredFile], directory: StoreDirectory, io: FileIO) -> None:
        self.lock = threading.Condition(threading.Lock())
        self.quarantine: list[StoredFile] = []
        self.moving: set[ObjectKey] = set()
        self._ledger = ledger
        self._directory = directory
        self._io = io

    def open(self, measure: Callable[[], Mapping[str, int]]) -> SharedBudget:
        """Join the other processes' budget and return it; ``measure`` returns the bytes that are in the directory, by
        tenant tag."""
        self.budget = SharedBudget(self._io, self._directory.path, measure, self.hidden)
        return self.budget

    def make_room(self, nbytes: int) -> None:
        """Evict until ``nbytes`` more fit; the files are gone before a byte of a new one is written.

        The budget is held. Raises :class:`ResourceExhausted` when there is no room.
        """
        limits = self._ledger.limits
        self.refund_departed()
        self._evict(lambda: limits.wanted(self.budget.used, nbytes), self._victims, lambda: limits.no_room(nbytes))

    def make_own_room(self, namespace: str, nbytes: int) -> None:
        """Evict of the objects of a namespace's tenant until ``nbytes`` more fit into its quota.

        The budget is held. Raises :class:`ResourceExhausted` when there is no room.
        """
        limits, tenant = self._ledger.limits, tenant_of(namespace)
        if limits.quotas.limit(tenant) is None:
            return

        def excess() -> tuple[int, int]:
            return (over := limits.excess(tenant, self.budget.share(tenant), nbytes)), over

        self.refund_departed()
        self._evict(excess, partial(self._victims, tenant=tenant), lambda: limits.over_quota(namespace, nbytes))

    def enforce_quotas(self) -> None:
        """Evict of the objects of tenants whose quota was lowered since. The budget is held."""
        for tenant, nbytes in self.budget.shares().items():
            if self._ledger.limits.excess(tenant, nbytes, 0):
                try:
                    self.make_own_room(tenant, 0)
                except ResourceExhausted as error:
                    _log.warning("other processes hold more than a quota: %s", error)

    def _evict(
        self,
        wanted: Callable[[], tuple[int, int]],
        pick: Callable[[int, int], list[StoredFile] | None],
        refusal: Callable[[], ResourceExhausted],
    ) -> None:
        recounted = False
        while True:
            needed, should = wanted()
            if not should:
                return
            recounted = self.budget.settle_deaths() or recounted
            needed, should = wanted()
            with self.lock:
                victims = pick(needed, should)
                keys = [held.key for held in victims or ()]
                self.moving.update(keys)
            if victims:
                self._unlink(victims, keys)
            elif not needed:
                return
            elif recounted:
                raise refusal()
            else:
                self.budget.recount()
                recounted = True

    def departed(self, held: StoredFile, gone: bool) -> None:
        """Count an object that was removed for as long as it is read, unless another process removed it first."""
        with self.lock:
            if gone:
                self._ledger.depart(held)
            else:
                self._ledger.drop_aside(held)
        if gone:
            self.refund_departed()
        elif self.budget.alone:
            self.budget.doubt()

    def refund_departed(self) -> None:
        """Give back the bytes of what was removed and is no longer read. The budget is held."""
        with self.lock:
            gone = self._ledger.reap()
        if gone:
            self.budget.refund(by_tenant(gone))

    def hidden(self) -> Counter[str]:
        """Return the bytes that this process removed and still reads, by tenant tag."""
        with self.lock:
            return by_tenant(self._ledger.departing)

    def moved(self, keys: list[ObjectKey]) -> None:
        """Let others touch these keys' files again."""
        with self.lock:
            self.moving.difference_update(keys)
            self.lock.notify_all()

    def erase(self, path: str) -> None:
        """Remove a file after a failure; if that fails too, whoever looks for it finds a whole object."""
        try:
            self._directory.discard(path)
        except OSError as error:
            _log.warning("%s cannot be removed: %s", path, describe(error))
            self.budget.doubt()

    def discard_or_empty(self, fd: int, path: str) -> bool:
        """Remove an open file; if that fails, empty it. Return whether that took its bytes from the directory: where
        the file had another name by now, or stays, the directory has to be measured."""
        try:
            return self._directory.discard(path)
        except OSError as error:
            _log.warning("%s cannot be removed: %s", path, describe(error))
        try:
            self._io.truncate(fd, 0)
        except OSError as error:
            _log.warning("%s cannot be emptied: %s", path, describe(error))
            return False
        return True

    def _victims(self, needed: int, should: int, tenant: str | None = None) -> list[StoredFile] | None:
        """Take out whose files must go, of one tenant or of all: what is quarantined first, then what is least
        recently used."""
        scrap: list[StoredFile] = []
        found = 0
        for held in [held for held in self.quarantine if tenant in (None, held.key.tenant)]:
            if found >= should:
                break
            self.quarantine.remove(held)
            self._ledger.drop_aside(held)
            scrap.append(held)
            found += held.nbytes
        needed, should = max(0, needed - found), max(0, should - found)
        more = self._ledger.evict(needed, should) if tenant is None else self._ledger.evict_own(tenant, needed)
        if more is None:
            for held in scrap:
                self._restore(held)
            return None
        return scrap + more

    def _unlink(self, victims: list[StoredFile], keys: list[ObjectKey]) -> None:
        left = list(victims)
        freed: Counter[str] = Counter()
        try:
            while left:
                if self._directory.discard(left[-1].aside or self._directory.path_of(left[-1].key)):
                    freed[left[-1].key.tenant] += left[-1].nbytes
                elif self.budget.alone:
                    self.budget.doubt()
                left.pop()
        except OSError:
            with self.lock:
                for held in left:
                    self._restore(held)
            raise
        finally:
            self.budget.refund(freed)
            self.moved(keys)

    def _restore(self, held: StoredFile) -> None:
        if held.aside is None:
            self._ledger.undo_eviction(held)
        else:
            self.quarantine.append(held)
            self._ledger.count_aside(held)
