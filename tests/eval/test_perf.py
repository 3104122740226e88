"""Experiments of time on a tiny model: what is varied varies, and each ends in time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from blend import Chunk, Engine, Plan, Prompt, StoreConfig, Text
from blend.errors import InvalidInput, ResourceExhausted
from blend.eval import calibrating
from blend.eval.calibrating import Setting, assemble, default_of, points, speeds
from blend.eval.perf import Bench, Workload, _spread, drop_pages, percentiles
from blend.eval.prompts import build_prompt
from blend.eval.streams import Shape, measure, suffix_ms
from blend.eval.values import Record
from blend.recompute.calibration import Point, parse
from tests import tiny
from tests.eval import samples

PLANS = (Plan("full"), Plan("reuse"), Plan("query", 0.2))


def build(chunks: Sequence[Chunk], question: str) -> Prompt:
    return Prompt([Text((1, 5)), *chunks, Text(tuple(question.encode()))])


WORKLOAD = Workload(tuple(Chunk(tiny.random_ids(40, i)) for i in range(12)), "what?", build)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with tiny.engine(tiny.save_model(tmp_path / "model"), tmp_path / "store") as engine:
        yield engine


def bench(engine: Engine, **changes: object) -> Bench:
    return Bench(engine, PLANS, **{"repeats": 2, "seconds": 60.0, **changes})  # type: ignore[arg-type]


def test_prompts_have_the_length_asked_for_and_begin_alike() -> None:
    short, long = WORKLOAD.sized(100), WORKLOAD.sized(300)
    assert (len(short), len(long)) == (100, 300)
    assert short.token_ids[:90] == long.token_ids[:90]
    assert len(WORKLOAD.sized(7 + 480)) == 487
    for tokens in (7, 488):
        with pytest.raises(InvalidInput, match="tokens"):
            WORKLOAD.sized(tokens)


def test_every_length_is_measured_with_every_plan(engine: Engine) -> None:
    told: list[float] = []
    found = bench(engine, tell=told.append).lengths(WORKLOAD, [100, 200])
    assert [(p.x, p.method) for p in found] == [(x, plan.method) for x in (100, 200) for plan in PLANS]
    for point in found:
        assert point.requests == 2 and 0 < point.ttft_p50 <= point.ttft_p95
        assert point.timings["first_token"] > 0 and point.detail["tokens"] == point.x
        assert point.detail["tiers"] == ([] if point.method == "full" else ["host"])
    assert told == sorted(told) and told[-1] == 1.0


def test_without_time_each_point_is_measured_once(engine: Engine) -> None:
    found = bench(engine, repeats=50, seconds=1e-6).lengths(WORKLOAD, [100])
    assert [p.requests for p in found] == [1, 1, 1]


def test_chunks_are_served_from_the_tier_under_test(engine: Engine) -> None:
    found = bench(engine).tiers(WORKLOAD, 200)
    assert {(p.x, *p.detail["tiers"]) for p in found if p.method == "reuse"} == {  # type: ignore[misc]
        ("host", "host"),
        ("disk", "disk"),
        ("disk-cold", "disk"),
    }


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system has no posix_fadvise")
def test_pages_can_be_dropped_and_files_stay(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"x" * 10000)
    assert drop_pages(tmp_path)
    assert (tmp_path / "a" / "file").read_bytes() == b"x" * 10000


def test_hit_rates_go_from_nothing_to_everything(engine: Engine) -> None:
    found = [p for p in bench(engine).hits(WORKLOAD, 407, [1.0, 0.0, 0.5]) if p.method == "reuse"]
    assert [(p.x, p.detail["cached"]) for p in found] == [(0.0, 0), (0.5, 200), (1.0, 400)]


def test_larger_shares_hold_smaller_ones_and_lie_spread() -> None:
    chunks = list(WORKLOAD.chunks)
    half, most = _spread(chunks, 0.5), _spread(chunks, 0.75)
    assert half == most[: len(half)] and len(half) == 6 and len(most) == 9
    first = sum(chunk in half for chunk in chunks[:6])
    assert 2 <= first <= 4
    assert _spread(chunks, 0.0) == [] and len(_spread(chunks, 1.0)) == 12


def test_several_threads_are_answered_and_counted(engine: Engine) -> None:
    found = bench(engine, seconds=0.6).concurrency(WORKLOAD, 100, [1, 3], max_new_tokens=2)
    assert [(p.x, p.method) for p in found] == [(x, plan.method) for x in (1, 3) for plan in PLANS]
    assert all(p.requests >= p.x and p.throughput is not None and p.throughput > 0 for p in found)  # type: ignore[operator]


def test_percentiles_lie_between_measured_values() -> None:
    assert percentiles([1.0, 3.0]) == {"ttft_p50": 2.0, "ttft_p95": pytest.approx(2.9)}


def test_a_stream_has_no_more_passages_than_every_prompt_has_room_for() -> None:
    uneven = Workload(tuple(Chunk(tiny.random_ids(n, n)) for n in (10, 40, 30, 20)), "what?", build)
    room = 2 + len("much longer?") + 70
    assert uneven.most_passages(["what?", "much longer?"], room) == 2, "the two longest fit"
    assert uneven.most_passages(["what?", "much longer?"], room - 1) == 1
    assert uneven.most_passages(["what?"], 10_000) == 4
    assert uneven.most_passages(["what?"], 20) == 0


SHAPE = Shape(questions=6, passages=3, requests=8, skews=(0.0, 3.0), played=100)


def test_a_stream_is_measured_and_played_on(engine: Engine) -> None:
    told: list[float] = []
    found, even = measure(bench(engine, tell=told.append), WORKLOAD, ["who?", "when?"], SHAPE)
    assert [(p.method, p.x, p.requests) for p in found] == [
        (method, 1.0, 8) for method in ("full", "prefix", "reuse", "query")
    ]
    assert found[1].detail["hits"] > 0, "a question comes up again"  # type: ignore[operator]
    assert all(p.detail["cached"] == 120 for p in found[2:]), "every passage is encoded before it is asked for"
    assert (even["questions"], even["passages"], even["requests"]) == (6, 12, 100)
    methods = even["methods"]
    assert isinstance(methods, list)
    assert [(m["method"], m["ratio"]) for m in methods] == [("reuse", None), ("query", 0.2)]
    for m in methods:
        rare, often = m["streams"]
        assert (rare["skew"], often["skew"], rare["requests"]) == (0.0, 3.0, 100)
        assert rare["prefix_hits"] <= often["prefix_hits"] and rare["precompute_ms"] > 0
    assert told == sorted(told) and told[-1] == 1.0


def test_a_stream_without_time_answers_one_request(engine: Engine) -> None:
    found, _ = measure(bench(engine, seconds=1e-6), WORKLOAD, ["who?"], SHAPE)
    assert {p.requests for p in found} == {1}


def test_behind_a_cached_prefix_only_the_rest_is_computed(engine: Engine) -> None:
    rows: list[int] = []
    forward = engine.decoder.forward

    def watch(batch, **kwargs):  # type: ignore[no-untyped-def]
        rows.extend(len(one.positions) for one in batch)
        return forward(batch, **kwargs)

    engine.decoder.forward = watch  # type: ignore[method-assign]
    assert suffix_ms(engine, WORKLOAD.sized(200), hit=160) > 0
    assert rows == [40]


def test_speeds_are_fitted_over_the_lengths(engine: Engine) -> None:
    told: list[float] = []
    found = speeds(engine, WORKLOAD, [100, 200, 400], 1, told.append)
    assert (found.passes.fewest, found.passes.most) == (7, 400), "of plain text alone, and of all"
    assert set(found.loads) == {"host", "disk", "disk-cold"}
    per_token = engine.stats().kv_bytes_per_token
    for curve in found.loads.values():
        assert (curve.fewest, curve.most) == (93 * per_token, 393 * per_token)
    assert told[-1] == 1.0


def test_a_calibration_is_not_made_of_chunks_that_found_no_room(tmp_path: Path) -> None:
    store = StoreConfig(host_bytes=96 << 10, disk_bytes=0)
    with tiny.engine(tiny.save_model(tmp_path / "model"), tmp_path / "store", store=store) as small:
        prompt = build_prompt(small, samples.example())
        with pytest.raises(ResourceExhausted, match="no room for"):
            list(calibrating.measure(small, samples.example(), prompt, [Setting("query", 0.5)], max_new_tokens=2))


def record(question: str, method: str, ratio: float | None, kl: float) -> Record:
    metrics = {"first_kl": kl, "answer_kl": 2 * kl, "top1": 1 - kl}
    return Record(question, method, ratio, "", (), metrics, 0.1, 0.1, 0.12345, 9, 5, method, {}, 1.0)


def test_points_are_means_with_intervals_by_method_and_ratio() -> None:
    records = [record(q, m, r, kl) for q, kl in (("a", 0.1), ("b", 0.3)) for m, r in (("query", 0.15), ("head", 0.3))]
    first, second = points([*records, record("a", "reuse", None, 0.5)])
    assert (first.method, first.ratio, second.method, second.ratio) == ("query", 0.15, "head", 0.3)
    assert (first.charged, first.kl, first.answer_kl, first.top1) == pytest.approx((0.1235, 0.2, 0.4, 0.8), abs=1e-4)
    assert first.variant == second.variant == "plain"
    assert first.kl_low <= 0.2 <= first.kl_high and first.top1_low is not None and first.top1_low <= 0.8


def test_points_of_variants_are_kept_apart_by_their_records_condition() -> None:
    plain, behind = record("a", "query", 0.15, 0.4), record("a", "query", 0.15, 0.1)
    found = points([plain, replace(behind, condition="conditioned")])
    assert [(point.variant, point.kl) for point in found] == [("plain", 0.4), ("conditioned", 0.1)]
    assert default_of(found[::-1]).variant == "plain"


def test_the_default_is_the_point_nearest_to_the_planners_ratio() -> None:
    def at(method: str, ratio: float, kl: float) -> Point:
        return Point(method, ratio, ratio, kl, kl, kl, 0.9)

    assert default_of([at("head", 0.15, 0.2), at("query", 0.15, 0.1), at("query", 0.3, 0.05)]).method == "query"
    with pytest.raises(InvalidInput, match="methods"):
        default_of([])


def test_a_calibration_is_put_together_and_can_be_read(engine: Engine) -> None:
    times = speeds(engine, WORKLOAD, [100], 1, lambda share: None)
    found = points([record("a", "query", 0.15, 0.1)])
    made = assemble("m", "made up", 1, found, times)
    assert parse(json.dumps(made.as_dict()), "test") == made
    assert made.default == found[0] and made.passes == times.passes
