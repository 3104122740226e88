"""A tenant that asks for far more than there is: another one's answers keep coming."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from blend.config import SecurityConfig
from blend.types import Plan
from blend_server.client import Client, Document, Retries, ServiceError
from blend_server.server import BlendServer
from tests.server.accounts import Accounts
from tests.server.faults import wait_for

QUERY = Plan("query", 0.15)
LIGHT = Document("light", "The lighthouse was built in 1888. " * 8, "Lighthouse")


@pytest.mark.parametrize("quota", [None, 2])
def test_answers_keep_coming(start: Callable[..., BlendServer], tmp_path: Path, quota: int | None) -> None:
    accounts = Accounts(tmp_path / "access.yaml")
    accounts.entries["tenants"] = {} if quota is None else {"acme": {"requests": quota}}
    flooding, other = (accounts.token(name, name, "writer") for name in ("acme", "umbrella"))
    server = start(security=SecurityConfig(access_file=accounts.write()), max_queue=8)
    became: Counter[str] = Counter()
    hints: list[float | None] = []
    ended = threading.Event()

    def flood() -> None:
        with Client(server.address, token=flooding, retries=Retries.none()) as client:
            while not ended.is_set():
                try:
                    client.ask("When was it built?", plan=QUERY, max_new_tokens=60)
                    became["OK"] += 1
                except ServiceError as error:
                    became[error.code] += 1
                    hints.append(error.retry_seconds)
                    ended.wait(0.02)  # far sooner than it was told to

    with Client(server.address, token=other) as client:
        for token in (flooding, other):
            with Client(server.address, token=token) as writer:
                list(writer.ingest([LIGHT]))
        threads = [threading.Thread(target=flood) for _ in range(12)]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: became["RESOURCE_EXHAUSTED"] > 10)
            for _ in range(4):
                assert client.ask("When was it built?", plan=QUERY, max_new_tokens=8).token_ids
                assert client.retrieve("When was it built?")
            *_, last = client.ingest([Document("ferry", "The ferry leaves at nine.", "Ferry")])
            assert last.WhichOneof("stage") == "stored"
        finally:
            ended.set()
            for thread in threads:
                thread.join()
    assert set(became) <= {"OK", "RESOURCE_EXHAUSTED"}
    assert None not in hints
