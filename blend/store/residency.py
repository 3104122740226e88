"""Which node holds which objects: kept from events alone, asked without scanning. Wrong hints only cost time."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from blend.store.key import ObjectKey

Kind = Literal["stored", "removed"]
_MAX_BITS = 256


class ResidencyObserver(Protocol):
    """Whoever wants to know what comes into a tier and what leaves it.

    Of one key it is told in the order in which things happened. Tiers see to that with their locks: calls are quick,
    never raise, and call no tier.
    """

    def on_stored(self, key: ObjectKey, tier: str, nbytes: int) -> None:
        """Take note that an object of ``nbytes``, header included, has become readable in ``tier``."""
        ...

    def on_removed(self, key: ObjectKey, tier: str) -> None:
        """Take note that an object is not to be found in ``tier`` any more."""
        ...


@dataclass(frozen=True, slots=True)
class Event:
    """One change of what a tier of a node holds. ``nbytes`` is the object's size, header included, when stored."""

    kind: Kind
    key: ObjectKey
    tier: str
    nbytes: int = 0


@dataclass(frozen=True)
class Candidate:
    """A node, how many of the objects asked for it holds, and their bytes."""

    node: str
    objects: int
    nbytes: int


class ResidencyIndex:
    """What every node holds, as far as it has said. Every method may be called from any thread.

    An entry is one dictionary item: the object's size, and one bit for each place (a tier of a node) that has it. A
    node is dropped in no time: its bits stop counting, and go when others are given out.

    Args:
        limit: most objects that are kept; what comes later is counted in ``ignored`` and is a miss.
    """

    def __init__(self, limit: int = 8_000_000) -> None:
        self.ignored = 0
        self._limit = limit
        self._lock = threading.Lock()
        self._entries: dict[ObjectKey, tuple[int, int]] = {}
        self._places: dict[tuple[str, str], int] = {}
        self._nodes: list[str | None] = []  # by bit; None when its node has been dropped

    def __len__(self) -> int:
        """Return the number of objects that have an entry."""
        return len(self._entries)

    def nodes(self) -> tuple[str, ...]:
        """Return the nodes that have told of anything, sorted."""
        with self._lock:
            return tuple(sorted({node for node, _ in self._places}))

    def apply(self, node: str, events: Iterable[Event]) -> None:
        """Take what a node tells. Telling it again, or of what was never there, changes nothing."""
        with self._lock:
            for event in events:
                bit = 1 << self._bit(node, event.tier)
                mask, nbytes = self._entries.get(event.key, (0, 0))
                if event.kind == "stored":
                    if not mask and len(self._entries) >= self._limit:
                        self.ignored += 1
                    else:
                        self._entries[event.key] = (mask | bit, event.nbytes)
                elif mask & ~bit:
                    self._entries[event.key] = (mask & ~bit, nbytes)
                else:
                    self._entries.pop(event.key, None)

    def drop(self, node: str) -> None:
        """Forget all that a node holds: it is gone, or has started again."""
        with self._lock:
            for place in [place for place in self._places if place[0] == node]:
                self._nodes[self._places.pop(place)] = None

    def best(self, keys: Iterable[ObjectKey]) -> list[Candidate]:
        """Return the nodes that hold any of these objects, in whichever tier: most objects first, then most bytes."""
        found: dict[str, list[int]] = {}
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is None:
                    continue
                mask, nbytes = entry
                for node in self._holders(mask):
                    sums = found.setdefault(node, [0, 0])
                    sums[0] += 1
                    sums[1] += nbytes
        ranked = [Candidate(node, objects, nbytes) for node, (objects, nbytes) in found.items()]
        return sorted(ranked, key=lambda candidate: (-candidate.objects, -candidate.nbytes, candidate.node))

    def _holders(self, mask: int) -> set[str]:
        holders = set()
        while mask:
            low = mask & -mask
            node = self._nodes[low.bit_length() - 1]
            if node is not None:
                holders.add(node)
            mask ^= low
        return holders

    def _bit(self, node: str, tier: str) -> int:
        bit = self._places.get((node, tier))
        if bit is None:
            if len(self._nodes) >= _MAX_BITS and None in self._nodes:
                self._compact()
            bit = self._places[node, tier] = len(self._nodes)
            self._nodes.append(node)
        return bit

    def _compact(self) -> None:
        """Take the bits of dropped nodes out of all entries, and number the others anew."""
        moved = {old: new for new, old in enumerate(bit for bit, node in enumerate(self._nodes) if node is not None)}
        entries = {}
        for key, (mask, nbytes) in self._entries.items():
            kept = sum(1 << new for old, new in moved.items() if mask >> old & 1)
            if kept:
                entries[key] = (kept, nbytes)
        self._entries = entries
        self._places = {place: moved[bit] for place, bit in self._places.items()}
        self._nodes = [node for node in self._nodes if node is not None]
