"""What ``query`` chooses: chunk heads first, then what the question looks at as far as other passages change it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blend import Chunk, Engine, Plan, Prompt, Text
from blend.recompute import prefill
from blend.recompute.budget import Budget
from blend.recompute.prefill import Outcome, Repair
from blend.recompute.select import Blend, selector
from tests import tiny

CHUNKS = [Chunk(tiny.random_ids(length, length)) for length in (40, 24, 33)]
PROMPT = Prompt([Text(tiny.random_ids(6, 1)), *CHUNKS, Text(tiny.random_ids(9, 3))])
HEADS = 8


class Choosing(Repair):
    """Keeps the tokens that ``query`` chooses at some budget, with a sensitivity put in the place of the stored one."""

    name, ratio = "choosing", 0.0

    def __init__(self, budget: float, sensitivity: torch.Tensor | None = None) -> None:
        self.chosen: list[int] = []
        self.spans: tuple[tuple[int, int], ...] = ()
        self._budget = budget
        self._sensitivity = sensitivity

    def __call__(self, blend: Blend, budget: Budget) -> Outcome:
        query = selector("query")
        assert query is not None
        known = replace(blend, sensitivity=self._sensitivity)
        outcome = prefill.blended(known, query.select, Budget(budget.layers, budget.cached, self._budget))
        self.chosen, self.spans = outcome.selection.positions.tolist(), blend.chunks
        return outcome


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("select")
    with tiny.engine(tiny.save_model(directory / "model"), directory / "store") as made:
        made.precompute(CHUNKS)
        yield made


def choose(engine: Engine, budget: float, sensitivity: torch.Tensor | None = None) -> Choosing:
    choosing = Choosing(budget, sensitivity)
    engine.prefill(PROMPT, Plan("reuse", variant="plain"), repair=choosing)
    return choosing


def test_the_first_tokens_of_each_chunk_go_first(engine: Engine) -> None:
    made = choose(engine, 0.5)
    for start, _ in made.spans:
        assert set(range(start, start + HEADS)) <= set(made.chosen)
    assert len(made.chosen) == 49  # half of 97, rounded up


def test_of_a_small_budget_they_get_half(engine: Engine) -> None:
    made = choose(engine, 0.13)  # 13 rows: two heads of each of three chunks
    heads = {start + at for start, _ in made.spans for at in range(2)}
    assert heads <= set(made.chosen) and len(made.chosen) == 13
    assert any(position not in {s + at for s, _ in made.spans for at in range(HEADS)} for position in made.chosen)


def test_what_no_passage_changes_is_chosen_last(engine: Engine) -> None:
    start, end = 6 + 40, 6 + 40 + 24
    still = torch.ones(engine.decoder.layers, len(PROMPT))
    still[:, start:end] = 0.0
    chosen = choose(engine, 0.5, still).chosen
    assert [p for p in chosen if start + HEADS <= p < end] == []
    assert any(start + HEADS <= p < end for p in choose(engine, 0.5).chosen)


def test_a_sensitivity_that_is_the_same_everywhere_changes_nothing(engine: Engine) -> None:
    even = torch.full((engine.decoder.layers, len(PROMPT)), 3.0)
    assert choose(engine, 0.4, even).chosen == choose(engine, 0.4).chosen


def test_each_layer_counts_by_its_own_sensitivity(engine: Engine) -> None:
    """What counts in one layer alone is chosen by that layer's mass."""
    found = []
    for layer in range(engine.decoder.layers):
        alone = torch.zeros(engine.decoder.layers, len(PROMPT))
        alone[layer] = 1.0
        found.append(tuple(choose(engine, 0.4, alone).chosen))
    assert len(set(found)) > 1


def test_stored_sensitivities_reach_the_choice(tmp_path: Path) -> None:
    """Conditioned chunks are chosen from by theirs: an engine that cannot know it chooses otherwise."""
    with tiny.engine(tiny.save_model(tmp_path / "model"), tmp_path / "store") as engine:
        engine.precompute(CHUNKS, behind=[[other for other in CHUNKS if other is not chunk] for chunk in CHUNKS])
        report = engine.prefill(PROMPT, Plan("query", 0.4), positions=True).report
        assert {chunk.variant for chunk in report.chunks} != {"plain"}
        seen = Choosing(0.4)
        engine.prefill(PROMPT, Plan("reuse"), repair=seen)
        assert report.recomputed_positions is not None
        assert set(seen.chosen) - set(report.recomputed_positions)
