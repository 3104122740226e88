"""The catalog: documents come, change and go as a whole, and every change can be followed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blend.errors import Closed, InvalidInput, NotFound, ObjectCorrupt, TierUnavailable
from blend.rag.catalog import Catalog
from blend.rag.records import Head, NewChunk, NewDocument


def document(document_id: str, text: str = "text", pipeline: str = "p") -> NewDocument:
    return NewDocument(document_id, f"Title of {document_id}", text, f"{pipeline}:{text}", pipeline)


def chunks(*keys: str) -> list[NewChunk]:
    """One chunk a key, with token ids and vectors made of the key."""
    made = []
    for i, key in enumerate(keys):
        vector = np.full(4, len(key) + i, dtype=np.float32)
        made.append(NewChunk(f"passage {key}", tuple(key.encode()), key, vector, i * 10, i * 10 + 10))
    return made


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    opened = Catalog(tmp_path / "catalog.sqlite3")
    yield opened
    opened.close()


def keys(orphans: tuple[object, ...]) -> list[str]:
    return sorted(o.content_key for o in orphans)  # type: ignore[attr-defined]


def test_what_is_stored_comes_back(catalog: Catalog) -> None:
    assert catalog.replace(document("a/b", "some téxt"), chunks("k1", "k2")) == ()
    found = catalog.get("a/b")
    assert (found.id, found.title, found.text, found.chunks) == ("a/b", "Title of a/b", "some téxt", 2)
    assert found.nbytes == 10 and found.created == found.updated > 1e9 and len(found.sha256) == 64
    rows = catalog.chunks_of("a/b")
    assert [(r.ordinal, r.text, r.token_ids, r.content_key) for r in rows] == [
        (0, "passage k1", (107, 49), "k1"),
        (1, "passage k2", (107, 50), "k2"),
    ]
    assert (rows[1].document_id, rows[1].title, rows[1].start_char, rows[1].end_char) == ("a/b", "Title of a/b", 10, 20)
    assert catalog.chunks_by_row([rows[1].row_id, 999, rows[0].row_id]) == (rows[1], rows[0])
    counts = catalog.counts()
    assert (counts.documents, counts.nbytes, counts.chunks, counts.tokens) == (1, 10, 2, 4)


def test_no_file_holds_the_text_of_a_document_that_is_gone(tmp_path: Path) -> None:
    directory = tmp_path / "rag"
    directory.mkdir()
    opened = Catalog(directory / "catalog.sqlite3")
    secret = [replace(chunk, text="confidential") for chunk in chunks("k1", "k2")]
    for document_id, text in (("short", "confidential"), ("long", "confidential " * 5000), ("kept", "of no secret")):
        opened.replace(document(document_id, text), secret)
    opened.replace(document("short", "something else"), chunks("k1"))
    opened.replace(document("kept", "of no secret"), chunks("k1"))
    opened.delete("long")
    opened.close()
    assert [path.name for path in directory.iterdir()] == ["catalog.sqlite3"]
    data = (directory / "catalog.sqlite3").read_bytes()
    assert b"of no secret" in data
    assert b"confidential" not in data


def test_what_is_not_there(catalog: Catalog) -> None:
    assert catalog.find("none") is None
    assert catalog.chunks_of("none") == catalog.chunks_by_row([]) == catalog.chunks_by_row(range(1, 2000)) == ()
    for call in (catalog.get, catalog.delete):
        with pytest.raises(NotFound, match="document: 'none'"):
            call("none")


def test_a_new_version_replaces_the_old_and_keeps_the_time_of_creation(catalog: Catalog) -> None:
    catalog.replace(document("a", "one"), chunks("k1", "k2", "k2"))
    first, before = catalog.get("a"), {r.row_id for r in catalog.chunks_of("a")}
    orphans = catalog.replace(document("a", "two"), chunks("k2", "k3"))
    assert keys(orphans) == ["k1"] and orphans[0].chunk.token_ids == (107, 49)
    second = catalog.get("a")
    assert second.text == "two" and second.created == first.created and second.updated > first.updated
    after = {r.row_id for r in catalog.chunks_of("a")}
    assert min(after) > max(before)
    catalog.delete("a")
    catalog.replace(document("b"), chunks("k4"))
    assert catalog.chunks_of("b")[0].row_id > max(after)


def test_a_shared_chunk_stays_until_its_last_document_goes(catalog: Catalog, tmp_path: Path) -> None:
    catalog.replace(document("a"), chunks("shared", "a"))
    catalog.replace(document("b"), chunks("b", "shared"))
    other = Catalog(tmp_path / "catalog.sqlite3", "other")
    other.replace(document("c"), chunks("shared"))
    assert catalog.references("shared") == 3
    assert keys(catalog.delete("a")) == ["a"]
    assert keys(catalog.delete("b")) == ["b"]
    assert keys(other.delete("c")) == ["shared"]
    assert catalog.references("shared") == 0
    other.close()


def test_namespaces_do_not_see_each_other(catalog: Catalog, tmp_path: Path) -> None:
    other = Catalog(tmp_path / "catalog.sqlite3", "other")
    catalog.replace(document("a", "mine"), chunks("k1"))
    before = other.head()
    assert other.find("a") is None and other.list().documents == () and other.counts().chunks == 0
    row_id = catalog.chunks_of("a")[0].row_id
    assert other.chunks_by_row([row_id]) == () and len(other.embeddings("p", [row_id]).rows) == 0
    assert list(other.all_embeddings("p")) == [] and other.head() == before
    other.replace(document("a", "yours"), chunks("k2"))
    assert catalog.get("a").text == "mine" and other.get("a").text == "yours"
    other.close()


def test_pages_follow_each_other_while_documents_come_and_go(catalog: Catalog) -> None:
    ids = [f"d{i:02}" for i in range(10)] + ["é/ü", "名"]
    for document_id in ids:
        catalog.replace(document(document_id), chunks("k"))
    first = catalog.list(page_size=5)
    assert [d.id for d in first.documents] == ids[:5] and first.documents[0].chunks == 1
    catalog.delete("d04")
    catalog.delete("d06")
    catalog.replace(document("d01b"), chunks("k"))
    second = catalog.list(5, first.next_page_token)
    assert [d.id for d in second.documents] == ["d05", "d07", "d08", "d09", "é/ü"]
    last = catalog.list(5, second.next_page_token)
    assert [d.id for d in last.documents] == ["名"] and last.next_page_token == ""
    assert catalog.list(1000).next_page_token == ""


@pytest.mark.parametrize("size", [0, -1, 1001, 2.5, True, None])
def test_page_sizes_out_of_range_are_refused(catalog: Catalog, size: int) -> None:
    with pytest.raises(InvalidInput, match="page_size.*1 to 1000"):
        catalog.list(size)


@given(st.text(min_size=1, max_size=12))
def test_page_tokens_that_no_page_gave_are_refused(token: str) -> None:
    catalog = Catalog(Path(":memory:"))
    with pytest.raises(InvalidInput, match="page_token"):
        catalog.list(5, token)
    catalog.close()


def test_changes_can_be_followed_from_any_generation(catalog: Catalog) -> None:
    heads = [catalog.head()]
    assert heads[0].generation == 0 and catalog.changes_since(heads[0]) == (heads[0], (), ())
    catalog.replace(document("a"), chunks("k1", "k2"))
    heads.append(catalog.head())
    old = tuple(r.row_id for r in catalog.chunks_of("a"))
    catalog.replace(document("a", "new"), chunks("k3"))
    heads.append(catalog.head())
    (new,) = (r.row_id for r in catalog.chunks_of("a"))
    assert [h.generation for h in heads] == [0, 1, 2] and len({h.stamp for h in heads}) == 3
    assert catalog.changes_since(heads[0]) == (heads[2], (new,), old)
    assert catalog.changes_since(heads[1]) == (heads[2], (new,), old)
    assert catalog.changes_since(heads[2]) == (heads[2], (), ())
    assert catalog.changes_since(Head(3, heads[2].stamp)) is None
    assert catalog.changes_since(Head(1, heads[2].stamp)) is None


def test_the_log_forgets_its_oldest_generations(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.sqlite3", log_limit=5)
    heads = [catalog.head()]
    for i in range(6):
        catalog.replace(document(f"d{i}"), chunks("k1", "k2"))
        heads.append(catalog.head())
    followed = [catalog.changes_since(head) for head in heads]
    assert [f is None for f in followed] == [True, True, True, True, False, False, False]
    assert followed[4] is not None and len(followed[4].added) == 4
    catalog.replace(document("huge"), chunks(*(f"k{i}" for i in range(20))))
    assert catalog.changes_since(heads[-1]) is None
    assert catalog.changes_since(catalog.head()) == (catalog.head(), (), ())
    catalog.close()


def test_embeddings_come_by_pipeline_and_in_order(catalog: Catalog) -> None:
    for i in range(5):
        catalog.replace(document(f"d{i}", pipeline="new" if i % 2 else "old"), chunks("k", "kk"))
    batches = list(catalog.all_embeddings("old", batch=4))
    assert [len(b.rows) for b in batches] == [4, 2]
    rows = np.concatenate([b.rows for b in batches])
    assert rows.dtype == np.int64 and (np.diff(rows) > 0).all() and batches[0].vectors.shape == (4, 4)
    asked = [int(r) for r in rows[::-1]] + [9999]
    np.testing.assert_array_equal(catalog.embeddings("old", asked).rows, rows)
    assert len(catalog.embeddings("new", asked).rows) == 0
    assert catalog.outdated("new") == ("d0", "d2", "d4")


def test_a_failed_change_changes_nothing(catalog: Catalog) -> None:
    catalog.replace(document("a", "one"), chunks("k1"))
    before = catalog.head(), catalog.get("a"), catalog.chunks_of("a")
    bad = chunks("k2", "k3")
    object.__setattr__(bad[1], "text", None)
    with pytest.raises(sqlite3.IntegrityError):
        catalog.replace(document("a", "two"), bad)
    assert (catalog.head(), catalog.get("a"), catalog.chunks_of("a")) == before


def test_it_survives_closing_and_refuses_use_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite3"
    first = Catalog(path)
    first.replace(document("a"), chunks("k1"))
    head = first.head()
    first.close()
    first.close()
    with pytest.raises(Closed):
        first.get("a")
    second = Catalog(path)
    assert second.head() == head and second.get("a").text == "text"
    second.close()


def test_files_that_are_no_catalog_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite3"
    path.write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(ObjectCorrupt, match="damaged, or is none"):
        Catalog(path)
    foreign = tmp_path / "foreign.sqlite3"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE things (a)")
    with pytest.raises(ObjectCorrupt, match="not a catalog"):
        Catalog(foreign)
    with pytest.raises(TierUnavailable):
        Catalog(tmp_path / "none" / "catalog.sqlite3")


def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite3"
    Catalog(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 7")
    with pytest.raises(ObjectCorrupt, match="schema version 7.*up to 1"):
        Catalog(path)
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (7,)


def test_threads_write_and_read_at_once(catalog: Catalog) -> None:
    def work(i: int) -> None:
        name = f"d{i % 4}"
        catalog.replace(document(name, f"version {i}"), chunks(f"k{i}", "shared"))
        found = catalog.chunks_of(name)
        assert len(found) == 2 and catalog.references("shared") >= 1
        catalog.list(2)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(80)))
    assert catalog.counts().documents == 4 and catalog.counts().chunks == 8 and catalog.head().generation == 80
