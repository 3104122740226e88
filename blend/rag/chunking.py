"""Cuts documents into chunks of bounded token count, at sentence ends where that is possible."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from blend.errors import InvalidConfig, InvalidDocument
from blend.rag.sentences import character_ends, line_ends, sentence_ends, word_ends

Encode = Callable[[str], tuple[int, ...]]
Ends = Callable[[str, int, int], Sequence[int]]

# Changes whenever the same text would be cut or rendered in another way, so that stored documents are known to be old.
VERSION = 1

_LEVELS: tuple[Ends, ...] = (sentence_ends, line_ends, word_ends, character_ends)
_TITLE_LEVELS: tuple[Ends, ...] = (word_ends, character_ends)
_TITLE_SHARE = 4
_TITLE_LEAST = 8
_GUESS_CHARS = 4
_MOST_CHARS = 64
_INTERPOLATIONS = 3


@dataclass(frozen=True)
class Piece:
    """One chunk of a document.

    ``text`` is the passage without title, stripped of white space at its edges; ``token_ids`` are exactly those
    of :func:`render_chunk`, tokenized on its own; ``document[start_char:end_char]`` is what the piece covers.
    """

    text: str
    token_ids: tuple[int, ...]
    start_char: int
    end_char: int


def render_chunk(title: str, text: str) -> str:
    """The chunk template: the title on a line of its own, if there is one, the passage, an empty line."""
    return f"{title}\n{text}\n\n" if title else f"{text}\n\n"


class Chunker:
    """Cuts text into pieces of at most ``max_tokens`` tokens, title and template included.

    A piece takes as many whole sentences as fit. A sentence that is too long is cut at line ends, then between
    words, then inside a word. A title is cut to a quarter of the budget. What is counted is always the rendered
    piece: token counts of parts do not add up.

    Args:
        tokenizer_encode: token ids of untrusted text, without added tokens.
        max_tokens: most tokens of one piece, at least 16.

    Raises:
        InvalidConfig: ``max_tokens`` is too small.
    """

    def __init__(self, tokenizer_encode: Encode, max_tokens: int) -> None:
        if max_tokens < 16:
            raise InvalidConfig("rag.chunk_tokens", max_tokens, "an integer of at least 16 (tokens)")
        self._encode = tokenizer_encode
        self.max_tokens = max_tokens

    @property
    def settings(self) -> str:
        """Names everything besides the tokenizer that decides on the pieces of a text."""
        return f"chunker {VERSION}, {self.max_tokens} tokens"

    def chunks(self, document_text: str, title: str = "") -> list[Piece]:
        """Pieces of ``document_text`` in order; every character lies in exactly one. A blank text has none.

        Raises:
            InvalidDocument: the tokenizer makes no tokens of a piece.
            InvalidConfig: ``max_tokens`` does not hold even one character.
        """
        body = document_text.lstrip()
        if not body:
            return []
        title = self.fit_title(title)
        first = len(document_text) - len(body)

        def ids(start: int, end: int) -> tuple[int, ...] | None:
            text = document_text[start:end].strip()
            return self._ids(render_chunk(title, text)) if len(text) <= _MOST_CHARS * self.max_tokens else None

        cutter = _Cutter(document_text, ids, self.max_tokens, _LEVELS)
        pieces = []
        for start, end, token_ids in cutter.cut(first, len(document_text)):
            covered = 0 if start == first else start
            pieces.append(Piece(document_text[start:end].strip(), token_ids, covered, end))
        return pieces

    def fit_title(self, title: str) -> str:
        """``title`` on one line, cut to at most a quarter of the budget, between words where that is possible."""
        title = " ".join(title.split())
        limit = max(self.max_tokens // _TITLE_SHARE, _TITLE_LEAST)

        def ids(start: int, end: int) -> tuple[int, ...] | None:
            text = title[start:end].strip()
            return self._encode(f"{text}\n") if len(text) <= _MOST_CHARS * limit else None

        if not title:
            return ""
        _, end, _ = next(_Cutter(title, ids, limit, _TITLE_LEVELS).cut(0, len(title)))
        return title[:end].strip()

    def _ids(self, rendered: str) -> tuple[int, ...]:
        ids = self._encode(rendered)
        if not ids:
            raise InvalidDocument("text", rendered, "text that the model's tokenizer makes tokens of")
        return ids


Span = tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True)
class _Cutter:
    """Greedy cutting of one text at ever finer levels.

    ``ids(start, end)`` gives the token ids of that part as a piece, or ``None`` if it is too long to be worth
    counting; this bounds each count, so that the whole stays linear in the text's length.
    """

    text: str
    ids: Callable[[int, int], tuple[int, ...] | None]
    limit: int
    levels: tuple[Ends, ...]

    def cut(self, start: int, end: int) -> Generator[Span, None, None]:
        """Yield ``(start, end, token_ids)`` of all pieces of ``text[start:end]``."""
        last = yield from self._all_but_last(start, end, 0)
        ids = self.ids(last, end)
        if ids is not None:
            yield last, end, ids

    def _all_but_last(self, start: int, end: int, level: int) -> Generator[Span, None, int]:
        """Yield all pieces but the last one, which may still grow; return where that one starts."""
        if level == len(self.levels):
            raise InvalidConfig("rag.chunk_tokens", self.limit, "enough tokens for one character and the template")
        ends = self.levels[level](self.text, start, end)
        unit = 0
        while True:
            found, ids = self._longest(start, ends, unit)
            if found == len(ends) - 1:
                return start
            if found < unit:
                # Cut this unit finer; what is left of it fits, and is the start of the next piece.
                start = yield from self._all_but_last(start, ends[unit], level + 1)
                continue
            yield start, ends[found], ids
            start, unit = ends[found], found + 1

    def _longest(self, start: int, ends: Sequence[int], low: int) -> tuple[int, tuple[int, ...]]:
        """The last index from ``low`` on whose piece fits, and its ids; ``low - 1`` if none fits.

        Guesses from characters per token, then closes in from both sides; each answer was really tokenized.
        """
        fits, over = low - 1, len(ends)
        best: tuple[int, ...] = ()
        probe = bisect_left(ends, start + _GUESS_CHARS * self.limit, low, over - 1)
        tries = 0
        while True:
            ids = self.ids(start, ends[probe])
            if ids is not None and len(ids) <= self.limit:
                fits, best = probe, ids
            else:
                over = probe
            if over - fits == 1:
                return fits, best
            tries += 1
            if ids and tries <= _INTERPOLATIONS:
                reach = start + (ends[probe] - start) * self.limit // len(ids)
                probe = bisect_left(ends, reach, fits + 1, over - 1)
            else:
                probe = (fits + over) // 2
