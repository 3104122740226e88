"""What retrieval needs of a tokenizer and of an embedding model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]


class Tokenizer(Protocol):
    """A model's tokenizer; :class:`blend.model.tokenizer.Tokenizer` is one."""

    name: str

    @property
    def digest(self) -> str:
        """Hex digest of everything that decides on token ids."""
        ...

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The id of the begin-of-text token, if there is one."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of untrusted text, none of them a control token."""
        ...

    def encode_template(self, text: str) -> tuple[int, ...]:
        """Token ids of trusted template text, control tokens parsed."""
        ...

    def render_template(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The chat template's text; raises :class:`blend.errors.InvalidPrompt` where it refuses the messages."""
        ...


class Embedder(Protocol):
    """An embedding model; :class:`blend.rag.embedding.Embedder` is one."""

    @property
    def digest(self) -> str:
        """Hex digest of everything that decides on vectors."""
        ...

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Vectors ``[n, d]`` float32 of length 1, in the order of ``texts``."""
        ...
