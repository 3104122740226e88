"""The planner: from a plan to the method that runs, by predicted loss and predicted time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blend import Plan
from blend.errors import InvalidConfig, InvalidPlan
from blend.model.decoder import Decoder
from blend.recompute import calibration
from blend.recompute.calibration import Calibration, Curve
from blend.recompute.cost import PassCost, Work
from blend.recompute.found import Found, Probe
from blend.recompute.planner import Decision, PrefillSpeed, decide, give_up, settle


def point(
    method: str, ratio: float, kl: float, variant: str | None = None, high: float | None = None
) -> dict[str, Any]:
    """A point whose mean KL is at most twice what was measured, or ``high``."""
    made = {"method": method, "ratio": ratio, "charged": ratio, "top1": 0.9}
    made |= {"kl": kl, "kl_low": kl / 2, "kl_high": 2 * kl if high is None else high}
    return made if variant is None else {**made, "variant": variant}


FILE = {
    "version": 1,
    "model": "m",
    "data": "made up",
    "questions": 3,
    "default": {"method": "query", "ratio": 0.15},
    "points": [
        point(m, r, kl)
        for m, r, kl in (("query", 0.05, 0.1), ("query", 0.15, 0.03), ("query", 0.3, 0.01), ("head", 0.15, 0.02))
    ],
}
KNOWN = calibration.parse(json.dumps(FILE), "test")
BOTH = calibration.parse(
    json.dumps(
        {
            **FILE,
            "version": 3,
            "passes": None,
            "points": [
                *FILE["points"],  # type: ignore[misc]
                point("query", 0.05, 0.02, "conditioned"),
                point("query", 0.15, 0.008, "conditioned"),
                point("head", 0.05, 0.01, "conditioned"),
            ],
        }
    ),
    "test",
)
DECODER = cast(Decoder, SimpleNamespace(layers=4, heads=2, head_dim=8, linear_flops_per_row=1000.0))
MEASURED = PassCost(base=1.0, per_row=0.1, per_key=1e-5)


def speed(passes: PassCost | None = MEASURED, loads: Mapping[str, Curve] | None = None) -> PrefillSpeed:
    return PrefillSpeed(DECODER, passes, loads)


def found(**changes: Any) -> Found:
    """A prompt of 60 tokens of plain text around 1,000 that were loaded, and a probe of 40 rows in each of 4 layers."""
    mandatory = Work(60, 60 * 1000)
    made = dict(tokens=1060, cached=1000, layers=4, mandatory=mandatory, candidates=Work(1000, 530_000))
    probes = {"query": Probe(40 * 4, 20)}
    made |= dict(conditioned=0.0, probe=lambda method: probes.get(method, Probe()), nbytes={"host": 1 << 20})
    return Found(**{**made, **changes})  # type: ignore[arg-type]


def settled(
    plan: Plan, known: Calibration = KNOWN, at: Found | None = None, by: PrefillSpeed | None = None
) -> Decision:
    return settle(decide(plan, known), plan, known, at or found(), by or speed())


# ------------------------------------------------------------------ before anything is looked up


def test_a_named_method_runs_as_asked() -> None:
    assert decide(Plan("head", 0.3), None) == Decision("head", 0.3, None, False, "as asked")
    assert decide(Plan("head"), None).ratio == 0.15
    assert decide(Plan("full"), None).ratio == 1.0
    assert decide(Plan("reuse"), None).ratio == 0.0


@pytest.mark.parametrize("name", ["quarry", "oracle", "deviation-released", "FULL"])
def test_an_unknown_method_is_named_with_those_that_exist(name: str) -> None:
    with pytest.raises(InvalidPlan, match=r"method.*auto, full, prefix, reuse, random, head, deviation, query"):
        decide(Plan(name), KNOWN)


def test_auto_without_a_calibration_is_full_prefill_and_says_why() -> None:
    got = decide(Plan(), None)
    assert (got.method, got.reason, got.predicted_kl) == ("full", "this model has no calibration", 0.0)
    assert decide(Plan(), KNOWN, "stopped").reason == "stopped"


@pytest.mark.parametrize(("cap", "ratio"), [(None, 0.15), (0.3, 0.3), (0.9, 0.3), (0.2, 0.15), (0.05, 0.05)])
def test_auto_takes_the_largest_calibrated_ratio_under_the_cap(cap: float | None, ratio: float) -> None:
    got = decide(Plan(max_charged=cap), KNOWN)
    assert (got.method, got.ratio, got.max_charged) == ("query", ratio, cap or 0.15)
    assert f"at ratio {ratio:g}" in got.reason


def test_auto_under_a_cap_below_every_calibrated_charge_is_full_prefill() -> None:
    got = decide(Plan(max_charged=0.01), KNOWN)
    assert (got.method, got.reason) == ("full", "no calibrated setting is charged at most 0.01")


def test_auto_meets_the_quality_target_with_the_upper_bound_of_the_mean() -> None:
    assert decide(Plan(max_kl=0.2, max_charged=1.0), KNOWN).ratio == 0.05
    got = decide(Plan(max_kl=0.04, max_charged=1.0), KNOWN)
    assert (got.method, got.ratio, got.predicted_kl) == ("head", 0.15, 0.02)
    assert got.reason == "calibrated mean KL 0.020 (at most 0.040) at ratio 0.15"
    assert decide(Plan(max_kl=0.039, max_charged=1.0), KNOWN).ratio == 0.3, "the mean alone would meet it"
    assert decide(Plan(max_kl=0.019, max_charged=1.0), KNOWN).method == "full"
    assert decide(Plan(max_kl=0.02, max_charged=0.2), KNOWN).method == "full", "target and cap cannot both be met"


def test_auto_plans_for_the_best_that_may_be_found() -> None:
    assert decide(Plan(max_kl=0.04, max_charged=1.0), BOTH).ratio == 0.05, "as if all chunks were conditioned"
    assert decide(Plan(max_kl=0.04, max_charged=1.0, variant="plain"), BOTH).ratio == 0.15
    strict = replace(BOTH, points=tuple(p for p in BOTH.points if p.variant == "plain" or p.kl > 0.015))
    assert decide(Plan(max_kl=0.02, max_charged=1.0), strict).ratio == 0.3, "plain points meet what conditioned do not"


@pytest.mark.parametrize(
    ("cap", "target", "variant", "chosen"),
    [
        (0.15, None, "plain", ("query", 0.15, "plain")),
        (0.15, None, "conditioned", ("query", 0.15, "conditioned")),
        (0.9, 0.04, "conditioned", ("head", 0.05, "conditioned")),
        (0.9, 0.04, "plain", ("head", 0.15, "plain")),
        (0.9, 0.01, "conditioned", None),
        (0.01, None, "conditioned", None),
    ],
)
def test_a_point_is_chosen_among_those_of_the_variant(
    cap: float, target: float | None, variant: Any, chosen: tuple[str, float, str] | None
) -> None:
    got = BOTH.choose(cap, target, variant)
    assert (None if got is None else (got.method, got.ratio, got.variant)) == chosen


def test_plain_points_stand_in_for_conditioned_ones_and_never_the_other_way_round() -> None:
    stands_in = KNOWN.choose(0.15, None, "conditioned")
    assert stands_in is not None and stands_in.variant == "plain"
    only = tuple(p for p in BOTH.points if p.variant == "conditioned")
    assert replace(BOTH, points=only, default=only[0]).choose(1.0, None, "plain") is None


def test_the_default_is_a_method_of_each_variant() -> None:
    without = tuple(p for p in BOTH.points if p.variant == "plain" or p.method == "head")
    got = replace(BOTH, points=without).choose(1.0, None, "conditioned")
    assert got is not None and got.method == "head", "the best one there, for the default's was not measured"


# ------------------------------------------------------------------ once it is known what was loaded


def test_a_named_method_stays_and_its_time_is_predicted() -> None:
    asked = decide(Plan("query", 0.15), KNOWN)
    got = settle(asked, Plan("query", 0.15), KNOWN, found(cached=0, candidates=Work()), speed())
    assert replace(got, predicted_ms=0.0) == asked and got.predicted_ms > 0
    full = settle(decide(Plan("full"), None), Plan("full"), None, found(), speed())
    assert full.predicted_ms == pytest.approx(MEASURED.of(Work.full(1060)))
    assert (full.predicted_kl, got.predicted_kl) == (0.0, None)


def test_auto_says_what_it_predicts() -> None:
    got = settled(Plan())
    full_ms = MEASURED.of(Work.full(1060))
    assert (got.method, got.ratio, got.predicted_kl) == ("query", 0.15, 0.03)
    assert 0 < got.predicted_ms < 0.5 * full_ms
    loss = "calibrated mean KL 0.030 (at most 0.060) at ratio 0.15"
    assert got.reason == f"{loss}; predicted {got.predicted_ms:.0f} ms against {full_ms:.0f}"


def test_the_predicted_time_is_loading_choosing_and_the_final_pass() -> None:
    loads = {"host": Curve(2.0, 1e-6, 0.0, 1, 2)}
    selected = 110  # of 1,000 under the cap of 0.15, less 40 rows of the probe
    chosen = Work(selected, selected * 530)
    head = Work.full(20)  # which the probe leaves behind, so that the final pass spares it
    want = MEASURED.of(Work(40, 40 * 1060).plus(head)) + MEASURED.of(Work(60, 60_000).plus(chosen).less(head))
    got = settled(Plan(), by=speed(loads=loads))
    assert got.predicted_ms == pytest.approx(want + 2 + 1.048576)
    reused = settle(decide(Plan("reuse"), None), Plan("reuse"), None, found(), speed(loads=loads))
    assert reused.predicted_ms == pytest.approx(MEASURED.of(Work(60, 60_000)) + 2 + 1.048576)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cached": 0, "candidates": Work()}, "no chunk was in the store"),
        ({"cached": 200, "candidates": Work(200, 1000)}, "choosing alone would use up the cap of 0.15"),
        ({"mandatory": Work(960, 500_000)}, "blending would save too little: predicted"),
    ],
)
def test_auto_gives_up_where_blending_cannot_pay(changes: dict[str, Any], reason: str) -> None:
    got = settled(Plan(), at=found(**changes))
    assert got.method == "full" and got.reason.startswith(reason)
    assert (got.ratio, got.max_charged, got.predicted_kl) == (1.0, None, 0.0)
    assert got.predicted_ms == pytest.approx(MEASURED.of(Work.full(1060)))


def test_only_if_all_chunks_are_conditioned_their_points_count() -> None:
    plan = Plan(max_kl=0.04, max_charged=1.0)
    behind = settled(plan, BOTH, found(conditioned=1.0))
    assert (behind.method, behind.ratio, behind.predicted_kl) == ("head", 0.05, 0.01)
    mixed = settled(plan, BOTH, found(conditioned=0.99))
    assert (mixed.method, mixed.ratio, mixed.predicted_kl) == ("head", 0.15, 0.02)


def test_auto_gives_up_where_only_conditioned_chunks_would_meet_the_target() -> None:
    plan = Plan(max_kl=0.04, max_charged=0.1)
    assert decide(plan, BOTH).method == "head", "which it may find"
    got = settled(plan, BOTH, found(conditioned=0.5))
    assert got.method == "full"
    assert got.reason == "no calibrated setting keeps the mean KL of plain chunks under 0.04 and is charged at most 0.1"


def test_of_settings_that_meet_the_target_the_one_that_is_ready_first_runs() -> None:
    plan = Plan(max_kl=0.06, max_charged=0.9)
    assert {p.method for p in KNOWN.meeting(0.9, 0.06, "plain")} == {"query", "head"}
    dear = {"query": Probe(100 * 4)}
    got = settled(plan, at=found(probe=lambda method: dear.get(method, Probe())))
    assert got.method == "head", "it has no probe"
    learned = speed()
    for _ in range(20):  # the probe turns out to cost next to nothing, and saves rows by the cap
        learned.chose("query", Work(60, 60_000), 0.01)
    assert settled(plan, by=learned).method in ("head", "query")


def exact(tokens: int, **changes: Any) -> Found:
    """Of the 1,000 cached tokens so many are exact."""
    rest = 1000 - tokens
    return found(candidates=Work(rest, rest * 700), exact_nbytes={"host": tokens}, **changes)


def test_an_exact_prefix_runs_where_it_is_ready_as_soon() -> None:
    got = settled(Plan(), at=exact(1000))
    assert (got.method, got.ratio, got.predicted_kl) == ("prefix", 0.0, 0.0)
    assert got.reason.startswith("an exact prefix of 1000 tokens loses nothing; predicted ")
    assert settled(Plan(), at=exact(20)).method == "query", "it would take far longer"
    unmet = settled(Plan(max_kl=0.05, max_charged=0.1), BOTH, exact(500))
    assert unmet.method == "prefix", "nothing else meets the target"


def test_where_no_exact_prefix_may_run_none_is_chosen() -> None:
    got = settle(decide(Plan(), KNOWN), Plan(), KNOWN, exact(1000), speed(), prefix=False)
    assert got.method == "query"


def test_what_was_given_up_stays_given_up() -> None:
    lost = give_up(decide(Plan(), KNOWN), "two chunks were lost")
    got = settle(lost, Plan(), KNOWN, exact(900), speed())
    assert (got.method, got.reason) == ("full", "two chunks were lost") and got.predicted_ms > 0


# ------------------------------------------------------------------ time


def test_before_anything_is_known_decisions_are_compared_by_flops_and_no_time_is_told() -> None:
    fresh = speed(passes=None)
    got = settled(Plan(), by=fresh)
    assert (got.method, got.predicted_ms) == ("query", 0.0) and got.reason.endswith("at ratio 0.15")
    small = settled(Plan(), at=found(mandatory=Work(960, 500_000)), by=fresh)
    assert small.reason == "blending would save too little: less than an eighth of the work"
    assert fresh.full_ms(100) == fresh.least_ms(100) == 0.0


def test_without_a_calibration_the_speed_is_learned_from_passes_and_encodings() -> None:
    learned = speed(passes=None)
    learned.saw(learned.flops(range(200)), 10.0)
    assert learned.full_ms(200) == pytest.approx(10.0)
    for _ in range(9):
        learned.passed(Work.full(200), 30.0)
    assert learned.full_ms(200) == pytest.approx(30.0)
    assert learned.least_ms(200) == pytest.approx(10.0)
    assert learned.flops([0, 9]) == 2 * 1000.0 + 4 * 4 * 2 * 8 * 11


def test_a_calibration_of_this_machine_holds_from_the_beginning_and_follows_the_load() -> None:
    measured = speed()
    full_ms = measured.full_ms(1000)
    assert full_ms == pytest.approx(MEASURED.of(Work.full(1000)))
    measured.saw(1e9, 1e9)
    assert measured.full_ms(1000) == full_ms, "encodings teach nothing here"
    for _ in range(20):
        measured.passed(Work.full(500), 3 * MEASURED.of(Work.full(500)))
    assert measured.full_ms(1000) == pytest.approx(3 * full_ms)


def test_one_odd_pass_does_not_change_what_auto_does() -> None:
    measured, before = speed(loads={"host": Curve(0.0, 1e-6, 0.0, 1, 2)}), settled(Plan())
    for odd in (1e6, 1e-6):
        measured.passed(Work.full(1060), odd)
        measured.loaded({"host": 1 << 20}, odd)
        measured.chose("query", Work(60, 60_000), odd)
        got = settled(Plan(), by=measured)
        assert (got.method, got.ratio) == (before.method, before.ratio)


def test_passes_of_few_rows_say_nothing() -> None:
    measured = speed()
    for _ in range(50):
        measured.passed(Work(3, 900), 1e6)
    assert measured.full_ms(1000) == pytest.approx(MEASURED.of(Work.full(1000)))


def test_loading_is_learned_by_tier_and_what_is_unknown_is_as_slow_as_the_slowest() -> None:
    learned = speed()
    decision = decide(Plan("reuse"), None)

    def loading(**nbytes: int) -> float:
        return learned.ms(decision, found(nbytes=nbytes)) - learned.ms(decision, found(nbytes={}))

    assert loading(host=1000) == 0.0, "nothing is known of any tier"
    learned.loaded({"host": 1000}, 2.0)
    learned.loaded({"disk": 1000}, 50.0)
    learned.loaded({"host": 1000, "disk": 1000}, 9e9)
    assert loading(host=2000, disk=1000) == pytest.approx(4.0 + 50.0)
    assert loading(mooncake=1000) == pytest.approx(50.0)


def test_a_slow_tier_can_make_full_prefill_the_faster_choice() -> None:
    slow = speed(loads={"disk": Curve(10_000.0, 0.0, 0.0, 1, 2)})
    got = settled(Plan(), at=found(nbytes={"disk": 1 << 20}), by=slow)
    assert got.method == "full" and got.reason.startswith("blending would save too little: predicted 10")


@given(
    st.integers(0, 1000),
    st.integers(0, 2000),
    st.floats(0, 1),
    st.integers(0, 400),
    st.sampled_from([None, 0.01, 0.05, 0.3]),
    st.booleans(),
)
def test_what_auto_chooses_is_never_predicted_slower_than_full_prefill(
    cached: int, text: int, conditioned: float, probe: int, target: float | None, measured: bool
) -> None:
    tokens = cached + text + 1
    mandatory = Work(text + 1, (text + 1) * tokens * 0.8)
    made = found(
        tokens=tokens,
        cached=cached,
        mandatory=mandatory,
        candidates=Work(cached, cached * tokens * 0.4),
        conditioned=conditioned,
        probe=lambda method: Probe(probe * 4 if method == "query" else 0),
    )
    by = speed(passes=MEASURED if measured else None)
    got = settled(Plan(max_kl=target, max_charged=0.4), BOTH, made, by)
    full = give_up(got, "")
    assert by.cost(got, made) <= by.cost(full, made) and by.cost(got, made) >= 0
    if got.method not in ("full", "prefix") and target is not None:
        variant: Any = "conditioned" if conditioned == 1.0 else "plain"
        (of,) = [p for p in BOTH.points if (p.method, p.ratio, p.variant) == (got.method, got.ratio, variant)]
        assert of.kl_high <= target


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("change", [{"version": 4}, {"points": [{}]}, {"default": {"method": "x", "ratio": 1}}])
def test_a_wrong_calibration_file_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig, match="test"):
        calibration.parse(json.dumps({**FILE, **change}), "test")
    with pytest.raises(InvalidConfig):
        calibration.parse("not json", "test")


def test_a_calibration_beside_the_weights_is_found(tmp_path: Path) -> None:
    assert calibration.load(str(tmp_path), tmp_path) is None
    (tmp_path / "blend_calibration.json").write_text(json.dumps(FILE))
    found = calibration.load(str(tmp_path), tmp_path)
    assert found is not None and found.default.ratio == 0.15


def test_the_embedded_model_has_one(tmp_path: Path) -> None:
    found = calibration.load("smollm2-135m", tmp_path)
    assert found is not None and found.default.method == "query"
