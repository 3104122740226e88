"""Three tiers, leases that run out, two processes' worth of stores and any failing system call, against a dictionary.

The steps are counted: in CI at least 2,000 of them run.
"""

from __future__ import annotations

import errno
import gc
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from blend.errors import Closed, LeaseReleased, ResourceExhausted, StoreError, TierUnavailable
from blend.store import DiskTier, Header, HostTier, Lease, ObjectKey, Policy, Terms, TieredStore
from tests.store.helpers import OBJECT_NBYTES, FaultyIO, make, path_of

STEPS = 2000
OBJECTS = [make(seed) for seed in range(5)] + [make(0, neighbours=["9" * 40]), make(0, neighbours=["8" * 40])]
ROOM = len(OBJECTS) + 4  # what is removed or rewritten while it is read counts twice
PAYLOADS = {header.key: payload for header, payload in OBJECTS}
WRITES = ["create", "pwrite", "fsync", "rename", "truncate", "write_record", "unlink", "mkdir"]
READS = ["open", "pread", "find", "read_record"]

objects = st.sampled_from(OBJECTS)
codes = st.sampled_from([errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS])
Item = tuple[Header, bytes]


class FaultMachine(RuleBasedStateMachine):
    """The host holds three objects, the near disk four, the far one all. ``model`` are those that must be there:
    whatever has been on the far disk and was neither removed nor damaged."""

    steps = 0

    @initialize(write=st.sampled_from(["write_through", "write_back"]), fsync=st.booleans())
    def open(self, write: str, fsync: bool) -> None:
        type(self).steps -= 1  # this one is none
        self.directory = Path(tempfile.mkdtemp())
        self.now = 0.0
        self.terms = Terms(lease_seconds=10, clock=lambda: self.now)
        self.policy = Policy(write=write, write_retries=1, retry_seconds=0.0, staging_bytes=2 * OBJECT_NBYTES)
        self.fsync = fsync
        self.model: set[ObjectKey] = set()
        self.leases: list[tuple[Lease, float]] = []
        self.start()

    def start(self) -> None:
        self.ios = {"near": FaultyIO(), "far": FaultyIO()}
        self.host = HostTier(3 * OBJECT_NBYTES, terms=self.terms)
        self.near = self.disk("near", 4, self.ios["near"])
        self.far = self.disk("far", ROOM, self.ios["far"])
        self.store = TieredStore([self.host, self.near, self.far], policy=self.policy)
        self.other = self.disk("far", ROOM, FaultyIO())

    def disk(self, name: str, count: int, io: FaultyIO) -> DiskTier:
        directory = self.directory / name
        return DiskTier(directory, count * OBJECT_NBYTES, self.fsync, name=name, io=io, terms=self.terms)

    def settled(self, key: ObjectKey) -> None:
        """What had to be there still is; and from now on it has to be, if it is on the far disk."""
        there = self.other.contains(key)
        assert there or key not in self.model
        if there:
            self.model.add(key)

    def fail(self, where: str, call: str, code: int, after: int) -> None:
        self.ios[where].faults, self.ios[where].after = {call: code}, after

    def mend(self) -> None:
        for io in self.ios.values():
            io.faults = {}

    def read(self, lease: Lease, layerwise: bool) -> None:
        """Read an object; what comes is right, or it is a fault."""
        payload = PAYLOADS[lease.header.key]
        if not layerwise:
            assert bytes(lease.payload()) == payload
            return
        size = lease.header.layer_nbytes
        for layer in (1, 0, 2):
            assert bytes(lease.layer(layer)) == payload[layer * size : (layer + 1) * size]

    # ------------------------------------------------------------------------------------------------- writing

    @rule(item=objects, later=st.booleans())
    def put(self, item: Item, later: bool) -> None:
        header, payload = item
        if later:
            events = self.store.put_async(header, payload)
            assert events.copied.result(30)
            assert events.durable.result(30) in (True, False)
        else:
            try:
                self.store.put(header, payload)
            except ResourceExhausted:
                assert self.leases
        self.settled(header.key)

    @rule(item=objects, where=st.sampled_from(["near", "far"]), call=st.sampled_from(WRITES), code=codes,
          after=st.integers(0, 3), later=st.booleans())  # fmt: skip
    def put_under_a_fault(self, item: Item, where: str, call: str, code: int, after: int, later: bool) -> None:
        header, payload = item
        self.fail(where, call, code, after)
        try:
            if later:
                events = self.store.put_async(header, payload)
                for event in (events.copied, events.readable, events.durable):
                    event.exception(30)
            else:
                self.store.put(header, payload)
        except (StoreError, ResourceExhausted):
            pass
        assert self.store.wait_idle(30)
        self.mend()
        self.settled(header.key)

    @rule(item=objects)
    def another_process_puts(self, item: Item) -> None:
        try:
            self.other.put(*item)
        except ResourceExhausted:
            assert self.leases
        self.settled(item[0].key)

    @rule()
    def flush(self) -> None:
        self.store.flush()
        assert self.store.write_stats().dirty == 0
        for key in PAYLOADS:
            self.settled(key)

    # ------------------------------------------------------------------------------------------------- reading

    @rule(item=objects, keep=st.booleans(), layerwise=st.booleans())
    def get(self, item: Item, keep: bool, layerwise: bool) -> None:
        lease = self.store.get(item[0].key)
        assert lease is not None or item[0].key not in self.model
        if lease is None:
            return
        self.read(lease, layerwise)
        if keep and len(self.leases) < 2:
            self.leases.append((lease, self.now))
        else:
            lease.release()

    @rule(item=objects, where=st.sampled_from(["near", "far"]), call=st.sampled_from(READS), code=codes,
          after=st.integers(0, 3), layerwise=st.booleans())  # fmt: skip
    def get_under_a_fault(self, item: Item, where: str, call: str, code: int, after: int, layerwise: bool) -> None:
        self.fail(where, call, code, after)
        found = self.store.lookup(item[0].key)
        if found.lease is not None:
            with found.lease as lease, suppress(TierUnavailable):
                self.read(lease, layerwise)
        elif item[0].key in self.model:
            assert found.reason
        self.mend()

    @rule(wanted=st.lists(objects, max_size=5), between=st.sampled_from(["nothing", "remove", "expire", "evict"]),
          first=st.integers(0, 2))  # fmt: skip
    def load(self, wanted: list[Item], between: str, first: int) -> None:
        with self.store.load(header.key for header, _ in wanted) as loads:
            assert not self.model & loads.missed.keys()
            for key, lease in loads.items():
                size = lease.header.layer_nbytes
                assert bytes(lease.layer(first)) == PAYLOADS[key][first * size : (first + 1) * size]
            if between == "remove" and wanted:
                key = wanted[0][0].key
                self.store.remove(key)
                self.model.discard(key)
            elif between == "expire":
                self.now += 11
            elif between == "evict":
                for header, _ in wanted:
                    if self.policy.write != "write_back":
                        self.host.remove(header.key)
            for lease in loads.values():
                try:
                    self.read(lease, layerwise=True)
                except LeaseReleased:
                    assert between == "expire"
        assert self.store.wait_idle(30)

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 1), renew=st.booleans())
    def use(self, which: int, renew: bool) -> None:
        """A lease that was kept reads until its time is over, whatever became of the object meanwhile."""
        lease, since = self.leases[which % len(self.leases)]
        over = self.now - since >= 10
        try:
            if renew:
                lease.renew()
                self.leases[which % len(self.leases)] = (lease, self.now)
            self.read(lease, layerwise=False)
            assert not over or lease.seconds_left > 0
        except LeaseReleased:
            assert over
            self.leases.pop(which % len(self.leases))

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # --------------------------------------------------------------------------------------------- going away

    @rule(item=objects)
    def remove(self, item: Item) -> None:
        key = item[0].key
        assert self.store.remove(key) or key not in self.model
        self.model.discard(key)
        assert self.store.get(key) is None
        assert not self.other.contains(key)

    @rule(item=objects, code=codes)
    def remove_under_a_fault(self, item: Item, code: int) -> None:
        self.fail("far", "unlink", code, 0)
        try:
            self.store.remove(item[0].key)
        except StoreError:
            assert self.other.contains(item[0].key)
        self.mend()
        self.settled(item[0].key)

    @rule(item=objects)
    def another_process_removes(self, item: Item) -> None:
        if self.other.remove(item[0].key):
            self.model.discard(item[0].key)

    @rule(item=objects, at=st.integers(0, OBJECT_NBYTES - 1), bit=st.integers(0, 7), cut=st.booleans())
    def damage(self, item: Item, at: int, bit: int, cut: bool) -> None:
        """Where all that is left of an object is wrong, it is a fault once and a miss afterwards."""
        key = item[0].key
        if any(lease.header.key == key for lease, _ in self.leases) or not self.far.contains(key):
            return
        self.store.flush()
        self.host.remove(key)
        self.near.remove(key)
        gc.collect(0)
        path = path_of(self.directory / "far", item[0])
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1 << bit
        path.write_bytes(raw[:at] if cut else raw)
        self.model.discard(key)
        found = self.store.lookup(key)
        if found.lease is not None:
            with found.lease as lease, pytest.raises(StoreError):
                lease.payload()
        else:
            assert found.reason
        assert self.store.get(key) is None

    @rule()
    def open_again(self) -> None:
        self.store.close()
        self.other.close()
        for lease, since in self.leases:
            if self.now - since < 10:
                try:
                    self.read(lease, layerwise=True)
                except (LeaseReleased, Closed):
                    raise AssertionError("leases outlive their store") from None
            lease.release()
        self.leases.clear()
        self.start()

    # ---------------------------------------------------------------------------------------------- invariants

    @invariant()
    def budgets_hold_and_nothing_is_lost(self) -> None:
        type(self).steps += 1
        for tier in (self.host, self.near, self.far, self.other):
            assert tier.stats().used_bytes <= tier.stats().capacity_bytes
        for name, count in (("near", 4), ("far", ROOM)):
            folders = [self.directory / name / folder for folder in ("objects", "quarantine")]
            files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
            assert sum(path.stat().st_size for path in files) <= count * OBJECT_NBYTES
        assert self.model <= set(self.store.keys())
        self.host.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            self.nothing_is_kept()
        finally:
            self.store.close()
            self.other.close()
            shutil.rmtree(self.directory)

    def nothing_is_kept(self) -> None:
        for lease, _ in self.leases:
            lease.release()
        self.leases.clear()
        self.store.check_integrity()
        self.other.check_integrity()
        for key in list(self.store.keys()):
            self.store.remove(key)
        gc.collect(0)
        assert self.host.stats().used_bytes == 0


@pytest.mark.slow
def test_at_least_2000_steps_against_the_model() -> None:
    FaultMachine.steps = 0
    run_state_machine_as_test(FaultMachine, settings=settings(max_examples=90, stateful_step_count=40, deadline=None))
    assert FaultMachine.steps >= STEPS
