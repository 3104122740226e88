"""Documents in, answers out: the service with a real engine and library, over real connections."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from time import sleep
from typing import Any

import pytest

from blend.engine import Engine
from blend.model.tokenizer import Detokenizer
from blend.rag.library import Library
from blend.serving.job import Job
from blend.serving.scheduler import Scheduler
from blend.types import Answer, Plan, Sampling, Token
from blend_server.client import Client, Document, Retries, ServiceError
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.server import BlendServer

FERRY = Document("harbour/ferry.md", "The ferry leaves the north pier at nine. It carries forty cars. " * 4, "Ferry")
LIGHT = Document("light", "The lighthouse was built in 1888. Its lamp is seen for twenty miles.", "Lighthouse")
QUERY = Plan("query", 0.15)


def stages(progress: Iterable[pb.IngestProgress]) -> list[tuple[int, str, str]]:
    return [(p.index, p.document_id, p.WhichOneof("stage") or "") for p in progress]


def outcomes(client: Client, *documents: Document) -> list[pb.IngestProgress]:
    """The last stage of each document."""
    last = {"stored", "unchanged", "failed"}
    return [p for p in client.ingest(documents) if p.WhichOneof("stage") in last]


def objects(client: Client) -> dict[str, int]:
    return {tier.name: tier.objects for tier in client.stats().engine.tiers}


# ------------------------------------------------------------------------------------------------ documents


def test_a_document_goes_through_all_stages_in_order(client: Client) -> None:
    progress = list(client.ingest([FERRY]))
    names = [p.WhichOneof("stage") for p in progress]
    chunks = progress[0].chunked.chunks
    assert chunks > 1
    assert names == ["chunked", "embedded", *["computed"] * (chunks + 1), "stored"]
    assert [(p.computed.done, p.computed.total) for p in progress[2:-1]] == [(n, chunks) for n in range(chunks + 1)]
    assert progress[-1].stored.chunks == progress[-1].stored.computed_chunks == chunks
    assert progress[-1].stored.reused_chunks == 0
    assert {(p.index, p.document_id) for p in progress} == {(0, FERRY.id)}


def test_the_same_document_again_costs_nothing(client: Client) -> None:
    outcomes(client, FERRY)
    before = client.stats().engine.details["counters"]["precomputed"]
    assert stages(client.ingest([FERRY])) == [(0, FERRY.id, "unchanged")]
    assert client.stats().engine.details["counters"]["precomputed"] == before


def test_a_changed_document_replaces_the_old_one_and_its_kv(client: Client) -> None:
    (first,) = outcomes(client, LIGHT)
    changed = Document(LIGHT.id, "The lighthouse was built in 1902.", LIGHT.title)
    (second,) = outcomes(client, changed)
    assert second.stored.dropped_chunks == first.stored.chunks
    assert client.get(LIGHT.id).content_bytes == len(changed.content)
    assert [d.id for d in client.documents()] == [LIGHT.id]
    assert [p.text for p in client.retrieve("When was it built?")] == [changed.content]
    assert objects(client)["disk"] == second.stored.chunks


def test_chunks_that_another_document_shares_stay(client: Client) -> None:
    twin = Document("twin", FERRY.content, FERRY.title)
    first, second = outcomes(client, FERRY, twin)
    stored = objects(client)["disk"]
    assert second.stored.chunks == first.stored.chunks
    assert client.delete(FERRY.id) == 0
    assert objects(client)["disk"] == stored
    assert client.delete("twin") == stored
    assert objects(client)["disk"] == 0


def test_a_deleted_document_is_gone(client: Client) -> None:
    outcomes(client, FERRY, LIGHT)
    assert client.delete(FERRY.id) > 0
    assert {p.document_id for p in client.retrieve("When does the ferry leave?", k=10)} == {LIGHT.id}
    with pytest.raises(ServiceError, match="no such document") as raised:
        client.get(FERRY.id)
    assert raised.value.code == "NOT_FOUND"
    assert raised.value.kind == "NotFound"
    assert raised.value.request_id


def test_documents_are_listed_in_pages_by_id(client: Client) -> None:
    ids = [f"page/{n:02}" for n in range(7)]
    outcomes(client, *(Document(name, f"Fact number {n}.") for n, name in enumerate(reversed(ids))))
    assert [d.id for d in client.documents(page_size=3)] == ids
    assert [d.id for d in client.documents()] == ids


def test_a_document_has_its_figures(client: Client) -> None:
    outcomes(client, LIGHT)
    info = client.get(LIGHT.id)
    assert (info.id, info.title, info.chunks) == (LIGHT.id, LIGHT.title, 1)
    assert info.content_bytes == len(LIGHT.content)
    assert len(info.sha256) == 64
    assert info.created_at.ToDatetime() <= info.updated_at.ToDatetime()


def test_one_bad_document_does_not_end_the_stream(client: Client) -> None:
    seen = outcomes(client, LIGHT, Document("empty", ""), FERRY)
    assert stages(seen) == [(0, LIGHT.id, "stored"), (1, "empty", "failed"), (2, FERRY.id, "stored")]
    assert seen[1].failed.code == "INVALID_ARGUMENT"


def test_a_fault_in_one_document_is_internal_and_hides_the_text(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compute = Engine.precompute

    def broken(engine: Engine, chunks: Any, *args: Any, **options: Any) -> list[str]:
        text = engine.tokenizer.decode(chunks[0].token_ids)
        if "unlucky" in text:
            raise RuntimeError(f"cannot compute {text}")
        return compute(engine, chunks, *args, **options)

    monkeypatch.setattr(Engine, "precompute", broken)
    with caplog.at_level(logging.INFO):
        bad, good = outcomes(client, Document("bad", "An unlucky text."), LIGHT)
    assert bad.failed.code == "INTERNAL"
    incident = bad.failed.message.rpartition(" ")[2]
    assert f"incident={incident}" in caplog.text
    assert "unlucky" not in caplog.text + bad.failed.message
    assert good.WhichOneof("stage") == "stored"
    assert [d.id for d in client.documents()] == [LIGHT.id]


def test_no_text_is_logged(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        outcomes(client, Document("notes", "The password is tungsten.", "On tungsten"), Document("bad", b"tungsten\0"))
        client.ask("What about tungsten?", plan=QUERY)
        with pytest.raises(ServiceError):
            client.ask("tungsten? " * 3000)
    assert "rpc=Ingest" in caplog.text
    assert "rpc=Answer" in caplog.text
    assert "tungsten" not in caplog.text


def test_kv_stays_that_a_document_being_ingested_will_need(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document goes with its chunks while another one with the same first chunk is on its way in."""
    outcomes(client, FERRY)
    longer = Document("longer", FERRY.content + "A second boat sails at dusk, in summer only. " * 3, FERRY.title)
    reached, go_on = threading.Event(), threading.Event()
    compute = Engine.precompute

    def slow(engine: Engine, chunks: Any, *args: Any, **options: Any) -> list[str]:
        reached.set()
        go_on.wait(20)
        return compute(engine, chunks, *args, **options)

    monkeypatch.setattr(Engine, "precompute", slow)
    seen: list[pb.IngestProgress] = []
    ingestion = threading.Thread(target=lambda: seen.extend(client.ingest([longer])))
    ingestion.start()
    assert reached.wait(20)
    threading.Timer(0.5, go_on.set).start()  # a deletion that wanted the engine would wait for this
    client.delete(FERRY.id)
    go_on.set()
    ingestion.join()

    reused = [p.computed.reused for p in seen if p.WhichOneof("stage") == "computed"]
    assert reused[0] > 0
    report = client.ask("When does the ferry leave?", k=10, plan=QUERY).report
    assert {chunk.outcome for chunk in report.chunks} == {"hit"}


def test_what_the_documents_raise_is_raised_after_the_progress_before(client: Client) -> None:
    def broken() -> Iterable[Document]:
        yield LIGHT
        raise LookupError("no more")

    seen: list[str] = []

    def run() -> None:
        seen.extend(p.WhichOneof("stage") or "" for p in client.ingest(broken()))

    with pytest.raises(LookupError, match="no more"):
        run()
    assert [d.id for d in client.documents()] == [LIGHT.id]


# ------------------------------------------------------------------------------------------------ questions


def test_an_answer_streams_passages_tokens_and_a_report(client: Client) -> None:
    outcomes(client, FERRY, LIGHT)
    passages, *tokens, answer = list(client.answer("When does the ferry leave?", k=2, plan=QUERY, max_new_tokens=5))
    assert isinstance(passages, pb.Passages)
    assert isinstance(answer, Answer)
    assert passages.passages[0].document_id == FERRY.id
    assert passages.retrieve_ms > 0
    assert tuple(t.token_id for t in tokens if isinstance(t, Token)) == answer.token_ids
    assert answer.text.startswith("".join(t.text for t in tokens if isinstance(t, Token)))
    assert len(answer.token_ids) <= 5

    report = answer.report
    assert report.mode == "query"
    assert [chunk.tokens for chunk in report.chunks] == [p.tokens for p in passages.passages]
    assert {chunk.outcome for chunk in report.chunks} == {"hit"}
    assert {chunk.tier for chunk in report.chunks} <= {"host", "disk"}
    assert report.cached + report.mandatory == report.tokens
    assert 0 < report.selected_ratio <= 0.16
    assert report.timings.ttft >= report.timings.queue
    assert report.recomputed_positions is None
    assert report.comparison is None


def test_a_comparison_and_positions_come_on_request(client: Client) -> None:
    outcomes(client, FERRY)
    answer = client.ask("When?", plan=Plan("query", 1.0), compare_full=True, positions=True)
    assert answer.report.comparison is not None
    assert answer.report.comparison.top1_agrees
    assert answer.report.comparison.first_token_kl < 1e-4
    assert answer.report.speedup > 0
    assert answer.report.recomputed_positions is not None
    assert len(answer.report.recomputed_positions) == answer.report.tokens


def test_every_served_method_answers(client: Client) -> None:
    outcomes(client, FERRY)
    for method in ("auto", "full", "prefix", "reuse", "random", "head", "deviation", "query"):
        assert client.ask("When?", plan=Plan(method), max_new_tokens=1).report.mode


def test_a_seed_sets_the_order_of_the_passages(client: Client) -> None:
    outcomes(client, *(Document(f"d{n}", f"Pier {n} is open on day {n}.") for n in range(8)))

    def order(seed: int | None) -> list[str]:
        events = client.answer("Which pier?", k=8, plan=QUERY, max_new_tokens=1, passage_order_seed=seed)
        first = next(events)
        events.close()
        assert isinstance(first, pb.Passages)
        return [p.document_id for p in first.passages]

    best_first = order(None)
    assert best_first == [p.document_id for p in client.retrieve("Which pier?", k=8)]
    assert order(3) == order(3)
    assert sorted(order(3)) == sorted(best_first)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


def test_retrieved_passages_come_best_first(client: Client) -> None:
    outcomes(client, FERRY, LIGHT)
    found = client.retrieve("In what year was the lighthouse built?", k=2)
    assert found[0].document_id == LIGHT.id
    assert found[0].score > found[1].score
    assert (found[0].title, found[0].ordinal) == (LIGHT.title, 0)
    assert found[0].tokens > 0


def watch(monkeypatch: pytest.MonkeyPatch) -> list[Future[Answer]]:
    """What becomes of each answer that is begun from now on."""
    begun: list[Future[Answer]] = []
    submit = Scheduler.submit

    def submitted(scheduler: Scheduler, job: Job[Any]) -> Job[Any]:
        if job.room is not None:
            begun.append(job.done)
        return submit(scheduler, job)

    monkeypatch.setattr(Scheduler, "submit", submitted)
    return begun


def test_a_client_that_leaves_ends_the_generation(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes(client, LIGHT)
    begun = watch(monkeypatch)
    events = client.answer("When?", plan=QUERY, max_new_tokens=1500)
    next(events)
    next(events)
    events.close()
    answer = begun[0].result(60)
    assert answer.finish_reason == "cancelled"
    assert len(answer.token_ids) < 1500


def test_a_short_answer_does_not_wait_for_a_long_one(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes(client, FERRY, LIGHT)
    long, short = {"plan": QUERY, "k": 2, "max_new_tokens": 400}, {"plan": Plan("full"), "k": 1, "max_new_tokens": 3}
    alone = [client.ask("When does it leave?", **long), client.ask("Who?", **short)]
    assert len(alone[0].token_ids) > 50

    begun = watch(monkeypatch)
    events = client.answer("When does it leave?", **long)
    next(events)
    next(events)
    beside = client.ask("Who?", **short)
    assert not begun[0].done()
    *_, last = events
    assert isinstance(last, Answer)
    assert [last.token_ids, beside.token_ids] == [answer.token_ids for answer in alone]


def test_sampling_is_by_request_and_its_usage_is_told(client: Client) -> None:
    outcomes(client, LIGHT)
    sampling = Sampling(temperature=1.5, top_p=0.99, top_k=200, seed=5, max_new_tokens=40)
    first, again = (client.ask("When?", plan=QUERY, sampling=sampling) for _ in range(2))
    assert first.token_ids == again.token_ids != client.ask("When?", plan=QUERY, max_new_tokens=40).token_ids
    stop = first.text[3:5]
    *_, stopped = client.answer("When?", plan=QUERY, sampling=replace(sampling, stop=(stop,)))
    assert isinstance(stopped, Answer)
    assert stopped.finish_reason == "stop"
    assert stopped.text == first.text[: first.text.find(stop)]


def slow_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on each token of an answer takes a while."""
    push = Detokenizer.push

    def slow(stream: Detokenizer, token_id: int) -> str:
        sleep(0.01)
        return push(stream, token_id)

    monkeypatch.setattr(Detokenizer, "push", slow)


def test_an_answer_that_is_not_complete_at_its_deadline_ends_there(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(client, LIGHT)
    client.ask("When?", max_new_tokens=1)
    slow_tokens(monkeypatch)
    answer = client.ask("When?", max_new_tokens=1500, timeout=3.0)
    assert answer.finish_reason == "deadline"
    assert 0 < len(answer.token_ids) < 1500


def test_the_prompt_comes_token_by_token_on_request(client: Client) -> None:
    outcomes(client, FERRY, LIGHT)
    found, *_, prompt, answer = client.answer("When does the ferry leave?", k=2, plan=QUERY, tokens=True)
    assert isinstance(found, pb.Passages) and isinstance(prompt, pb.PromptTokens) and isinstance(answer, Answer)
    assert len(prompt.texts) == answer.report.tokens
    segments = list(prompt.segments)
    assert [s.start for s in segments] == [sum(s.tokens for s in segments[:n]) for n in range(len(segments))]
    chunks = [s for s in segments if s.kind == pb.SEGMENT_KIND_CHUNK]
    assert [(s.start, s.tokens) for s in chunks] == [(c.start, c.tokens) for c in answer.report.chunks]
    for segment, passage in zip(chunks, found.passages, strict=True):
        assert passage.text in "".join(prompt.texts[segment.start : segment.start + segment.tokens])
    assert {s.kind for s in (segments[0], segments[-1])} == {pb.SEGMENT_KIND_TEXT}
    assert "When does the ferry leave?" in "".join(prompt.texts[segments[-1].start :])
    assert not any(isinstance(event, pb.PromptTokens) for event in client.answer("When?", plan=QUERY))


def test_the_time_to_first_token_counts_from_the_request_on(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes(client, LIGHT)
    find = Library.retrieve

    def slow(*arguments: Any) -> Any:
        sleep(0.1)
        return find(*arguments)

    monkeypatch.setattr(Library, "retrieve", slow)
    passages, *_, answer = client.answer("When?", plan=QUERY, max_new_tokens=1)
    assert isinstance(passages, pb.Passages)
    assert isinstance(answer, Answer)
    assert answer.report.timings.ttft > passages.retrieve_ms >= 100


# ---------------------------------------------------------------------------------------------------- stats


def test_stats_have_corpus_engine_tiers_and_limits(client: Client, tiny_server: BlendServer) -> None:
    outcomes(client, FERRY, LIGHT)
    client.ask("When?", plan=QUERY)
    stats = client.stats()
    assert stats.version
    assert (stats.corpus.documents, stats.corpus.outdated) == (2, 0)
    assert stats.corpus.content_bytes == len(FERRY.content) + len(LIGHT.content)
    assert stats.corpus.chunks == sum(d.chunks for d in client.documents())
    assert stats.corpus.tokens > stats.corpus.chunks
    assert (stats.engine.layers, stats.engine.dtype, stats.engine.device) == (4, "float32", "cpu")
    assert stats.engine.requests > 0
    assert stats.engine.details["max_positions"] == stats.limits.context_tokens == 2048
    assert [t.name for t in stats.engine.tiers] == ["host", "disk"]
    assert stats.engine.tiers[1].used_bytes > 0
    assert stats.limits.max_document_bytes == tiny_server.config.rag.max_document_bytes
    assert stats.limits.default_k == 3
    assert (stats.queue.requests, stats.queue.max_queue) == (0, 64)


def test_what_reads_the_catalog_leaves_the_event_loop_alone(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    count = Library.outdated

    def watched(library: Library) -> tuple[str, ...]:
        threads.append(threading.current_thread().name)
        return count(library)

    monkeypatch.setattr(Library, "outdated", watched)
    with pytest.raises(ServiceError, match="ingest some first"):
        client.ask("When?")
    assert threads
    assert all(name.startswith("blend-library") for name in threads)


def test_an_ingestion_that_waits_for_its_client_holds_no_place(start: Callable[..., BlendServer]) -> None:
    server = start(max_queue=1)
    done = threading.Event()

    def waiting() -> Iterable[Document]:
        yield LIGHT
        done.wait(30)

    with Client(server.address) as client:
        streams = [client.ingest(waiting()) for _ in range(3)]
        for stream in streams:
            while next(stream).WhichOneof("stage") not in {"stored", "unchanged"}:
                pass
        assert client.ask("When?", plan=QUERY, max_new_tokens=1).report.tokens > 0
        assert client.stats().queue.requests == 0
        done.set()
        for stream in streams:
            list(stream)


def test_requests_that_hold_the_engine_are_counted_and_bounded(
    start: Callable[..., BlendServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(max_queue=1)
    done = threading.Event()
    embed = Library.embed

    def slow(*arguments: Any) -> Any:
        done.wait(30)
        return embed(*arguments)

    monkeypatch.setattr(Library, "embed", slow)
    with Client(server.address, retries=Retries.none()) as client:
        streams = [client.ingest([LIGHT]) for _ in range(2)]
        for stream in streams:
            next(stream)
        assert client.stats().queue.requests == 2
        with pytest.raises(ServiceError, match="1 requests wait") as raised:
            client.ask("When?")
        assert raised.value.code == "RESOURCE_EXHAUSTED"
        with pytest.raises(ServiceError) as raised:
            list(client.ingest([FERRY]))
        assert raised.value.code == "RESOURCE_EXHAUSTED"
        done.set()
        for stream in streams:
            list(stream)
        assert client.ask("When?", plan=QUERY).report.tokens > 0
