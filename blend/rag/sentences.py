"""Where a text may be cut: at sentences, lines, words, characters.

Every function returns rising end positions within ``text[start:end]``, which begins with a visible character. The
last one is ``end``, give or take white space. White space belongs to what it follows, so each unit begins with a
visible character too. All run in linear time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_STOPS = ".!?…؟۔।"
_CJK_STOPS = "。！？｡"
_CLOSERS = "\"'”’»)]}*_`"
_BREAK = re.compile(rf"(?<=[{re.escape(_STOPS + _CLOSERS)}])\s+|\n\s*|[{_CJK_STOPS}]+[」』”’）】〉》]*\s*")
_LINE = re.compile(r"\n\s*")
_SPACE = re.compile(r"\s+")

# Lines that begin something new even without an empty line before them: headings, list items, quotes, tables.
_OPENS = re.compile(r"#{1,6}[ \t]|[-*+•][ \t]|\d{1,3}[.)][ \t]|>|\|")
_HEADING = re.compile(r"#{1,6}[ \t]")
_HEADING_CHARS = 240

_WORD = re.compile(r"[^\s(\[\"'“‘]*$")
_WORD_CHARS = 24
_LETTERS = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]$")
_NEVER_LAST = frozenset(
    "mr mrs ms mx dr prof rev hon st sr jr gen col capt lt sgt maj cmdr gov sen rep pres messrs mme mlle mt "
    "vs cf al approx viz dept inc ltd corp co bros ave blvd ph.d".split()
)
_BEFORE_NUMBERS = frozenset(
    "no nos p pp fig figs vol vols ch sec eq art para ca c jan feb mar apr jun jul aug sep sept oct nov dec".split()
)


def sentence_ends(text: str, start: int, end: int) -> Sequence[int]:
    """Ends of sentences, paragraphs and list items. A Markdown heading stays with what comes after it."""
    found = (m for m in _BREAK.finditer(text, start, end))
    return [m.end() for m in found if m.end() < end and _ends_sentence(text, m.start(), m.end())] + [end]


def line_ends(text: str, start: int, end: int) -> Sequence[int]:
    """Ends of lines."""
    return [m.end() for m in _LINE.finditer(text, start, end) if m.end() < end] + [end]


def word_ends(text: str, start: int, end: int) -> Sequence[int]:
    """Ends of words, in the sense of runs without white space."""
    return [m.end() for m in _SPACE.finditer(text, start, end) if m.end() < end] + [end]


def character_ends(text: str, start: int, end: int) -> Sequence[int]:
    """Ends of characters, up to the last visible one."""
    return range(start + 1, start + len(text[start:end].rstrip()) + 1)


def _ends_sentence(text: str, start: int, end: int) -> bool:
    """Whether a sentence ends in the white space (or at the CJK full stop) ``text[start:end]``."""
    if text[start] in _CJK_STOPS:
        return True
    newlines = text.count("\n", start, end)
    if newlines and _is_heading(text, start):
        return False
    if newlines > 1 or (newlines and _OPENS.match(text, end)):
        return True
    if text[end].islower():
        return False
    stop = start
    while stop > 0 and start - stop < 8 and text[stop - 1] in _CLOSERS:
        stop -= 1
    if stop == 0 or text[stop - 1] not in _STOPS:
        return False
    return text[stop - 1] != "." or not _is_abbreviation(text, stop - 1, text[end])


def _is_heading(text: str, position: int) -> bool:
    """Whether the line before ``position`` is a heading; looks back a bounded distance."""
    line = text.rfind("\n", max(0, position - _HEADING_CHARS), position) + 1
    if line == 0 and position > _HEADING_CHARS:
        return False
    return _HEADING.match(text, line, position) is not None


def _is_abbreviation(text: str, dot: int, after: str) -> bool:
    """Whether the full stop at ``dot`` belongs to the word before it: "Dr.", "J.", "U.S.", "No. 5", "1." of a list."""
    low = max(0, dot - _WORD_CHARS)
    match = _WORD.search(text, low, dot)
    word = match.group() if match else ""
    folded = word.lower()
    if folded in _NEVER_LAST or _LETTERS.match(word):
        return True
    if folded in _BEFORE_NUMBERS and after.isdigit():
        return True
    if len(word) == 1 and word.isupper():
        return True
    at = dot - len(word)
    return word.isdigit() and len(word) <= 3 and (at == 0 or text[at - 1] == "\n")
