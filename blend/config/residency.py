"""Telling other nodes what the tiers hold."""

from __future__ import annotations

from dataclasses import dataclass

from blend.config.checks import at_least, is_address
from blend.errors import InvalidConfig

RESIDENCY_LOOPBACK = "tcp://127.0.0.1:*"
"""Where residency events are published unless they are told otherwise: this machine alone, on a free port."""
MAX_NODE_NAME = 256
_OWN_ENDPOINT = "tcp://HOST:PORT, where the port * takes a free one, or ipc://PATH"
_OTHERS_ENDPOINT = "tcp://HOST:PORT or ipc://PATH"


@dataclass(frozen=True)
class ResidencySource:
    """Another node to listen to.

    Args:
        address: where it publishes residency events: ``tcp://host:port`` or ``ipc://path``.
        replay_address: where its last messages can be asked for; ``None`` means that what it said before is not.

    Raises:
        InvalidConfig: an address is malformed.
    """

    address: str
    replay_address: str | None = None

    def __post_init__(self) -> None:
        for name in ("address", "replay_address"):
            value = getattr(self, name)
            if not (value is None and name == "replay_address") and not _is_endpoint(value):
                raise InvalidConfig(f"residency.sources.{name}", value, _OTHERS_ENDPOINT)


@dataclass(frozen=True)
class ResidencyConfig:
    """What a node tells of the objects that its tiers come to hold and lose, and whom it listens to.

    Events hold keys, sizes and names, nothing of any text; whoever reaches the addresses can read them.

    Args:
        node: this node's name, as the others and a router know it.
        publish: where events are published: ``tcp://host:port``, port ``*`` taking a free one, or ``ipc://path``.
        replay: where the last of them can be asked for.
        sources: the nodes to follow. A Mooncake tier learns from them which variants others have stored.
        max_entries: most objects of other nodes that are remembered.

    Raises:
        InvalidConfig: a value is malformed or out of range.
    """

    node: str
    publish: str = RESIDENCY_LOOPBACK
    replay: str = RESIDENCY_LOOPBACK
    sources: tuple[ResidencySource, ...] = ()
    max_entries: int = 1_000_000

    def __post_init__(self) -> None:
        if not isinstance(self.node, str) or not 0 < len(self.node) <= MAX_NODE_NAME:
            raise InvalidConfig("residency.node", self.node, f"a name of 1 to {MAX_NODE_NAME} characters")
        for name in ("publish", "replay"):
            value = getattr(self, name)
            if not _is_endpoint(value, own=True):
                raise InvalidConfig(f"residency.{name}", value, _OWN_ENDPOINT)
        if not isinstance(self.sources, tuple) or not all(isinstance(s, ResidencySource) for s in self.sources):
            raise InvalidConfig("residency.sources", self.sources, "a tuple of ResidencySource")
        at_least("residency.max_entries", self.max_entries, 1, "objects")


def _is_endpoint(value: object, own: bool = False) -> bool:
    """Whether ZeroMQ could bind (``own``) or connect to an address."""
    if not isinstance(value, str) or not value.isprintable() or " " in value:
        return False
    scheme, _, rest = value.partition("://")
    if scheme == "ipc":
        return 0 < len(rest.encode()) < 100
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or (host == "*" and not own):
        return False
    return is_address(rest) or (own and port == "*")
