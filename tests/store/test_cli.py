"""The command blend-store, on a directory and on a real Mooncake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blend.store import DiskTier, FileIO, Namespace, Quotas, load_secret
from blend.store.__main__ import main, size
from blend.store.mooncake import MooncakeTier, library
from tests.store.helpers import NAMESPACE, OBJECT_NBYTES, make, path_of
from tests.store.mooncake_server import Master, cluster, config_for

__all__ = ["cluster"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    with DiskTier(path, 1 << 20, fsync=False) as tier:
        for seed in range(4):
            tier.put(*make(seed))
        tier.put(*make(0, neighbours=["ab" * 20]))
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: object, status: int = 0) -> Any:
    assert main([str(argument) for argument in argv] + ["--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_ls_and_stat(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "ls", directory)["objects"]
    assert [row["key"] for row in found] == sorted(row["key"] for row in found)
    assert len(found) == 5
    assert {row["tokens"] for row in found} == {5}
    assert sorted(row["neighbours"] for row in found) == [0, 0, 0, 0, 1]
    assert run(capsys, "ls", directory, "--limit", 2, "--keys-only")["objects"] == [
        {"key": row["key"]} for row in found[:2]
    ]
    stat = run(capsys, "stat", directory.parent)  # as a server's data directory
    assert (stat["objects"], stat["conditioned"], stat["quarantined"]) == (5, 1, 0)
    assert stat["used_bytes"] == 5 * OBJECT_NBYTES


@pytest.fixture
def shared(tmp_path: Path) -> tuple[Path, list[Namespace]]:
    """A store of two tenants, of whom one has used two models, with its secret in it."""
    path = tmp_path / "shared"
    secret = load_secret(path)
    namespaces = [Namespace(name, model * 16, secret) for name, model in (("acme", "0f"), ("acme", "1e"), ("b", "0f"))]
    quotas = Quotas(None, {namespaces[0].tag[:12]: 8 * OBJECT_NBYTES})
    with DiskTier(path, 1 << 20, fsync=False, quotas=quotas) as tier:
        for number, namespace in enumerate(namespaces):
            for seed in range(number + 1):
                tier.put(*make(seed, namespace=namespace))
    return path, namespaces


def test_namespaces_are_listed_and_told_apart(
    shared: tuple[Path, list[Namespace]], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, namespaces = shared
    found = run(capsys, "namespaces", directory)["namespaces"]
    wanted = [(space.tag, number + 1, (number + 1) * OBJECT_NBYTES) for number, space in enumerate(namespaces)]
    assert [(row["namespace"], row["objects"], row["bytes"]) for row in found] == sorted(wanted)
    for name, count in ((namespaces[1].tag, 2), (namespaces[1].tag[:12], 3), ("acme", 3), ("b", 3), ("nobody", 0)):
        rows = run(capsys, "ls", directory, "--namespace", name)["objects"]
        assert len(rows) == count
        assert all(row["namespace"] in {space.tag for space in namespaces} for row in rows)
    assert run(capsys, "stat", directory)["tenants"] == {
        namespaces[0].tag[:12]: {"used_bytes": 3 * OBJECT_NBYTES, "quota_bytes": 8 * OBJECT_NBYTES},
        namespaces[2].tag[:12]: {"used_bytes": 3 * OBJECT_NBYTES, "quota_bytes": None},
    }
    assert main(["namespaces", str(directory)]) == main(["stat", str(directory)]) == 0
    printed = capsys.readouterr().out
    assert "3 namespaces" in printed
    assert f"{3 * OBJECT_NBYTES:,} of {8 * OBJECT_NBYTES:,}" in printed


def test_drop_removes_a_namespace_when_it_is_told_twice(
    shared: tuple[Path, list[Namespace]], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, namespaces = shared
    assert main(["drop", str(directory), "acme", "--json"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["would_remove"] == 3
    assert "--yes" in printed.err
    assert run(capsys, "stat", directory)["objects"] == 6
    found = run(capsys, "drop", directory, namespaces[1].tag, "--yes")
    assert (found["removed"], found["freed_bytes"], found["problems"]) == (2, 2 * OBJECT_NBYTES, {})
    assert [row["namespace"] for row in run(capsys, "namespaces", directory)["namespaces"]] == sorted(
        [namespaces[0].tag, namespaces[2].tag]
    )
    assert main(["drop", str(directory), "acme", "--yes"]) == 0
    assert "removed" in capsys.readouterr().out
    assert run(capsys, "drop", directory, "acme", "--yes")["removed"] == 0
    assert [row["objects"] for row in run(capsys, "namespaces", directory)["namespaces"]] == [3]
    assert run(capsys, "verify", directory)["whole"] == 3
    assert Quotas.decode((directory / "quotas").read_text()).limits  # looking from outside leaves the note


def test_names_need_the_secret(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drop", str(directory), "acme", "--yes"]) == 2
    assert "12 or 18 hex digits" in capsys.readouterr().err
    assert not (directory / "secret").exists()
    assert run(capsys, "drop", directory, NAMESPACE.tag, "--yes")["removed"] == 5


def test_what_cannot_be_removed_is_said(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = make(2)[0].key
    unlink = FileIO.unlink

    def refuse(self: FileIO, path: str) -> None:
        if path.endswith(str(key)):
            raise PermissionError(13, "Permission denied")
        unlink(self, path)

    monkeypatch.setattr(FileIO, "unlink", refuse)
    found = run(capsys, "drop", directory, NAMESPACE.tag, "--yes", status=1)
    assert found["removed"] == 4
    assert list(found["problems"]) == [f"disk: {key}"]
    assert "EACCES" in found["problems"][f"disk: {key}"]
    assert run(capsys, "ls", directory, "--keys-only")["objects"] == [{"key": str(key)}]


def test_people_get_tables(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("ls", "stat", "verify", "gc"):
        assert main([command, str(directory)]) == 0
    printed = capsys.readouterr()
    assert "5 objects" in printed.out
    assert "problems" in printed.out
    assert printed.err == ""


def test_a_key_is_printed_in_one_piece(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {str(make(number)[0].key) for number in range(4)}
    for columns in ("80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["ls", str(directory)]) == 0
        assert keys <= set(capsys.readouterr().out.split())


def test_verify_finds_and_gc_frees_what_is_corrupt(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, _ = make(2)
    path = path_of(directory, header)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = run(capsys, "verify", directory, status=1)
    assert found["whole"] == 4
    assert list(found["problems"]) == [str(header.key)]
    assert "checksum" in found["problems"][str(header.key)]
    assert run(capsys, "stat", directory)["quarantined"] == 1
    freed = run(capsys, "gc", directory)
    assert (freed["removed"], freed["kept"], freed["quarantined_removed"]) == (0, 4, 1)
    assert freed["freed_bytes"] == OBJECT_NBYTES
    assert run(capsys, "verify", directory)["problems"] == {}


def test_gc_makes_a_store_smaller(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "gc", directory, "--to", 2 * OBJECT_NBYTES + 5)
    assert (found["removed"], found["kept"]) == (3, 2)
    assert run(capsys, "stat", directory)["objects"] == 2


def test_bench_leaves_nothing(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "bench", directory, "--objects", 2, "--tokens", 3)
    assert found["put_gb_per_s"] > 0
    assert found["get_gb_per_s"] > 0
    assert run(capsys, "stat", directory)["objects"] == 5


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["ls", "{missing}"], "no such store"),
        (["stat", "{tmp}"], "no such store"),
        (["ls", "mooncake://nowhere"], "mooncake.master"),
        (["ls", "http://there"], "mooncake://host:port"),
        (["gc", "mooncake://127.0.0.1:1", "--to", "5"], "directory"),
    ],
)
def test_wrong_targets_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    named = [argument.format(missing=tmp_path / "missing", tmp=tmp_path) for argument in argv]
    assert main(named) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "missing").exists()


def test_a_directory_of_a_newer_layout_is_left_alone(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "layout").write_text("blend-store 99\n")
    assert main(["stat", str(directory)]) == 1
    assert "layout 99" in capsys.readouterr().err


def test_wrong_arguments(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["ls"], ["ls", str(directory), "--limit", "0"], ["gc", str(directory), "--to", "much"]):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 2
    assert size("1.5KiB") == 1536
    assert size("7") == 7
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert "blend-store gc" in capsys.readouterr().out


def test_on_mooncake(cluster: Master, capsys: pytest.CaptureFixture[str]) -> None:
    where = [f"mooncake://{cluster.rpc}", "--health", cluster.admin, "--prefix", "cli"]
    with MooncakeTier(config_for(cluster, prefix="cli"), library()) as tier:
        for seed in range(3):
            tier.put(*make(seed))
        assert [row["tokens"] for row in run(capsys, "ls", *where)["objects"]] == [5, 5, 5]
        stat = run(capsys, "stat", *where)
        assert stat["objects"] == 3
        assert stat["segments"] == 1
        assert run(capsys, "verify", *where)["whole"] == 3
        listed = run(capsys, "namespaces", *where)["namespaces"]
        assert [(row["namespace"], row["objects"]) for row in listed] == [(NAMESPACE.tag, 3)]
        assert len(run(capsys, "ls", *where, "--namespace", NAMESPACE.tag)["objects"]) == 3
        wrong = make(9)[0]
        tier.put(wrong, bytes(wrong.payload_nbytes))
        assert list(run(capsys, "verify", *where, status=1)["problems"]) == [str(wrong.key)]
        assert run(capsys, "gc", *where) == {"target": where[0], "removed": 0, "kept": 3}
        assert run(capsys, "bench", *where, "--objects", 2, "--tokens", 3)["get_gb_per_s"] > 0
        assert run(capsys, "stat", *where)["objects"] == 3
        assert run(capsys, "drop", *where, NAMESPACE.tag, "--yes")["removed"] == 3
        assert run(capsys, "stat", *where)["objects"] == 0
