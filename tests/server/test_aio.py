"""The asynchronous client against real servers: the same values as the blocking one, many tasks, one event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from blend.config import SecurityConfig, TlsConfig
from blend.errors import InvalidInput
from blend.types import Answer, Plan, Token
from blend_server.client import AsyncClient, Client, Document, ServiceError, Tls
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.server import BlendServer
from tests.server.accounts import Accounts
from tests.server.certificates import Authority

FERRY = Document("harbour/ferry.md", "The ferry leaves the north pier at nine. It carries forty cars. " * 4, "Ferry")
LIGHT = Document("light", "The lighthouse was built in 1888.", "Lighthouse")
QUERY = Plan("query", 0.15)


def test_it_has_the_methods_of_the_blocking_client_with_their_arguments() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        public = {n: f for n, f in vars(kind).items() if inspect.isfunction(f) and not n.startswith("_")}
        return {name: list(inspect.signature(function).parameters) for name, function in public.items()}

    assert methods(AsyncClient) == methods(Client)
    assert list(inspect.signature(AsyncClient).parameters) == list(inspect.signature(Client).parameters)


async def test_documents_go_in_and_answers_come_out(client: Client, tiny_server: BlendServer) -> None:
    async def sent() -> AsyncIterator[Document]:
        yield FERRY
        await asyncio.sleep(0)
        yield LIGHT

    async with AsyncClient(tiny_server.address) as aio:
        progress = [p async for p in aio.ingest(sent())]
        ended = [(p.index, p.document_id) for p in progress if p.WhichOneof("stage") == "stored"]
        assert ended == [(0, FERRY.id), (1, LIGHT.id)]
        assert [p.WhichOneof("stage") async for p in aio.ingest([LIGHT])] == ["unchanged"]
        assert [d.id async for d in aio.documents(page_size=1)] == [FERRY.id, LIGHT.id]
        assert await aio.get(LIGHT.id) == client.get(LIGHT.id)
        assert await aio.retrieve("When?", k=2) == client.retrieve("When?", k=2)
        assert (await aio.stats()).limits == client.stats().limits

        events = [event async for event in aio.answer("When does the ferry leave?", k=2, plan=QUERY, tokens=True)]
        passages, *tokens, prompt, answer = events
        assert isinstance(passages, pb.Passages) and isinstance(prompt, pb.PromptTokens) and isinstance(answer, Answer)
        assert tuple(t.token_id for t in tokens if isinstance(t, Token)) == answer.token_ids
        assert answer.token_ids == client.ask("When does the ferry leave?", k=2, plan=QUERY).token_ids

        assert await aio.delete(FERRY.id) > 0
        with pytest.raises(ServiceError, match="no such document") as raised:
            await aio.get(FERRY.id)
        assert (raised.value.code, raised.value.kind) == ("NOT_FOUND", "NotFound")
        assert raised.value.request_id


async def test_many_tasks_share_a_client(client: Client, tiny_server: BlendServer) -> None:
    list(client.ingest([FERRY, LIGHT]))
    questions = [f"When does ferry {n} leave?" for n in range(6)]
    alone = [client.ask(question, plan=QUERY, max_new_tokens=4).token_ids for question in questions]
    async with AsyncClient(tiny_server.address) as aio:
        answers = await asyncio.gather(*(aio.ask(question, plan=QUERY, max_new_tokens=4) for question in questions))
    assert [answer.token_ids for answer in answers] == alone


async def test_whoever_leaves_early_ends_the_generation(client: Client, tiny_server: BlendServer) -> None:
    list(client.ingest([LIGHT]))
    async with AsyncClient(tiny_server.address) as aio:
        async with aclosing(aio.answer("When?", plan=QUERY, max_new_tokens=1500)) as events:
            assert isinstance(await anext(events), pb.Passages)
            assert isinstance(await anext(events), Token)
        asked = asyncio.create_task(aio.ask("When?", plan=QUERY, max_new_tokens=1500))
        await asyncio.sleep(0.2)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        while (await aio.stats()).queue.requests:
            await asyncio.sleep(0.05)
        assert (await aio.ask("When?", plan=QUERY, max_new_tokens=1)).report.tokens > 0


async def test_whoever_leaves_an_ingestion_early_lets_the_documents_go(
    client: Client, tiny_server: BlendServer
) -> None:
    closed: list[bool] = []

    async def endless() -> AsyncIterator[Document]:
        try:
            yield LIGHT
            await asyncio.sleep(3600)
            yield FERRY
        finally:
            closed.append(True)

    async with AsyncClient(tiny_server.address) as aio:
        async with aclosing(aio.ingest(endless())) as progress:
            async for told in progress:
                if told.WhichOneof("stage") == "stored":
                    break
        assert closed == [True]
        assert [d.id async for d in aio.documents()] == [LIGHT.id]


async def test_what_the_documents_raise_is_raised_after_the_progress_before(
    client: Client, tiny_server: BlendServer
) -> None:
    async def broken() -> AsyncIterator[Document]:
        yield LIGHT
        raise LookupError("no more")

    seen: list[Any] = []
    async with AsyncClient(tiny_server.address) as aio:
        with pytest.raises(LookupError, match="no more"):
            async for told in aio.ingest(broken()):
                seen.append(told.WhichOneof("stage"))
    assert seen[-1] == "stored"


def test_another_event_loop_is_refused(tiny_server: BlendServer) -> None:
    aio = AsyncClient(tiny_server.address)
    first = asyncio.new_event_loop()
    assert first.run_until_complete(aio.stats()).version
    with pytest.raises(InvalidInput, match="event loop"):
        asyncio.run(aio.stats())
    first.run_until_complete(aio.close())
    first.close()


async def test_tls_and_tokens(start: Callable[..., BlendServer], tmp_path: Path) -> None:
    authority, accounts = Authority(tmp_path, "ca"), Accounts(tmp_path / "access.yaml")
    token = accounts.token("a", "acme", "writer")
    certificate, key = authority.sign("server", "localhost")
    security = SecurityConfig(tls=TlsConfig(certificate, key), access_file=accounts.write())
    server = await asyncio.to_thread(start, security=security)
    tls = Tls(authority.path)
    async with AsyncClient(server.address, tls=tls, token=token) as aio:
        assert [p.WhichOneof("stage") async for p in aio.ingest([LIGHT])][-1] == "stored"
        assert [d.id async for d in aio.documents()] == [LIGHT.id]
        assert (await aio.ask("When?", plan=QUERY, max_new_tokens=1)).report.tokens > 0
    async with AsyncClient(server.address, tls=tls) as aio:
        with pytest.raises(ServiceError) as raised:
            await aio.stats()
        assert raised.value.code == "UNAUTHENTICATED"


def test_what_cannot_be_used_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="tls"):
        AsyncClient("blend.example:50061", token="blend.a.secret")
    with pytest.raises(InvalidInput, match=r"tls\.ca"):
        AsyncClient(tls=Tls(tmp_path / "none.pem"))
    with pytest.raises(InvalidInput, match="address"):
        AsyncClient("")
    with pytest.raises(InvalidInput, match="timeout"):
        AsyncClient(timeout=0)
