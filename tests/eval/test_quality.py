"""Quality on real questions with the default model: the question selects better than deviation does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from blend import Engine, EngineConfig, StoreConfig
from blend.eval import datasets
from blend.eval.plan import plan
from blend.eval.prompts import build_prompt
from blend.eval.runner import CLOSENESS, measure
from blend.eval.summary import summarize


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_query_loses_at_most_0_6_of_what_deviation_loses(
    default_model_dir: Path, xquad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 XQuAD questions with 8 passages, both methods at ratio 0.15, KL against full prefill."""
    store = StoreConfig(host_bytes=1 << 30, disk_bytes=0, directory=tmp_path)
    planned = plan(["deviation", "query"], [0.15])
    records = []
    with Engine(EngineConfig(recompute_misses=False, store=store)) as engine:
        for example in datasets.load(str(xquad), passages=8, limit=20).examples:
            prompt = build_prompt(engine, example)
            records += measure(engine, example, prompt, planned, max_new_tokens=16, metrics=CLOSENESS)
    _, deviation, query = summarize(records, margins={}, seed=0)
    with capsys.disabled():
        for row in (deviation, query):
            kl, answer, top1 = (row.metrics[name] for name in ("first_kl", "answer_kl", "top1"))
            sys.stdout.write(
                f"\n{row.method:>10} {row.ratio:g}: first-token KL {kl}, answer KL {answer}, top-1 {top1}, "
                f"charged {row.charged:.3f}\n"
            )
    assert query.metrics["first_kl"].mean <= 0.6 * deviation.metrics["first_kl"].mean
    assert query.metrics["answer_kl"].mean <= 0.6 * deviation.metrics["answer_kl"].mean
    assert query.charged < deviation.charged
