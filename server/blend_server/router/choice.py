"""Which engine answers a question: the one whose own tiers hold most of its chunks, unless it is busy."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from blend.errors import InvalidInput
from blend.store.events import ResidencySubscriber
from blend.store.key import PLAIN, ObjectKey
from blend.store.residency import Event, ResidencyIndex
from blend_server.router.config import RouterConfig
from blend_server.router.link import Link

logger = logging.getLogger("blend_server.router")

_SHARED = "mooncake"


class OwnTiers(ResidencyIndex):
    """What nodes hold in tiers of their own. A shared tier is as near to the others as to the node that filled it."""

    def apply(self, node: str, events: Iterable[Event]) -> None:
        """Take what a node tells, but for the shared tier."""
        super().apply(node, [event for event in events if event.tier != _SHARED])


class Chooser:
    """Puts engines in the order in which they are asked. A context manager, which listens to residency events.

    Args:
        config: which engines publish, and how far one may be ahead in answers under way.

    Raises:
        TierUnavailable: an address cannot be listened to.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._lead = config.lead
        self._index = OwnTiers()
        sources = [engine.events for engine in config.engines if engine.events is not None]
        self._engines = frozenset(engine.name for engine in config.engines)
        self._unknown: set[str] = set()
        self._subscriber = ResidencySubscriber(self._index, sources, self._heard)

    def order(self, links: Sequence[Link], keys: Iterable[str] = ()) -> list[Link]:
        """Return the engines, the one to ask first first.

        Those within ``lead`` answers of the least busy one come first; then it goes by bytes of the chunks with these
        content keys, then by answers under way, then by whose last answer is longest ago.
        """
        held = self.held(keys)
        least = min((link.in_flight for link in links), default=0)

        def rank(link: Link) -> tuple[bool, int, int, int]:
            ahead = link.in_flight - least > self._lead
            return ahead, -held.get(link.name, 0), link.in_flight, link.last_answer

        return sorted(links, key=rank)

    def held(self, keys: Iterable[str]) -> dict[str, int]:
        """Return how many bytes of these chunks each engine holds in its own tiers, as far as is known."""
        try:
            wanted = [ObjectKey(key, PLAIN) for key in set(keys) if key]
        except InvalidInput:  # keys of a later kind: they only cost the detour
            return {}
        return {found.node: found.nbytes for found in self._index.best(wanted)}

    def objects(self) -> int:
        """Return how many objects engines have told of."""
        return len(self._index)

    def _heard(self, node: str, _: Sequence[Event]) -> None:
        """Say once of a node that it is no engine: what it holds counts for nobody. Runs in the listener's thread."""
        if node not in self._engines and node not in self._unknown:
            self._unknown.add(node)
            names = ",".join(sorted(self._engines))
            logger.warning("event=unknown_node node=%r engines=%s hint=--residency-node", node, names)

    def close(self) -> None:
        """Stop listening."""
        self._subscriber.close()

    def __enter__(self) -> Chooser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
