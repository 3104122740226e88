"""Any method by name: the engine's, and those that only evaluation has."""

from __future__ import annotations

import pytest
import torch

from blend import Engine, Plan, Prompt, Text
from blend.errors import InvalidInput, InvalidPlan, InvalidPrompt
from blend.eval.methods import BASELINES, Reference, Released, closed_book, names, prefill, split
from blend.recompute.select import methods
from blend_server import convert
from blend_server.proto.blend.v1 import blend_pb2 as pb
from tests import tiny

WHERE = "evaluation"


def reference(engine: Engine, prompt: Prompt, tokens: int = 4) -> Reference:
    full = engine.prefill(prompt, Plan("full"), namespace=WHERE, reserve=tokens)
    return Reference(full, engine.greedy(full, tokens) or (5,))


def test_every_method_gives_a_prefill_that_goes_on(engine: Engine, prompt: Prompt) -> None:
    known = reference(engine, prompt)
    for method in names():
        base, _ = split(method)
        ratio = None if base in ("auto", "full", "prefix", "reuse", "closed-book") else 0.3
        got = prefill(engine, method, ratio, prompt, namespace=WHERE, reserve=4, reference=known)
        assert got.report.mode == ("full" if method == "auto" else base)
        assert got.report.requested_ratio == (ratio or got.report.requested_ratio)
        log_probs = engine.continuation(got, (7, 8, 9))
        assert log_probs.shape == (3, engine.decoder.vocab_size)
        torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3))
        assert len(engine.greedy(got, 4)) <= 4


@pytest.mark.parametrize(("method", "ratio"), [("full", None), ("reuse", None), ("query", 0.2), ("deviation", None)])
def test_the_engines_methods_run_as_the_engine_runs_them(
    engine: Engine, prompt: Prompt, method: str, ratio: float | None
) -> None:
    got = prefill(engine, method, ratio, prompt, namespace=WHERE, positions=True)
    same = engine.prefill(prompt, Plan(method, ratio), namespace=WHERE, positions=True)
    torch.testing.assert_close(got.logits, same.logits)
    assert got.report.recomputed_positions == same.report.recomputed_positions
    assert got.report.charged_ratio == same.report.charged_ratio


@pytest.mark.parametrize("method", BASELINES)
def test_neither_engine_nor_service_takes_evaluations_methods(engine: Engine, prompt: Prompt, method: str) -> None:
    assert method not in methods()
    with pytest.raises(InvalidPlan, match="allowed: auto, full"):
        engine.prefill(prompt, Plan(method), namespace=WHERE)
    with pytest.raises(InvalidPlan, match=r"plan\.method"):
        convert.plan_from_proto(pb.Plan(method=method))


def test_a_repair_is_given_what_is_reused(engine: Engine, prompt: Prompt) -> None:
    with pytest.raises(InvalidPlan, match="allowed: reuse"):
        engine.prefill(prompt, Plan("query"), namespace=WHERE, repair=Released(prompt, engine.sink, 0.1))


def test_bad_input_says_what_is_allowed(engine: Engine, prompt: Prompt) -> None:
    with pytest.raises(InvalidPlan, match=r"oracle \(the nearest\)"):
        prefill(engine, "orakel", 0.1, prompt, namespace=WHERE)
    with pytest.raises(InvalidPlan, match="ratio"):
        prefill(engine, "deviation-released", 1.5, prompt, namespace=WHERE)
    with pytest.raises(InvalidPlan, match="none with method closed-book"):
        prefill(engine, "closed-book", 0.1, prompt, namespace=WHERE)
    with pytest.raises(InvalidInput, match="reference"):
        prefill(engine, "oracle", 0.1, prompt, namespace=WHERE)
    with pytest.raises(InvalidPrompt, match="a Prompt"):
        prefill(engine, "closed-book", None, "Who?", namespace=WHERE)  # type: ignore[arg-type]


def test_closed_book_is_full_prefill_of_what_is_no_passage(engine: Engine, prompt: Prompt) -> None:
    got = prefill(engine, "closed-book", None, prompt, namespace=WHERE, reserve=3)
    short = Prompt([s for s in prompt.segments if isinstance(s, Text)])
    full = engine.prefill(short, Plan("full"), namespace=WHERE, reserve=3)
    torch.testing.assert_close(got.logits, full.logits)
    torch.testing.assert_close(engine.continuation(got, (7, 8, 9)), engine.continuation(full, (7, 8, 9)))
    assert closed_book(prompt) == short
    report = got.report
    assert (report.mode, report.tokens, report.cached, report.charged_ratio) == ("closed-book", len(short), 0, 0.0)


def test_closed_book_needs_something_besides_passages() -> None:
    with pytest.raises(InvalidPrompt, match="at least one"):
        closed_book(Prompt(tiny.chunks_of(tiny.prompt())))
