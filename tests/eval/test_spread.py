"""How far a metric moves over the orders of a question."""

from __future__ import annotations

from blend.eval.spread import spread
from blend.eval.values import Record


def record(question: str, order: int, f1: float, answer: str) -> Record:
    return Record(
        question,
        "query",
        0.15,
        answer,
        ("x",),
        {"f1": f1},
        0.15,
        0.15,
        0.16,
        9,
        5,
        "query",
        {},
        1.0,
        condition="order",
        order=order,
    )


def test_spread_is_within_a_question_not_between_questions() -> None:
    records = [record("a", 0, 1.0, "x"), record("a", 1, 1.0, "x"), record("b", 0, 0.0, "y"), record("b", 1, 1.0, "x")]
    found = spread(records)
    assert found["spread_f1"].mean == 0.25 and found["spread_f1"].count == 2
    assert found["spread_answers"].mean == 0.5
    assert spread(records[:1]) == {}
