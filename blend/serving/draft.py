"""An answer while it is being written."""

from __future__ import annotations

from collections.abc import Sequence

from blend.model.tokenizer import Detokenizer, Tokenizer
from blend.serving.sampling import StopText
from blend.types import Token


class Draft:
    """The tokens of an answer so far, and their text up to the first stop string.

    Args:
        tokenizer: of the model.
        stop: strings that end the answer.

    Attributes:
        token_ids: those that were pushed.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self.token_ids: list[int] = []
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopText(stop)
        self._shown: list[str] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop.stopped

    def push(self, token_id: int) -> Token:
        """Take the next token; returns it with the text that can be shown now."""
        self.token_ids.append(token_id)
        text = self._stop.push(self._detokenizer.push(token_id))
        self._shown.append(text)
        return Token(token_id, text)

    def text(self) -> str:
        """Return all of the text."""
        return "".join(self._shown) if self.stopped else self._tokenizer.decode(self.token_ids)
