"""The server's side of TLS: certificates from files, read again for the next connection when they change."""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from blend.config import TlsConfig
from blend.errors import InvalidConfig
from blend_server.watched import Watched


@dataclass(frozen=True)
class _Pem:
    certificate: bytes
    key: bytes
    client_ca: bytes | None

    def configuration(self) -> Any:
        """The same for gRPC."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.client_ca)


def server_credentials(config: TlsConfig) -> grpc.ServerCredentials:
    """Credentials for a port. Connections that are open stay when the files change; new ones see the new files.

    A change that cannot be used, such as a certificate that is there before its key, is logged, and the files before
    it stay in use.

    Raises:
        InvalidConfig: the files cannot be used now.
    """
    paths = {"certificate": config.certificate, "key": config.key, "client_ca": config.client_ca}
    files = {name: Path(path).expanduser() for name, path in paths.items() if path is not None}
    watched = Watched("certificates", list(files.values()), lambda: _read(files))

    def fetch() -> Any:
        return watched.value.configuration() if watched.refresh() else None  # None: as before

    return grpc.dynamic_ssl_server_credentials(
        watched.value.configuration(), fetch, require_client_authentication=config.client_ca is not None
    )


def _read(files: dict[str, Path]) -> _Pem:
    found = {name: _bytes(name, path) for name, path in files.items()}
    # gRPC would take anything here and fail at each handshake.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files["certificate"], files["key"], password=lambda: b"")
    except (ssl.SSLError, OSError) as error:
        allowed = f"a certificate and its private key in PEM, without a passphrase ({_reason(error)})"
        raise InvalidConfig("security.tls.certificate", str(files["certificate"]), allowed) from error
    if "client_ca" in files:
        try:
            context.load_verify_locations(files["client_ca"])
        except (ssl.SSLError, OSError) as error:
            allowed = f"certificates in PEM ({_reason(error)})"
            raise InvalidConfig("security.tls.client_ca", str(files["client_ca"]), allowed) from error
    return _Pem(found["certificate"], found["key"], found.get("client_ca"))


def _bytes(name: str, path: Path) -> bytes:
    try:
        data = path.read_bytes()
        mode = os.stat(path).st_mode
    except OSError as error:
        raise InvalidConfig(f"security.tls.{name}", str(path), f"a file that can be read ({error.strerror})") from error
    if name == "key" and mode & 0o007:
        what = f"{path}, mode {stat.filemode(mode)}"
        raise InvalidConfig(
            "security.tls.key", what, "a file that only its owner and group may read, such as mode 0600"
        )
    return data


def _reason(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or type(error).__name__
