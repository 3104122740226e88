"""Who may call the gRPC service, and how it is kept from being overheard."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blend.config.checks import at_least
from blend.errors import InvalidConfig


@dataclass(frozen=True)
class TlsConfig:
    """Encryption. The files are read again when they change.

    Args:
        certificate: the server's certificate and those that it was signed by, in PEM.
        key: its private key in PEM, without a passphrase; only its owner and group may read it.
        client_ca: certificates in PEM that those of clients have to be signed by: mutual TLS. ``None`` asks clients
            for none.

    Raises:
        InvalidConfig: a path is no path.
    """

    certificate: str | Path
    key: str | Path
    client_ca: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "client_ca"):
            value = getattr(self, name)
            if not (value is None and name == "client_ca") and not _is_path(value):
                raise InvalidConfig(f"security.tls.{name}", value, "the path of a PEM file")


@dataclass(frozen=True)
class SecurityConfig:
    """Who may call.

    Args:
        tls: encryption; ``None`` serves plain HTTP/2.
        access_file: tokens, certificates and tenants (see :mod:`blend_server.access`); ``None`` lets everyone who
            reaches the address act as the administrator of the tenant ``default``.
        insecure_listen: listen beyond this machine even without ``tls`` and ``access_file``.
        audit_file: where a line of JSON about each call goes; ``-`` is standard error, ``None`` is nowhere.
        max_open_tenants: tenants whose documents and indexes are kept open; beyond them idle ones are closed.

    Raises:
        InvalidConfig: a value is malformed.
    """

    tls: TlsConfig | None = None
    access_file: str | Path | None = None
    insecure_listen: bool = False
    audit_file: str | Path | None = None
    max_open_tenants: int = 64

    def __post_init__(self) -> None:
        for name in ("access_file", "audit_file"):
            value = getattr(self, name)
            if value is not None and not _is_path(value):
                raise InvalidConfig(f"security.{name}", value, "the path of a file")
        at_least("security.max_open_tenants", self.max_open_tenants, 1, "tenants")

    @property
    def closed(self) -> bool:
        """Whether calls are encrypted and every caller has to prove who it is."""
        return self.tls is not None and self.access_file is not None


def _is_path(value: object) -> bool:
    return isinstance(value, (str, Path)) and bool(str(value)) and "\0" not in str(value)
