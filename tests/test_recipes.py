"""``benchmarks/recipes.py``: every recipe is charged what it says, and what changes nothing loses nothing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blend import Plan
from tests import tiny

ROOT = Path(__file__).resolve().parent.parent
CAP = 0.7

with pytest.MonkeyPatch.context() as _patching:
    _patching.syspath_prepend(ROOT / "benchmarks")
    book = importlib.import_module("recipe_book")

PROMPT = tiny.prompt(chunks=7)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("recipes")
    chunks = tiny.chunks_of(PROMPT)
    near = {chunk: tuple(other for other in chunks if other != chunk) for chunk in chunks}
    with tiny.engine(tiny.save_model(directory / "model"), directory / "store") as engine:
        yield book.Bench(book.Encoder(engine, near), PROMPT, CAP, 4)


@pytest.mark.parametrize("recipes", ["baselines", "scores", "heads", "stored", "after"])
def test_each_recipe_is_charged_at_most_the_cap_and_gives_a_loss(bench: Any, recipes: str) -> None:
    found = dict(getattr(book, recipes)(bench))
    assert len(found) >= 2
    for name, loss in found.items():
        assert 0 <= loss.charged <= CAP + 1e-9, name
        assert loss.first >= -1e-6 and loss.answer > 0 and 0 <= loss.top1 <= 1, name


def test_choosing_every_token_is_full_prefill(bench: Any) -> None:
    everything = (~bench.text).nonzero().squeeze(1)
    loss = bench.loss(bench.canvas(book.KEPT), everything, 0)
    assert (loss.first, loss.answer, loss.top1) == (pytest.approx(0, abs=1e-6), pytest.approx(0, abs=1e-6), 1.0)
    assert loss.charged == pytest.approx(1.0)


def test_plain_chunks_lose_what_the_engine_loses_by_reuse(bench: Any) -> None:
    bench.engine.precompute(tiny.chunks_of(PROMPT))
    reused = bench.engine.prefill(PROMPT, Plan("reuse", variant="plain"))
    full = bench.full.logits.log_softmax(-1)
    kl = torch.nn.functional.kl_div(reused.logits.log_softmax(-1), full, reduction="sum", log_target=True)
    assert dict(book.baselines(bench))[book.REUSE].first == pytest.approx(float(kl), rel=1e-3)


def test_what_is_kept_is_what_the_engine_does(bench: Any) -> None:
    engine, chunks = bench.engine, tiny.chunks_of(PROMPT)
    engine.precompute(chunks, behind=[[other for other in chunks if other != chunk] for chunk in chunks])
    blended = engine.prefill(PROMPT, Plan("query", ratio=1.0, max_charged=CAP, variant="conditioned"))
    full = bench.full.logits.log_softmax(-1)
    kl = torch.nn.functional.kl_div(blended.logits.log_softmax(-1), full, reduction="sum", log_target=True)
    kept = bench.chosen(book.KEPT, bench.weighted(book.KEPT))
    assert blended.report.charged_ratio == pytest.approx(kept.charged, abs=0.005)
    assert kept.first == pytest.approx(float(kl), rel=1e-2)
