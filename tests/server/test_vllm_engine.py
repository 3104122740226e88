"""The command ``blend-server --engine vllm`` with a tiny random model in a real vLLM, beside the native engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import pytest

import blend_server
from blend.types import Answer, Plan, Token
from blend_server.client import Client, Document, ServiceError
from blend_server.server import BlendServer
from tests.connector.conftest import require_vllm
from tests.server.conftest import config
from tests.tiny import save_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SIZES = dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=32)  # head sizes that vLLM has
VLLM_ARGS = {"enforce_eager": True, "max_num_batched_tokens": 512}
DOCUMENTS = [
    Document("ferry.md", "The ferry to Halm leaves the north pier at nine. A ticket costs four crowns.", "The ferry"),
    Document("light.md", "The lighthouse of Halm was built in 1888 of grey granite.", "The lighthouse"),
    Document("mill.md", "The water mill grinds rye. It stands on the river Orn, below the bridge.", "The mill"),
]
QUESTION = "In what year was the lighthouse built?"


@dataclass
class Served:
    """The command, in a process of its own."""

    process: subprocess.Popen[bytes]
    address: str
    data: Path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048, **SIZES)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    require_vllm()
    directory = tmp_path_factory.mktemp("served")
    ready, log = directory / "address", directory / "log"
    arguments = ["--engine", "vllm", "--model", str(model), "--dtype", "float32", "--address", "127.0.0.1:0"]
    arguments += ["--kv-cache-bytes", "256MiB", "--max-model-len", "2048", "--vllm-args", json.dumps(VLLM_ARGS)]
    arguments += ["--data-dir", str(directory / "data"), "--ready-file", str(ready), "--drain-seconds", "60"]
    arguments += ["--host-bytes", "64MiB", "--disk-bytes", "256MiB", "--chunk-tokens", "128", "--max-new-tokens", "8"]
    root = Path(blend_server.__file__).parents[1]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "blend_server", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=sink,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        )
    end = monotonic() + 240
    while not ready.exists() and process.poll() is None and monotonic() < end:
        sleep(0.1)
    try:
        if not ready.exists():
            pytest.fail(f"blend-server did not start:\n{log.read_text()[-8000:]}")
        yield Served(process, ready.read_text().strip(), directory / "data")
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Client]:
    """A client of the served vLLM, which has the documents."""
    with Client(served.address) as made:
        _ingest(made)
        yield made


@pytest.fixture(scope="module")
def native(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """The same documents and model in the native engine."""
    with (
        BlendServer(config(model, tmp_path_factory.mktemp("native"))) as server,
        Client(server.address) as made,
    ):
        _ingest(made)
        yield made


def _ingest(client: Client) -> None:
    ends = [stage.WhichOneof("stage") for stage in client.ingest(DOCUMENTS)]
    assert ends.count("stored") == len(DOCUMENTS)


def _objects(client: Client) -> dict[str, int]:
    return {tier.name: tier.objects for tier in client.stats().engine.tiers}


def test_a_full_prefill_gives_the_native_engines_answer(client: Client, native: Client) -> None:
    ours, theirs = (c.ask(QUESTION, plan=Plan("full"), max_new_tokens=12) for c in (client, native))
    assert (ours.token_ids, ours.text, ours.finish_reason) == (theirs.token_ids, theirs.text, theirs.finish_reason)
    report = ours.report
    assert (report.mode, report.cached, report.charged_ratio) == ("full", 0, 1.0)
    assert {chunk.outcome for chunk in report.chunks} == {"unused"}
    assert [chunk.key for chunk in report.chunks] != []
    assert report.timings.first_token > 0


def test_a_blended_answer_recomputes_what_the_native_engine_recomputes(client: Client, native: Client) -> None:
    plan = Plan("query", ratio=0.2)
    ours, theirs = (c.ask(QUESTION, plan=plan, positions=True, max_new_tokens=8).report for c in (client, native))
    assert (ours.mode, ours.reason, ours.tokens) == (theirs.mode, theirs.reason, theirs.tokens)
    assert ours.recomputed_positions == theirs.recomputed_positions
    assert (ours.cached, ours.mandatory, ours.selected) == (theirs.cached, theirs.mandatory, theirs.selected)
    assert (ours.requested_ratio, ours.selected_ratio) == (theirs.requested_ratio, theirs.selected_ratio)
    assert ours.charged_ratio == pytest.approx(theirs.charged_ratio)
    assert [(c.start, c.tokens, c.outcome) for c in ours.chunks] == [(c.start, c.tokens, "hit") for c in theirs.chunks]
    assert {chunk.tier for chunk in ours.chunks} <= {"host", "disk"}
    assert ours.timings.fetch > 0 and ours.full_ms == 0


def test_an_identical_request_finds_its_own_blocks(client: Client) -> None:
    """In vLLM's prefix cache, where the prompt is long enough for whole blocks; the report says which it was."""
    plan = Plan("head", ratio=0.3)
    first, second = (client.ask(QUESTION, plan=plan, max_new_tokens=4) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert first.report.mode == second.report.mode == "head"


def test_tokens_come_one_by_one(client: Client) -> None:
    events = list(client.answer(QUESTION, plan=Plan("reuse"), max_new_tokens=6))
    tokens = [event for event in events if isinstance(event, Token)]
    last = events[-1]
    assert isinstance(last, Answer)
    assert tuple(token.token_id for token in tokens) == last.token_ids
    assert last.text.startswith("".join(token.text for token in tokens))


def test_what_it_cannot_do_is_refused_by_name(client: Client) -> None:
    with pytest.raises(ServiceError, match="compare_full.*full prefill") as caught:
        client.ask(QUESTION, compare_full=True)
    assert (caught.value.code, caught.value.field) == ("INVALID_ARGUMENT", "compare_full")
    with pytest.raises(ServiceError, match="context") as caught:
        client.ask(QUESTION, max_new_tokens=5000)
    assert caught.value.kind == "PromptTooLong"


def test_an_answer_that_is_cancelled_leaves_the_engine_free(client: Client) -> None:
    events = client.answer(QUESTION, plan=Plan("full"), max_new_tokens=500)
    for event in events:
        if isinstance(event, Token):
            break
    events.close()
    assert client.ask(QUESTION, plan=Plan("full"), max_new_tokens=1).finish_reason == "length"


def test_stats(client: Client) -> None:
    found = client.stats()
    assert (found.engine.dtype, found.engine.device, found.engine.layers) == ("float32", "cpu", 4)
    assert found.engine.requests > 0
    assert [tier.name for tier in found.engine.tiers] == ["host", "disk"]
    assert found.limits.context_tokens == 2048
    assert found.engine.details["counters"]["precomputed"] >= 3
    assert found.engine.details["tenants"][0]["name"] == "default"
    environment = found.environment
    assert environment.engine == "vllm" and environment.vllm and environment.tensor_parallel == 1
    assert environment.fingerprint == found.engine.details["model_fingerprint"] and environment.tokenizer


def test_deleting_a_document_removes_its_kv(client: Client) -> None:
    before = _objects(client)
    extra = Document("extra.md", "The harbour master of Halm keeps bees behind the customs house.")
    list(client.ingest([extra]))
    assert _objects(client) == {name: count + 1 for name, count in before.items()}
    assert client.delete("extra.md") == 1
    assert _objects(client) == before


def test_a_stop_lets_answers_end_and_leaves_what_the_native_engine_reads(
    client: Client, served: Served, model: Path
) -> None:
    found: list[Answer] = []
    begun = threading.Event()

    def ask() -> None:
        for event in client.answer(QUESTION, plan=Plan("head", ratio=0.1), max_new_tokens=200):
            begun.set()
            if isinstance(event, Answer):
                found.append(event)

    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(60)
    served.process.send_signal(signal.SIGTERM)
    asking.join(120)
    assert served.process.wait(120) == 0
    assert len(found) == 1

    settings = config(model, served.data)
    with BlendServer(settings) as server, Client(server.address) as again:
        ends = [stage for stage in again.ingest(DOCUMENTS) if stage.WhichOneof("stage") == "unchanged"]
        assert [stage.unchanged.reused_chunks for stage in ends] == [1, 1, 1]
        report = again.ask(QUESTION, plan=Plan("reuse"), max_new_tokens=1).report
        assert {(chunk.outcome, chunk.tier) for chunk in report.chunks} == {("hit", "disk")}
