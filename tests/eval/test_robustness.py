"""Variations of a prompt: the same tokens in another order, in another place, or cut into other chunks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from blend.errors import InvalidInput
from blend.eval.datasets import Example, Passage
from blend.eval.prompts import Asked
from blend.eval.robustness import Options, answer_cut, cut, orders, placed, variations
from blend.rag.chunking import render_chunk
from blend.types import Chunk, Prompt, Text

GOLD = "It opened early. The clock struck nine when Ada came home. It rained."
PASSAGES = (
    Passage("One", "Nothing of note happened that day in the valley."),
    Passage("Two", GOLD, gold=True),
    Passage("", "A third passage without a title."),
    Passage("Four", "The last one."),
)
EXAMPLE = Example("q", "When did Ada come home?", ("nine",), PASSAGES)


def encode(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def build(chunks: list[Chunk], question: str) -> Prompt:
    return Prompt([Text(encode("<")), *chunks, Text(encode(question))])


def made(example: Example = EXAMPLE, **options: object) -> tuple[list[Asked], Counter[str]]:
    dropped: Counter[str] = Counter()
    return list(variations(example, Options(**options), encode, build, dropped)), dropped  # type: ignore[arg-type]


def texts(variation: Asked) -> list[str]:
    return [bytes(s.token_ids).decode() for s in variation.prompt.segments if isinstance(s, Chunk)]


WHOLE = [render_chunk(p.title, p.text) for p in PASSAGES]


def test_orders_differ_and_begin_with_that_of_the_data() -> None:
    found, dropped = made(experiments=("order",), orders=5)
    assert [v.order for v in found] == [0, 1, 2, 3, 4] and not dropped
    assert texts(found[0]) == WHOLE
    assert all(sorted(texts(v)) == sorted(WHOLE) for v in found)
    assert len({tuple(texts(v)) for v in found}) == 5
    assert {(v.condition, v.level) for v in found} == {("order", None)}


def test_orders_are_seeded_and_no_more_than_there_are() -> None:
    assert orders(8, 4, "a") == orders(8, 4, "a") != orders(8, 4, "b")
    assert orders(2, 9, "a") == [(0, 1), (1, 0)]
    _, dropped = made(replace(EXAMPLE, passages=PASSAGES[:1]), experiments=("order",))
    assert dropped == {"order: a single passage": 1}


def test_evidence_goes_first_to_the_middle_and_last() -> None:
    found, _ = made(experiments=("position",))
    assert [(v.level, texts(v).index(WHOLE[1])) for v in found] == [("first", 0), ("middle", 1), ("last", 3)]
    assert all([t for t in texts(v) if t != WHOLE[1]] == [WHOLE[0], *WHOLE[2:]] for v in found)
    assert placed([True, False, True, False, False], "middle") == [1, 0, 2, 3, 4]


@pytest.mark.parametrize("gold", [True, False])
def test_without_evidence_that_is_known_no_position_is_made(gold: bool) -> None:
    example = replace(EXAMPLE, passages=tuple(replace(p, gold=gold) for p in PASSAGES))
    found, dropped = made(example, experiments=("position",))
    assert (found, sum(dropped.values())) == ([], 1)


def test_the_answers_sentence_is_split_over_two_chunks() -> None:
    (whole, split), _ = made(experiments=("boundary",))
    assert (whole.level, split.level) == ("whole", "split")
    assert whole.prompt.token_ids == split.prompt.token_ids, "only the border between chunks is new"
    assert texts(whole) == WHOLE
    before, behind = texts(split)[1:3]
    assert before == "Two\nIt opened early. The clock struck nine" and behind == " when Ada came home. It rained.\n\n"


@pytest.mark.parametrize(
    "change",
    [{"answers": ("ten",)}, {"answers": ("",)}, {"passages": tuple(replace(p, gold=False) for p in PASSAGES)}],
)
def test_evidence_without_the_answer_is_not_split_but_counted(change: dict[str, object]) -> None:
    found, dropped = made(replace(EXAMPLE, **change), experiments=("boundary",))  # type: ignore[arg-type]
    assert found == [] and dropped == {"boundary: no gold passage holds an answer": 1}


def test_a_sentence_of_one_word_is_cut_inside_of_it() -> None:
    example = replace(EXAMPLE, passages=(Passage("", "Nine", gold=True),))
    assert answer_cut(example, encode) == (0, 2)


def test_chunks_of_another_size_hold_the_same_tokens() -> None:
    found, dropped = made(experiments=("chunk-size",), chunk_sizes=(16, 64, 512))
    total = len("".join(WHOLE))
    assert [v.level for v in found] == [16, 64]
    assert dropped == {"chunk-size 512: the passages have fewer tokens": 1}
    for variation in found:
        assert "".join(texts(variation)) == "".join(WHOLE)
        *full, last = [len(t) for t in texts(variation)]
        assert set(full) == {variation.level} and 0 < last <= int(str(variation.level))
        assert sum(full) + last == total


def test_more_or_fewer_chunks_share_the_same_tokens_evenly() -> None:
    found, _ = made(experiments=("count",), counts=(2, 7, 20))
    assert [(v.level, len(texts(v))) for v in found] == [(2, 2), (7, 7), (20, 20)]
    for variation in found:
        sizes = [len(t) for t in texts(variation)]
        assert max(sizes) - min(sizes) <= 1 and "".join(texts(variation)) == "".join(WHOLE)


def test_a_cut_keeps_every_token() -> None:
    assert [c.token_ids for c in cut((1, 2, 3, 4, 5), [0, 1, 3])] == [(1,), (2, 3), (4, 5)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"experiments": ("ordr",)}, "order"),
        ({"positions": ("start",)}, "first"),
        ({"orders": 1}, "orders"),
        ({"chunk_sizes": (64, 0)}, "chunk_sizes"),
        ({"counts": (0,)}, "counts"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        Options(**options)  # type: ignore[arg-type]
