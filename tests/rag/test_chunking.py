"""Pieces cover the document, keep to the budget, end at sentences, and are tokenized as they are stored."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blend.errors import InvalidConfig, InvalidDocument
from blend.model.tokenizer import Tokenizer
from blend.rag.chunking import Chunker, Piece, render_chunk

CONTROL = ["<|im_end|>", "<|im_start|>system\n", "<|end|>", "<|start|>system\n", "<|endoftext|>"]
WORDS = st.text(max_size=12) | st.sampled_from([*CONTROL, ". ", "。", "\n\n", "# ", "Dr. ", " " * 40, "é" * 50])
DOCUMENTS = st.lists(WORDS, max_size=40).map("".join)
TITLES = st.sampled_from(["", "A title", "<|im_end|><|end|>\n<|im_start|>system", "long " * 40, "x" * 300, "👩‍👩‍👧"])


def byte_ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode("utf-8"))


def check(chunker: Chunker, pieces: list[Piece], text: str, title: str, tokenizer: Tokenizer) -> None:
    if not text.strip():
        assert pieces == []
        return
    assert pieces[0].start_char == 0 and pieces[-1].end_char == len(text)
    assert all(a.end_char == b.start_char for a, b in pairwise(pieces))
    for piece in pieces:
        assert piece.text == text[piece.start_char : piece.end_char].strip() != ""
        assert len(piece.token_ids) <= chunker.max_tokens
        assert piece.token_ids == tokenizer.encode(render_chunk(chunker.fit_title(title), piece.text))
        assert tokenizer.control_ids.isdisjoint(piece.token_ids)


@given(text=DOCUMENTS, title=TITLES, limit=st.integers(16, 80))
@example(text=" " * 3000 + "a" + " " * 3000 + "b", title="", limit=16)
@example(text="。" * 100 + "😀" * 100, title="👩‍👩‍👧", limit=16)
def test_every_character_lies_in_one_piece_within_the_budget(
    text: str, title: str, limit: int, tokenizer: Tokenizer
) -> None:
    chunker = Chunker(tokenizer.encode, limit)
    check(chunker, chunker.chunks(text, title), text, title, tokenizer)


@settings(max_examples=50, deadline=None)
@given(text=DOCUMENTS, title=TITLES, limit=st.integers(16, 80))
def test_the_same_with_a_tokenizer_that_merges(text: str, title: str, limit: int, merging_tokenizer: Tokenizer) -> None:
    chunker = Chunker(merging_tokenizer.encode, limit)
    check(chunker, chunker.chunks(text, title), text, title, merging_tokenizer)


def test_pieces_end_at_sentences_and_are_as_large_as_they_may_be() -> None:
    sentences = [f"Sentence number {i} says {'so ' * (i % 7)}much. " for i in range(60)]
    text = "".join(sentences)
    pieces = Chunker(byte_ids, 100).chunks(text)
    for piece, following in pairwise(pieces):
        assert piece.text.endswith("much.")
        with_next = piece.text + " " + following.text.partition(". ")[0] + "."
        assert len(byte_ids(render_chunk("", with_next))) > 100


def test_a_long_sentence_is_cut_at_lines_then_words_then_characters() -> None:
    lines = "one two three\nfour five six\nseven eight nine\nten"
    assert [p.text for p in Chunker(byte_ids, 32).chunks(lines)] == [
        "one two three\nfour five six",
        "seven eight nine\nten",
    ]
    words = "one two three four five six seven eight nine ten"
    assert [p.text for p in Chunker(byte_ids, 20).chunks(words)] == [
        "one two three four",
        "five six seven",
        "eight nine ten",
    ]
    assert [p.text for p in Chunker(byte_ids, 16).chunks("x" * 30 + " yes")] == ["x" * 14, "x" * 14, "xx yes"]


def test_the_rest_of_a_long_sentence_shares_a_piece_with_the_next_one() -> None:
    text = "alpha beta gamma delta epsilon zeta. Eta."
    assert [p.text for p in Chunker(byte_ids, 32).chunks(text)] == ["alpha beta gamma delta epsilon", "zeta. Eta."]


def test_a_chunk_holds_its_title_and_none_without_one() -> None:
    titled, plain = Chunker(byte_ids, 64).chunks("Text.", " The  title\n"), Chunker(byte_ids, 64).chunks("Text.")
    assert titled[0].token_ids == byte_ids("The title\nText.\n\n")
    assert plain[0].token_ids == byte_ids("Text.\n\n")
    assert titled[0].text == plain[0].text == "Text."


def test_a_long_title_is_cut_to_a_quarter_between_words() -> None:
    chunker = Chunker(byte_ids, 80)
    assert chunker.fit_title("a title of five words and more") == "a title of five"
    assert chunker.fit_title("x" * 1_000_000) == "x" * 19
    assert chunker.fit_title("   ") == ""


@pytest.mark.parametrize(
    "text",
    [
        "A sentence of some words. " * 8000,
        "word " * 40_000,
        "x" * 200_000,
        ". " * 100_000,
        '.").")' * 30_000,
        "a\n" * 100_000,
        "# a\n" * 50_000,
        "a" + " " * 100_000 + "b. C" + "\n" * 100_000 + "d",
        "文。" * 50_000,
        "é" * 100_000,
    ],
    ids=["sentences", "words", "characters", "stops", "quotes", "lines", "headings", "space", "cjk", "bytes"],
)
def test_what_is_tokenized_grows_with_the_document_only(text: str) -> None:
    """Counting again from the start, or counting the whole rest for each piece, would show here."""
    counted = 0

    def counting(part: str) -> tuple[int, ...]:
        nonlocal counted
        counted += len(part)
        return byte_ids(part)

    Chunker(counting, 256).chunks(text)
    assert counted < 30 * len(text)


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="chunk_tokens"):
        Chunker(byte_ids, 15)
    with pytest.raises(InvalidConfig, match="one character"):
        Chunker(lambda text: tuple(range(17)), 16).chunks("a")
    with pytest.raises(InvalidDocument, match="tokens"):
        Chunker(lambda text: (), 16).chunks("a")
