"""Reading questions from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blend.errors import InvalidInput, NotFound
from blend.eval import datasets

SQUAD = {
    "data": [
        {
            "title": title,
            "paragraphs": [
                {
                    "context": f"{title} paragraph {i}",
                    "qas": [
                        {"id": f"{title}-{i}", "question": f"{title}{i}?", "answers": [{"text": "x"}, {"text": "x"}]}
                    ],
                }
                for i in range(3)
            ],
        }
        for title in ("A", "B", "C")
    ]
}


def write(path: Path, value: object) -> str:
    path.write_text(json.dumps(value), "utf-8")
    return str(path)


def test_squad_passages_hold_the_gold_one_and_the_articles_own_first(tmp_path: Path) -> None:
    found = datasets.load(write(tmp_path / "s.json", SQUAD), passages=4)
    assert len(found) == 9
    for example in found:
        title, place = example.id.split("-")
        texts = [p.text for p in example.passages]
        assert f"{title} paragraph {place}" in texts
        assert len(set(texts)) == 4
        assert sum(t.startswith(title) for t in texts) == 3
        assert example.answers == ("x",)
    assert found == datasets.load(str(tmp_path / "s.json"), passages=4)
    assert found != datasets.load(str(tmp_path / "s.json"), passages=4, seed=1)


def test_a_limit_spreads_over_the_file(tmp_path: Path) -> None:
    found = datasets.load(write(tmp_path / "s.json", SQUAD), limit=3)
    assert [e.id for e in found] == ["A-0", "B-0", "C-0"]


def test_the_cacheblend_format_keeps_its_passages_and_flattens_answers(tmp_path: Path) -> None:
    row = {"question": "q?", "answers": [["a", "b"], "c"], "ctxs": [{"title": "", "text": "t"}, {"text": "u"}]}
    (example,) = datasets.load(write(tmp_path / "c.json", [row]))
    assert example.answers == ("a", "b", "c")
    assert [p.text for p in example.passages] == ["t", "u"]


def test_the_demo_corpus_is_a_data_set() -> None:
    found = datasets.load("demo", passages=5)
    assert len(found) == 20
    assert all(len(e.passages) == 5 and e.answers for e in found)


@pytest.mark.parametrize("content", ["{", "3", "[]", "[" * 100_000, '{"data": [{}]}', '[{"question": "q"}]', "[3]"])
def test_a_file_of_no_known_format_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(InvalidInput, match=r"bad\.json"):
        datasets.load(str(tmp_path / "bad.json"))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(NotFound, match=r"nowhere\.json"):
        datasets.load("nowhere.json")


@pytest.mark.parametrize("wrong", [{"passages": 0}, {"limit": 0}])
def test_counts_below_one_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        datasets.load("demo", **wrong)  # type: ignore[arg-type]
