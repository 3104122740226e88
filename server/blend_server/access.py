"""The access file: who may call, as whom, and how much each tenant may have.

It is YAML, and may be replaced while the server runs::

    quotas:                        # of every tenant that has none of its own; each may be left out
      documents: 10000
      bytes: 1GiB                  # of documents' texts
      requests: 16                 # calls at once
    tenants:
      acme: {documents: 500, bytes: 64MiB, requests: 4}
    certificates:                  # of clients, with mutual TLS
      - {name: search.acme.example, tenant: acme, role: reader}
    tokens:                        # each from: python -m blend_server.tokens
      - id: acme-loader
        hash: scrypt$16384$8$1$…
        tenant: acme
        role: writer
        expires: 2027-06-30T00:00:00Z

A certificate goes by its subject's alternative names, or by its common name where it has none.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time, timezone
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias

import yaml

from blend.decoding import decode
from blend.errors import InvalidConfig, InvalidInput
from blend.sizes import parse_size
from blend_server.tokens import NAME, NAMES, Hash

Role: TypeAlias = Literal["reader", "writer", "admin"]

_FIELD = "security.access_file"
_MAX_NBYTES = 16 << 20
_MAX_CERTIFICATE_NAME = 256
_MAX_SHOWN = 40


@dataclass(frozen=True)
class TenantQuotas:
    """Most that a tenant may have; ``None`` is no limit.

    ``documents``; ``nbytes`` of their texts in UTF-8; ``requests``: calls that are under way at once.
    """

    documents: int | None = None
    nbytes: int | None = None
    requests: int | None = None


@dataclass(frozen=True)
class TokenEntry:
    """A bearer token: the hash of its secret, and what it stands for. ``expires`` is aware of its time zone."""

    id: str
    hash: Hash = field(repr=False)
    tenant: str
    role: Role
    expires: datetime | None = None


@dataclass(frozen=True)
class CertificateEntry:
    """A client's certificate, by a name in it, and what it stands for."""

    name: str
    tenant: str
    role: Role


@dataclass(frozen=True)
class Access:
    """What an access file says: tokens by id, certificates by name, quotas of tenants that have their own."""

    tokens: Mapping[str, TokenEntry] = field(default_factory=dict)
    certificates: Mapping[str, CertificateEntry] = field(default_factory=dict)
    tenants: Mapping[str, TenantQuotas] = field(default_factory=dict)
    every_tenant: TenantQuotas = TenantQuotas()

    @cached_property
    def named(self) -> frozenset[str]:
        """All tenants that it names."""
        tokens = frozenset(entry.tenant for entry in self.tokens.values())
        return tokens.union(self.tenants, (entry.tenant for entry in self.certificates.values()))

    def quotas(self, tenant: str) -> TenantQuotas:
        """A tenant's quotas: where it has one of its own, that, else everyone's."""
        own, every = self.tenants.get(tenant, TenantQuotas()), self.every_tenant
        return TenantQuotas(
            *(mine if mine is not None else theirs for mine, theirs in zip(_values(own), _values(every), strict=True))
        )


@dataclass(frozen=True)
class _Quotas:
    documents: int | None = None
    bytes: int | str | None = None
    requests: int | None = None

    def checked(self, where: str) -> TenantQuotas:
        nbytes = parse_size(self.bytes) if isinstance(self.bytes, str) else self.bytes
        for name, value, low in (
            ("documents", self.documents, 0),
            ("bytes", nbytes, 0),
            ("requests", self.requests, 1),
        ):
            if value is not None and value < low:
                raise InvalidInput(f"{where}.{name}", value, f"at least {low}")
        return TenantQuotas(self.documents, nbytes, self.requests)


@dataclass(frozen=True)
class _Token:
    id: str
    hash: str
    tenant: str
    role: Role
    expires: object = None


@dataclass(frozen=True)
class _File:
    tokens: tuple[_Token, ...] = ()
    certificates: tuple[CertificateEntry, ...] = ()
    tenants: Mapping[str, _Quotas] = field(default_factory=dict)
    quotas: _Quotas = _Quotas()


def read(path: Path) -> Access:
    """Read an access file.

    Raises:
        InvalidConfig: it cannot be read, others than its owner may write it, or it says what is not allowed.
    """
    try:
        return parse(_text(path))
    except OSError as error:
        raise InvalidConfig(_FIELD, str(path), f"a file that can be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InvalidConfig(_FIELD, str(path), "a file in UTF-8") from error


def parse(text: str) -> Access:
    """Read an access file's text.

    Raises:
        InvalidConfig: it says what is not allowed.
    """
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # Never the lines themselves, which hold hashes.
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark is not None else "somewhere"
        raise InvalidConfig(_FIELD, where, f"YAML ({getattr(error, 'problem', None) or 'no such value'})") from None
    try:
        return _checked(decode(_File, {} if found is None else found, "access"))
    except InvalidInput as error:
        # Long values may be tokens or hashes in the wrong place, and errors go to logs.
        value = error.value if len(repr(error.value)) <= _MAX_SHOWN else "…"
        raise InvalidConfig(f"{_FIELD}: {error.field}", value, error.allowed) from None


def _text(path: Path) -> str:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o022:
            what = f"{path}, mode {stat.filemode(found.st_mode)}"
            raise InvalidConfig(_FIELD, what, "a regular file that only its owner may write")
        data = file.read(_MAX_NBYTES + 1)
    if len(data) > _MAX_NBYTES:
        raise InvalidConfig(_FIELD, f"{found.st_size} bytes", f"at most {_MAX_NBYTES} bytes")
    return data.decode("utf-8")


def _checked(file: _File) -> Access:
    tokens: dict[str, TokenEntry] = {}
    for token in file.tokens:
        where = f"token {token.id}"
        _check_name("token id", token.id, tokens)
        _check_name(f"{where}: tenant", token.tenant)
        try:
            hashed = Hash.parse(token.hash)
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error.field}", error.value, error.allowed) from None
        tokens[token.id] = TokenEntry(token.id, hashed, token.tenant, token.role, _moment(where, token.expires))
    certificates: dict[str, CertificateEntry] = {}
    for entry in file.certificates:
        if not 0 < len(entry.name) <= _MAX_CERTIFICATE_NAME or not entry.name.isprintable():
            raise InvalidInput("certificate name", entry.name, f"1 to {_MAX_CERTIFICATE_NAME} printable characters")
        if entry.name in certificates:
            raise InvalidInput("certificate name", entry.name, "each name once")
        _check_name(f"certificate {entry.name}: tenant", entry.tenant)
        certificates[entry.name] = entry
    for name in file.tenants:
        _check_name("tenant", name)
    tenants = {name: quotas.checked(f"tenants.{name}") for name, quotas in file.tenants.items()}
    return Access(tokens, certificates, tenants, file.quotas.checked("quotas"))


def _check_name(what: str, name: str, taken: Mapping[str, object] | None = None) -> None:
    if not NAME.fullmatch(name):
        raise InvalidInput(what, name, NAMES)
    if taken and name in taken:
        raise InvalidInput(what, name, "each id once")


def _moment(where: str, value: object) -> datetime | None:
    """A point in time; a day is its beginning, and what names no time zone is UTC."""
    if value is None:
        return None
    if isinstance(value, datetime):
        return value if value.tzinfo is not None else value.replace(tzinfo=timezone.utc)
    if isinstance(value, date):
        return datetime.combine(value, time(), timezone.utc)
    raise InvalidInput(f"{where}: expires", value, "a date such as 2027-06-30, or 2027-06-30T12:00:00Z")


def _values(quotas: TenantQuotas) -> tuple[int | None, int | None, int | None]:
    return quotas.documents, quotas.nbytes, quotas.requests
