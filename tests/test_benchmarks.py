"""The benchmarks of prefill: what they make of their measurements, and each mode once on a tiny model."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blend import Chunk, Engine, Plan
from tests import tiny
from tests.connector.conftest import require_vllm

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "ttft.py"
PNG = b"\x89PNG\r\n\x1a\n"

with pytest.MonkeyPatch.context() as _patching:
    _patching.syspath_prepend(SCRIPT.parent)
    growth, spans, workload = (importlib.import_module(name) for name in ("growth", "spans", "workload"))
    ttft, ttft_plot, ttft_profile, ttft_targets = (
        importlib.import_module(name) for name in ("ttft", "ttft_plot", "ttft_profile", "ttft_targets")
    )
    bound = importlib.import_module("bound")
    vllm_figures, vllm_load, vllm_phases, vllm_served, vllm_ttft = (
        importlib.import_module(f"vllm_{name}") for name in ("figures", "load", "phases", "served", "ttft")
    )


def cells(cost: Any) -> list[Any]:
    """Cells of a grid that take ``cost(rows, tokens, nbytes)`` seconds."""
    grid = [(n, r) for n in (1000, 2000, 4000, 8000) for r in (0.0, 0.05, 0.15, 0.3, 0.6, 1.0)]
    sizes = [(n, r, 60 + r * (n - 60), 1000 * (n - 60)) for n, r in grid]
    return [growth.Cell(n, r, rows, nbytes, cost(rows, n, nbytes)) for n, r, rows, nbytes in sizes]


# ------------------------------------------------------------------ growth


_COEFFICIENT = st.one_of(st.just(0.0), st.floats(0.1, 10.0))


@given(_COEFFICIENT, _COEFFICIENT, _COEFFICIENT, st.floats(0.1, 10.0))
def test_a_cost_of_the_terms_is_fitted_exactly(a: float, b: float, c: float, d: float) -> None:
    wanted = {"row": a * 1e-3, "row_token": b * 1e-6, "byte": c * 1e-8, "request": d * 0.1}
    row, row_token, byte, request = wanted.values()
    made = cells(lambda rows, tokens, nbytes: row * rows + row_token * rows * tokens + byte * nbytes + request)
    found = growth.fit(made)
    for cell, predicted in zip(made, found.predicted, strict=True):
        assert predicted == pytest.approx(cell.seconds, rel=1e-6)
    for name, least in (("row", 1e-8), ("row_token", 1e-11), ("byte", 1e-13), ("request", 1e-6)):
        assert found.coefficients[name] == pytest.approx(wanted[name], rel=1e-4, abs=least)
    assert found.worst < 1e-6 and found.r2 > 1 - 1e-9
    assert growth.unexplained(made) < 1e-6


def test_no_coefficient_is_negative() -> None:
    found = growth.fit(cells(lambda rows, tokens, nbytes: 1.0 + 1e-3 * rows - 1e-9 * nbytes))
    assert min(found.coefficients.values()) >= 0.0
    assert found.worst > 0.0


def test_work_on_every_pair_of_tokens_is_told() -> None:
    made = cells(lambda rows, tokens, nbytes: 1e-3 * rows + 1e-7 * tokens**2)
    assert growth.unexplained(made) > 0.9
    assert growth.fit(made).worst > 0.1


def test_a_fit_that_is_off_says_by_how_much() -> None:
    made = cells(lambda rows, tokens, nbytes: 1e-3 * rows + 0.5)
    slow = [growth.Cell(**{**vars(c), "seconds": c.seconds * 1.5}) if i == 9 else c for i, c in enumerate(made)]
    found = growth.fit(slow)
    assert 0.2 < found.worst < 0.4
    assert found.worst == max(abs(p / c.seconds - 1) for p, c in zip(found.predicted, slow, strict=True))
    assert found.r2 < growth.fit(made).r2


def test_too_few_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="3 cells; 4 terms"):
        growth.fit(cells(lambda rows, tokens, nbytes: 1.0)[:3])


@given(st.floats(0.1, 3.0), st.floats(1e-6, 1e3))
def test_the_exponent_of_a_power_is_that_power(power: float, factor: float) -> None:
    x = [10.0, 35.0, 700.0, 9000.0]
    assert growth.exponent(x, [factor * v**power for v in x]) == pytest.approx(power)


def test_one_value_has_no_exponent() -> None:
    assert growth.exponent([5.0, 5.0], [1.0, 2.0]) != growth.exponent([5.0, 5.0], [1.0, 2.0])


def test_exponents_are_of_cells_with_one_ratio_or_one_length() -> None:
    made = cells(lambda rows, tokens, nbytes: rows**0.5 * tokens)
    assert growth.over_rows(made) == {n: pytest.approx(0.5) for n in (1000, 2000, 4000, 8000)}
    over_tokens = growth.over_tokens(made)
    assert list(over_tokens) == [0.0, 0.05, 0.15, 0.3, 0.6, 1.0]
    assert over_tokens[0.0] == pytest.approx(1.0)  # its rows are the same at every length
    assert over_tokens[1.0] == pytest.approx(1.5)


# ------------------------------------------------------------------- spans


def test_time_of_ranges_within_is_not_the_outer_ones() -> None:
    recorded = [
        spans.Span("norm", 10, 15),
        spans.Span("pass", 5, 40),
        spans.Span("norm", 50, 58),
        spans.Span("all", 0, 100),
        spans.Span("mlp", 15, 30),
        spans.Span("later", 100, 101),
    ]
    assert spans.self_times(recorded) == {
        ("all",): 100 - 35 - 8,
        ("all", "pass"): 35 - 5 - 15,
        ("all", "pass", "norm"): 5,
        ("all", "pass", "mlp"): 15,
        ("all", "norm"): 8,
        ("later",): 1,
    }


@st.composite
def _nested(draw: st.DrawFn, start: int = 0, end: int = 1000, depth: int = 3) -> list[Any]:
    made = [spans.Span(draw(st.sampled_from("abc")), start, end)]
    cuts = sorted(draw(st.lists(st.integers(start, end), max_size=4, unique=True))) if depth else []
    for low, high in zip(cuts[::2], cuts[1::2], strict=False):
        made += draw(_nested(low, high, depth - 1))
    return made


@given(_nested(), st.randoms())
def test_all_times_together_are_the_outermost_range(made: list[Any], random: Any) -> None:
    random.shuffle(made)
    times = spans.self_times(made)
    assert sum(times.values()) == 1000
    assert min(times.values()) >= 0


def test_a_recorder_nests_and_lets_errors_through() -> None:
    recorder = spans.Recorder(torch.device("cpu"))

    def fail() -> None:
        raise KeyError("as expected")

    assert recorder.around("sum", sum)([1, 2]) == 3
    with pytest.raises(KeyError, match="as expected"), recorder.range("outer"):
        recorder.around("inner", fail)()
    assert [span.name for span in recorder.spans] == ["sum", "inner", "outer"]
    assert set(spans.self_times(recorder.spans)) == {("sum",), ("outer",), ("outer", "inner")}


# ----------------------------------------------------------------- profile


def test_paths_have_their_place_in_the_table() -> None:
    times = {
        ("prefill",): 1_000_000,
        ("prefill", "lookup"): 2_000_000,
        ("prefill", "select"): 3_000_000,
        ("prefill", "select", "pass"): 4_000_000,
        ("prefill", "select", "pass", "mass"): 5_000_000,
        ("prefill", "select", "pass", "fetch", "rotate"): 6_000_000,
        ("prefill", "pass"): 7_000_000,
        ("prefill", "pass", "mlp"): 8_000_000,
        ("prefill", "pass", "mlp", "norms"): 500_000,
        ("prefill", "pass", "norms"): 500_000,
        ("prefill", "pass", "fetch"): 0,
    }
    assert list(ttft_profile.milliseconds(times).items()) == [
        (("request", "lookup"), 2.0),
        (("request", "rotate"), 6.0),
        (("request", "other in the request"), 1.0),
        (("select", "mass"), 5.0),
        (("select", "other in the pass"), 4.0),
        (("select", "choosing"), 3.0),
        (("recompute", "norms"), 1.0),
        (("recompute", "mlp"), 8.0),
        (("recompute", "other in the pass"), 7.0),
    ]


def test_a_table_sums_its_sections() -> None:
    from rich.console import Console

    columns = {
        "host": {("request", "lookup"): 1.0, ("recompute", "mlp"): 6.0, ("recompute", "norms"): 3.0},
        "full": {("recompute", "mlp"): 20.0},
    }
    console = Console(width=110, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - it prints to nowhere
    console.print(ttft_profile.table(columns, "title"))
    lines = [line.replace("│", " ").split() for line in console.export_text().splitlines()]
    assert ["request", "lookup", "1.0", "10.0", "–", "–"] in lines
    assert ["recompute,", "in", "all", "9.0", "90.0", "20.0", "100.0"] in lines
    assert ["prefill", "10.0", "100.0", "20.0", "100.0"] in lines


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    with tiny.engine(tiny.save_model(tmp_path / "model"), tmp_path / "store") as made:
        yield made


@pytest.mark.parametrize(
    ("method", "probe"), [("query", {"mass", "mlp"}), ("deviation", {"deviation"}), ("head", set()), ("full", None)]
)
def test_a_profile_adds_up_and_leaves_nothing_behind(
    method: str, probe: set[str] | None, engine: Engine, tmp_path: Path
) -> None:
    prompt = tiny.prompt(chunks=3)
    engine.precompute(tiny.chunks_of(prompt))
    before = [getattr(owner, name) for owner, name, _ in ttft_profile.STEPS]
    kernels, plain = engine.decoder.kernels, engine.prefill(prompt, workload.plan(method, 0.15)).logits
    recorder = spans.Recorder(engine.decoder.device)
    with ttft_profile.recorded(engine.decoder, recorder):
        parts, report = ttft_profile.run(engine, prompt, workload.plan(method, 0.15), recorder)
        within = engine.prefill(prompt, workload.plan(method, 0.15)).logits
    assert torch.equal(plain, within)
    (whole,) = [span for span in recorder.spans if span.name == "prefill"]
    assert sum(parts.values()) == pytest.approx((whole.end - whole.start) / 1e6)
    assert sum(parts.values()) >= report.timings.ttft * 0.99
    found = {part for section, part in parts if section == "recompute"}
    assert found >= set(ttft_profile.PARTS) - {"mass", "deviation", "choosing"}
    selecting = {part for section, part in parts if section == "select"}
    assert selecting >= (probe or set()) and bool(selecting) == (probe is not None)
    assert [getattr(owner, name) for owner, name, _ in ttft_profile.STEPS] == before
    assert engine.decoder.kernels is kernels
    count = len(recorder.spans)
    engine.prefill(prompt, Plan("full"))
    assert len(recorder.spans) == count


def test_a_trace_holds_the_ranges_and_what_torch_does_in_them(engine: Engine, tmp_path: Path) -> None:
    prompt = tiny.prompt(chunks=3)
    engine.precompute(tiny.chunks_of(prompt))
    path = tmp_path / "trace.json"
    ttft_profile.Profile(engine, prompt, Plan("query", 0.15), 1, tmp_path / "store").trace(path)
    names = Counter(event.get("name") for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X")
    assert names["prefill"] == 1 and names["pass"] == 2
    assert names["mlp"] == 2 * engine.decoder.layers - 1  # the probe ends at the last layer
    assert names["aten::linear"] > 0


# ----------------------------------------------------------------- targets


def comparison(**changes: Any) -> dict[str, Any]:
    """Figures of a comparison that meets everything at 5,700 tokens."""
    met = dict(method="query", requested_ratio=0.15, tokens=5700, speedup_host=4.5, of_bound=0.8)
    return {**met, "own_full": 1.0, "select_share": 0.1, "of_disk_bound": 0.9, **changes}


@pytest.mark.parametrize(
    ("changes", "missed", "status"),
    [
        ({}, set(), 0),
        ({"speedup_host": 4.1}, {"speed-up"}, 65),
        ({"speedup_host": 4.1, "of_bound": 0.69, "own_full": 1.06}, {"speed-up", "of bound", "own full"}, 71),
        ({"select_share": 0.16, "of_disk_bound": 1.01}, {"selecting", "from disk"}, 88),
        ({"tokens": 1700, "speedup_host": 3.1, "select_share": 0.3}, set(), 0),
        ({"tokens": 1700, "speedup_host": 2.9}, {"speed-up"}, 65),
        ({"tokens": 3000, "speedup_host": 1.0}, set(), 0),
        ({"requested_ratio": 0.3, "speedup_host": 2.0, "of_bound": 0.1}, set(), 0),
        ({"method": "full", "requested_ratio": 1.0, "own_full": None, "speedup_host": 1.0}, set(), 0),
        ({"method": "head", "select_share": 0.9, "speedup_host": 1.0}, {"speed-up"}, 65),
    ],
)
def test_the_status_tells_what_was_missed(changes: dict[str, Any], missed: set[str], status: int) -> None:
    verdicts = ttft_targets.of_comparison(comparison(**changes))
    assert {verdict.target for verdict in verdicts if not verdict.met} == missed
    assert ttft_targets.status(verdicts) == status
    assert {name for name, met in ttft_targets.as_json(verdicts).items() if not met} == missed


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({}, True),
        ({"r2": 0.9}, False),
        ({"square_share": 0.2}, False),
        ({"exponents": {"tokens": {"0": 2.4}, "rows": {"1000": 0.8}}}, False),
        ({"exponents": {"tokens": {"0": 0.9}, "rows": {"1000": 1.3}}}, False),
    ],
)
def test_a_sweep_tells_whether_its_cost_grows_as_it_should(changes: dict[str, Any], met: bool) -> None:
    good = {"r2": 0.995, "square_share": 0.0, "exponents": {"tokens": {"0": 0.4, "1": 1.7}, "rows": {"1000": 0.9}}}
    verdicts = ttft_targets.of_sweep({**good, **changes})
    assert ttft_targets.as_json(verdicts) == {"growth": met}
    assert ttft_targets.status(verdicts) == (0 if met else 96)


# ---------------------------------------------------------------- workload


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Five questions with four passages each, one of which they share."""
    rows = [
        {
            "question": f"What is said of thing {q}?",
            "ctxs": [{"title": "", "text": "All share this."}]
            + [{"title": f"Thing {q}.{p}", "text": f"Of {q} and {p} much is said. " * 4} for p in range(3)],
        }
        for q in range(5)
    ]
    path = tmp_path / "data.json"
    path.write_text(json.dumps(rows))
    return path


def test_prompts_have_the_lengths_asked_for_and_no_passage_twice(engine: Engine, data: Path) -> None:
    made = workload.sized_prompts(engine, data, [400, 700, 900])
    assert [len(prompt) for prompt in made] == [400, 700, 900]
    for prompt in made:
        chunks = workload.chunks_of(prompt)
        assert len(set(chunks)) == len(chunks)
    short, _, long = (workload.chunks_of(prompt) for prompt in made)
    assert len(long) > len(short) and short[:-1] == long[: len(short) - 1]


def test_lengths_that_the_data_cannot_make_are_refused(engine: Engine, data: Path) -> None:
    with pytest.raises(SystemExit, match="too few passages for 90000 tokens"):
        workload.sized_prompts(engine, data, [90_000])
    with pytest.raises(SystemExit, match="no room for passages"):
        workload.sized_prompts(engine, data, [8])


@pytest.mark.parametrize(("method", "probes"), [("head", 0), ("query", 1), ("full", 0)])
def test_fresh_rows_are_all_that_was_computed(method: str, probes: int, engine: Engine) -> None:
    prompt = tiny.prompt(chunks=3)
    engine.precompute(tiny.chunks_of(prompt))
    report = engine.prefill(prompt, workload.plan(method, 0.25), positions=True).report
    rows = workload.fresh_rows(report)
    if method == "full":
        assert rows == len(prompt)
        return
    question = len(prompt.segments[-1])
    header = len(prompt.segments[0])
    assert rows == pytest.approx(header + question + report.selected + probes * question)


# ------------------------------------------------------------ command line


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--sweep", "--method", "reuse"], "takes no ratio"),
        (["--sweep", "--tokens", "100", "--ratios", "0,1"], "fewer than 5 cells"),
        (["--sweep", "--tokens", "100", "--ratios", "0,0.1,0.2,0.3,1"], "two or more of each"),
        (["--sweep", "--tokens", "1,2,3,4,5", "--ratios", "0.15"], "two or more of each"),
        (["--ratio", "1.5"], "1.5 is not from 0 to 1"),
        (["--ratios", "0,nan"], "nan is not from 0 to 1"),
        (["--sweep", "--plot", "missing/x.png"], "can be written to"),
        (["--sweep", "--plot", "x.svg"], "ends in .png"),
        (["--profile", "--trace", "missing/x.json"], "can be written to"),
        (["--sweep", "--profile"], "not allowed with"),
        (["--trace", "x.json"], "--trace is for --profile"),
        (["--method", "guess"], "one of auto, full"),
        (["--tokens", "many"], "invalid"),
        (["--passages", "0"], "1 or more"),
        (["--repeats", "0"], "1 or more"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    flags: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ttft.py", "--data", "x.json", *flags])
    with pytest.raises(SystemExit) as stopped:
        ttft.arguments()
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


def test_lists_are_read_in_ascending_order(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--data", "x.json", "--sweep", "--tokens", "512,256,512", "--ratios", "1,0.5,0"]
    monkeypatch.setattr(sys, "argv", ["ttft.py", *flags])
    args: argparse.Namespace = ttft.arguments()
    assert args.tokens == [256, 512] and args.ratios == [0.0, 0.5, 1.0]


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttft_plot, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None)))
    with pytest.raises(SystemExit, match=r"needs matplotlib: pip install .*\[eval\]"):
        ttft_plot.need_matplotlib()


def _need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI needs matplotlib")
        pytest.skip("matplotlib is not installed")


def test_a_sweep_is_drawn(tmp_path: Path) -> None:
    _need_matplotlib()
    made = cells(lambda rows, tokens, nbytes: 0.1 + 1e-3 * rows + 1e-6 * rows * tokens)
    ttft_plot.plot(made, growth.fit(made), tmp_path / "drawn.png", "a machine")
    assert (tmp_path / "drawn.png").read_bytes().startswith(PNG)


MODES = {
    "compare": (["--own-full", "3", "--prompts", "2", "--ratio", "0.15"], "ttft"),
    "sweep": (["--sweep", "--tokens", "300,600", "--ratios", "0,0.3,1", "--repeats", "1"], "ttft-sweep"),
    "profile": (["--profile", "--trace", "trace.json", "--repeats", "1"], "ttft-profile"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_ends_with_its_figures_and_with_what_was_missed(mode: str, data: Path, tmp_path: Path) -> None:
    flags, name = MODES[mode]
    if mode == "sweep":
        _need_matplotlib()
    model = tiny.save_model(tmp_path / "model", vocab_size=512)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        [sys.executable, SCRIPT, "--data", data, "--model", model, "--dtype", "float32", *flags],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["benchmark"] == name
    assert result["environment"]["engine"] == "native" and result["environment"]["fingerprint"]
    missed = {target for target, met in result["targets"].items() if not met}
    assert ran.returncode == (64 + sum(ttft_targets.BITS[target] for target in missed) if missed else 0)
    if mode == "compare":
        assert result["own_full_pairs"] == 3 and set(result["targets"]) >= {"own full", "of bound", "from disk"}
    if mode == "sweep":
        assert len(result["cells"]) == 6 and (tmp_path / "ttft_sweep.png").read_bytes().startswith(PNG)
    if mode == "profile":
        assert set(result["ms"]) == {"host", "disk", "full"} and (tmp_path / "trace.json").is_file()


# -------------------------------------------------------------------- vLLM


def _mix(tokens: int, stored: float = 0.98, passage: int = 500) -> Any:
    return vllm_load.Mix(lambda text: [ord(letter) for letter in text], tokens, stored, passage)


@pytest.mark.parametrize("tokens", [4000, 1001, 300])
@pytest.mark.parametrize("stored", [0.98, 0.9])
def test_requests_to_vllm_have_their_length_and_their_share_of_stored_tokens(tokens: int, stored: float) -> None:
    mix = _mix(tokens, stored, min(500, tokens // 5))
    requests = [mix.request(number) for number in range(6)]
    assert len({request.prompt.token_ids for request in requests}) == 6
    assert [r.prompt for r in requests] == [mix.request(number).prompt for number in range(6)]
    pool, unstored = set(mix.pool), []
    assert len(pool) == len(mix.pool)
    for request in requests:
        header, *chunks, question = request.prompt.segments
        assert len(request.prompt) == tokens
        assert all(isinstance(chunk, Chunk) for chunk in chunks) and len(question) > len(header) > 0
        assert sum(len(chunk) for chunk in chunks if chunk in pool) == request.stored
        assert request.stored == pytest.approx(stored * tokens, abs=len(chunks))
        assert len(header) + len(question) == pytest.approx(0.02 * tokens, abs=len(chunks))
        unstored += [chunk for chunk in chunks if chunk not in pool]
    assert len(set(unstored)) == len(unstored) == (0 if stored == 0.98 else 6)
    named = {segment for prompt in mix.filling() for segment in prompt.segments if isinstance(segment, Chunk)}
    assert named == pool


def test_lengths_without_room_for_a_question_are_refused() -> None:
    with pytest.raises(SystemExit, match="no room for header and question"):
        _mix(60)


def test_full_prefills_rate_is_what_its_times_are_made_of() -> None:
    wanted = bound.Rate(row=1e-3, key=2e-7)
    rate = bound.rate_of({n: [wanted.seconds(range(n))] for n in (1000, 2000, 4000)})
    assert (rate.row, rate.key) == (pytest.approx(1e-3), pytest.approx(2e-7))
    assert rate.seconds([3999]) - rate.seconds([0]) == pytest.approx(3999 * 2e-7)


def _report(**changes: Any) -> dict[str, Any]:
    """A report of 100 tokens: 10 of header and 10 of question around 80 that are stored."""
    chunks = [{"tokens": 40, "outcome": "hit", "tier": "host"}] * 2
    made = dict(method="query", computed=0, filled=90, cached=80, selected=8, charged_ratio=0.1, chunks=chunks)
    return {**made, "recomputed_positions": [*range(10), *range(20, 28)], **changes}


def test_a_requests_bound_is_its_rows_at_full_prefills_rate() -> None:
    rate = bound.Rate(row=1.0, key=0.01)
    rows = rate.seconds([*range(10), *range(20, 28), *range(90, 100)])
    assert bound.blended_seconds(_report(), 100, rate) == pytest.approx(rows)
    probed = bound.blended_seconds(_report(charged_ratio=0.2), 100, rate)
    assert probed == pytest.approx(rows + 8 * rate.seconds([99]))
    everything = _report(recomputed_positions=[*range(90)], selected=80, charged_ratio=1.0)
    assert bound.blended_seconds(everything, 100, rate) == pytest.approx(rate.seconds(range(100)))
    assert bound.decode_seconds(bound.Load(32, 8, 8), 0.5) == 14.0


def _answer(**changes: Any) -> Any:
    return vllm_served.Answer(**{"request_id": "1", "tokens": 100, "arrived": 0.0, "done": True, **changes})


@pytest.mark.parametrize(
    ("report", "complaint"),
    [
        (None, "not blended at all"),
        (_report(method="full"), "'method': 'full'"),
        (_report(computed=16), "'computed': 16"),
        (_report(cached=40), "'cached': 40"),
        (_report(chunks=[{"tokens": 80, "outcome": "hit", "tier": "disk"}]), "with 0 tokens of the host tier"),
    ],
)
def test_blended_answers_that_measure_something_else_stop_the_benchmark(report: Any, complaint: str) -> None:
    request = vllm_load.Request(tiny.prompt(), 80)
    assert vllm_served.check_blended(_answer(report=_report()), request, "query")
    with pytest.raises(SystemExit, match=complaint):
        vllm_served.check_blended(_answer(report=report), request, "query")


def test_full_prefills_that_were_spared_tokens_stop_the_benchmark() -> None:
    vllm_served.check_full(_answer())
    for spared in ({"cached": 16}, {"report": _report()}):
        with pytest.raises(SystemExit, match="measures something else"):
            vllm_served.check_full(_answer(**spared))


class _Stepped:
    """Serves one token of each request in every step."""

    def __init__(self) -> None:
        self.running: list[Any] = []
        self.most = self.settled = 0

    def add(self, prompt: Any, plan: Any, tokens: int) -> Any:
        self.running.append(_answer(tokens=tokens, done=False))
        self.most = max(self.most, len(self.running))
        return self.running[-1]

    def step(self) -> None:
        for answer in self.running:
            answer.stamps.append(0.0)
            answer.done = len(answer.stamps) == answer.tokens
        self.running = [answer for answer in self.running if not answer.done]

    def settle(self) -> None:
        self.settled += 1


def test_a_load_keeps_as_many_requests_under_way_as_it_should() -> None:
    served, mix = _Stepped(), _mix(300)
    asked = [mix.request(number) for number in range(7)]
    seconds, answers = vllm_phases._closed_loop(served, asked, None, bound.Load(7, 3, 4))
    assert seconds >= 0 and served.most == 3 and served.settled == 1
    assert [len(answer.stamps) for answer in answers] == [4] * 7


def test_latencies_are_held_against_those_without_arrivals() -> None:
    gaps = {"alone": [0.01] * 99 + [0.02], "blend": [0.01] * 50 + [0.03] * 50, "full": [1.0] * 100}
    found = vllm_figures.of_itl({kind: vllm_phases.Latencies(gaps=of, ttfts=[2.0]) for kind, of in gaps.items()})
    assert (found["alone"]["p50_ms"], found["full"]["p99_ms"], found["full"]["ttft_s"]) == (10.0, 1000.0, 2.0)
    assert 2.9 < found["itl_p99_ratio"] < 3.0 and 98 < found["itl_full_p99_ratio"] < 100


def _measured(**changes: Any) -> dict[str, Any]:
    """Figures of vLLM that meet every target."""
    met = dict(method="query", ratio=0.15, tokens=4000, speedup=3.1, itl_p99_ratio=1.9, throughput_ratio=2.1)
    return {**met, "of_bound": 0.61, **changes}


@pytest.mark.parametrize(
    ("changes", "missed", "status"),
    [
        ({}, set(), 0),
        ({"speedup": 2.99}, {"speed-up"}, 65),
        ({"itl_p99_ratio": 2.1, "of_bound": 0.59}, {"latency", "of bound"}, 74),
        ({"throughput_ratio": 1.9, "speedup": None}, {"throughput"}, 68),
        ({"speedup": 1.0, "tokens": 1000}, set(), 0),
        ({"speedup": 1.0, "ratio": 0.3}, set(), 0),
        ({"speedup": 1.0, "method": "head"}, set(), 0),
    ],
)
def test_vllms_status_tells_what_was_missed(changes: dict[str, Any], missed: set[str], status: int) -> None:
    verdicts = vllm_figures.verdicts(_measured(**changes))
    assert {verdict.target for verdict in verdicts if not verdict.met} == missed
    assert vllm_figures.status(verdicts) == status


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--methods", "query,guess"], "--methods guess: some of query"),
        (["--ratio", "0"], "above 0, at most 1"),
        (["--ratio", "nan"], "above 0, at most 1"),
        (["--rounds", "0"], "--rounds is 1 or more"),
        (["--itl-rounds", "0"], "--itl-rounds is 1 or more"),
        (["--new-tokens", "1"], "--new-tokens is 2 or more"),
        (["--only", "all"], "invalid choice"),
    ],
)
def test_flags_of_vllms_benchmark_that_make_no_sense_are_refused(
    flags: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm_ttft.py", *flags])
    with pytest.raises(SystemExit) as stopped:
        vllm_ttft.arguments()
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.slow
def test_vllms_benchmark_ends_with_its_figures(tmp_path: Path) -> None:
    require_vllm()
    sizes = dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=32)  # head sizes that vLLM has
    model = tiny.save_model(tmp_path / "model", **sizes)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    flags = "--dtype float32 --eager --tokens 300 --passage 60 --methods query,head --rounds 2 --itl-rounds 1"
    flags += " --arrivals 2 --quiet 8 --requests 4 --concurrency 2 --new-tokens 3"
    ran = subprocess.run(
        [sys.executable, SCRIPT.with_name("vllm_ttft.py"), "--model", model, *flags.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert (result["benchmark"], result["tokens"], result["targets"]) == ("vllm-ttft", 300, {})
    for name in ("full_s", "blend_s", "speedup", "itl_p99_ratio", "throughput_ratio", "of_bound"):
        assert result[name] > 0
    assert set(result["ttft"]) == {"query", "head"}
    assert 0.15 < result["charged_ratio"] < 0.25
    assert result["ttft"]["head"]["charged_ratio"] == pytest.approx(0.15, abs=0.01)
