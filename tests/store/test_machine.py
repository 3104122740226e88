"""A store against a plain dictionary, through any sequence of calls."""

from __future__ import annotations

import gc
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blend.errors import ObjectCorrupt, ResourceExhausted, StoreError
from blend.store import DiskTier, Header, HostTier, Lease, ObjectKey, TieredStore
from tests.store.helpers import NO_SPACE, OBJECT_NBYTES, FaultyIO, make, path_of

OBJECTS = [make(seed) for seed in range(6)] + [make(0, neighbours=["9" * 40]), make(1, neighbours=["8" * 40])]
objects = st.sampled_from(OBJECTS)


class StoreMachine(RuleBasedStateMachine):
    """The host holds three objects; the disk all of them, or four, in which case objects may vanish, unchanged."""

    @initialize(roomy=st.booleans())
    def open(self, roomy: bool) -> None:
        self.directory = tempfile.mkdtemp()
        self.roomy = roomy
        self.model: dict[ObjectKey, bytes] = {}
        self.leases: list[tuple[Lease, bytes]] = []
        self.start()

    def start(self) -> None:
        self.io = FaultyIO()
        self.host = HostTier(3 * OBJECT_NBYTES)
        self.disk = DiskTier(self.directory, (len(OBJECTS) if self.roomy else 4) * OBJECT_NBYTES, False, io=self.io)
        self.store = TieredStore([self.host, self.disk])

    @rule(item=objects)
    def put(self, item: tuple[Header, bytes]) -> None:
        header, payload = item
        known = self.store.contains(header.key)
        try:
            stored = self.store.put(header, payload)
        except ResourceExhausted:
            assert self.leases
            return
        assert stored != known
        self.model[header.key] = payload

    @rule(item=objects)
    def put_with_a_full_disk(self, item: tuple[Header, bytes]) -> None:
        header, payload = item
        self.io.faults = {"pwrite": NO_SPACE}
        try:
            self.store.put(header, payload)
        except (ResourceExhausted, StoreError):
            assert self.leases
        self.io.faults = {}
        if self.disk.contains(header.key):
            self.model[header.key] = payload
        else:
            self.model.pop(header.key, None)  # in the host alone: it may go at any time

    @rule(item=objects, keep=st.booleans(), layer=st.integers(0, 2))
    def get(self, item: tuple[Header, bytes], keep: bool, layer: int) -> None:
        header, payload = item
        lease = self.store.get(header.key)
        if lease is None:
            assert header.key not in self.model or not self.roomy
            self.model.pop(header.key, None)
            return
        assert lease.header == header
        size = header.layer_nbytes
        assert bytes(lease.layer(layer)) == payload[layer * size : (layer + 1) * size]
        assert bytes(lease.payload()) == payload
        if keep:
            self.leases.append((lease, payload))
        else:
            lease.release()

    @rule(item=objects)
    def remove(self, item: tuple[Header, bytes]) -> None:
        key = item[0].key
        assert self.store.remove(key) or key not in self.model or not self.roomy
        self.model.pop(key, None)
        assert self.store.get(key) is None

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        lease, payload = self.leases.pop(which % len(self.leases))
        assert bytes(lease.payload()) == payload
        lease.release()

    @rule(item=objects, at=st.integers(0, OBJECT_NBYTES - 1))
    def damage(self, item: tuple[Header, bytes], at: int) -> None:
        key = item[0].key
        path = path_of(Path(self.directory), item[0])
        if not self.disk.contains(key) or any(lease.header.key == key for lease, _ in self.leases):
            return
        raw = bytearray(path.read_bytes())
        raw[at] ^= 0x20
        path.write_bytes(raw)
        self.host.remove(key)
        self.model.pop(key, None)
        try:
            lease = self.store.get(key)
            assert lease is not None
            with lease:
                lease.payload()
            raise AssertionError("damaged bytes were handed out")
        except ObjectCorrupt:
            assert self.store.get(key) is None

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.start()

    @rule(item=objects)
    def evict_from_host(self, item: tuple[Header, bytes]) -> None:
        self.host.remove(item[0].key)

    @invariant()
    def budgets_hold_and_counts_agree(self) -> None:
        for tier in (self.host, self.disk):
            assert tier.stats().used_bytes <= tier.stats().capacity_bytes
        self.store.check_integrity()

    @invariant()
    def nothing_is_lost(self) -> None:
        if self.roomy:
            assert self.model.keys() <= set(self.disk.keys())
        for header, _ in OBJECTS:
            assert (header.key.variant in self.store.variants(header.key.content)) == self.store.contains(header.key)

    def teardown(self) -> None:
        try:
            self.nothing_is_kept()
        finally:
            self.store.close()
            shutil.rmtree(self.directory)

    def nothing_is_kept(self) -> None:
        for lease, payload in self.leases:
            assert bytes(lease.payload()) == payload
            lease.release()
        self.leases.clear()
        for key in list(self.store.keys()):
            assert self.store.remove(key)
        gc.collect(0)
        assert self.host.stats().used_bytes == 0


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
