"""The oracle: better rows than chance, honest about what choosing them takes."""

from __future__ import annotations

import pytest
import torch

from blend import Engine, Plan, Prompt
from blend.errors import InvalidInput
from blend.eval.methods import Oracle, Reference, prefill
from blend.eval.metrics import kl_rows
from tests import tiny

WHERE = "evaluation"
ANSWER = 4


def reference(engine: Engine, prompt: Prompt) -> Reference:
    full = engine.prefill(prompt, Plan("full"), namespace=WHERE, reserve=ANSWER)
    return Reference(full, engine.greedy(full, ANSWER) or (5,))


def answer_kl(engine: Engine, prompt: Prompt, method: str, known: Reference) -> float:
    got = prefill(engine, method, 0.25, prompt, namespace=WHERE, reserve=ANSWER, reference=known)
    full = engine.continuation(known.prefill, known.answer_ids)
    return float(kl_rows(full, engine.continuation(got, known.answer_ids)).mean())


def test_it_beats_chance_at_the_same_number_of_rows(engine: Engine) -> None:
    found: dict[str, list[float]] = {"oracle": [], "random": []}
    for seed in range(6):
        prompt = tiny.prompt(seed=100 * seed, length=24)
        engine.precompute(tiny.chunks_of(prompt), namespace=WHERE)
        known = reference(engine, prompt)
        for method, values in found.items():
            values.append(answer_kl(engine, prompt, method, known))
    assert sum(found["oracle"]) < 0.9 * sum(found["random"])


def test_ratio_one_is_full_prefill_and_tries_nothing(engine: Engine, prompt: Prompt) -> None:
    known = reference(engine, prompt)
    got = prefill(engine, "oracle", 1.0, prompt, namespace=WHERE, reference=known)
    torch.testing.assert_close(got.logits, known.prefill.logits, rtol=0, atol=1e-3)
    assert got.report.charged_ratio == 1.0


def test_it_chooses_as_many_rows_as_any_method_and_charges_every_trial(engine: Engine, prompt: Prompt) -> None:
    known, seen = reference(engine, prompt), list[tuple[int, int]]()
    got = prefill(
        engine,
        "oracle",
        0.1,
        prompt,
        namespace=WHERE,
        reference=known,
        positions=True,
        progress=lambda done, most: seen.append((done, most)),
    )
    report = got.report
    assert report.selected == prefill(engine, "head", 0.1, prompt, namespace=WHERE).report.selected
    assert set(range(len(prompt) - 11, len(prompt))) <= set(report.recomputed_positions or ())
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert all(done <= most for done, most in seen)
    rows = len(seen) * (11 + len(known.answer_ids) - 1)  # the question's and the answer's in each trial
    assert report.charged_ratio == pytest.approx(1 + (rows + report.selected) / report.cached)


def test_several_rounds_choose_as_many_rows_with_more_trials(engine: Engine, prompt: Prompt) -> None:
    known, trials = reference(engine, prompt), []
    full = engine.continuation(known.prefill, known.answer_ids)
    for rounds in (1, 3):
        seen: list[int] = []
        oracle = Oracle(known, full, 0.4, block=8, rounds=rounds, progress=lambda done, _, seen=seen: seen.append(done))
        got = engine.prefill(prompt, Plan("reuse"), namespace=WHERE, repair=oracle)
        assert got.report.selected == 52  # 0.4 of 129, rounded up
        trials.append(len(seen))
    assert trials[0] < trials[1] <= 3 * trials[0]


def test_the_same_rows_come_again(engine: Engine, prompt: Prompt) -> None:
    known = reference(engine, prompt)
    first, second = (
        prefill(engine, "oracle", 0.2, prompt, namespace=WHERE, reference=known, positions=True) for _ in range(2)
    )
    assert first.report.recomputed_positions == second.report.recomputed_positions
    torch.testing.assert_close(first.logits, second.logits, rtol=0, atol=0)


def test_without_a_hit_there_is_nothing_to_choose(engine: Engine, prompt: Prompt) -> None:
    known = reference(engine, prompt)
    got = prefill(engine, "oracle", 0.2, prompt, namespace="nothing", reference=known)
    torch.testing.assert_close(got.logits, known.prefill.logits, rtol=0, atol=1e-3)
    assert (got.report.cached, got.report.charged_ratio) == (0, 0.0)


def test_bad_input_is_refused(engine: Engine, prompt: Prompt) -> None:
    known = reference(engine, prompt)
    other = tiny.prompt(chunks=2)
    with pytest.raises(InvalidInput, match="full prefill of this prompt"):
        prefill(engine, "oracle", 0.2, other, namespace=WHERE, reference=known)
    for wrong in ({"block": 0}, {"rounds": 0}):
        with pytest.raises(InvalidInput, match="1 or more"):
            Oracle(known, torch.zeros(1), 0.2, **wrong)
