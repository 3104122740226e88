"""An embedding model and a tokenizer that need no weights and import fast."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from blend.rag.protocols import Vectors


class WordEmbedder:
    """Sums a fixed random vector for each word, so that texts with common words are close."""

    dim = 32

    def __init__(self, digest: str = "words") -> None:
        self.digest = digest
        self.texts = 0

    def embed(self, texts: Sequence[str]) -> Vectors:
        self.texts += len(texts)
        vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            for word in text.lower().split():
                seed = int.from_bytes(hashlib.blake2b(word.strip(".,?!").encode(), digest_size=8).digest(), "little")
                vector += np.random.default_rng(seed).standard_normal(self.dim).astype(np.float32)
            vector /= max(float(np.linalg.norm(vector)), 1e-9)
        return vectors


class ByteTokenizer:
    """One token a byte; all that a library needs of a tokenizer."""

    name = "bytes"
    digest = "bytes"
    has_template = False
    bos_id = None

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def encode_template(self, text: str) -> tuple[int, ...]:
        return self.encode(text)

    def render_template(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        raise NotImplementedError
