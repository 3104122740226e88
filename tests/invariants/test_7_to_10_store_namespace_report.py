"""Invariants 7 to 10 as far as the engine alone shows them: faults, namespaces, exact caches, honest reports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blend import Engine, Plan, StoreConfig
from tests import tiny


def disk_only(model: Path, store: Path) -> Engine:
    config = StoreConfig(host_bytes=0, disk_bytes=256 << 20, directory=store, fsync=False)
    return tiny.engine(model, store, store=config)


@pytest.mark.parametrize("method", ["reuse", "head", "deviation", "query"])
def test_a_corrupt_chunk_answers_as_if_it_were_absent(model_of, tmp_path: Path, method: str) -> None:  # type: ignore[no-untyped-def]
    prompt = tiny.prompt(chunks=3)
    chunks = tiny.chunks_of(prompt)
    plan = Plan(method) if method == "reuse" else Plan(method, ratio=0.2)
    with disk_only(model_of("llama"), tmp_path / "absent") as engine:
        engine.precompute([chunks[0], chunks[2]])
        want = engine.prefill(prompt, plan)
    with disk_only(model_of("llama"), tmp_path / "corrupt") as engine:
        engine.precompute(chunks)
        key = engine.content_key(chunks[1])
        (path,) = [p for p in (tmp_path / "corrupt").rglob("*") if p.is_file() and p.name.startswith(key)]
        raw = bytearray(path.read_bytes())
        raw[-100] ^= 0x40
        path.write_bytes(raw)
        got = engine.prefill(prompt, plan)
        assert [c.outcome for c in got.report.chunks] == ["hit", "failed", "hit"]
        assert got.report.chunks[1].reason
        assert torch.equal(got.logits, want.logits)
        again = engine.prefill(prompt, plan)
        assert torch.equal(again.logits, want.logits)


def test_namespaces_share_nothing(llama: Engine) -> None:
    prompt = tiny.prompt()
    chunks = tiny.chunks_of(prompt)
    llama.precompute(chunks, namespace="alice")
    assert llama.missing(chunks, namespace="alice") == []
    assert llama.missing(chunks, namespace="bob") == chunks
    report = llama.prefill(prompt, Plan("query", ratio=0.2), namespace="bob").report
    assert {c.outcome for c in report.chunks} == {"miss"}
    assert llama.content_key(chunks[0], namespace="alice") != llama.content_key(chunks[0], namespace="bob")


def test_another_model_reads_nothing_of_the_first(model_of, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    other = tiny.save_model(tmp_path / "other", "llama", seed=1)
    prompt = tiny.prompt()
    with tiny.engine(model_of("llama"), tmp_path / "store") as engine:
        engine.precompute(tiny.chunks_of(prompt))
    with tiny.engine(other, tmp_path / "store") as engine:
        report = engine.prefill(prompt, Plan("reuse")).report
        assert {c.outcome for c in report.chunks} == {"miss"}
    with tiny.engine(model_of("llama"), tmp_path / "store", dtype="bfloat16") as engine:
        report = engine.prefill(prompt, Plan("reuse")).report
        assert {c.outcome for c in report.chunks} == {"miss"}
    with tiny.engine(model_of("llama"), tmp_path / "store") as engine:
        report = engine.prefill(prompt, Plan("reuse")).report
        assert {(c.outcome, c.tier) for c in report.chunks} == {("hit", "disk")}


def test_approximate_kv_serves_no_exact_request(llama: Engine) -> None:
    prompt = tiny.prompt()
    llama.precompute(tiny.chunks_of(prompt))
    want = llama.prefill(prompt, Plan("full")).logits
    llama.prefill(prompt, Plan("query", ratio=0.2))
    for plan in (Plan("full"), Plan("prefix")):
        got = llama.prefill(prompt, plan)
        assert (got.logits - want).abs().max() <= 1e-4 * max(1.0, float(want.abs().max()))


def test_the_clock_includes_every_part(llama: Engine) -> None:
    prompt = tiny.prompt()
    llama.precompute(tiny.chunks_of(prompt))
    answer = llama.generate(prompt, max_new_tokens=4, plan=Plan("query", ratio=0.2), compare_full=True)
    t = answer.report.timings
    parts = t.queue + t.lookup + t.fetch + t.rotate + t.select + t.recompute
    assert 0 < parts <= t.ttft == t.first_token
    assert min(t.lookup, t.fetch, t.rotate, t.select, t.recompute) > 0
    assert answer.report.comparison is not None
    assert answer.report.comparison.first_token_kl >= 0
    assert answer.report.full_ms == answer.report.comparison.full_ms
    assert sum(c.nbytes for c in answer.report.chunks) == sum(
        len(c) * llama.stats().kv_bytes_per_token for c in tiny.chunks_of(prompt)
    )
