"""Invariant 6: misses, plain text and the question are always computed; the ratio counts cached tokens only."""

from __future__ import annotations

import pytest
import torch

from blend import Chunk, Engine, Plan, Prompt, Text
from tests import tiny

METHODS = ("reuse", "random", "head", "deviation", "query")


def spans(prompt: Prompt) -> list[tuple[int, int, object]]:
    return list(prompt.spans())


@pytest.mark.parametrize("method", METHODS)
def test_text_and_misses_are_rows_whatever_the_ratio(engine: Engine, method: str) -> None:
    prompt = tiny.prompt(chunks=4)
    chunks = tiny.chunks_of(prompt)
    engine.precompute([chunks[0], chunks[2], chunks[3]])
    for ratio in (0.0, 0.2, 1.0):
        plan = Plan("reuse") if method == "reuse" else Plan(method, ratio=ratio)
        report = engine.prefill(prompt, plan, positions=True).report
        held = {p for a, b, s in spans(prompt) if s in (chunks[0], chunks[2], chunks[3]) for p in range(a, b)}
        assert report.cached == len(held)
        assert report.mandatory == len(prompt) - len(held)
        rows = set(report.recomputed_positions or ())
        must = set(range(len(prompt))) - held
        # What a probe left of the first loaded chunk is final and exact; it is not run twice.
        assert must - rows <= set(range(min(held)))
        if method != "reuse":
            assert len(rows & held) == report.selected == -(-round(ratio * len(held) * 1000) // 1000)


@pytest.mark.parametrize("missing", [0, 1, 2, 3])
def test_a_miss_costs_that_chunk_and_no_other(llama: Engine, missing: int) -> None:
    prompt = tiny.prompt(chunks=4)
    chunks = tiny.chunks_of(prompt)
    llama.precompute(c for i, c in enumerate(chunks) if i != missing)
    report = llama.prefill(prompt, Plan("query", ratio=0.2)).report
    assert [c.outcome for c in report.chunks] == ["miss" if i == missing else "hit" for i in range(4)]
    assert report.cached == sum(len(c) for i, c in enumerate(chunks) if i != missing)
    assert report.chunks[missing].reason == "not stored"


@pytest.mark.parametrize("method", METHODS)
def test_with_nothing_stored_every_method_is_full_prefill(llama: Engine, method: str) -> None:
    prompt = tiny.prompt()
    plan = Plan("reuse") if method == "reuse" else Plan(method, ratio=0.15)
    want = llama.prefill(prompt, Plan("full")).logits
    got = llama.prefill(prompt, plan)
    assert torch.equal(got.logits.argmax(), want.argmax())
    assert (got.logits - want).abs().max() <= 1e-4 * max(1.0, float(want.abs().max()))
    assert got.report.cached == 0 and got.report.charged_ratio == 0.0


def test_the_same_chunk_twice_counts_twice_and_is_read_once(llama: Engine) -> None:
    chunk = Chunk(tiny.random_ids(40, 3))
    prompt = Prompt([Text((1, 5)), chunk, Text((9,)), chunk, Text(tiny.random_ids(6, 4))])
    llama.precompute([chunk])
    hits = llama.store.stats().hits
    report = llama.prefill(prompt, Plan("head", ratio=0.1)).report
    assert llama.store.stats().hits == hits + 1
    assert report.cached == 80 and report.selected == 8
    assert [c.outcome for c in report.chunks] == ["hit", "hit"]
    assert len({c.key for c in report.chunks}) == 1
    assert [c.nbytes for c in report.chunks] == [40 * llama.stats().kv_bytes_per_token, 0]


def test_the_same_chunk_twice_may_be_two_variants(llama: Engine) -> None:
    """Where it stands exactly as it was encoded, the plain variant is exact; elsewhere the asked-for one is used."""
    chunk, other = Chunk(tiny.random_ids(40, 3)), Chunk(tiny.random_ids(20, 4))
    prompt = Prompt([Text(llama.sink), chunk, Text((9,)), chunk, Text(tiny.random_ids(6, 4))])
    llama.precompute([chunk])
    llama.precompute([chunk], behind=[(other,)])
    first, second = llama.prefill(prompt, Plan("reuse")).report.chunks
    assert first.variant == "plain" and str(second.variant).startswith("c")


def test_a_chunk_of_one_token(llama: Engine) -> None:
    prompt = Prompt([Text((1, 5)), Chunk((17,)), Text((9, 10))])
    llama.precompute(tiny.chunks_of(prompt))
    for method in ("random", "head", "deviation", "query"):
        report = llama.prefill(prompt, Plan(method, ratio=0.15)).report
        assert (report.cached, report.selected) == (1, 1)


def test_charges_name_probes_in_full(llama: Engine) -> None:
    prompt = tiny.prompt()
    llama.precompute(tiny.chunks_of(prompt))
    layers, cached = llama.decoder.layers, sum(len(c) for c in tiny.chunks_of(prompt))
    selected = -(-cached * 15 // 100)
    probes = {"random": 0, "head": 0, "deviation": 2 * cached, "query": 11 * layers}
    for method, probe in probes.items():
        report = llama.prefill(prompt, Plan(method, ratio=0.15)).report
        assert report.selected == selected
        assert report.charged_ratio == pytest.approx((probe + selected * layers) / (layers * cached))


def test_the_cap_on_the_charge_holds(llama: Engine) -> None:
    prompt = tiny.prompt()
    llama.precompute(tiny.chunks_of(prompt))
    for method in ("random", "head", "deviation", "query"):
        for cap in (0.0, 0.05, 0.3, 0.6, 1.0):
            report = llama.prefill(prompt, Plan(method, ratio=0.5, max_charged=cap)).report
            assert report.charged_ratio <= cap + 1e-9
            if report.selected == 0:
                assert any("max_charged" in w for w in report.warnings)
