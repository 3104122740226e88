"""A node's part in residency: what its own tiers tell, and what it hears from other nodes."""

from __future__ import annotations

from collections.abc import Sequence

from blend.config import ResidencyConfig
from blend.store.events import ResidencyPublisher, ResidencySubscriber
from blend.store.mooncake_tier import MooncakeTier
from blend.store.residency import Event, ResidencyIndex


class ResidencyNode:
    """Publishes what this node's tiers tell it, and keeps an index of what other nodes publish.

    The store whose tiers these are owns it, and closes it after them, so that their last events are sent. A context
    manager.

    Args:
        config: names, addresses, and whom to follow.

    Attributes:
        publisher: the observer to give to the tiers; it knows the addresses that were bound.
        index: which node holds what, this one left out unless it follows itself.

    Raises:
        TierUnavailable: an address cannot be bound.
    """

    def __init__(self, config: ResidencyConfig) -> None:
        self.config = config
        self.index = ResidencyIndex(config.max_entries)
        self._subscriber: ResidencySubscriber | None = None
        self.publisher = ResidencyPublisher(config.node, config.publish, config.replay)

    def follow(self, shared: MooncakeTier | None = None) -> None:
        """Begin to listen to the other nodes, if there are any.

        Args:
            shared: the store that they share with this node. It cannot be asked for the variants of a chunk: it
                learns from events which there are.

        Raises:
            TierUnavailable: an address cannot be listened to.
        """
        if not self.config.sources:
            return

        def learn(node: str, events: Sequence[Event]) -> None:
            for event in events:
                if shared is not None and event.tier == shared.name:
                    (shared.learn if event.kind == "stored" else shared.unlearn)(event.key)

        self._subscriber = ResidencySubscriber(self.index, self.config.sources, learn)

    def close(self) -> None:
        """Stop listening, send what waits to be sent, and end all threads; safe to call again."""
        if self._subscriber is not None:
            self._subscriber.close()
        self.publisher.close()

    def __enter__(self) -> ResidencyNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
