"""Which chunks are encoded behind their neighbours, decided from a library and a store; and when none are."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from blend.config import RagConfig
from blend.errors import Closed, TierUnavailable
from blend.rag.library import Library
from blend.types import Chunk
from blend_server.conditioned import Conditioned, chunk_of
from blend_server.conditioning import Conditioning, Counts
from blend_server.engines import ConditioningEngine
from blend_server.ingestion import Ingestion
from blend_server.worker import Worker
from tests.rag.words import ByteTokenizer, WordEmbedder

TAG = "00" * 9


class Stored:
    """An engine's store, without its engine."""

    def __init__(self) -> None:
        self.variants: dict[str, tuple[str, ...]] = {}
        self.tag = TAG

    def content_key(self, chunk: Chunk, *, namespace: str) -> str:
        return hashlib.blake2b(repr(chunk.token_ids).encode(), digest_size=11).hexdigest() + self.tag

    def behind(self, chunk: Chunk, *, namespace: str) -> tuple[str, ...]:
        return self.variants.get(self.content_key(chunk, namespace=namespace), ())

    def forget(self, key: str) -> None:
        self.variants = {k: behind for k, behind in self.variants.items() if key not in (k, *behind)}

    def longest_neighbour(self, tokens: int) -> int:
        return 1000 - tokens


@pytest.fixture
def stored() -> Stored:
    return Stored()


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library(tmp_path / "library", RagConfig(chunk_tokens=64), ByteTokenizer(), WordEmbedder()) as opened:
        yield opened


@pytest.fixture
def ingest(library: Library, stored: Stored) -> Callable[[str, str], None]:
    """Stores a document of one chunk."""

    def done(name: str, text: str) -> None:
        prepared = library.embed(library.prepare(name, None, text))
        orphans = library.commit(
            prepared, [stored.content_key(chunk, namespace="default") for chunk in prepared.chunks]
        )
        for orphan in orphans:
            stored.forget(orphan.content_key)

    return done


def conditioned(library: Library, stored: Stored, count: int = 2) -> Conditioned:
    return Conditioned(library, cast(ConditioningEngine, stored), count)


def work_off(chunks: Conditioned, stored: Stored) -> dict[str, list[str]]:
    """Encode all that wait; returns the documents that each document's chunk was encoded behind."""
    encoded = {}
    chunks.follow()
    while chunks.waiting:
        if (one := chunks.next) is None:
            chunks.look()
            continue
        encoded[one.chunk.document_id] = [other.document_id for other in one.neighbours]
        stored.variants[one.chunk.content_key] = tuple(other.content_key for other in one.neighbours)
        chunks.settle(one, True)
    return encoded


def test_each_chunk_is_encoded_once(library: Library, stored: Stored, ingest: Callable[[str, str], None]) -> None:
    for name in ("one", "two", "three"):
        ingest(name, f"red green blue {name}")
    chunks = conditioned(library, stored)
    encoded = work_off(chunks, stored)
    assert {name: set(behind) for name, behind in encoded.items()} == {
        "one": {"two", "three"},
        "two": {"one", "three"},
        "three": {"one", "two"},
    }
    assert (chunks.conditioned, chunks.waiting) == (3, 0)
    assert work_off(chunks, stored) == {}
    assert work_off(conditioned(library, stored), stored) == {}, "the store tells what is there"


def test_one_alone_has_nothing_to_stand_behind(
    library: Library, stored: Stored, ingest: Callable[[str, str], None]
) -> None:
    chunks = conditioned(library, stored)
    assert work_off(chunks, stored) == {}
    ingest("one", "red green blue one")
    assert work_off(chunks, stored) == {}
    assert (chunks.conditioned, chunks.waiting) == (0, 0)
    ingest("two", "red green blue two")
    assert work_off(chunks, stored) == {"one": ["two"], "two": ["one"]}


def test_a_new_document_leaves_those_alone_whose_neighbours_are_still_near(
    library: Library, stored: Stored, ingest: Callable[[str, str], None]
) -> None:
    for name in ("one", "two", "three"):
        ingest(name, f"red green blue {name}")
    chunks = conditioned(library, stored)
    work_off(chunks, stored)
    ingest("four", "red green blue four")
    assert set(work_off(chunks, stored)) == {"four"}
    assert chunks.conditioned == 4


def test_a_chunk_whose_neighbours_are_no_longer_near_is_encoded_again(
    library: Library, stored: Stored, ingest: Callable[[str, str], None]
) -> None:
    ingest("one", "red green blue one")
    for name in ("far", "farther"):
        ingest(name, f"{name} {name} {name} away")
    chunks = conditioned(library, stored)
    work_off(chunks, stored)
    for name in ("two", "three"):
        ingest(name, f"red green blue {name}")
    encoded = work_off(chunks, stored)
    assert set(encoded["one"]) == {"two", "three"} and "far" not in encoded


def test_what_stood_behind_a_document_that_went_is_encoded_behind_others(
    library: Library, stored: Stored, ingest: Callable[[str, str], None]
) -> None:
    for name in ("one", "two", "three", "four"):
        ingest(name, f"red green blue {name}")
    chunks = conditioned(library, stored)
    before = work_off(chunks, stored)
    for orphan in library.delete("two"):
        stored.forget(orphan.content_key)
    encoded = work_off(chunks, stored)
    assert set(encoded) == {name for name, behind in before.items() if "two" in behind and name != "two"} != set()
    assert all("two" not in behind for behind in encoded.values()) and chunks.conditioned == 3


def test_a_variant_that_could_not_be_forgotten_yet_is_encoded_behind_others_all_the_same(
    library: Library, stored: Stored, ingest: Callable[[str, str], None]
) -> None:
    for name in ("one", "two", "three"):
        ingest(name, f"red green blue {name}")
    chunks = conditioned(library, stored)
    work_off(chunks, stored)
    library.delete("two")
    assert work_off(chunks, stored) == {"one": ["three"], "three": ["one"]}


def test_a_replaced_document_keeps_what_stays_the_same(
    library: Library, stored: Stored, ingest: Callable[[str, str], None]
) -> None:
    texts = [f"red green blue {name} and a long row of words" for name in ("one", "two", "three")]
    ingest("all", "\n\n".join(texts))
    chunks = conditioned(library, stored)
    work_off(chunks, stored)
    before = dict(stored.variants)
    assert len(before) == 3
    ingest("all", "\n\n".join([*texts, "something else entirely, and a long row of words"]))
    assert len(library.chunks_of("all")) == 4
    assert work_off(chunks, stored).keys() == {"all"}
    assert {key: stored.variants[key] for key in before} == before and len(stored.variants) == 4


def test_documents_of_another_model_are_left_out_until_they_are_processed_again(
    library: Library, stored: Stored, ingest: Callable[[str, str], None]
) -> None:
    ingest("one", "red green blue one")
    ingest("two", "red green blue two")
    stored.tag = "11" * 9
    chunks = conditioned(library, stored)
    ingest("three", "red green blue three")
    assert work_off(chunks, stored) == {} and chunks.conditioned == 0
    for name in ("one", "two"):
        ingest(name, f"red green blue {name}")  # unchanged, with other keys
    assert set(work_off(chunks, stored)) >= {"one", "two"}


def test_a_fault_half_way_loses_nothing(
    library: Library, stored: Stored, ingest: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two", "three"):
        ingest(name, f"red green blue {name}")
    chunks = conditioned(library, stored)
    work_off(chunks, stored)
    for orphan in library.delete("two"):
        stored.forget(orphan.content_key)
    ingest("four", "red green blue four")

    def failing(*_: object) -> Any:
        raise TierUnavailable("no such device")

    with monkeypatch.context() as broken:
        broken.setattr(library.neighbours, "around", failing)
        with pytest.raises(TierUnavailable):
            chunks.follow()
    work_off(chunks, stored)
    assert {key for behind in stored.variants.values() for key in behind} == set(stored.variants)
    assert chunks.conditioned == 3


def test_what_is_postponed_comes_last(library: Library, stored: Stored, ingest: Callable[[str, str], None]) -> None:
    for name in ("one", "two", "three"):
        ingest(name, f"red green blue {name}")
    chunks = conditioned(library, stored)
    chunks.follow()
    chunks.look()
    first = chunks.next
    assert first is not None
    chunks.postpone(first)
    assert chunks.next is not first and chunks.waiting == 3
    chunks.settle(first, False)
    assert chunks.waiting == 3, "it is looked at again"


def test_nothing_is_encoded_for_a_chunk_that_has_gone_by_then() -> None:
    here, encoded = {"one", "two"}, list[list[str]]()
    library = SimpleNamespace(namespace="default", references=lambda key: int(key in here))

    def encode(keys: list[str]) -> str:
        encoded.append(keys)
        return "done"

    async def asked() -> list[Any]:
        worker = Worker("conditioned", 1)
        nothing: Any = None
        ingestion = Ingestion(nothing, cast(Any, library), worker, nothing, nothing, lambda: None)
        answers: list[Any] = []
        for keys in (["one", "two"], ["one", "three"]):
            answers.append(await ingestion.in_idle_time(keys, partial(encode, keys)))
        await ingestion.close()
        with pytest.raises(Closed):
            await ingestion.in_idle_time(["one"], partial(encode, ["one"]))
        await worker.close()
        return answers

    assert asyncio.run(asked()) == ["done", None]
    assert encoded == [["one", "two"]]


def test_an_engine_that_cannot_is_told_once_and_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "blend_server"):
        idle = Conditioning(cast(Any, SimpleNamespace()), 3)
        off = Conditioning(cast(Any, SimpleNamespace()), 0)
    assert caplog.messages == ["event=neighbours_ignored neighbours=3 reason=engine"]
    for one in (idle, off):
        assert one.stats() is None and one.counts("default") == Counts(0, 0)


def test_a_chunk_goes_to_the_engine_as_its_tokens(library: Library, ingest: Callable[[str, str], None]) -> None:
    ingest("one", "red")
    (row,) = library.chunks_of("one")
    assert chunk_of(row) == Chunk(row.token_ids)
