"""What is in a snapshot: the names that may be in it, and its last member, which tells what has to be.

A snapshot is a plain tar file::

    library/catalog.sqlite3                   documents of the tenant ``default``
    tenants/NAME/catalog.sqlite3              documents of another tenant
    store/secret                              what keys the names of stored KV
    store/objects/<2 hex digits>/<object key> stored KV, if it was asked for
    manifest.json                             versions, sizes, digests

Indexes are not in it: they are made from the catalogs. KV has checksums of its own, which are checked whenever it is
used, so that the manifest only counts it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import blend
from blend.errors import InvalidInput, ObjectCorrupt
from blend.rag.backup import CatalogSize
from blend.store.key import ObjectKey
from blend.store.layout import LAYOUT_VERSION
from blend_server.auth import DEFAULT_TENANT
from blend_server.tokens import NAME

FORMAT = 1
MANIFEST = "manifest.json"
SECRET = "store/secret"
MANIFEST_NBYTES = 64 << 20
"""A larger manifest is none: a tenant takes about 300 bytes of it."""

_CATALOG = re.compile(rf"library/catalog\.sqlite3|tenants/({NAME.pattern})/catalog\.sqlite3")
_OBJECT = re.compile(r"store/objects/([0-9a-f]{2})/([0-9a-z.]+)")


def catalog_name(tenant: str) -> str:
    """The name of a tenant's catalog."""
    return "library/catalog.sqlite3" if tenant == DEFAULT_TENANT else f"tenants/{tenant}/catalog.sqlite3"


def is_catalog(name: str) -> bool:
    """Whether a name is that of a tenant's catalog."""
    found = _CATALOG.fullmatch(name)
    return found is not None and found[1] != DEFAULT_TENANT


def object_name(key: ObjectKey) -> str:
    """The name of a stored object."""
    return f"store/objects/{str(key)[:2]}/{key}"


def is_object(name: str) -> bool:
    """Whether a name is that of a stored object."""
    found = _OBJECT.fullmatch(name)
    try:
        return found is not None and object_name(ObjectKey.parse(found[2])) == name
    except InvalidInput:
        return False


@dataclass(frozen=True)
class File:
    """A file's length in bytes and its BLAKE2b digest of 32 bytes in hex."""

    nbytes: int
    blake2b: str


@dataclass(frozen=True)
class Objects:
    """How much KV there is, and the version of its format."""

    layout: int
    objects: int
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    """What a snapshot holds.

    ``created`` is in UTC, ISO 8601; ``tenants`` is what each tenant's catalog holds, ``files`` all files but KV by
    name; ``kv`` is ``None`` where KV was left out.
    """

    created: str
    tenants: Mapping[str, CatalogSize]
    files: Mapping[str, File]
    kv: Objects | None
    blend: str = blend.__version__

    def encode(self) -> bytes:
        """Return it as it stands in the snapshot."""
        return json.dumps({"format": FORMAT, **self.plain()}, indent=1).encode()

    def plain(self) -> dict[str, Any]:
        """Return it as values that JSON has."""
        return {
            "blend": self.blend,
            "created": self.created,
            "tenants": {name: asdict(size) for name, size in self.tenants.items()},
            "files": {name: asdict(file) for name, file in self.files.items()},
            "kv": None if self.kv is None else asdict(self.kv),
        }

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Return the manifest that these bytes are.

        Raises:
            ObjectCorrupt: they are none, or one of a newer format.
        """
        try:
            fields = json.loads(data)
            found = fields["format"]
            if found != FORMAT:
                raise ObjectCorrupt(
                    f"the snapshot has format {found!r}; this version of blend reads {FORMAT}: use the version that "
                    f"wrote it, blend {fields.get('blend')!r}"
                )
            made = cls(
                created=_checked(fields["created"], str),
                tenants={name: CatalogSize(**_counts(size)) for name, size in fields["tenants"].items()},
                files={
                    name: File(_count(f["nbytes"]), _checked(f["blake2b"], str)) for name, f in fields["files"].items()
                },
                kv=None if fields["kv"] is None else Objects(**_counts(fields["kv"])),
                blend=_checked(fields["blend"], str),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ObjectCorrupt(f"the snapshot's manifest does not make sense: {type(error).__name__}") from error
        if {name for name in made.files if name != SECRET} != {catalog_name(tenant) for tenant in made.tenants}:
            raise ObjectCorrupt("the snapshot's manifest lists other files than those of its tenants")
        return made

    def check_layout(self) -> None:
        """Raise :class:`ObjectCorrupt` where KV is in it that this version cannot read."""
        if self.kv is not None and self.kv.layout != LAYOUT_VERSION:
            raise ObjectCorrupt(
                f"the snapshot's KV has layout {self.kv.layout}; this version of blend reads {LAYOUT_VERSION}: "
                "restore it without KV, which is computed again"
            )


def _checked(value: Any, kind: type[str]) -> str:
    if not isinstance(value, kind):
        raise TypeError(kind.__name__)
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError("count")
    return value


def _counts(values: Mapping[str, Any]) -> dict[str, int]:
    return {name: _count(value) for name, value in values.items()}
