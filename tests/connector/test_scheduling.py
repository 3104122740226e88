"""The scheduler's half, on real requests of vLLM: how many tokens it claims, and whose blocks are whose."""

# ruff: noqa: E402 - nothing of vLLM is imported where it is not installed

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from blend import Chunk, Part, Plan, Prompt, Text
from blend.config import ConnectorConfig, StoreConfig
from blend.connector.client import BlendRequest, ask_to_recognise, build_prompt
from tests import tiny
from tests.connector.conftest import require_vllm, store_settings

require_vllm()

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from blend.connector.vllm.known import Stored
from blend.connector.vllm.scheduling import Scheduling

BLOCK = 16
pytestmark = pytest.mark.slow  # importing vLLM alone takes seconds


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    init_none_hash(sha256)
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def half(model: Path) -> Scheduling:
    return Scheduling(str(model), BLOCK, 512, ConnectorConfig(), "", fails=True)


def request(
    prompt: Prompt, plan: Plan | None = None, name: str = "one", salt: str | None = None, **params: Any
) -> Request:
    wire = None if plan is None else build_prompt(prompt, plan, **params)["kv_transfer_params"]
    return ordinary(prompt.token_ids, wire, name, salt)


def ordinary(
    token_ids: Sequence[int], wire: dict[str, Any] | None = None, name: str = "one", salt: str | None = None
) -> Request:
    return Request(
        name,
        list(token_ids),
        SamplingParams(max_tokens=4, extra_args=None if wire is None else {"kv_transfer_params": wire}),
        None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def hashes(half: Scheduling, *given: Any, **params: Any) -> list[bytes]:
    made = request(*given, **params)
    half.arrived(made)
    return [bytes(value) for value in made.block_hashes]


PROMPT = tiny.prompt(header=BLOCK * 2 + 3, question=20)
CHUNKS_END = len(PROMPT) - 20
HEAD = Plan("head", ratio=0.2)
QUERY = Plan("query", ratio=0.2)


def test_all_but_the_last_token_is_claimed_if_there_are_chunks_among_it(half: Scheduling) -> None:
    asked = request(PROMPT, HEAD)
    half.arrived(asked)
    assert half.matched(asked, 0) == len(PROMPT) - 1
    assert half.matched(asked, 32) == len(PROMPT) - 33
    assert half.matched(asked, CHUNKS_END - 1) == 20
    assert half.matched(asked, CHUNKS_END) == 0
    nothing_behind = request(Prompt(PROMPT.segments[:-1]), HEAD, "two")
    half.arrived(nothing_behind)
    assert half.matched(nothing_behind, 0) == CHUNKS_END - 1
    exact = request(PROMPT, None, "three")
    half.arrived(exact)
    assert half.matched(exact, 0) == 0


@pytest.mark.parametrize("plan", [Plan("full"), Plan("prefix"), Plan()], ids=["full", "prefix", "no calibration"])
def test_a_plan_without_blending_is_vllms_own_business(half: Scheduling, plan: Plan) -> None:
    asked = request(PROMPT, plan)
    before = list(asked.block_hashes)
    half.arrived(asked)
    assert half.matched(asked, 0) == 0
    assert asked.block_hashes == before


def test_a_job_names_the_blocks_and_what_is_there_already(half: Scheduling) -> None:
    asked = request(PROMPT, HEAD)
    half.arrived(asked)
    half.allocated(asked, (5, 6, 7), len(PROMPT) - 33)
    (job,) = half.take_jobs()
    assert (job.request_id, job.blocks, job.computed, job.end) == ("one", (5, 6, 7), 32, len(PROMPT) - 1)
    assert half.take_jobs() == ()


def test_only_whole_blocks_before_the_first_chunk_are_anybodys(half: Scheduling) -> None:
    exact, blended = hashes(half, PROMPT), hashes(half, PROMPT, HEAD, name="two")
    assert len(exact) == len(blended) == len(PROMPT) // BLOCK
    assert blended[:2] == exact[:2]
    assert set(blended[2:]).isdisjoint(exact)
    assert hashes(half, PROMPT, HEAD, name="three") == blended


def test_a_chunk_in_the_first_block_shares_nothing(half: Scheduling) -> None:
    prompt = tiny.prompt()
    exact, blended = hashes(half, prompt), hashes(half, prompt, HEAD, name="two")
    assert set(exact).isdisjoint(blended)


def test_blocks_that_fill_up_later_go_on_from_the_blended_ones(half: Scheduling) -> None:
    """Where no block behind the shared ones is whole yet, the chain must not go on from an exact one."""
    prompt = Prompt([Text(range(10, 10 + BLOCK)), Chunk(range(50, 58))])
    exact, blended = request(prompt), request(prompt, HEAD, "two")
    half.arrived(blended)
    for each in (exact, blended):
        each.append_output_token_ids(list(range(100, 100 + 2 * BLOCK)))
    assert len(exact.block_hashes) == len(blended.block_hashes) == 3
    assert set(exact.block_hashes[1:]).isdisjoint(blended.block_hashes)


def test_everything_that_the_blended_kv_depends_on_keeps_blocks_apart(half: Scheduling) -> None:
    other_question = Prompt([*PROMPT.segments[:-1], Text(range(30, 50))])
    chunk = tiny.chunks_of(PROMPT)[0]
    longer = [Part(Chunk((*chunk.token_ids, 9)), 0, len(chunk))]
    shifted = Prompt([*PROMPT.segments[:1], *tiny.chunks_of(tiny.prompt(seed=5)), PROMPT.segments[-1]])
    found = [
        hashes(half, PROMPT, HEAD),
        hashes(half, PROMPT, QUERY),
        hashes(half, PROMPT, Plan("head", ratio=0.3)),
        hashes(half, PROMPT, HEAD, tenant="acme"),
        hashes(half, PROMPT, HEAD, salt="theirs"),
        hashes(half, shifted, HEAD),
        hashes(half, other_question, QUERY),
        hashes(half, Prompt([*PROMPT.segments[:1], *longer, *PROMPT.segments[2:]]), HEAD),
    ]
    blended = [tuple(each[2:5]) for each in found]
    assert len(set(blended)) == len(blended)
    # Heads are chosen by position alone: another question meets the same blocks up to where the prompts part.
    assert hashes(half, other_question, HEAD)[2:5] == found[0][2:5]


def test_too_long_for_the_scratch_canvas_is_served_without_blending(model: Path) -> None:
    half = Scheduling(str(model), BLOCK, 64, ConnectorConfig(), "", fails=True)
    asked = request(PROMPT, HEAD)
    half.arrived(asked)
    assert half.matched(asked, 0) == 0


def test_a_strict_request_in_an_engine_that_cannot_blend_is_refused(model: Path) -> None:
    half = Scheduling(str(model), BLOCK, 512, ConnectorConfig(), "pipeline parallelism", fails=True)
    lenient, strict = request(PROMPT, HEAD), request(PROMPT, HEAD, "two", strict=True)
    half.arrived(lenient)
    half.arrived(strict)
    assert (half.matched(lenient, 0), half.matched(strict, 32)) == (0, 1)
    half.allocated(strict, (4, 5, 6, 7), 1)
    assert half.take_refused() == {"two"}
    assert half.take_refused() == frozenset()


def test_where_vllm_would_compute_what_was_not_loaded_nothing_can_be_refused(model: Path) -> None:
    half = Scheduling(str(model), BLOCK, 512, ConnectorConfig(), "pipeline parallelism", fails=False)
    strict = request(PROMPT, HEAD, strict=True)
    half.arrived(strict)
    assert half.matched(strict, 0) == 0


CHUNK = Chunk(tiny.random_ids(60, 7))
TEXT = (*tiny.random_ids(BLOCK, 8), *CHUNK.token_ids[2:-3], *tiny.random_ids(20, 9))


def recognising(model: Path, recognise: Any) -> Scheduling:
    """One that knows a chunk, for a request has named it."""
    half = Scheduling(str(model), BLOCK, 512, ConnectorConfig(recognise=recognise), "", fails=True)
    half.arrived(request(Prompt([CHUNK, Text((5,))]), HEAD, "first"))
    return half


def job_of(half: Scheduling, asked: Request) -> BlendRequest | None:
    half.arrived(asked)
    if matched := half.matched(asked, 0):
        half.allocated(asked, (1, 2), matched)
    return next((job.request for job in half.take_jobs()), None)


def test_a_chunk_that_was_named_before_is_found_in_a_prompt_by_who_asks_for_it(model: Path) -> None:
    half = recognising(model, "asked")
    found = job_of(half, ordinary(TEXT, ask_to_recognise(HEAD), "two"))
    assert found is not None
    assert (found.plan, list(found.prompt.parts())) == (HEAD, [(BLOCK, Part(CHUNK, 2, 57))])
    assert job_of(half, ordinary(TEXT, ask_to_recognise(HEAD, tenant="acme"), "three")) is None
    assert job_of(half, ordinary(TEXT, None, "four")) is None
    assert job_of(half, ordinary(TEXT[:40], ask_to_recognise(HEAD), "five")) is None


def test_an_engine_that_is_not_to_recognise_refuses_whoever_asks_strictly(model: Path) -> None:
    half = recognising(model, "off")
    assert job_of(half, ordinary(TEXT, ask_to_recognise(HEAD), "two")) is None
    strict = ordinary(TEXT, ask_to_recognise(HEAD, strict=True), "three")
    half.arrived(strict)
    assert half.matched(strict, 0) == 1


def test_where_every_prompt_is_looked_at_a_salt_of_its_own_exempts_one(model: Path) -> None:
    half = recognising(model, "always")
    half._exact = lambda plan: False  # type: ignore[method-assign]  # as with a calibration
    found = job_of(half, ordinary(TEXT, None, "two"))
    assert found is not None
    assert (found.plan, list(found.prompt.parts())) == (Plan(), [(BLOCK, Part(CHUNK, 2, 57))])
    assert job_of(half, ordinary(TEXT, None, "three", salt="theirs")) is None
    assert job_of(half, ordinary(TEXT, ask_to_recognise(HEAD, tenant="acme"), "four")) is None


def test_what_the_store_had_at_start_up_is_known_to_its_tenant_alone(model: Path, tmp_path: Path) -> None:
    store = StoreConfig(**store_settings(tmp_path))
    with tiny.engine(model, tmp_path, store=store) as engine:
        engine.precompute([CHUNK], namespace="acme")
        engine.precompute([Chunk(tiny.random_ids(50, 3))])
    with tiny.engine(model, tmp_path, store=store) as engine:
        cache = engine._chunks
        assert [len(ids) for _, ids in cache.known(110)] in ([60, 50], [50, 60])
        assert len(cache.known(109)) == 1
        stored = Stored.of(cache, 1000)
        assert cache.store.stats().hits == 0
    half = Scheduling(str(model), BLOCK, 512, ConnectorConfig(), "", fails=True)
    assert half.known is not None
    half.known.start(stored)
    assert job_of(half, ordinary(TEXT, ask_to_recognise(HEAD), "one")) is None
    assert job_of(half, ordinary(TEXT, ask_to_recognise(HEAD, tenant="acme"), "two")) is not None


def test_nothing_is_kept_of_requests_that_have_ended(half: Scheduling) -> None:
    ended = [
        request(PROMPT, HEAD, "one"),
        request(PROMPT, None, "two"),
        request(PROMPT, Plan("odd"), "three", strict=True),
    ]
    for each in ended:
        half.arrived(each)
        half.matched(each, 0)
        half.allocated(each, (1, 2, 3), 1)
    assert half.open
    for each in ended:
        assert half.ended(each) is None
    assert half.take_refused()
    assert (half.open, half.take_jobs()) == (0, ())


def test_importing_the_connector_leaves_numba_alone() -> None:
    """vLLM imports it early on, and fails to start in a process where numba was imported."""
    code = "import sys; from blend.connector.vllm import BlendConnector; print('numba' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split()[-1] == "False"
