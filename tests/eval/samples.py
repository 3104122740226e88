"""What tests of evaluation share: a tiny model, a data set, a results document made by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from blend.eval.datasets import Example, Passage
from blend.eval.summary import summarize
from blend.eval.values import Identity, Record, Results
from blend.versions import Environment


def example(number: int = 0, passages: int = 3) -> Example:
    """A question with passages of unequal lengths."""
    texts = tuple(Passage("", f"passage {number} {j}. " * (3 + j)) for j in range(passages))
    return Example(f"q{number}", f"what {number}?", ("x", "y z"), texts)


def write_data(path: Path, questions: int = 3, words: int = 4) -> Path:
    """A file in CacheBlend's format."""
    rows = [
        {"question": f"what {i}?", "answers": ["x"], "ctxs": [{"text": f"passage {i} {j}. " * words} for j in range(3)]}
        for i in range(questions)
    ]
    path.write_text(json.dumps(rows))
    return path


def record(question: str, method: str, ratio: float | None = None, **metrics: float) -> Record:
    """A record with the metrics given."""
    timings = {"first_token": 8.0}
    return Record(question, method, ratio, "x", ("x",), metrics, 0.1, 0.1, 0.2, 90, 70, method, timings, 8.0)


def records(values: Mapping[tuple[str, float | None], Sequence[float]], metric: str = "f1") -> list[Record]:
    """Records of one metric: for each method and ratio the value of each question."""
    return [
        record(f"q{i}", method, ratio, **{metric: value})
        for (method, ratio), row in values.items()
        for i, value in enumerate(row)
    ]


def document(made: Sequence[Record], **identity: str) -> Results:
    """A document of records."""
    known = {"model": "ab", "name": "tiny", "dtype": "float32", "dataset": "cd", "prompts": "ef"}
    return Results(
        "run",
        "blend-eval run",
        {"dataset": "demo", "max_new_tokens": 4, "margins": {"f1": 0.02}},
        Environment("0.1.0", "3.11", "2.13", "5.19", "Linux", "some", 2, "cpu"),
        Identity(**{**known, **identity}),
        len({r.question for r in made}),
        {},
        0,
        summarize(made, margins={"f1": 0.02}, seed=0),
        tuple(made),
    )
