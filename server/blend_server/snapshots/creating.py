"""A data directory into a snapshot, while a server may be using it."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import tempfile
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from blend.errors import InvalidInput, NotFound, TierUnavailable
from blend.rag.backup import CatalogSize, content_keys, copy_catalog
from blend.store.fileio import READ, FileIO, describe, sync_directory
from blend.store.key import ObjectKey
from blend.store.layout import LAYOUT_VERSION
from blend.store.secret import load_secret
from blend_server.auth import DEFAULT_TENANT
from blend_server.snapshots.manifest import MANIFEST, SECRET, File, Manifest, Objects, catalog_name, object_name
from blend_server.tokens import NAME


def create(directory: Path, archive: Path, *, store: Path | None = None, kv: bool = False) -> Manifest:
    """Write a snapshot of the data directory ``directory`` to the new file ``archive``, which has mode 0600.

    Each tenant's documents are as they are at one moment. KV is that of those documents, as far as it is stored.

    Args:
        store: the store's directory, where that is not ``directory/store``.
        kv: whether stored KV comes along.

    Raises:
        NotFound: there is no data directory, or no store.
        InvalidInput: ``archive`` is there already.
        TierUnavailable: a file cannot be read or written.
        ObjectCorrupt: a catalog is damaged.
    """
    directory, archive = directory.expanduser(), archive.expanduser()
    kept = directory / "store" if store is None else store.expanduser()
    if (store is not None or kv) and not (kept / "layout").is_file():
        raise NotFound("store", f"{kept} (a directory with a file named layout)")
    _require_new(archive)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{archive.name}.", dir=archive.parent) as work:
            draft = Path(work) / "draft"
            with open(draft, "xb", opener=lambda path, how: os.open(path, how, 0o600)) as file:
                manifest = _write(directory, kept, file, Path(work) / "catalog", kv)
                file.flush()
                os.fsync(file.fileno())
            _require_new(archive)
            os.rename(draft, archive)
            sync_directory(FileIO(), str(archive.parent))
    except OSError as error:
        raise TierUnavailable(f"the snapshot {archive} cannot be written: {describe(error)}") from error
    return manifest


def _require_new(archive: Path) -> None:
    if os.path.lexists(archive):
        raise InvalidInput("FILE", str(archive), "a file that is not there yet")


def _write(directory: Path, store: Path, file: IO[bytes], copy: Path, kv: bool) -> Manifest:
    tenants: dict[str, CatalogSize] = {}
    files: dict[str, File] = {}
    wanted: set[str] = set()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        for tenant, path in _catalogs(directory):
            size = copy_catalog(path, copy)
            if size is None:
                continue
            tenants[tenant], name = size, catalog_name(tenant)
            with open(copy, "rb") as data:
                files[name] = _add(tar, name, data)
            if kv:
                wanted |= content_keys(copy)
            copy.unlink()
        if not tenants:
            raise NotFound("data directory (one with library/catalog.sqlite3)", str(directory))
        if (store / "secret").is_file():
            files[SECRET] = _add(tar, SECRET, io.BytesIO(load_secret(store)))
        # After the catalogs: whatever KV comes since is of no document that they have.
        objects = _add_objects(tar, store, wanted) if kv else None
        manifest = Manifest(created, tenants, files, objects)
        _add(tar, MANIFEST, io.BytesIO(manifest.encode()))
    return manifest


def _catalogs(directory: Path) -> Iterator[tuple[str, Path]]:
    """The tenants that have a catalog, and where that is."""
    try:
        names = sorted(entry.name for entry in (directory / "tenants").iterdir() if NAME.fullmatch(entry.name))
    except FileNotFoundError:
        names = []
    for tenant in (DEFAULT_TENANT, *(name for name in names if name != DEFAULT_TENANT)):
        path = directory / catalog_name(tenant)
        if path.is_file():
            yield tenant, path


def _add(tar: tarfile.TarFile, name: str, data: IO[bytes]) -> File:
    """Add a file; return its length and digest."""
    nbytes = data.seek(0, os.SEEK_END)
    data.seek(0)
    digest = hashlib.blake2b(digest_size=32)
    while block := data.read(1 << 20):
        digest.update(block)
    data.seek(0)
    tar.addfile(_header(name, nbytes), data)
    return File(nbytes, digest.hexdigest())


def _add_objects(tar: tarfile.TarFile, store: Path, wanted: set[str]) -> Objects:
    objects = nbytes = 0
    for folder in sorted((store / "objects").iterdir()):
        for entry in os.scandir(folder):
            try:
                key = ObjectKey.parse(entry.name)
            except InvalidInput:
                continue  # being written
            if key.content not in wanted:
                continue
            try:
                fd = os.open(entry.path, READ)
            except FileNotFoundError:
                continue  # removed or evicted meanwhile
            with open(fd, "rb") as data:
                size = os.fstat(fd).st_size
                tar.addfile(_header(object_name(key), size), data)
            tar.members.clear()  # type: ignore[attr-defined] # or it keeps them all in memory
            objects, nbytes = objects + 1, nbytes + size
    return Objects(LAYOUT_VERSION, objects, nbytes)


def _header(name: str, nbytes: int) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.size, header.mode = nbytes, 0o600
    return header
