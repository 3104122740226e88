"""When the clients try again, how often and after how long: against a server that fails as it is told."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, TypeAlias

import grpc
import pytest

from blend.errors import InvalidInput
from blend.types import Answer
from blend_server.client import Document, Retries, ServiceError
from blend_server.proto.blend.v1 import blend_pb2 as pb
from tests.server.scripted import EXHAUSTED, UNAVAILABLE, Awaiting, Blocking, Fault, Scripted, Serving

Make: TypeAlias = "Callable[..., Blocking]"

READS = {
    "stats": ("GetStats", ()),
    "get": ("GetDocument", ("a",)),
    "documents": ("ListDocuments", ()),
    "retrieve": ("Retrieve", ("When?",)),
}
FINAL = [code for code in grpc.StatusCode if code not in (grpc.StatusCode.OK, UNAVAILABLE)]


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    made = Serving()
    yield made
    made.close()


@pytest.fixture
def told(serving: Serving) -> Scripted:
    """The server, which nothing has been told yet."""
    serving.told.__init__()  # type: ignore[misc]
    return serving.told


@pytest.fixture(params=[Blocking, Awaiting])
def make(request: pytest.FixtureRequest, serving: Serving, told: Scripted) -> Iterator[Make]:
    """Makes clients of either kind."""
    made: list[Blocking] = []

    def client(**options: Any) -> Blocking:
        made.append(request.param(serving.address, **options))
        return made[-1]

    yield client
    for one in made:
        one.close()


def within(waits: list[float], bounds: list[tuple[float, float]]) -> bool:
    return len(waits) == len(bounds) and all(a <= w <= b for w, (a, b) in zip(waits, bounds, strict=True))


def documents(names: str) -> list[Document]:
    return [Document(name, "text") for name in names]


def ends(progress: Iterable[pb.IngestProgress]) -> list[tuple[int, str, str | None]]:
    return [(p.index, p.document_id, p.WhichOneof("stage")) for p in progress]


# ------------------------------------------------------------------------------------------- single calls


@pytest.mark.parametrize("method", READS)
def test_a_read_is_tried_again_after_longer_and_longer_waits(method: str, make: Make, told: Scripted) -> None:
    rpc, arguments = READS[method]
    told.script[rpc].extend([Fault(UNAVAILABLE)] * 3)
    client = make(retries=Retries(attempts=4, base=1.0, most=3.0))
    assert client(method, *arguments)
    assert told.count(rpc) == 4
    assert within(client.waits, [(0.0, 1.0), (0.0, 2.0), (0.0, 3.0)])


def test_waits_are_drawn_anew(make: Make, told: Scripted) -> None:
    client = make()
    for _ in range(5):
        told.script["GetStats"].append(Fault(UNAVAILABLE))
        client("stats")
    assert len(set(client.waits)) == 5


def test_there_are_only_so_many_tries(make: Make, told: Scripted) -> None:
    told.script["GetStats"].extend([Fault(UNAVAILABLE)] * 9)
    client = make(retries=Retries(attempts=3))
    with pytest.raises(ServiceError, match="as told") as raised:
        client("stats")
    assert (raised.value.code, told.count("GetStats"), len(client.waits)) == ("UNAVAILABLE", 3, 2)


def test_without_retries_there_is_one_try(make: Make, told: Scripted) -> None:
    told.script["GetStats"].append(Fault(UNAVAILABLE))
    client = make(retries=Retries.none())
    with pytest.raises(ServiceError):
        client("stats")
    assert (told.count("GetStats"), client.waits) == (1, [])


@pytest.mark.parametrize("code", FINAL, ids=lambda code: code.name)
@pytest.mark.parametrize(("method", "rpc"), [("get", "GetDocument"), ("ask", "Answer"), ("delete", "DeleteDocument")])
def test_what_would_fail_again_is_not_tried_again(
    method: str, rpc: str, code: grpc.StatusCode, make: Make, told: Scripted
) -> None:
    told.script[rpc].append(Fault(code))
    client = make()
    with pytest.raises(ServiceError) as raised:
        client(method, "a")
    assert (raised.value.code, told.count(rpc), client.waits) == (code.name, 1, [])


@pytest.mark.parametrize(("method", "rpc"), [("stats", "GetStats"), ("ask", "Answer")])
def test_a_servers_hint_is_waited_for(method: str, rpc: str, make: Make, told: Scripted) -> None:
    told.script[rpc].extend([Fault(EXHAUSTED, hint=2.0), Fault(UNAVAILABLE, hint=4.0)])
    client = make(retries=Retries(base=0.5))
    client(method, *(["When?"] if method == "ask" else []))
    assert told.count(rpc) == 3
    assert within(client.waits, [(2.0, 2.5), (4.0, 5.0)])


def test_no_try_begins_after_the_policys_time_or_the_calls(make: Make, told: Scripted) -> None:
    for options in ({"retries": Retries(total=6.0)}, {"timeout": 6.0}):
        told.script["GetStats"].extend([Fault(EXHAUSTED, hint=4.0), Fault(EXHAUSTED, hint=4.0)])
        client = make(**options)
        with pytest.raises(ServiceError) as raised:
            client("stats")
        assert (raised.value.code, raised.value.retry_seconds, len(client.waits)) == ("RESOURCE_EXHAUSTED", 4.0, 1)
        told.script["GetStats"].clear()


def test_all_tries_share_the_calls_time(make: Make, told: Scripted) -> None:
    told.script["GetStats"].append(Fault(EXHAUSTED, hint=20.0))
    make(timeout=30.0, retries=Retries(base=0.0))("stats")
    first, second = (left or 0.0 for left in told.left)
    assert first - second == pytest.approx(20, abs=2)


def test_a_repeated_delete_that_finds_nothing_may_have_been_done_before(make: Make, told: Scripted) -> None:
    missing = Fault(grpc.StatusCode.NOT_FOUND)
    client = make()
    assert client("delete", "a") == 3
    told.script["DeleteDocument"].extend([Fault(UNAVAILABLE), missing])
    assert client("delete", "a") == 0
    for before in ([], [Fault(EXHAUSTED, hint=1.0)]):  # neither of these did anything
        told.script["DeleteDocument"].extend([*before, missing])
        with pytest.raises(ServiceError) as raised:
            client("delete", "a")
        assert raised.value.code == "NOT_FOUND"


# ----------------------------------------------------------------------------------------------- answers


def test_an_answer_is_tried_again_before_its_first_event(make: Make, told: Scripted) -> None:
    told.script["Answer"].extend([Fault(UNAVAILABLE)] * 2)
    client = make()
    *_, answer = client("answer", "When?")
    assert isinstance(answer, Answer) and answer.text == "yes"
    assert (told.count("Answer"), len(client.waits)) == (3, 2)


@pytest.mark.parametrize("fault", [Fault(UNAVAILABLE, after=1), Fault(EXHAUSTED, hint=1.0, after=2)])
def test_an_answer_is_not_begun_again_once_something_came(fault: Fault, make: Make, told: Scripted) -> None:
    told.script["Answer"].append(fault)
    client, seen = make(), list[Any]()
    with pytest.raises(ServiceError) as raised:
        client("answer", "When?", into=seen)
    assert (raised.value.code, len(seen)) == (fault.code.name, fault.after)
    assert (told.count("Answer"), client.waits) == (1, [])


def test_an_answers_timeout_is_its_deadline(make: Make, told: Scripted) -> None:
    client = make(timeout=5.0)
    client("ask", "When?", timeout=50.0)
    client("ask", "When?")
    first, second = (left if left is not None and left < 1e9 else math.inf for left in told.left)
    assert 40 < first < 60
    assert second == math.inf
    for timeout in (0, -1, math.nan, math.inf):
        with pytest.raises(InvalidInput, match="timeout"):
            client("ask", "When?", timeout=timeout)


# --------------------------------------------------------------------------------------------- ingestion


@pytest.mark.parametrize("fault", [Fault(UNAVAILABLE, after=2), Fault(EXHAUSTED, hint=1.0, after=2)])
def test_an_ingestion_goes_on_with_what_has_no_answer(fault: Fault, make: Make, told: Scripted) -> None:
    told.script["Ingest"].append(fault)
    client = make()
    assert ends(client("ingest", documents("abcd"))) == [(n, name, "stored") for n, name in enumerate("abcd")]
    assert told.received == [["a", "b"], ["c", "d"]]
    assert len(client.waits) == 1


def test_an_ingestion_that_gets_on_has_its_tries_anew(make: Make, told: Scripted) -> None:
    told.script["Ingest"].extend([Fault(UNAVAILABLE, after=1)] * 5)
    client = make(retries=Retries(attempts=2))
    assert [name for _, name, _ in ends(client("ingest", documents("abcdef")))] == list("abcdef")


def test_an_ingestion_that_does_not_get_on_fails(make: Make, told: Scripted) -> None:
    told.script["Ingest"].extend([Fault(UNAVAILABLE, after=1), *[Fault(UNAVAILABLE)] * 9])
    client, seen = make(retries=Retries(attempts=3)), list[Any]()
    with pytest.raises(ServiceError):
        client("ingest", documents("ab"), into=seen)
    assert (len(seen), told.count("Ingest")) == (1, 3)


def test_an_ingestion_is_not_tried_again_where_that_is_no_use(make: Make, told: Scripted) -> None:
    told.script["Ingest"].append(Fault(EXHAUSTED, after=1))
    client = make()
    with pytest.raises(ServiceError):
        client("ingest", documents("a"))
    assert (told.count("Ingest"), client.waits) == (1, [])


def test_refused_documents_keep_their_places_through_all_tries(make: Make, told: Scripted) -> None:
    told.script["Ingest"].append(Fault(UNAVAILABLE, after=1))
    sent = [Document("a", "text"), Document("big", "x" * 2000), Document("c", "text"), Document("bad", "\ud800")]
    found = ends(make()("ingest", sent))
    assert sorted(found) == [(0, "a", "stored"), (1, "big", "failed"), (2, "c", "stored"), (3, "bad", "failed")]


def test_a_document_that_comes_while_there_is_no_connection_is_not_lost(make: Make, told: Scripted) -> None:
    """The second document is awaited on the first stream, and comes once the second one has begun."""
    told.script["Ingest"].append(Fault(UNAVAILABLE, after=1))
    first, *others = documents("abc")

    def second_stream() -> None:
        assert told.streams.acquire(timeout=20)
        assert told.streams.acquire(timeout=20)

    def slow() -> Iterator[Document]:
        yield first
        second_stream()
        yield from others

    async def slow_async() -> AsyncIterator[Document]:
        yield first
        await asyncio.to_thread(second_stream)
        for document in others:
            yield document

    client = make()
    source = slow_async() if isinstance(client, Awaiting) else slow()
    assert ends(client("ingest", source)) == [(n, name, "stored") for n, name in enumerate("abc")]
    assert told.received == [["a"], ["b", "c"]]


def test_what_the_documents_raise_comes_out_after_all_tries(make: Make, told: Scripted) -> None:
    told.script["Ingest"].append(Fault(UNAVAILABLE, after=1))

    def broken() -> Iterator[Document]:
        yield from documents("ab")
        raise LookupError("no more")

    seen: list[Any] = []
    with pytest.raises(LookupError, match="no more"):
        make()("ingest", broken(), into=seen)
    assert [name for _, name, _ in ends(seen)] == ["a", "b"]


# ------------------------------------------------------------------------------------------------ policy


def test_every_try_has_the_token(make: Make, told: Scripted) -> None:
    client = make(token="blend.a.secret")
    for method, rpc, arguments in (
        ("stats", "GetStats", ()),
        ("ask", "Answer", ("When?",)),
        ("ingest", "Ingest", (documents("a"),)),
    ):
        told.script[rpc].append(Fault(UNAVAILABLE))
        client(method, *arguments)
    assert len(told.metadata) == 7  # an ingestion asks for the limits first
    assert {sent["authorization"] for sent in told.metadata} == {"Bearer blend.a.secret"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attempts", 0),
        ("attempts", 101),
        ("attempts", 1.5),
        ("attempts", True),
        ("base", -1.0),
        ("base", math.nan),
        ("most", 0.1),
        ("total", -1.0),
        ("total", math.inf),
    ],
)
def test_a_policy_out_of_range_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=field):
        Retries(**{field: value})  # type: ignore[arg-type]
