"""The flags of ``blend-server`` that say who may call, and the settings that they stand for."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from blend.config import SecurityConfig, TlsConfig
from blend.errors import InvalidConfig

PATHS = ("tls_cert", "tls_key", "tls_client_ca", "access_file", "audit_file")
"""Those that are paths."""
NAMES = {
    "security.tls.certificate": "tls_cert",
    "security.tls.key": "tls_key",
    "security.tls.client_ca": "tls_client_ca",
    "security.access_file": "access_file",
    "security.audit_file": "audit_file",
    "security.max_open_tenants": "max_open_tenants",
    "store.tenant_quota_bytes": "tenant_kv_bytes",
}
"""Settings, and what their flags are called."""


def add(parser: argparse.ArgumentParser, *, count: Callable[[str], int], size: Callable[[str], int]) -> None:
    """Add the flags; ``count`` and ``size`` read numbers and sizes."""
    base = SecurityConfig()
    group = parser.add_argument_group("who may call")
    group.add_argument("--tls-cert", metavar="FILE", help="the server's certificate and its issuers', in PEM")
    group.add_argument("--tls-key", metavar="FILE", help="its private key in PEM; not readable by others")
    group.add_argument(
        "--tls-client-ca",
        metavar="FILE",
        help="certificates in PEM that those of clients must be signed by: mutual TLS (default: clients need none)",
    )
    group.add_argument(
        "--access-file",
        metavar="FILE",
        help="tokens, clients' certificates and tenants, in YAML; tokens come from python -m blend_server.tokens "
        "(default: everyone who reaches the address may do everything)",
    )
    group.add_argument(
        "--insecure-listen",
        action="store_true",
        help="listen beyond this machine even without encryption and an access file",
    )
    group.add_argument(
        "--audit-file", metavar="FILE", help="a line of JSON for each call; - is standard error (default: none)"
    )
    group.add_argument(
        "--max-open-tenants",
        type=count,
        default=base.max_open_tenants,
        metavar="N",
        help=f"tenants whose indexes are kept in memory (default: {base.max_open_tenants})",
    )
    group.add_argument(
        "--tenant-kv-bytes",
        type=size,
        metavar="SIZE",
        help="most KV of a tenant in each tier (default: no limit but the tier's)",
    )


def config(arguments: argparse.Namespace) -> SecurityConfig:
    """The settings that the arguments stand for.

    Raises:
        InvalidConfig: a value is not allowed, or not with the others.
    """
    return SecurityConfig(
        tls=_tls(arguments),
        access_file=arguments.access_file,
        insecure_listen=arguments.insecure_listen,
        audit_file=arguments.audit_file,
        max_open_tenants=arguments.max_open_tenants,
    )


def _tls(arguments: argparse.Namespace) -> TlsConfig | None:
    certificate, key, client_ca = arguments.tls_cert, arguments.tls_key, arguments.tls_client_ca
    if certificate is None and key is None and client_ca is None:
        return None
    for flag, value in (("--tls-cert", certificate), ("--tls-key", key)):
        if value is None:
            raise InvalidConfig(flag, None, "a file: encryption needs both --tls-cert and --tls-key")
    return TlsConfig(certificate, key, client_ca)
