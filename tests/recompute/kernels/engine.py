"""Whole prefills, decoding, and requests side by side, against the same on plain torch and on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from blend import Plan, StoreConfig
from blend.model.decoder import Decoder, Rows
from blend.recompute.canvas import Canvas
from blend.recompute.kernels.dispatch import Choice
from tests import tiny
from tests.models import VOCABULARY, build
from tests.recompute.kernels.common import DEVICE, DTYPES, name_of, rms

PREFILLS = [
    {"architecture": architecture, "method": method, "dtype": dtype}
    for architecture in ("llama", "mistral-window", "gemma2")
    # What is selected by a sum may change with its rounding: in 16 bits a fixed choice is compared.
    for dtype, methods in (("float32", ("full", "query", "deviation")), ("bfloat16", ("head",)))
    for method in methods
]
BATCHES = [
    *({"family": "llama", "dtype": dtype} for dtype in DTYPES),
    {"family": "llama-mha", "dtype": torch.float32},
    {"family": "mistral-window", "dtype": torch.float16},
    {"family": "gemma2", "dtype": torch.float32},
    {"family": "gemma2", "dtype": torch.bfloat16},
]
BOUNDS = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Relative root-mean-square difference after all layers of a tiny model, by dtype."""


@pytest.mark.parametrize("case", PREFILLS, ids=name_of)
def test_prefill_and_decoding(case: dict[str, Any], tmp_path: Path) -> None:
    check_prefill(case, "triton", tmp_path)


@pytest.mark.parametrize("case", BATCHES, ids=name_of)
def test_requests_side_by_side(case: dict[str, Any]) -> None:
    check_batch(case, "triton")


@pytest.mark.parametrize("host_bytes", [64 << 20, 0], ids=["pinned", "staged"])
@pytest.mark.parametrize("method", ["reuse", "query"])
def test_what_the_cpu_stored_is_answered_alike(method: str, host_bytes: int, tmp_path: Path) -> None:
    """From disk, and where there is a host tier then from there: it is pinned, and else layers are staged."""
    model = tiny.save_model(tmp_path / "model")
    store = StoreConfig(host_bytes=host_bytes, disk_bytes=256 << 20, directory=tmp_path / "store", fsync=False)
    prompt, plan = tiny.prompt(), Plan(method, 0.3 if method == "query" else None)
    with tiny.engine(model, tmp_path, store=store, kernels="torch") as engine:
        engine.precompute(tiny.chunks_of(prompt))
        want = engine.prefill(prompt, plan, reserve=4, positions=True)
        kv = torch.stack((want.canvas.k, want.canvas.v)).double()
        answer = engine.greedy(want, 4)
    with tiny.engine(model, tmp_path, store=store, device=DEVICE.type, kernels="triton") as engine:
        for tier in ("disk", "host" if host_bytes else "disk"):
            got = engine.prefill(prompt, plan, reserve=4, positions=True)
            assert {chunk.tier for chunk in got.report.chunks} == {tier}
            assert got.report.recomputed_positions == want.report.recomputed_positions
            assert rms(got.logits.cpu(), want.logits.double()) < BOUNDS[torch.float32]
            assert rms(torch.stack((got.canvas.k, got.canvas.v)).cpu(), kv) < BOUNDS[torch.float32]
            assert engine.greedy(got, 4) == answer
            assert engine.store.wait_idle(30)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="counts copies from a GPU")
def test_decoding_brings_nothing_back_but_token_ids(tmp_path: Path) -> None:
    with tiny.engine(tiny.save_model(tmp_path / "model"), tmp_path, device=DEVICE.type) as engine:
        prefill = engine.prefill(tiny.prompt(), Plan("full"), reserve=4)
        engine.greedy(prefill, 2)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            produced = engine.greedy(prefill, 4)
    assert len(produced) == sum("DtoH" in event.name for event in seen.events()) == 4


def check_prefill(case: dict[str, Any], kernels: Choice, directory: Path) -> None:
    """Refuse a version of the kernels on which an engine answers otherwise than on plain torch.

    Each engine encodes its own chunks. One chunk is not stored, and a prefill takes more than one pass.
    """
    model = tiny.save_model(directory / "model", case["architecture"], num_hidden_layers=2)
    prompt = tiny.prompt(length=7)
    plan = Plan(method=case["method"], ratio=None if case["method"] == "full" else 0.3)
    tail = tiny.random_ids(3, 9)
    found = {}
    for choice in ("torch", kernels):
        with tiny.engine(
            model, directory / choice, device=DEVICE.type, dtype=case["dtype"], max_rows=40, kernels=choice
        ) as engine:
            assert engine.decoder.kernels.backend == choice
            engine.precompute(tiny.chunks_of(prompt)[:2])
            prefill = engine.prefill(prompt, plan, reserve=3, positions=True)
            scores = engine.continuation(prefill, tail)
            kv = torch.stack((prefill.canvas.k, prefill.canvas.v))
            found[choice] = (prefill.report.recomputed_positions, kv.clone(), scores, engine.greedy(prefill, 3))
    (rows, kv, scores, answer), (wanted_rows, wanted_kv, wanted_scores, wanted_answer) = found[kernels], found["torch"]
    bound = BOUNDS[getattr(torch, case["dtype"])]
    assert rows == wanted_rows
    assert rms(kv, wanted_kv.double()) < bound
    assert rms(scores, wanted_scores.double()) < bound
    assert case["dtype"] != "float32" or answer == wanted_answer


def check_batch(case: dict[str, Any], kernels: Choice) -> None:
    """Refuse a version of the kernels on which requests of one pass come out otherwise than on plain torch."""
    found = {}
    for choice in ("torch", kernels):
        decoder = Decoder(build(case["family"]).to(DEVICE, case["dtype"]), choice)
        requests = _requests(decoder)
        logits = decoder.forward(requests, keep="all")
        assert logits is not None
        found[choice] = [logits, *(torch.stack((rows.canvas.k, rows.canvas.v)) for rows in requests)]
    for got, want in zip(found[kernels], found["torch"], strict=True):
        assert rms(got, want.double()) < BOUNDS[case["dtype"]]


def _requests(decoder: Decoder) -> list[Rows]:
    """A whole prompt, scattered rows that may not read all of their canvas, and one row as in decoding."""
    generator = torch.Generator().manual_seed(3)

    def filled(length: int) -> Canvas:
        canvas = decoder.new_canvas(length)
        for stored in (canvas.k, canvas.v):
            stored.copy_(torch.randn(stored.shape, generator=generator))
        return canvas

    def tokens(count: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (count,), generator=generator).to(DEVICE)

    scattered = torch.randperm(90, generator=generator)[:31].sort().values.to(DEVICE)
    visible = (torch.rand(97, generator=generator) > 0.4).to(DEVICE)
    return [
        Rows(decoder.new_canvas(45), torch.arange(45, device=DEVICE), tokens(45)),
        Rows(filled(97), scattered, tokens(31), visible=visible),
        Rows(filled(60), torch.tensor([52], device=DEVICE), tokens(1)),
    ]
