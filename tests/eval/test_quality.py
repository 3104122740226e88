"""Quality on real questions with the default model: the question selects better than deviation does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from blend import Engine, EngineConfig, Plan, StoreConfig
from blend.eval import datasets
from blend.eval.__main__ import summary
from blend.eval.fidelity import measure


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_query_loses_at_most_0_6_of_what_deviation_loses(
    default_model_dir: Path, xquad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 XQuAD questions with 8 passages, both methods at ratio 0.15, KL against full prefill."""
    plans = [Plan("deviation", 0.15), Plan("query", 0.15)]
    store = StoreConfig(host_bytes=1 << 30, disk_bytes=0, directory=tmp_path)
    found: list[list] = [[], []]  # type: ignore[type-arg]
    with Engine(EngineConfig(recompute_misses=False, store=store)) as engine:
        for example in datasets.load(str(xquad), passages=8, limit=20).examples:
            for kept, result in zip(found, measure(engine, example, plans), strict=True):
                kept.append(result)
    deviation, query = (summary(results) for results in found)
    with capsys.disabled():
        for row in (deviation, query):
            sys.stdout.write(
                f"\n{row['method']:>10} {row['ratio']:g}: first-token KL {row['first_kl']}, "
                f"answer KL {row['answer_kl']}, top-1 {row['top1']}, charged {row['charged_ratio']:.3f}\n"
            )
    assert query["first_kl"].mean <= 0.6 * deviation["first_kl"].mean
    assert query["answer_kl"].mean <= 0.6 * deviation["answer_kl"].mean
    assert query["charged_ratio"] < deviation["charged_ratio"]
