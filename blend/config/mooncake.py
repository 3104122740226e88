"""Taking part in a Mooncake store."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from blend.config.checks import is_address, one_of
from blend.config.units import GiB, MiB
from blend.errors import InvalidConfig

MOONCAKE_PROTOCOLS = ("tcp", "rdma")
MOONCAKE_ADMIN_PORT = 9003
"""Where a master serves its admin pages unless it is told otherwise."""
_PREFIX = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class MooncakeConfig:
    """How a process takes part in a Mooncake store.

    Args:
        master: ``host:port`` of the master's RPC.
        health: ``host:port`` of its admin pages; ``None`` means port 9003 of the master's host.
        hostname: the address that other nodes reach this one at. A process that lends memory, or that reads from
            one that does, opens data ports on all interfaces: keep them behind a firewall.
        protocol: ``tcp`` or ``rdma``.
        devices: RDMA devices, separated by commas; empty lets the library choose.
        segment_bytes: memory that this process lends to the store; 0 makes it a pure client.
        local_buffer_bytes: memory for the library's own calls that copy, of which this tier makes none.
        capacity_bytes: most bytes of objects that this process puts and keeps in the store.
        staging_bytes: registered memory that its transfers go through; views that it hands out live there.
        prefix: what the names of its objects begin with; tiers of one prefix share objects.
        deadline_seconds: how long a call may take, beside 20 ms a MiB.
        connect_seconds: how long opening the tier waits for the master before it starts as down.
        health_seconds: time between two looks at the health page, and how long one may take.
        negative_seconds: how long a key counts as missing after its owner could not be reached; the master goes on
            listing the keys of a dead owner for about 10 s.
        threads: calls that may be under way at once.

    Raises:
        InvalidConfig: a value is malformed or out of range.
    """

    master: str
    health: str | None = None
    hostname: str = "127.0.0.1"
    protocol: str = "tcp"
    devices: str = ""
    segment_bytes: int = 0
    local_buffer_bytes: int = 0
    capacity_bytes: int = 16 * GiB
    staging_bytes: int = 256 * MiB
    prefix: str = "blend"
    deadline_seconds: float = 2.0
    connect_seconds: float = 2.0
    health_seconds: float = 1.0
    negative_seconds: float = 12.0
    threads: int = 4

    def __post_init__(self) -> None:
        for name in ("master", "health"):
            value = getattr(self, name)
            if value is not None and not is_address(value):
                raise InvalidConfig(f"mooncake.{name}", value, "host:port with a port from 1 to 65535")
        if not isinstance(self.hostname, str) or not self.hostname:
            raise InvalidConfig("mooncake.hostname", self.hostname, "a host name or an address")
        one_of("mooncake.protocol", self.protocol, MOONCAKE_PROTOCOLS)
        if not isinstance(self.prefix, str) or not _PREFIX.fullmatch(self.prefix):
            raise InvalidConfig("mooncake.prefix", self.prefix, "1 to 64 letters, digits, dots, dashes, underscores")
        for name, low in {
            "segment_bytes": 0,
            "local_buffer_bytes": 0,
            "capacity_bytes": 1,
            "staging_bytes": 4096,
            "threads": 1,
        }.items():
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise InvalidConfig(f"mooncake.{name}", value, f"an integer of at least {low}")
        for name, least in {
            "deadline_seconds": 0.01,
            "connect_seconds": 0.0,
            "health_seconds": 0.01,
            "negative_seconds": 0.0,
        }.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
                raise InvalidConfig(f"mooncake.{name}", value, f"seconds, at least {least}")

    @property
    def health_address(self) -> str:
        """``host:port`` of the master's admin pages."""
        return self.health or f"{self.master.rpartition(':')[0]}:{MOONCAKE_ADMIN_PORT}"
