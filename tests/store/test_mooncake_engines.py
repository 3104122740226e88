"""Two engines share chunks through a real Mooncake store: the second answers from the first one's work."""

from __future__ import annotations

from pathlib import Path

import torch

from blend import Plan, StoreConfig
from tests import tiny
from tests.store.mooncake_server import Master, cluster, config_for

__all__ = ["cluster"]


def test_the_second_engine_answers_from_the_first_ones_work(cluster: Master, tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model")
    prompt, plan = tiny.prompt(), Plan("query", ratio=0.2)

    store = StoreConfig(
        host_bytes=64 << 20,
        disk_bytes=0,
        secret=b"one secret for both machines",
        mooncake=config_for(cluster, prefix="engines", staging_bytes=16 << 20),
    )
    with tiny.engine(model, tmp_path, store=store) as one:
        one.precompute(tiny.chunks_of(prompt))
        want = one.prefill(prompt, plan)
        assert {c.tier for c in want.report.chunks} == {"host"}
        with tiny.engine(model, tmp_path, store=store) as two:
            assert two.missing(tiny.chunks_of(prompt)) == []
            got = two.prefill(prompt, plan)
            assert {(c.outcome, c.tier) for c in got.report.chunks} == {("hit", "mooncake")}
            assert torch.equal(got.logits, want.logits)
            assert {c.tier for c in two.prefill(prompt, plan).report.chunks} == {"host"}, "it was promoted"
