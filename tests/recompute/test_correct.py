"""KV that is not computed again moves by what its chunk's rows show, for the question and the answer alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from blend import Chunk, Engine, Plan, Prompt, Text
from blend.recompute import correct, passes, prefill
from blend.recompute.budget import Budget
from blend.recompute.kernels.dispatch import kernels
from blend.recompute.prefill import Outcome, Repair
from blend.recompute.rope import Rotation
from blend.recompute.select import Blend, Selection, selector
from tests import tiny

CHUNKS = [Chunk(tiny.random_ids(length, length)) for length in (40, 24, 33)]
PROMPT = Prompt([Text(tiny.random_ids(6, 1)), *CHUNKS, Text(tiny.random_ids(9, 3))])
HEADS = 8


@pytest.fixture(scope="module", params=["llama", "gemma3", "smollm3"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("correct")
    model = tiny.save_model(directory / "model", request.param)
    with tiny.engine(model, directory / "store") as made:
        made.precompute(CHUNKS)
        yield made


class Keeping(Repair):
    """``query`` with half of the budget; keeps canvases before and after, and the selection."""

    name, ratio = "keeping", 0.5

    def __init__(self, *, corrected: bool = True, max_rows: int = 4096) -> None:
        self._corrected = corrected
        self._max_rows = max_rows

    def __call__(self, blend: Blend, budget: Budget) -> Outcome:
        query = selector("query")
        assert query is not None
        blend.canvas.need(blend.decoder.layers - 1)
        self.stored = blend.canvas.k.clone(), blend.canvas.v.clone()
        selection = query.select(blend, Budget(budget.layers, budget.cached, 0.5))
        assert selection.correction is not None
        self.blend, self.correction = blend, selection.correction
        if not self._corrected:
            selection = replace(selection, correction=None)
        blend = replace(blend, max_rows=self._max_rows)
        outcome = prefill.blended(blend, lambda *_: selection, budget)
        self.chosen, self.logits = selection.positions, outcome.logits
        self.k, self.v = blend.canvas.k.clone(), blend.canvas.v.clone()
        return outcome


def run(engine: Engine, **options: object) -> Keeping:
    keeping = Keeping(**options)  # type: ignore[arg-type]
    engine.prefill(PROMPT, Plan("reuse"), repair=keeping)
    return keeping


@pytest.mark.parametrize("what", ["keys", "values"])
def test_kv_moves_by_the_mean_of_what_its_chunk_shows(engine: Engine, what: str) -> None:
    """By hand, position by position: keys go back to 0, there is the mean, and out again."""
    made = run(engine)
    fresh = set(made.chosen.tolist())
    for layer, turning in enumerate(engine.decoder.rotations):
        rotation = turning if what == "keys" else None
        stored, found = (pair[what == "values"][layer] for pair in (made.stored, (made.k, made.v)))
        for start, end in made.blend.chunks:
            inside = range(start + HEADS, end)
            shown = [p for p in inside if p in fresh]
            moves = [turned(rotation, found[:, p] - stored[:, p], -p) for p in shown]
            mean = by_hand(moves) if shown else torch.zeros(())
            for p in range(start, end):
                if p in fresh:
                    continue
                expected = stored[:, p]
                if p in inside and shown:
                    expected = expected + turned(rotation, mean, p)
                torch.testing.assert_close(found[:, p], expected, atol=2e-5, rtol=1e-4)


def by_hand(moves: list[torch.Tensor]) -> torch.Tensor:
    """The mean of moves ``[KVH, D]``, each weighted by one over its length, less the more some of them outweigh all."""
    weights = torch.stack([1 / move.norm(dim=1).clamp(min=1e-12) for move in moves])
    mean = sum(w[:, None] * move for w, move in zip(weights, moves, strict=True)) / weights.sum(0)[:, None]
    rows = weights.sum(0) ** 2 / (weights**2).sum(0)
    return mean * (rows / (rows + correct.DOUBT))[:, None]


def turned(rotation: Rotation | None, vector: torch.Tensor, shift: int) -> torch.Tensor:
    return vector if rotation is None else rotation.rotate(vector[:, None], shift)[:, 0]


def test_what_is_computed_before_the_question_stays(engine: Engine) -> None:
    made, without = run(engine), run(engine, corrected=False)
    start = made.blend.question[0]
    assert torch.equal(made.chosen, without.chosen)
    for one, other in ((made.k, without.k), (made.v, without.v)):
        assert torch.equal(one[:, :, made.chosen], other[:, :, made.chosen])
        assert not torch.equal(one[:, :, :start], other[:, :, :start])


def test_the_question_reads_moved_kv(engine: Engine) -> None:
    """Its rows, computed once more over the canvas as it is then, come out the same."""
    made = run(engine)
    blend = made.blend
    question = torch.arange(*blend.question)
    again = passes.unstopped(passes.run(engine.decoder, blend.canvas, blend.token_ids, question, 4096))
    torch.testing.assert_close(again, made.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(blend.canvas.v, made.v, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("max_rows", [1, 7, 50])
def test_however_rows_are_cut_into_passes(engine: Engine, max_rows: int) -> None:
    whole, cut = run(engine), run(engine, max_rows=max_rows)
    torch.testing.assert_close(cut.k, whole.k, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cut.logits, whole.logits, atol=1e-4, rtol=1e-4)


def test_a_pass_is_not_run_again_over_what_is_moved(engine: Engine) -> None:
    """Rows before the question would see it."""
    kept = run(engine, corrected=False)
    blend = kept.blend
    rows = prefill.rows_of(blend, Selection(kept.chosen))
    observer = kept.correction.observer()
    passes.run(engine.decoder, blend.canvas, blend.token_ids, rows, 4096, observer=observer)
    with pytest.raises(correct.PassRepeated):
        passes.run(engine.decoder, blend.canvas, blend.token_ids, rows, 4096, observer=observer)


def test_the_engine_does_the_same(engine: Engine) -> None:
    made = run(engine)
    plan = Plan("query", 0.5)
    assert torch.allclose(engine.prefill(PROMPT, plan).logits, made.logits, atol=1e-4)


def test_with_nothing_to_go_by_nothing_moves() -> None:
    candidates, version = torch.ones(40, dtype=torch.bool), kernels(torch.device("cpu"))
    heads = torch.arange(0, HEADS)
    assert correct.correction((None,), ((0, 30),), candidates, heads, 30, HEADS, version) is None
    everything = torch.arange(0, 30)
    assert correct.correction((None,), ((0, 30),), candidates, everything, 30, HEADS, version) is None
    assert correct.correction((None,), ((0, 30),), candidates, torch.tensor([9]), 30, HEADS, version) is not None


def mean_of(*moves: tuple[float, float]) -> torch.Tensor:
    """Of one head and one chunk."""
    seen = correct.Moves(1, 1, 2, torch.device("cpu"))
    for move in moves:
        seen.add(torch.tensor([[move]]), torch.ones(1, 1))
    return seen.mean()[0, 0]


def test_what_moves_far_counts_less() -> None:
    """One row in a hundred times as far moves the mean no more than another one."""
    rows = 16
    share = rows / (rows + correct.DOUBT)
    alike = mean_of(*[(1.0, 0.0)] * rows)
    torch.testing.assert_close(alike, torch.tensor([share, 0.0]))
    stray = mean_of(*[(1.0, 0.0)] * (rows - 1), (0.0, 100.0))
    assert float((stray - alike).abs().max()) < 0.1
    assert float(mean_of((3.0, 4.0)).norm()) == pytest.approx(5 / (1 + correct.DOUBT))


def test_what_does_not_move_at_all_is_a_mean_of_0() -> None:
    assert torch.equal(mean_of((0.0, 0.0), (0.0, 0.0)), torch.zeros(2))
    assert bool(mean_of((0.0, 0.0), (1.0, 0.0)).isfinite().all())


def test_other_methods_move_nothing(engine: Engine) -> None:
    for method in ("random", "head", "deviation"):
        chooser = selector(method)
        assert chooser is not None
        assert chooser.correction(run(engine).blend, torch.tensor([20])) is None
