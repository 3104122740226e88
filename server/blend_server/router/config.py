"""The settings of a router."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from blend.config import GiB, MiB, ResidencySource, SecurityConfig, cache_dir, is_loopback
from blend.config.checks import at_least, is_address, is_listening
from blend.errors import InvalidConfig
from blend_server.client.credentials import Tls

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class EngineAddress:
    """A ``blend-server`` behind the router.

    Args:
        name: what it is called in metadata, figures and logs; also the ``--residency-node`` that it publishes as.
        address: its ``host:port``.
        events: where it publishes residency events; ``None`` means that nothing is known of what its tiers hold.

    Raises:
        InvalidConfig: a value is malformed.
    """

    name: str
    address: str
    events: ResidencySource | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise InvalidConfig("engines.name", self.name, "1 to 64 letters, digits, dots, hyphens and underscores")
        if not is_address(self.address):
            raise InvalidConfig("engines.address", self.address, "host:port with a port from 1 to 65535")


@dataclass(frozen=True)
class RouterConfig:
    """A router.

    Args:
        engines: the servers behind it, of one model and one set of settings; names and addresses are all different.
        address: ``host:port`` to listen on; port 0 takes a free one.
        data_dir: its journal; ``None`` means ``cache_dir() / "router"``.
        lead: an engine that holds more of a question's chunks is left alone while it has more than so many answers
            under way beyond the least busy one.
        journal_bytes: most bytes of documents that are kept for engines which are away; beyond them documents are
            refused.
        max_message_bytes: largest gRPC message.
        drain_seconds: how long a shutdown waits for running calls.
        tls: encryption towards the engines, and the certificate that the router shows them.
        security: who may call the router, and encryption towards them; the access file is that of the engines.

    Raises:
        InvalidConfig: a value is not allowed, or not with the others.
    """

    engines: tuple[EngineAddress, ...]
    address: str = "127.0.0.1:50060"
    data_dir: str | Path | None = None
    lead: int = 4
    journal_bytes: int = 4 * GiB
    max_message_bytes: int = 16 * MiB
    drain_seconds: int = 20
    tls: Tls | None = None
    security: SecurityConfig = field(default_factory=SecurityConfig)

    def __post_init__(self) -> None:
        if not self.engines:
            raise InvalidConfig("engines", "none", "one engine or more")
        for what in ("name", "address"):
            values = [getattr(engine, what) for engine in self.engines]
            if len(set(values)) < len(values):
                raise InvalidConfig(f"engines.{what}", values, "a different one for each engine")
        if not is_listening(self.address):
            raise InvalidConfig("address", self.address, "host:port with a port from 0 to 65535")
        here = is_loopback(self.address.rpartition(":")[0])
        if not (here or self.security.closed or self.security.insecure_listen):
            raise InvalidConfig(
                "address", self.address, "a loopback address; wider with TLS and an access file, or insecure_listen"
            )
        at_least("lead", self.lead, 0, "answers")
        at_least("journal_bytes", self.journal_bytes, 1, "bytes")
        at_least("max_message_bytes", self.max_message_bytes, 1024, "bytes")
        at_least("drain_seconds", self.drain_seconds, 0, "seconds")
        self._check_tokens()

    def _check_tokens(self) -> None:
        """Refuse to send tokens unencrypted to another machine."""
        for engine in self.engines:
            away = not is_loopback(engine.address.rpartition(":")[0])
            if away and self.tls is None and self.security.access_file is not None:
                raise InvalidConfig(
                    "tls", None, f"encryption: engine {engine.name} is another machine, and callers' tokens are secrets"
                )

    @property
    def path(self) -> Path:
        """The router's data directory."""
        return Path(self.data_dir).expanduser() if self.data_dir is not None else cache_dir() / "router"
