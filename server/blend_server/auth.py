"""Who is calling, and what they may do. Nothing here looks into a message."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from blend.errors import PermissionDenied, ResourceExhausted, Unauthenticated
from blend_server import access, tokens
from blend_server.access import Access, CertificateEntry, Role, TenantQuotas, TokenEntry
from blend_server.threads import Threads
from blend_server.watched import Watched

logger = logging.getLogger("blend_server")

REQUIRED: Mapping[str, Role] = {
    "Answer": "reader",
    "Retrieve": "reader",
    "ListDocuments": "reader",
    "GetDocument": "reader",
    "GetStats": "reader",
    "Ingest": "writer",
    "DeleteDocument": "writer",
    "ResetQuality": "admin",
}
"""The least role that may call each rpc."""

DEFAULT_TENANT = "default"
"""Whose documents these are where nobody has to prove who they are."""

_LOOK_SECONDS = 1.0
_MOST_CHECKS = 32
_MOST_CHECKS_OF_ONE = 4  # or guesses at one token, whose id is no secret, would keep all others out
_MOST_KNOWN = 4096
_RETRY_SECONDS = 1.0
_TOKEN_ALLOWED = "send a valid one as metadata, `authorization: Bearer TOKEN`"


@dataclass(frozen=True)
class Caller:
    """Who is calling: the tenant whose documents these are, a role, and a name for logs.

    ``entry`` is what the access file says of it; ``None`` where there is no such file.
    """

    tenant: str
    role: Role
    name: str
    entry: TokenEntry | CertificateEntry | None = None

    def require(self, method: str) -> None:
        """Check that this caller may call an rpc.

        Raises:
            PermissionDenied: it may not.
        """
        needed = REQUIRED.get(method, "admin")
        if not self.may(needed):
            raise PermissionDenied(f"{method} needs the role {needed}; {self.name} has the role {self.role}")

    def may(self, role: Role) -> bool:
        """Whether the caller has that role, or one that may do more."""
        return tokens.ROLES.index(self.role) >= tokens.ROLES.index(role)


ANYONE = Caller(DEFAULT_TENANT, "admin", "anyone")
"""Who calls where nobody has to prove who they are."""

caller: ContextVar[Caller] = ContextVar("caller")
"""Who made the call that this task serves; it has no default, for nobody is let in by mistake."""


class Gate(Protocol):
    """Tells who is calling."""

    many: bool
    """Whether there may be several tenants."""

    async def identify(self, context: Any) -> Caller:
        """Return who made a call.

        Raises:
            Unauthenticated: it does not prove that, or not any more.
            ResourceExhausted: too many callers are being checked.
        """

    async def recheck(self, who: Caller) -> None:
        """Check that a caller whose call goes on is still let in.

        Raises:
            Unauthenticated: it is not.
        """

    def quotas(self, tenant: str) -> TenantQuotas:
        """Return what a tenant may have."""

    def tenants(self) -> frozenset[str]:
        """Return the tenants that the access file names; none without one. May be called from any thread."""

    async def close(self) -> None:
        """End the gate's threads."""


class OpenGate:
    """Everyone is the administrator of the one tenant."""

    many = False

    async def identify(self, context: Any) -> Caller:
        """Return :data:`ANYONE`."""
        return ANYONE

    async def recheck(self, who: Caller) -> None:
        """Do nothing."""

    def quotas(self, tenant: str) -> TenantQuotas:
        """Return none."""
        return TenantQuotas()

    def tenants(self) -> frozenset[str]:
        """Return none."""
        return frozenset()

    async def close(self) -> None:
        """Do nothing."""


class FileGate:
    """Callers prove who they are by a token of an access file, else by a certificate that it names.

    The file is looked at once a second at most. A token's hash takes long to check, on purpose, so that is done in a
    thread, once for each token, and what was found is remembered under a keyed digest of the token. Few checks wait for
    that thread, and fewer of one entry; reading the file never does.

    Args:
        path: the access file.
        now: returns the time, aware of its zone.

    Raises:
        InvalidConfig: the file cannot be used.
    """

    many = True

    def __init__(self, path: Path, now: Callable[[], datetime] = lambda: datetime.now(timezone.utc)) -> None:
        self._file: Watched[Access] = Watched("access_file", [path], lambda: access.read(path))
        self._now = now
        self._checkers = Threads("blend-auth", 1)
        self._readers = Threads("blend-auth-file", 1)
        self._look_at = monotonic() + _LOOK_SECONDS
        self._key = secrets.token_bytes(32)
        self._known: OrderedDict[bytes, tokens.Hash] = OrderedDict()
        self._checks: dict[tuple[bytes, tokens.Hash], asyncio.Future[bool]] = {}

    async def identify(self, context: Any) -> Caller:
        """Return who made a call; see :class:`Gate`."""
        await self._look()
        sent = _bearer(context.invocation_metadata() or ())
        if sent is not None:
            return await self._by_token(sent)
        names = _certificate_names(context.auth_context())
        if names:
            return self._by_certificate(names)
        raise Unauthenticated(f"the call has no token; {_TOKEN_ALLOWED}")

    async def recheck(self, who: Caller) -> None:
        """Check that the caller's entry is still in the file, and has not expired; see :class:`Gate`."""
        await self._look()
        entry, found = who.entry, self._file.value
        if isinstance(entry, TokenEntry):
            if found.tokens.get(entry.id) != entry:
                raise Unauthenticated(f"the token is not valid any more; {_TOKEN_ALLOWED}")
            self._check_expiry(entry)
        elif isinstance(entry, CertificateEntry) and found.certificates.get(entry.name) != entry:
            raise Unauthenticated("the certificate is not listed any more")

    def quotas(self, tenant: str) -> TenantQuotas:
        """Return what a tenant may have; see :class:`Gate`."""
        return self._file.value.quotas(tenant)

    def tenants(self) -> frozenset[str]:
        """Return the tenants that the access file names; see :class:`Gate`."""
        return self._file.value.named

    async def close(self) -> None:
        """End the threads."""
        await self._checkers.close()
        await self._readers.close()

    async def _look(self) -> None:
        """Read the file again if it has changed, and was not looked at just now."""
        if monotonic() >= self._look_at:
            self._look_at = monotonic() + _LOOK_SECONDS
            if self._file.changed:
                await self._readers.call(self._file.refresh)

    async def _by_token(self, token: str) -> Caller:
        parts = tokens.split(token)
        entry = self._file.value.tokens.get(parts[0]) if parts is not None else None
        if parts is None or entry is None or not await self._verified(token, parts[1], entry.hash):
            raise Unauthenticated(f"the token is not valid; {_TOKEN_ALLOWED}")
        self._check_expiry(entry)
        return Caller(entry.tenant, entry.role, f"token:{entry.id}", entry)

    def _check_expiry(self, entry: TokenEntry) -> None:
        if entry.expires is not None and self._now() >= entry.expires:
            raise Unauthenticated(f"the token {entry.id} expired at {entry.expires.isoformat()}; {_TOKEN_ALLOWED}")

    async def _verified(self, token: str, secret: str, hashed: tokens.Hash) -> bool:
        digest = hashlib.blake2b(token.encode(), key=self._key).digest()
        if self._known.get(digest) == hashed:
            self._known.move_to_end(digest)
            return True
        check = self._checks.get((digest, hashed))
        if check is None:
            of_one = sum(entry == hashed for _, entry in self._checks)
            if len(self._checks) >= _MOST_CHECKS or of_one >= _MOST_CHECKS_OF_ONE:
                raise ResourceExhausted("too many tokens are being checked; try again later", _RETRY_SECONDS)
            check = asyncio.ensure_future(self._checkers.call(hashed.matches, secret))
            self._checks[digest, hashed] = check
            check.add_done_callback(lambda _: self._checks.pop((digest, hashed), None))
        if not await asyncio.shield(check):  # others may wait for it when this call is cancelled
            return False
        self._known[digest] = hashed
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return True

    def _by_certificate(self, names: Iterable[str]) -> Caller:
        listed = self._file.value.certificates
        entries = [listed[name] for name in names if name in listed]
        if not entries:
            raise Unauthenticated(
                "the access file lists no name of the client's certificate, and the call has no token"
            )
        if len({(entry.tenant, entry.role) for entry in entries}) > 1:
            raise Unauthenticated("the access file lists names of the client's certificate that contradict each other")
        entry = entries[0]
        return Caller(entry.tenant, entry.role, f"certificate:{entry.name}", entry)


def gate(path: str | Path | None) -> Gate:
    """The gate of an access file, or the open one where there is none.

    Raises:
        InvalidConfig: the file cannot be used.
    """
    if path is None:
        return OpenGate()
    return FileGate(Path(path).expanduser())


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The token of a call's ``authorization``; an empty one where there is something else."""
    sent = [value for key, value in metadata if key == "authorization"]
    if not sent:
        return None
    scheme, _, token = sent[0].partition(" ") if len(sent) == 1 and isinstance(sent[0], str) else ("", "", "")
    return token.strip() if scheme.lower() == "bearer" else ""


def _certificate_names(context: Mapping[str, Iterable[bytes]]) -> list[str]:
    """What a client's verified certificate goes by: its alternative names, else its common name (RFC 9525)."""
    for key in ("x509_subject_alternative_name", "x509_common_name"):
        if names := [name.decode("utf-8", "replace") for name in context.get(key, ())]:
            return names
    return []
