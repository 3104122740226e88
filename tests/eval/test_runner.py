"""Measuring one question: a record a method, full prefill the measure of all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from blend import Chunk, Engine, Plan, Prompt
from blend.errors import InvalidInput
from blend.eval.metrics import METRICS
from blend.eval.plan import Planned, plan
from blend.eval.prompts import build_prompt, chunks_of
from blend.eval.runner import measure
from blend.eval.values import Record
from tests import tiny
from tests.eval import samples


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("runner")
    with tiny.engine(tiny.save_model(directory / "model"), directory / "store") as made:
        yield made


def measured(engine: Engine, planned: tuple[Planned, ...], **changes: object) -> list[Record]:
    example = samples.example()
    prompt = build_prompt(engine, example)
    return list(measure(engine, example, prompt, planned, max_new_tokens=4, **changes))  # type: ignore[arg-type]


def test_each_method_gets_a_record_with_every_metric(engine: Engine) -> None:
    planned = plan(["reuse", "prefix", "closed-book", "query", "deviation-released"], [0.2])
    found = measured(engine, planned)
    assert [(r.method, r.ratio) for r in found] == [(p.method, p.ratio) for p in planned]
    assert all(list(r.metrics) and set(r.metrics) == set(METRICS) for r in found)
    full, reuse, prefix, closed, query, _ = found
    assert (full.metrics["first_kl"], full.metrics["top1"], full.metrics["same_answer"]) == (0.0, 1.0, 1.0)
    assert reuse.metrics["first_kl"] > 1e-4 and reuse.metrics["attention_error"] > 1e-3
    assert prefix.metrics["first_kl"] == pytest.approx(0, abs=1e-6)
    assert closed.metrics["attention_error"] > 1e-3 and closed.tokens < full.tokens
    assert query.requested == 0.2 and query.charged > query.selected > 0 and query.cached == reuse.cached > 0
    assert not query.warnings or all("calibration" in w for w in query.warnings)
    assert query.ttft_ms > 0 and query.timings["first_token"] == query.ttft_ms
    assert query.gold == ("x", "y z")


def test_answers_are_those_of_the_engine(engine: Engine) -> None:
    prompt = build_prompt(engine, samples.example())
    for record in measured(engine, plan(["reuse", "head"], [0.3])):
        asked = engine.generate(
            prompt, max_new_tokens=4, plan=Plan(record.method, record.ratio), namespace="evaluation"
        )
        assert record.answer == asked.text


def test_what_was_measured_before_does_not_change_what_is_measured_now(engine: Engine) -> None:
    planned = plan(["reuse", "head"], [0.3])
    alone = measured(engine, planned[2:])
    assert replace(alone[0], timings={}, ttft_ms=0) == replace(measured(engine, planned)[2], timings={}, ttft_ms=0)


def test_only_the_metrics_that_are_asked_for_are_measured(engine: Engine) -> None:
    found = measured(engine, plan(["reuse"], [0.1]), metrics=("f1", "top1"), condition="count", level=3, order=2)
    assert all(list(r.metrics) and set(r.metrics) == {"f1", "top1"} for r in found)
    assert found[1].key == ("q0", "count", 3, 2, "reuse", None)


def test_chunks_that_find_no_room_are_warned_of(tmp_path: Path) -> None:
    from blend import StoreConfig

    store = StoreConfig(host_bytes=96 << 10, disk_bytes=0)
    with tiny.engine(tiny.save_model(tmp_path / "model"), tmp_path / "store", store=store) as small:
        found = measured(small, plan(["reuse"], [0.1]))
    assert any("not in the store" in w for w in found[1].warnings)


def test_a_prompt_without_a_question_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidInput, match="question"):
        next(measure(engine, samples.example(), Prompt([Chunk((5, 6))]), plan([], []), max_new_tokens=1))


def test_methods_over_conditioned_chunks_run_over_them_and_the_others_do_not(engine: Engine) -> None:
    prompt = build_prompt(engine, samples.example())
    chunks = chunks_of(prompt)
    related = {chunk: tuple(other for other in chunks if other != chunk) for chunk in chunks}
    planned = plan(["reuse", "reuse@conditioned", "query", "query@conditioned"], [0.2])
    before = measured(engine, plan(["reuse", "query"], [0.2]), namespace="conditioned")
    found = measured(engine, planned, namespace="conditioned", related=related)
    by_name = {record.method: record.metrics["first_kl"] for record in found}
    assert by_name["reuse@conditioned"] != pytest.approx(by_name["reuse"], rel=1e-3)
    assert by_name["query@conditioned"] != pytest.approx(by_name["query"], rel=1e-3)
    for record in before[1:]:
        assert by_name[record.method] == pytest.approx(record.metrics["first_kl"], abs=1e-6)


def test_chunks_without_related_ones_run_as_they_are(engine: Engine) -> None:
    found = measured(engine, plan(["reuse", "reuse@conditioned"], [0.2]), namespace="alone", related={})
    assert found[1].metrics == found[2].metrics and found[2].cached == found[1].cached > 0


def test_a_capped_ratio_has_the_probe_in_it(engine: Engine) -> None:
    free, capped = (measured(engine, plan(["query"], [0.6]), capped=capped)[1] for capped in (False, True))
    assert free.charged > 0.6 >= capped.charged > 0
