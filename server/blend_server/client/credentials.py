"""How a client proves who it is, and how its connection is encrypted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from ssl import PROTOCOL_TLS_CLIENT, SSLContext, SSLError
from typing import Any

import grpc

from blend.config import is_loopback
from blend.config.checks import is_address
from blend.errors import InvalidInput
from blend_server.client import tracing

_MAX_TOKEN = 4096


@dataclass(frozen=True)
class Tls:
    """An encrypted connection.

    Args:
        ca: certificates in PEM that the server's has to be signed by; ``None`` means those that gRPC comes with.
        certificate: the client's own certificate and its issuers', in PEM, where the server asks for one.
        key: its private key in PEM.

    Raises:
        InvalidInput: one of certificate and key without the other.
    """

    ca: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InvalidInput("tls", "only one of certificate and key", "both of them, or neither")


class Endpoint:
    """A server, and what it takes to talk to it.

    Args:
        address: ``host:port``.
        max_message_bytes: largest gRPC message to send or take.
        token: goes with each call.
        tls: encrypt the connection.

    Raises:
        InvalidInput: the address is none; the token is none, or would go unencrypted over a network; a file of ``tls``
            cannot be read.
    """

    def __init__(self, address: str, max_message_bytes: int, token: str | None, tls: Tls | None) -> None:
        named = "/" in address or is_address(address)  # as dns:///name:port and unix:/path are, which gRPC knows
        if not named or not address.isprintable() or not address.isascii():
            raise InvalidInput("address", address, "host:port with a port from 1 to 65535")
        if token is not None:
            if not (0 < len(token) <= _MAX_TOKEN and token.isascii() and token.isprintable()):
                raise InvalidInput("token", "…", f"1 to {_MAX_TOKEN} printable ASCII characters")
            if tls is None and not is_loopback(address.rpartition(":")[0]):
                raise InvalidInput("tls", None, f"encryption: {address} is another machine, and the token is a secret")
        self.address = address
        self._token = token
        self._credentials = None if tls is None else channel_credentials(tls)
        self._options = [
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.keepalive_time_ms", 60_000),  # find out that a server is gone while a call waits for it
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.initial_reconnect_backoff_ms", 100),  # a second try is to find a new connection
        ]
        if tls is None:
            self._options.append(("grpc.enable_http_proxy", 0))  # it would read the token

    def channel(self) -> grpc.Channel:
        """Return a channel to the server."""
        return self._channel(grpc)

    def aio_channel(self) -> grpc.aio.Channel:
        """Return a channel to the server that belongs to the event loop that runs."""
        return self._channel(grpc.aio)

    def _channel(self, maker: Any) -> Any:
        if self._credentials is None:
            return maker.insecure_channel(self.address, options=self._options)
        return maker.secure_channel(self.address, self._credentials, options=self._options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what goes with each call: the trace that it belongs to, and the token.

        gRPC's own call credentials refuse unencrypted loopback connections.
        """
        token = () if self._token is None else (("authorization", f"Bearer {self._token}"),)
        return (*tracing.headers(), *token)


def read_token(path: str | Path) -> str:
    """The token in a file.

    Raises:
        InvalidInput: the file cannot be read, or holds no token.
    """
    token = _read("token", path).decode("ascii", "replace").strip()
    if not token or len(token.split()) != 1:
        raise InvalidInput("token", str(path), "a file with one token in it")
    return token


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Credentials for a channel.

    Raises:
        InvalidInput: a file of ``tls`` cannot be read, or ``tls.ca`` holds no certificate.
    """
    files = {name: getattr(tls, name) for name in ("ca", "certificate", "key")}
    pem = {name: _read(f"tls.{name}", path) for name, path in files.items() if path is not None}
    if tls.ca is not None:
        _check_certificates("tls.ca", tls.ca, pem["ca"])
    return grpc.ssl_channel_credentials(pem.get("ca"), pem.get("key"), pem.get("certificate"))


def _check_certificates(name: str, path: str | Path, pem: bytes) -> None:
    try:
        # What stands between certificates may be in any encoding.
        SSLContext(PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (SSLError, ValueError) as error:  # ValueError: nothing at all
        raise InvalidInput(name, str(path), "a file with certificates in PEM") from error


def _read(name: str, path: str | Path) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InvalidInput(name, str(path), f"a file that can be read ({error.strerror})") from error
