"""``blend-eval sweep``: from reuse to a large share, all of it one document."""

from __future__ import annotations

from pathlib import Path

from blend.eval.commands.sweep import SETTINGS
from tests.eval import samples
from tests.eval.commands.conftest import Call


def test_a_sweep_goes_from_nothing_to_more_than_half_by_default() -> None:
    ratios = SETTINGS().ratios
    assert ratios[0] == 0.0 and ratios[-1] == 0.6 and list(ratios) == sorted(ratios)


def test_ratios_give_rows_in_order_and_zero_is_reuse(call: Call, tmp_path: Path, model: Path) -> None:
    data = samples.write_data(tmp_path / "data.json")
    found = call(
        "sweep", "--dataset", data, "--model", model, "--methods", "reuse,head", "--ratios", "0,0.3,0.6", "--metrics",
        "first_kl", "--max-new-tokens", 2,
    )  # fmt: skip
    assert found["kind"] == "sweep"
    assert [(r["method"], r["ratio"]) for r in found["rows"][2:]] == [("head", 0.0), ("head", 0.3), ("head", 0.6)]
    reuse, nothing = (found["rows"][i]["metrics"]["first_kl"]["mean"] for i in (1, 2))
    assert nothing == reuse > 0
    assert [r["selected"] for r in found["rows"][2:]] == sorted(r["selected"] for r in found["rows"][2:])
