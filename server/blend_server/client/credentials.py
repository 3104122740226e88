"""How a client proves who it is, and how its connection is encrypted."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from blend.config import is_loopback
from blend.errors import InvalidInput

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


def channel(address: str, options: Sequence[tuple[str, Any]], token: str | None, tls: Tls | None) -> grpc.Channel:
    """A channel to a server; each call on it carries the token.

    Raises:
        InvalidInput: the token is none, would go unencrypted over a network, or a file of ``tls`` cannot be read.
    """
    if token is not None and not (0 < len(token) <= _MAX_TOKEN and token.isascii() and token.isprintable()):
        raise InvalidInput("token", "…", f"1 to {_MAX_TOKEN} printable ASCII characters")
    if tls is not None:
        made = grpc.secure_channel(address, _credentials(tls), options=options)
    elif token is not None and not is_loopback(address.rpartition(":")[0]):
        raise InvalidInput("tls", None, f"encryption: {address} is another machine, and the token is a secret")
    else:
        made = grpc.insecure_channel(address, options=options)
    return made if token is None else grpc.intercept_channel(made, _Bearer(token))


def read_token(path: str | Path) -> str:
    """The token in a file.

    Raises:
        InvalidInput: the file cannot be read, or holds no token.
    """
    token = _read("token", path).decode("ascii", "replace").strip()
    if not token or len(token.split()) != 1:
        raise InvalidInput("token", str(path), "a file with one token in it")
    return token


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    files = {name: getattr(tls, name) for name in ("ca", "certificate", "key")}
    pem = {name: _read(f"tls.{name}", path) for name, path in files.items() if path is not None}
    return grpc.ssl_channel_credentials(pem.get("ca"), pem.get("key"), pem.get("certificate"))


def _read(name: str, path: str | Path) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InvalidInput(name, str(path), f"a file that can be read ({error.strerror})") from error


class _Details(
    namedtuple("_Details", ("method", "timeout", "metadata", "credentials", "wait_for_ready", "compression")),
    grpc.ClientCallDetails,  # type: ignore[misc]
):
    """A call's details with other metadata."""


class _Bearer(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[misc]
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc]
):
    """Adds a token to each call. gRPC's own call credentials refuse unencrypted loopback connections."""

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def _call(self, proceed: Callable[..., Any], details: Any, request: Any) -> Any:
        metadata = (*(details.metadata or ()), self._header)
        changed = _Details(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready, details.compression
        )
        return proceed(changed, request)

    def intercept_unary_unary(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        """Make the call with the token."""
        return self._call(continuation, client_call_details, request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        """Make the call with the token."""
        return self._call(continuation, client_call_details, request)

    def intercept_stream_stream(
        self, continuation: Callable[..., Any], client_call_details: Any, request_iterator: Any
    ) -> Any:
        """Make the call with the token."""
        return self._call(continuation, client_call_details, request_iterator)
