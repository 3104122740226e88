"""The index finds what brute force finds, follows its catalog from any state, and trusts no file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blend.errors import Closed, InvalidInput, TierUnavailable
from blend.rag import snapshot
from blend.rag.catalog import Catalog
from blend.rag.index import Index
from blend.rag.protocols import Vectors
from blend.rag.records import Embeddings, Head, NewChunk, NewDocument

DIM = 8


def unit(seed: int, n: int = 1) -> Vectors:
    vectors = np.random.default_rng(seed).standard_normal((n, DIM)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def put(catalog: Catalog, document_id: str, seed: int, n: int = 3, pipeline: str = "p") -> None:
    chunks = [NewChunk("t", (1,), f"{document_id}{i}", v, 0, 1) for i, v in enumerate(unit(seed, n))]
    catalog.replace(NewDocument(document_id, "", "t", str(seed), pipeline), chunks)


def check(index: Index, catalog: Catalog, pipeline: str = "p") -> None:
    """The index holds exactly the catalog's vectors."""
    batches = list(catalog.all_embeddings(pipeline))
    expected = {int(r): v for b in batches for r, v in zip(b.rows, b.vectors, strict=True)}
    assert len(index) == len(expected)
    query = unit(99)[0]
    found = dict(index.search(query, len(expected) + 5))
    assert found.keys() == expected.keys()
    for row_id, score in found.items():
        assert score == pytest.approx(float(expected[row_id] @ query), abs=1e-5)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    opened = Catalog(tmp_path / "catalog.sqlite3")
    yield opened
    opened.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index.bin"


@given(seed=st.integers(0, 1000), n=st.integers(1, 60), k=st.integers(1, 70), copies=st.integers(1, 4))
def test_search_is_exact_and_breaks_ties_by_row(seed: int, n: int, k: int, copies: int) -> None:
    vectors = np.repeat(unit(seed, n), copies, axis=0)
    rows = np.random.default_rng(seed).permutation(len(vectors)).astype(np.int64) * 3 + 1
    query = unit(seed + 1)[0]
    index = Index(Path("/nonexistent/index.bin"), "p")
    index.add(rows, vectors)
    hits = index.search(query, k)
    exact = {
        int(r): sum(float(a) * float(b) for a, b in zip(v, query, strict=True))
        for r, v in zip(rows, vectors, strict=True)
    }
    expected = sorted(exact, key=lambda r: (-round(exact[r], 12), r))[:k]
    assert [r for r, _ in hits] == expected
    assert [s for _, s in hits] == pytest.approx([exact[r] for r in expected])


def test_an_empty_index_finds_nothing_and_wrong_questions_are_refused(path: Path) -> None:
    index = Index(path, "p")
    assert index.search(unit(0)[0], 3) == [] and len(index) == 0
    index.add(np.array([4]), unit(1))
    for k in (0, -1, 1.5, True):
        with pytest.raises(InvalidInput, match="k: .*at least 1"):
            index.search(unit(0)[0], k)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="8 numbers"):
        index.search(np.ones(5, np.float32), 1)
    with pytest.raises(InvalidInput, match="8 numbers"):
        index.add(np.array([5]), np.ones((1, 5), np.float32))
    with pytest.raises(InvalidInput, match="2 rows"):
        index.add(np.array([5, 6]), unit(1))


def test_adding_twice_and_removing_what_is_not_there_do_nothing(path: Path) -> None:
    index = Index(path, "p")
    index.add(np.array([1, 2]), unit(0, 2))
    index.add(np.array([2, 3]), unit(1, 2))
    index.remove([1, 7, 8])
    assert index.search(unit(0, 2)[1], 9)[0][0] == 2 and len(index) == 2


def test_it_follows_every_change_and_its_snapshot_continues(catalog: Catalog, path: Path) -> None:
    index = Index(path, "p")
    for step in range(12):
        put(catalog, f"d{step % 5}", step, n=1 + step % 4)
        if step % 4 == 3:
            catalog.delete(f"d{(step - 1) % 5}")
        index.catch_up(catalog)
        check(index, catalog)
        if step % 3 == 2:
            index.save()
            assert index.unsaved == 0
        else:
            index.close()  # as after a crash: changes since the last snapshot are replayed
            index = Index(path, "p")
            index.catch_up(catalog)
            check(index, catalog)


def test_replaying_asks_for_the_changes_only(catalog: Catalog, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(catalog, "a", 1, n=50)
    index = Index(path, "p")
    index.catch_up(catalog)
    index.save()
    put(catalog, "b", 2)
    monkeypatch.setattr(catalog, "all_embeddings", lambda *_: pytest.fail("rebuilt"))
    again = Index(path, "p")
    again.catch_up(catalog)
    assert len(again) == 53 and again.unsaved == 3


def test_too_far_behind_is_rebuilt(tmp_path: Path, path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.sqlite3", log_limit=4)
    put(catalog, "a", 1)
    index = Index(path, "p")
    index.catch_up(catalog)
    for seed in range(4):
        put(catalog, "a", seed)
        put(catalog, f"b{seed}", seed)
    index.catch_up(catalog)
    check(index, catalog)
    catalog.close()


def test_a_snapshot_newer_than_the_catalog_is_left_aside(tmp_path: Path, path: Path) -> None:
    """The catalog was restored from a backup, and went on from there to the very generation of the snapshot."""
    catalog = Catalog(tmp_path / "catalog.sqlite3")
    put(catalog, "a", 1)
    catalog.close()
    shutil.copy(tmp_path / "catalog.sqlite3", tmp_path / "backup.sqlite3")

    catalog = Catalog(tmp_path / "catalog.sqlite3")
    put(catalog, "b", 2)
    index = Index(path, "p")
    index.catch_up(catalog)
    index.save()
    catalog.close()

    restored = Catalog(tmp_path / "backup.sqlite3")
    index = Index(path, "p")
    index.catch_up(restored)
    check(index, restored)
    put(restored, "c", 3)
    assert restored.head().generation == 2
    index = Index(path, "p")
    index.catch_up(restored)
    check(index, restored)
    restored.close()


def test_another_pipeline_starts_anew_with_its_own_chunks(catalog: Catalog, path: Path) -> None:
    put(catalog, "a", 1)
    index = Index(path, "p")
    index.catch_up(catalog)
    index.save()
    put(catalog, "b", 2, n=2, pipeline="q")
    index.catch_up(catalog)
    check(index, catalog)
    other = Index(path, "q")
    other.catch_up(catalog)
    assert len(other) == 2
    check(other, catalog, "q")


def damaged(data: bytes) -> Iterator[bytes]:
    yield b""
    yield b"\0" * len(data)
    yield data + b"\0"
    for size in (3, 8, 12, 40, len(data) // 2, len(data) - 1):
        yield data[:size]
    for at in (0, 7, 9, 20, len(data) // 2, len(data) - 40, len(data) - 1):
        yield data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def test_damaged_snapshots_are_made_anew(catalog: Catalog, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(catalog, "a", 1)
    index = Index(path, "p")
    index.catch_up(catalog)
    index.save()
    whole = path.read_bytes()
    for bad in damaged(whole):
        path.write_bytes(bad)
        caplog.clear()
        index = Index(path, "p")
        assert "made anew" in caplog.text
        index.catch_up(catalog)
        check(index, catalog)
        index.save()
        assert len(path.read_bytes()) == len(whole)


@pytest.mark.parametrize(
    "contents",
    [
        Embeddings(np.array([5, 5]), unit(0, 2)),
        Embeddings(np.array([7, 5]), unit(0, 2)),
        Embeddings(np.array([5]), np.full((1, DIM), np.nan, np.float32)),
    ],
)
def test_whole_files_that_make_no_sense_are_left_aside(contents: Embeddings, path: Path) -> None:
    snapshot.write(path, "p", Head(3, "s"), contents)
    with pytest.raises(snapshot.Unusable):
        snapshot.read(path, "p")


def test_a_snapshot_is_written_whole_or_not_at_all(catalog: Catalog, tmp_path: Path, path: Path) -> None:
    index = Index(path, "p")
    index.save()
    assert not path.exists()  # nothing is known yet
    put(catalog, "a", 1)
    index.catch_up(catalog)
    index.save()
    before = path.read_bytes()
    stamped = json.loads(before[12 : 12 + int.from_bytes(before[8:12], "little")])
    assert (stamped["generation"], stamped["stamp"]) == catalog.head() and stamped["rows"] == 3
    (tmp_path / "index.bin.tmp").mkdir()
    put(catalog, "b", 2)
    index.catch_up(catalog)
    with pytest.raises(TierUnavailable):
        index.save()
    assert path.read_bytes() == before and len(index) == 6
    blocked = Index(tmp_path, "p")  # a directory where the file should be
    blocked.catch_up(catalog)
    check(blocked, catalog)


def test_an_empty_catalog_has_a_snapshot_too(catalog: Catalog, path: Path) -> None:
    index = Index(path, "p")
    index.catch_up(catalog)
    index.save()
    assert snapshot.read(path, "p") is not None
    assert len(Index(path, "p")) == 0


def test_use_after_close_is_refused(catalog: Catalog, path: Path) -> None:
    index = Index(path, "p")
    index.close()
    index.close()
    for use in (lambda: index.search(unit(0)[0], 1), index.save, lambda: index.catch_up(catalog)):
        with pytest.raises(Closed):
            use()


@given(seed=st.integers(0, 1000), n=st.integers(1, 60), k=st.integers(1, 70), gone=st.integers(0, 5))
def test_the_nearest_rows_of_many_are_those_of_brute_force(
    tmp_path_factory: pytest.TempPathFactory, seed: int, n: int, k: int, gone: int
) -> None:
    index = Index(tmp_path_factory.mktemp("index") / "index.bin", "p")
    rows, vectors = np.arange(1, n + 1, dtype=np.int64), unit(seed, n)
    index.add(rows, vectors)
    index.remove(range(1, gone + 1))
    left = [int(row) for row in rows if row > gone]
    assert index.rows == tuple(left)
    found = index.nearest([*range(1, n + 1), n + 1], k)
    assert list(found) == left, "those that are not there are left out"
    scores = np.multiply(vectors[:, None], vectors[None], dtype=np.float64).sum(axis=2)
    for row in left:
        others = sorted((other for other in left if other != row), key=lambda o: (-scores[row - 1, o - 1], o))
        assert found[row] == others[:k]
    index.close()
