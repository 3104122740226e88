"""Metrics against values that were worked out by hand from their published definitions, and as ``evaluate`` modules."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from setuptools import find_packages

from blend.errors import InvalidInput
from blend.eval.metrics import METRICS, identical, kl_rows, module_path, text_scores, top1_rows
from blend.eval.metrics.text import normalize

ROOT = Path(__file__).parents[2]
TEXT = ("f1", "em", "token_f1", "rouge_l", "contains")
MODEL = ("first_kl", "answer_kl", "top1", "same_answer", "attention_error")

# The sums: an answer, its references, and f1, em, token_f1, rouge_l, contains. SQuAD's normal form drops
# punctuation before articles; Rouge's words are runs of a-z and 0-9, articles among them.
SUMS = {
    "the same": ("1888", ["1888"], (1, 1, 1, 1, 1)),
    "articles, case, punctuation": ("The Eiffel Tower!", ["eiffel tower"], (1, 1, 1, 0.8, 1)),
    "inside a sentence": ("It was built in 1888.", ["1888"], (2 / 6, 0, 2 / 6, 2 / 6, 1)),
    "the best reference": ("in Paris", ["Lyon", "Paris", "city of Paris"], (2 / 3, 0, 2 / 3, 2 / 3, 1)),
    # b c shared of 3 and 3 words; the longest common subsequence is one word.
    "another order": ("c x b", ["b c d"], (2 / 3, 0, 2 / 3, 1 / 3, 0)),
    "repeated words": ("no1 no1 no1", ["no1"], (2 / 4, 0, 0, 2 / 4, 1)),
    "part of a word": ("unclear", ["clear"], (0, 0, 0, 0, 0)),
    "nothing shared": ("Paris", ["Rome"], (0, 0, 0, 0, 0)),
    "empty": ("", ["Rome"], (0, 0, 0, 0, 0)),
    # v1.1's F1 of nothing is 0; CacheBlend's is 1.
    "articles alone": ("the", ["a"], (0, 1, 1, 0, 0)),
    "hyphens join in SQuAD, part in Rouge": ("twenty-one", ["twenty one"], (0, 0, 0, 1, 0)),
    "apostrophes": ("the dog's bone", ["dogs bone"], (1, 1, 1, 2 / 6, 1)),
    # The released code's shortening: yes and no by their beginnings, and the first line alone.
    "yes and more": ("Yes, it is.", ["yes"], (2 / 4, 0, 1, 2 / 4, 1)),
    "no and more": ("no it is not", ["no"], (2 / 5, 0, 1, 2 / 5, 1)),
    "Norway": ("Norway", ["Norway"], (1, 1, 0, 1, 1)),
    "a second line": ("\nRome\nQuestion: where", ["Rome"], (2 / 4, 0, 1, 2 / 4, 1)),
    "no words in Latin letters": ("Москва", ["москва"], (1, 1, 1, 0, 1)),
    "white space": ("  new \t york\n", ["New York"], (1, 1, 1, 1, 1)),
    "no stemming": ("cities", ["city"], (0, 0, 0, 0, 0)),
}


@pytest.mark.parametrize("case", SUMS)
def test_the_sums(case: str) -> None:
    answer, references, expected = SUMS[case]
    assert text_scores(answer, references, TEXT) == pytest.approx(dict(zip(TEXT, expected, strict=True)))


def test_squads_own_normal_form() -> None:
    assert normalize("  The  cat,   an ANT & a dog's: (theatre)! ") == "cat ant dogs theatre"
    assert normalize("a.n the-an") == "thean", "punctuation goes first, and joins what it parted"
    assert normalize("«à» the") == "«à»", "only ASCII punctuation and English articles"


def test_token_f1_counts_the_tokens_of_the_tokenizer_it_is_given() -> None:
    """Letters as tokens: of abc and abd two are shared, of three and three."""
    assert text_scores("a-b-c", ["abd"], ["token_f1"], tokenizer=list) == {"token_f1": pytest.approx(2 / 3)}
    ids = {"new": [5, 9], "york": [7], "jersey": [8, 8]}
    tokenizer = lambda text: [i for word in text.split() for i in ids[word]]  # noqa: E731
    found = text_scores("New York", ["new jersey"], ["f1", "token_f1"], tokenizer=tokenizer)
    assert found == {"f1": 0.5, "token_f1": pytest.approx(2 * 2 / (3 + 4))}


words = st.lists(st.sampled_from("a the red Red fox fox. jumps yes no 7 é".split()), max_size=6).map(" ".join)


@given(words, st.lists(words, min_size=1, max_size=3))
def test_scores_are_shares_and_a_reference_more_lowers_none(answer: str, references: list[str]) -> None:
    found = text_scores(answer, references, TEXT)
    assert all(0 <= value <= 1 for value in found.values())
    fewer = text_scores(answer, references[:1], TEXT)
    assert all(found[name] >= fewer[name] for name in TEXT)
    if found["em"] and any(normalize(r) for r in references if normalize(r) == normalize(answer)):
        assert found["f1"] == found["contains"] == 1


@given(words, words)
def test_f1_does_not_mind_which_is_which(left: str, right: str) -> None:
    for name in ("f1", "em", "rouge_l"):
        assert text_scores(left, [right], [name])[name] == pytest.approx(text_scores(right, [left], [name])[name])


@pytest.mark.parametrize("references", [[], (), "Rome", b"Rome", iter(()), [None]])
def test_references_are_a_list_of_at_least_one(references: object) -> None:
    with pytest.raises(InvalidInput, match="references"):
        text_scores("Rome", references, ["f1"])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["f-1", "rougel", "first_kl"])
def test_an_unknown_text_metric_is_refused_with_what_there_is(name: str) -> None:
    near = {"f-1": "f1 .the nearest", "rougel": "rouge_l .the nearest", "first_kl": "em, token_f1"}
    for call in (lambda: text_scores("x", ["x"], [name]), lambda: module_path(name)):
        with pytest.raises(InvalidInput, match=near[name]):
            call()


def test_the_registry_names_all_metrics_and_which_way_they_point() -> None:
    assert tuple(METRICS) == TEXT + MODEL
    assert {name for name, metric in METRICS.items() if metric.better == "lower"} == {
        "first_kl",
        "answer_kl",
        "attention_error",
    }
    for name, metric in METRICS.items():
        assert metric.name == name and metric.title and metric.description.endswith(".")
    assert {METRICS[name].unit for name in TEXT} == {""} and METRICS["first_kl"].unit == "nats"


def test_references_may_be_read_once_and_an_answer_is_a_text() -> None:
    assert text_scores("Rome", iter(["Rome"]), ["f1", "em"]) == {"f1": 1, "em": 1}  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="answer"):
        text_scores(None, ["Rome"], ["f1"])  # type: ignore[arg-type]


def test_what_full_prefill_rules_out_adds_nothing_to_the_kl() -> None:
    full = torch.tensor([[0.5, 0.5, 0.0]]).log()
    assert kl_rows(full, full).tolist() == [0]
    assert kl_rows(full, torch.tensor([[0.25, 0.25, 0.5]]).log()).tolist() == pytest.approx([math.log(2)])


def test_kl_by_hand() -> None:
    """Of (1/2, 1/4, 1/4) to thirds: 1/2·ln(3/2) + 1/2·ln(3/4); to itself: 0."""
    full = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]).log()
    other = torch.tensor([[1 / 3, 1 / 3, 1 / 3], [0.5, 0.25, 0.25]]).log()
    assert kl_rows(full, other).tolist() == pytest.approx([0.5 * math.log(1.5) + 0.5 * math.log(0.75), 0], abs=1e-7)
    assert kl_rows(full, other).shape == (2,)


def test_kl_is_never_negative_in_float32() -> None:
    full = torch.randn(50, 4000, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    assert (kl_rows(full, full + 1e-8) >= 0).all()


def test_agreement_and_identity() -> None:
    full = torch.tensor([[0.1, 0.9], [0.9, 0.1], [0.4, 0.6]])
    other = torch.tensor([[0.4, 0.6], [0.3, 0.7], [-2.0, -1.0]])
    assert top1_rows(full, other).tolist() == [True, False, True]
    assert identical((1, 2), [1, 2]) == 1.0 and identical((1, 2), (1, 2, 3)) == 0.0 and identical((), ()) == 1.0


@pytest.mark.slow
def test_without_evaluate_and_rouge_score_all_but_rouge_work() -> None:
    script = """
import sys
for name in ("evaluate", "datasets", "rouge_score"):
    sys.modules[name] = None
from blend.eval.metrics import text_scores
print(text_scores("the Rome", ["rome"], ["f1", "em", "token_f1", "contains"]))
text_scores("Rome", ["Rome"], ["rouge_l"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.strip() == "{'f1': 1.0, 'em': 1.0, 'token_f1': 1.0, 'contains': 1.0}"
    assert done.returncode == 1 and "InvalidInput: rouge_l" in done.stderr and "blendkv[eval]" in done.stderr


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library's caches in a directory of their own, and no connection to anywhere."""
    import evaluate

    def refuse(*_: object) -> None:
        raise AssertionError("a metric reached for the network")

    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", tmp_path / "modules")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name in [n for n in sys.modules if n.split(".")[0] == "evaluate_modules"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.slow
def test_each_text_metric_is_an_evaluate_module_that_loads_without_network(offline: Path) -> None:
    import evaluate

    for name in TEXT:
        metric = evaluate.load(str(module_path(name)), cache_dir=str(offline / "data"))
        assert isinstance(metric, evaluate.Metric) and metric.name == name
        assert metric.description == METRICS[name].description
        assert metric.citation.startswith("@inproceedings") and "references" in metric.inputs_description
        cases = list(SUMS.values())
        found = metric.compute(predictions=[c[0] for c in cases], references=[c[1] for c in cases])
        assert found == {name: pytest.approx(sum(c[2][TEXT.index(name)] for c in cases) / len(cases))}
        alone = metric.compute(predictions=["in Rome", "Oslo"], references=["Rome", "Oslo"])
        assert alone == {name: pytest.approx({"em": 0.5, "contains": 1.0}.get(name, 5 / 6))}


@pytest.mark.slow
def test_the_token_f1_module_takes_a_tokenizer(offline: Path) -> None:
    import evaluate

    metric = evaluate.load(str(module_path("token_f1")), cache_dir=str(offline / "data"))
    found = metric.compute(predictions=["abc"], references=[["abd"]], tokenizer=list)
    assert found == {"token_f1": pytest.approx(2 / 3)}


def test_the_modules_are_part_of_the_distribution() -> None:
    """Each is a package, so that the wheel takes it in."""
    found = find_packages(str(ROOT), include=["blend", "blend.*"])
    for name in TEXT:
        directory = module_path(name)
        assert (directory / f"{name}.py").is_file()
        assert ".".join(directory.relative_to(ROOT).parts) in found
