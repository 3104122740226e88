"""A store of every write policy against a plain dictionary, through any sequence of calls, faults included."""

from __future__ import annotations

import gc
import shutil
import tempfile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from blend.config import PREFETCH_POLICIES, WRITE_POLICIES
from blend.errors import ResourceExhausted, StoreError
from blend.store import DiskTier, Header, HostTier, Lease, ObjectKey, Policy, Terms, TieredStore
from tests.store.helpers import NO_SPACE, OBJECT_NBYTES, FaultyIO, make

OBJECTS = [make(seed) for seed in range(7)]
BY_KEY = {header.key: payload for header, payload in OBJECTS}
objects = st.sampled_from(OBJECTS)


class PolicyMachine(RuleBasedStateMachine):
    """The host holds three objects, the disk all. ``model`` are those that must be there; under selective writes that
    is what was written through, since the others may be evicted."""

    @initialize(write=st.sampled_from(WRITE_POLICIES), prefetch=st.sampled_from(PREFETCH_POLICIES), low=st.booleans())
    def open(self, write: str, prefetch: str, low: bool) -> None:
        self.directory = tempfile.mkdtemp()
        self.policy = Policy(
            write=write, prefetch=prefetch, prefetch_base=0.5, retry_seconds=0.0, staging_bytes=2 * OBJECT_NBYTES
        )
        self.terms = Terms(high_watermark=0.9, low_watermark=0.6) if low else Terms()
        self.model: set[ObjectKey] = set()
        self.leases: list[tuple[Lease, bytes]] = []
        self.now = 0.0
        self.start()

    def start(self) -> None:
        self.io = FaultyIO()
        self.host = HostTier(3 * OBJECT_NBYTES, terms=self.terms)
        self.disk = DiskTier(self.directory, len(OBJECTS) * OBJECT_NBYTES, False, io=self.io)
        self.store = TieredStore([self.host, self.disk], policy=self.policy)

    def stored(self, key: ObjectKey) -> None:
        if self.policy.write != "write_through_selective" or self.disk.contains(key):
            self.model.add(key)

    @rule(item=objects)
    def put(self, item: tuple[Header, bytes]) -> None:
        header, payload = item
        known = self.store.contains(header.key)
        assert self.store.put(header, payload) != known
        self.stored(header.key)

    @rule(item=objects)
    def put_async(self, item: tuple[Header, bytes]) -> None:
        header, payload = item
        events = self.store.put_async(header, payload)
        assert events.copied.result(30)
        durable = events.durable.result(30)
        assert durable == self.disk.contains(header.key)
        self.stored(header.key)

    @rule(item=objects)
    def put_on_a_full_disk(self, item: tuple[Header, bytes]) -> None:
        header, payload = item
        self.io.faults = {"pwrite": NO_SPACE}
        try:
            self.store.put(header, payload)
        except (ResourceExhausted, StoreError):
            assert not self.store.contains(header.key)
        self.store.wait_idle(30)
        self.io.faults = {}
        if self.policy.write == "write_back" and self.store.contains(header.key):
            self.model.add(header.key)

    @rule(item=objects, keep=st.booleans(), layerwise=st.booleans())
    def get(self, item: tuple[Header, bytes], keep: bool, layerwise: bool) -> None:
        header, payload = item
        lease = self.store.get(header.key)
        assert lease is not None or header.key not in self.model
        if lease is None:
            return
        if layerwise:
            assert b"".join(bytes(lease.layer(layer)) for layer in range(3)) == payload
        else:
            assert bytes(lease.payload()) == payload
        if keep and len(self.leases) < 2:
            self.leases.append((lease, payload))
        else:
            lease.release()

    @rule(wanted=st.lists(objects, max_size=5), settle=st.booleans())
    def load(self, wanted: list[tuple[Header, bytes]], settle: bool) -> None:
        keys = {header.key for header, _ in wanted}
        with self.store.load(header.key for header, _ in wanted) as loads:
            assert loads.keys() | loads.missed.keys() == keys
            assert not self.model & loads.missed.keys()
            if settle:
                loads.settle()
            for key, lease in loads.items():
                size = lease.header.layer_nbytes
                for layer in range(3):
                    assert bytes(lease.layer(layer)) == BY_KEY[key][layer * size : (layer + 1) * size]

    @rule(item=objects)
    def remove(self, item: tuple[Header, bytes]) -> None:
        key = item[0].key
        assert self.store.remove(key) or key not in self.model
        self.model.discard(key)
        assert self.store.wait_idle(30)
        assert not self.store.contains(key)

    @rule()
    def release(self) -> None:
        for lease, payload in self.leases:
            assert bytes(lease.payload()) == payload
            lease.release()
        self.leases.clear()

    @rule()
    def flush(self) -> None:
        self.store.flush()
        assert self.store.write_stats().dirty == 0

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.start()
        if self.policy.write != "write_through_selective":
            assert self.model <= set(self.disk.keys())

    @invariant()
    def budgets_hold_and_no_key_is_in_neither_tier(self) -> None:
        for tier in (self.host, self.disk):
            assert tier.stats().used_bytes <= tier.stats().capacity_bytes
        assert self.model <= set(self.store.keys())
        writes, loads = self.store.write_stats(), self.store.load_stats()
        assert writes.staging_peak_bytes <= writes.staging_capacity_bytes
        assert loads.inflight_peak_bytes <= loads.inflight_capacity_bytes

    def teardown(self) -> None:
        try:
            self.nothing_is_kept()
        finally:
            self.store.close()
            shutil.rmtree(self.directory)

    def nothing_is_kept(self) -> None:
        self.release()
        assert self.store.wait_idle(30)
        self.store.check_integrity()
        for key in list(self.store.keys()):
            assert self.store.remove(key)
        gc.collect(0)
        assert self.host.stats().used_bytes == 0


TestPolicies = pytest.mark.slow(PolicyMachine.TestCase)
TestPolicies.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
