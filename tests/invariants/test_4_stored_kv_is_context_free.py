"""Invariant 4: stored KV depends on the chunk's tokens, the sink and declared neighbours, and its key says so."""

from __future__ import annotations

from pathlib import Path

from blend import Chunk, Engine, Plan, Prompt, Text
from blend.encoding import CONTEXT
from blend.store import Header, ObjectKey
from tests import tiny


def stored(engine: Engine, chunk: Chunk, namespace: str = "default", variant: str = "plain") -> tuple[Header, bytes]:
    lease = engine.store.get(ObjectKey(engine.content_key(chunk, namespace=namespace), variant))
    assert lease is not None
    with lease:
        return lease.header, bytes(lease.payload())


def test_what_ran_before_leaves_no_trace(model_of, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    chunk = Chunk(tiny.random_ids(50, 1))
    with tiny.engine(model_of("llama"), tmp_path / "a") as first:
        first.precompute([chunk])
        header, want = stored(first, chunk)
        assert header.token_ids == chunk.token_ids
        assert header.position == len(first.sink)
    with tiny.engine(model_of("llama"), tmp_path / "b", recompute_misses=True) as second:
        prompt = Prompt([Text((1, 3, 4)), Chunk(tiny.random_ids(31, 2)), chunk, Text(tiny.random_ids(9, 3))])
        second.precompute([Chunk(tiny.random_ids(31, 2))])
        second.generate(prompt, max_new_tokens=3, plan=Plan("query", ratio=0.3))
        assert second.wait_idle(60), "the miss is computed afterwards, on its own"
        assert stored(second, chunk)[1] == want


def test_blended_kv_is_never_written_back(engine: Engine) -> None:
    prompt = tiny.prompt()
    chunks = tiny.chunks_of(prompt)
    engine.precompute(chunks)
    before = [stored(engine, c)[1] for c in chunks]
    keys = sorted(engine.store.keys())
    for method in ("reuse", "head", "deviation", "query"):
        plan = Plan(method) if method == "reuse" else Plan(method, ratio=0.5)
        engine.generate(prompt, max_new_tokens=3, plan=plan, compare_full=True)
    assert [stored(engine, c)[1] for c in chunks] == before
    assert sorted(engine.store.keys()) == keys


def test_another_sink_is_another_key(model_of, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    chunk = Chunk(tiny.random_ids(20, 1))
    found = set()
    for sink in ("bos", (), (1, 9, 9)):
        with tiny.engine(model_of("llama"), tmp_path, sink=sink) as engine:
            engine.precompute([chunk])
            header, payload = stored(engine, chunk)
            assert header.position == len(engine.sink)
            found.add((engine.content_key(chunk), payload))
    assert len({key for key, _ in found}) == len({payload for _, payload in found}) == 3


def test_a_conditioned_variant_is_another_object_of_the_same_chunk(llama: Engine) -> None:
    chunk, one, two, three = (Chunk(tiny.random_ids(20, seed)) for seed in (1, 2, 3, 4))
    llama.precompute([chunk])
    for behind in ((one,), (one, two), (one, two, three)):
        assert llama.precompute([chunk], behind=[behind]) == [llama.content_key(chunk)]
        variant, plain = llama.store.variants(llama.content_key(chunk))
        assert plain == "plain"
        header, _ = stored(llama, chunk, variant=variant)
        assert header.neighbours == tuple(llama.content_key(c) for c in behind)
        assert header.position == 1 + 20 * min(len(behind), CONTEXT)
        assert stored(llama, chunk)[0].neighbours == ()
    prompt = Prompt([Text((1, 5)), chunk, Text((9, 8))])
    assert llama.prefill(prompt, Plan("reuse")).report.chunks[0].variant != "plain"
    assert llama.prefill(prompt, Plan("reuse", variant="plain")).report.chunks[0].variant == "plain"


def test_forgetting_a_chunk_takes_along_what_was_encoded_behind_it(llama: Engine) -> None:
    chunk, one, two = (Chunk(tiny.random_ids(20, seed)) for seed in (1, 2, 3))
    llama.precompute([chunk, one, two])
    llama.precompute([chunk, two], behind=[(one,), (chunk,)])
    assert llama.forget([one]) == 2
    assert llama.store.variants(llama.content_key(chunk)) == ("plain",)
    assert len(llama.store.variants(llama.content_key(two))) == 2
    assert llama.store.variants(llama.content_key(one)) == ()
