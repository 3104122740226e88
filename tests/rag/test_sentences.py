"""Where sentences end, and where they only seem to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blend.rag.sentences import character_ends, line_ends, sentence_ends, word_ends


def sentences(text: str) -> list[str]:
    ends = sentence_ends(text, 0, len(text))
    return [text[a:b].strip() for a, b in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize(
    "parts",
    [
        ["The ferry leaves at nine.", "It returns at noon."],
        ["Is it open?", "Yes!", "Come in."],
        ["Dr. Marsh met Mrs. Hill at St. Brannock.", "They spoke."],
        ["It costs 3.14 crowns, i.e. more than before.", "Nobody minds."],
        ["Some birds, e.g. Terns, nest here.", "Others do not."],
        ["The U.S. Army and the J. R. Parker works, et al. Many more.", "See No. 5 and p. 12 of vol. 3."],
        ["He said “Stop.”", "Then he left (slowly).", "The end…", "Or not."],
        ["“Why?” he asked.", "Nobody knew."],
        ["Version 2.0 is out.", "It is 1.5 times faster."],
        ["It opened on Jan. 5.", "It closed on Feb. 7."],
        ["これは文です。", "次の文です！", "「本当？」", "はい。"],
        ["यह एक वाक्य है।", "यह दूसरा है।"],
        ["هل هذا صحيح؟", "نعم."],
    ],
)
def test_sentences(parts: list[str]) -> None:
    separator = "" if "。" in parts[0] else " "
    assert sentences(separator.join(parts)) == parts


def test_an_empty_line_ends_a_sentence_and_a_wrapped_line_does_not() -> None:
    assert sentences("A line that\nwraps\n\nA new paragraph\r\n\r\nA third") == [
        "A line that\nwraps",
        "A new paragraph",
        "A third",
    ]


def test_a_heading_begins_a_sentence_and_stays_with_what_follows() -> None:
    text = "Before it\n# Opening hours\n\nNine to five. Closed on Mondays.\n## Getting there\nBy ferry."
    assert sentences(text) == [
        "Before it",
        "# Opening hours\n\nNine to five.",
        "Closed on Mondays.",
        "## Getting there\nBy ferry.",
    ]


def test_list_items_quotes_and_table_rows_stand_alone() -> None:
    text = "Bring\n- a coat\n* boots\n1. First\n2) second\n> quoted\n| a | b |"
    assert sentences(text) == ["Bring", "- a coat", "* boots", "1. First", "2) second", "> quoted", "| a | b |"]


@given(st.text(alphabet=st.sampled_from("aB1.!?。 \n\t#-'\")\u3000"), max_size=60).map(str.lstrip).filter(bool))
def test_ends_rise_to_the_end_and_units_begin_visibly(text: str) -> None:
    for level in (sentence_ends, line_ends, word_ends):
        ends = list(level(text, 0, len(text)))
        assert ends == sorted(set(ends)) and ends[-1] == len(text)
        assert not any(text[end].isspace() for end in ends[:-1])
    characters = list(character_ends(text, 0, len(text)))
    assert characters == list(range(1, len(text.rstrip()) + 1))
