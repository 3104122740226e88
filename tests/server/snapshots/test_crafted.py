"""Archives that are damaged, or made to do harm: refused, and nothing is left of them."""

from __future__ import annotations

import io
import json
import sqlite3
import tarfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blend.errors import BlendError, ObjectCorrupt
from blend.rag.catalog import Catalog
from blend_server.snapshots import create, inspect, restore

CATALOG = "library/catalog.sqlite3"
KEY = "ab" * 20 + ".plain"


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, bytes]:
    """The members of a snapshot, by name."""
    (tmp_path / "data/library").mkdir(parents=True)
    Catalog(tmp_path / "data" / CATALOG).close()
    create(tmp_path / "data", tmp_path / "whole.tar")
    with tarfile.open(tmp_path / "whole.tar") as tar:
        found = {}
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            found[member.name] = file.read()
    return found


def written(path: Path, members: dict[str, bytes], **odd: Any) -> Path:
    """An archive of these members; ``odd`` are fields of one more that comes before them."""
    with tarfile.open(path, "w") as tar:
        if odd:
            header = tarfile.TarInfo(odd.pop("name"))
            data = odd.pop("data", b"")
            header.size = len(data)
            for name, value in odd.items():
                setattr(header, name, value)
            tar.addfile(header, io.BytesIO(data))
        for name, data in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))
    return path


def refused(tmp_path: Path, archive: Path, match: str = "") -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ObjectCorrupt, match=match):
        restore(archive, tmp_path / "restored")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "odd",
    [
        {"name": "../escaped", "data": b"x"},
        {"name": "/tmp/escaped", "data": b"x"},
        {"name": "library/../../escaped", "data": b"x"},
        {"name": "library/catalog.sqlite3-wal", "data": b"x"},
        {"name": "tenants/../catalog.sqlite3", "data": b"x"},
        {"name": "tenants/default/catalog.sqlite3", "data": b"x"},
        {"name": "tenants/UPPER/catalog.sqlite3", "data": b"x"},
        {"name": "lock", "data": b"1"},
        {"name": f"store/objects/cd/{KEY}", "data": b"x"},
        {"name": "store/objects/ab/../../../secret", "data": b"x"},
        {"name": "store/secret", "data": b"short"},
        {"name": "library", "type": tarfile.DIRTYPE},
        {"name": CATALOG, "type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
        {"name": CATALOG, "type": tarfile.LNKTYPE, "linkname": "/etc/passwd"},
        {"name": "store/secret", "type": tarfile.FIFOTYPE},
        {"name": "store/secret", "type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5},
        {"name": CATALOG, "type": tarfile.GNUTYPE_SPARSE, "data": b"x"},
    ],
    ids=lambda odd: odd["name"],
)
def test_members_that_no_snapshot_has(tmp_path: Path, whole: dict[str, bytes], odd: dict[str, Any]) -> None:
    refused(tmp_path, written(tmp_path / "odd.tar", whole, **odd), "no snapshot does|no plain file")


def test_members_that_come_twice_or_that_the_manifest_does_not_know(tmp_path: Path, whole: dict[str, bytes]) -> None:
    twice = written(tmp_path / "twice.tar", whole, name=CATALOG, data=whole[CATALOG])
    refused(tmp_path, twice, "twice")
    more = written(tmp_path / "more.tar", whole, name="tenants/acme/catalog.sqlite3", data=whole[CATALOG])
    refused(tmp_path, more, "tenants/acme")
    refused(tmp_path, written(tmp_path / "kv.tar", whole, name=f"store/objects/ab/{KEY}", data=b"x"), "0 objects")
    refused(tmp_path, written(tmp_path / "less.tar", {"manifest.json": whole["manifest.json"]}), CATALOG)
    refused(tmp_path, written(tmp_path / "none.tar", {CATALOG: whole[CATALOG]}), "no whole snapshot")


@pytest.mark.parametrize("place", [20, 100, 4000])
def test_a_changed_byte_is_found(tmp_path: Path, whole: dict[str, bytes], place: int) -> None:
    raw = bytearray(whole[CATALOG])
    raw[place] ^= 1
    refused(tmp_path, written(tmp_path / "changed.tar", {**whole, CATALOG: bytes(raw)}), "not as it was")


def with_manifest(whole: dict[str, bytes], change: Callable[[dict[str, Any]], None]) -> dict[str, bytes]:
    fields = json.loads(whole["manifest.json"])
    change(fields)
    return {**whole, "manifest.json": json.dumps(fields).encode()}


def test_another_version_is_named(tmp_path: Path, whole: dict[str, bytes]) -> None:
    newer = with_manifest(whole, lambda fields: fields.update(format=2, blend="9.0"))
    refused(tmp_path, written(tmp_path / "newer.tar", newer), "format 2.*blend '9.0'")
    layout = with_manifest(whole, lambda fields: fields.update(kv={"layout": 1, "objects": 0, "nbytes": 0}))
    archive = written(tmp_path / "layout.tar", layout)
    refused(tmp_path, archive, "without KV")
    assert restore(archive, tmp_path / "restored", kv=False).kv is not None


def test_a_catalog_of_a_newer_version_is_refused(tmp_path: Path, whole: dict[str, bytes]) -> None:
    refused(tmp_path, written(tmp_path / "schema.tar", tampered(tmp_path, whole, "PRAGMA user_version = 99")), "99")


def test_a_catalog_with_code_in_it_is_refused(tmp_path: Path, whole: dict[str, bytes]) -> None:
    trigger = "CREATE TRIGGER t AFTER INSERT ON chunks BEGIN DELETE FROM documents; END"
    refused(tmp_path, written(tmp_path / "trigger.tar", tampered(tmp_path, whole, trigger)), "triggers")


def tampered(tmp_path: Path, whole: dict[str, bytes], statement: str) -> dict[str, bytes]:
    """The members with one catalog changed, and a manifest that fits it."""
    path = tmp_path / "tampered"
    path.write_bytes(whole[CATALOG])
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode = DELETE")
    db.execute(statement)
    db.commit()
    db.close()
    raw = path.read_bytes()
    digest = {"nbytes": len(raw), "blake2b": blake2b(raw, digest_size=32).hexdigest()}
    return with_manifest({**whole, CATALOG: raw}, lambda fields: fields["files"].update({CATALOG: digest}))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"format": 1}', b'{"format": 1, "files": 3}', b"null", b"\xff"])
def test_manifests_that_are_none(tmp_path: Path, whole: dict[str, bytes], data: bytes) -> None:
    archive = written(tmp_path / "odd.tar", {**whole, "manifest.json": data})
    refused(tmp_path, archive, "manifest")
    with pytest.raises(ObjectCorrupt, match="manifest"):
        inspect(archive)


def test_a_compressed_archive_is_refused(tmp_path: Path, whole: dict[str, bytes]) -> None:
    with tarfile.open(tmp_path / "small.tar", "w:gz"):
        pass
    refused(tmp_path, tmp_path / "small.tar", "no snapshot")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 1 << 20), noise=st.binary(max_size=64), at=st.integers(0, 1 << 20))
def test_damage_anywhere_is_a_typed_error_or_does_no_harm(
    tmp_path: Path, whole: dict[str, bytes], cut: int, noise: bytes, at: int
) -> None:
    archive = tmp_path / "damaged.tar"
    if not (tmp_path / "good.tar").exists():
        written(tmp_path / "good.tar", whole)
    raw = bytearray((tmp_path / "good.tar").read_bytes())
    start = at % len(raw)
    raw[start : start + len(noise)] = noise
    archive.write_bytes(raw[: max(0, len(raw) - cut % len(raw))])
    target = tmp_path / "restored"
    try:
        restore(archive, target)
    except BlendError:
        assert not target.exists()
    else:
        assert (target / CATALOG).read_bytes() == whole[CATALOG]
        for path in sorted(target.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        target.rmdir()
