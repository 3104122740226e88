"""Questions that are made up."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from blend.errors import InvalidInput
from blend.eval.datasets import Example, load
from blend.model.tokenizer import Tokenizer

KINDS = ("needle-single", "needle-multikey", "needle-multivalue", "needle-variables")


@pytest.fixture(scope="module")
def tokenizer(default_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_directory(default_model_dir, "smollm2-135m")


def text(example: Example) -> str:
    return " ".join(passage.text for passage in example.passages)


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_of_the_answer_lies_in_a_gold_passage(kind: str) -> None:
    found = load(f"{kind}?tokens=1000&count=9", passages=5)
    assert len(found.examples) == 9
    for example in found.examples:
        (answer,) = example.answers
        gold = " ".join(p.text for p in example.passages if p.gold)
        assert len(example.passages) == 5 and any(p.gold for p in example.passages)
        assert all(value in gold for value in answer.split(", "))
        assert answer not in example.question


def test_single_and_multikey_ask_for_one_of_one_and_of_several() -> None:
    for kind, keys in (("needle-single", 1), ("needle-multikey", 4)):
        for example in load(f"{kind}?count=5").examples:
            facts = dict(re.findall(r"number of the ([a-z ]+) is (\d{7})\.", text(example)))
            (asked,) = (key for key in facts if key in example.question)
            assert len(facts) == keys and example.answers == (facts[asked],)
            assert sum(p.gold for p in example.passages) == 1


def test_multivalue_asks_for_all_values_in_the_order_of_the_text() -> None:
    for example in load("needle-multivalue?count=5").examples:
        assert example.answers == (", ".join(re.findall(r"\d{7}", text(example))),)
        assert example.answers[0].count(", ") == 3


def test_variables_form_chains_of_which_one_has_the_value() -> None:
    for example in load("needle-variables?count=5").examples:
        value: dict[str, str] = {}
        for name, number, other in re.findall(
            r"Variable ([A-Z]{5}) is set to the value (?:(\d{5})|of variable ([A-Z]{5}))\.", text(example)
        ):
            value[name] = number or value[other]  # a variable is set before it is used
        assert len(value) == 8 and len(set(value.values())) == 2
        asked = next(v for v in set(value.values()) if v in example.question)
        assert example.answers == (", ".join(name for name in value if value[name] == asked),)


def test_needles_lie_equally_often_in_each_passage() -> None:
    found = load("needle-multikey?tokens=800&count=12", passages=4)
    places = Counter([p.gold for p in e.passages].index(True) for e in found.examples)
    assert places == {0: 3, 1: 3, 2: 3, 3: 3}


def test_the_same_seed_gives_the_same_questions_on_every_python() -> None:
    found = load("needle-variables?tokens=512&count=2", passages=2, seed=3)
    assert found.digest == "2b22767acb75c678a282d993612b21e8cd621c2dd19b0f12be320065e466decf"
    assert load("needle-variables?tokens=512&count=2", passages=2, seed=4).digest != found.digest


def test_a_limit_takes_some_of_the_same_questions() -> None:
    whole = load("needle-single?tokens=800&count=8").examples
    assert load("needle-single?tokens=800&count=8", limit=4).examples == whole[::2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [512, 3000])
def test_the_length_is_about_what_was_asked_for(tokenizer: Tokenizer, kind: str, tokens: int) -> None:
    for example in load(f"{kind}?tokens={tokens}&count=3").examples:
        counts = [len(tokenizer.encode(passage.text)) for passage in example.passages]
        assert 0.85 * tokens <= sum(counts) <= 1.15 * tokens
        assert max(counts) < 2 * min(counts)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("needle-single?tokens=0", "tokens: got '0'"),
        ("needle-single?count=0", "count: got '0'"),
        ("needle-single?count=-1", "count: got '-1'"),
        ("needle-single?tokens=1e3", "tokens: got '1e3'"),
        ("needle-single?tokens=99999999999999999999", "tokens: "),
        ("needle-single?tokens=", "tokens: got ''"),
        ("needle-single?tokens=511", "at least 512: 64 for each of 8 passages"),
        ("needle-single?token=900", r"option: got 'token'; allowed: tokens \(the nearest\)"),
        ("needle-single?tokens", "options as in"),
        ("needle-singel", r"needle-single \(the nearest\)"),
    ],
)
def test_wrong_options_are_told(name: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        load(name)
