"""Documents, retrieval and prompts."""

from __future__ import annotations

from dataclasses import dataclass

from blend.config.checks import at_least
from blend.config.units import MiB
from blend.errors import InvalidConfig

_MOST_NEIGHBOURS = 10


@dataclass(frozen=True)
class RagConfig:
    """Documents, retrieval and prompts.

    Args:
        chunk_tokens: most tokens of one chunk, the chunk template's tokens included.
        embedding_model: ``all-minilm-l6-v2`` (carried by a package) or whatever sentence-transformers loads.
        neighbours: nearest chunks that a service encodes each chunk behind, two at a time, in idle time, for its
            ``conditioned`` variant; 0 to 10, where 0 encodes none.
        top_k: passages given to a question unless it asks for another number.
        max_document_bytes: largest document, in bytes of UTF-8.
        max_new_tokens: answer length unless a question asks for another.
        system: the system turn of the prompt.
        answer_prefix: text that the assistant's turn is begun with.
    """

    chunk_tokens: int = 256
    embedding_model: str = "all-minilm-l6-v2"
    neighbours: int = 6
    top_k: int = 5
    max_document_bytes: int = 8 * MiB
    max_new_tokens: int = 48
    system: str = "Answer the question from the passages, in a few words."
    answer_prefix: str = "Answer:"

    def __post_init__(self) -> None:
        at_least("rag.chunk_tokens", self.chunk_tokens, 16, "tokens")
        count = self.neighbours
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= _MOST_NEIGHBOURS:
            raise InvalidConfig("rag.neighbours", count, f"an integer from 0 to {_MOST_NEIGHBOURS} (chunks)")
        at_least("rag.top_k", self.top_k, 1, "passages")
        at_least("rag.max_document_bytes", self.max_document_bytes, 1, "bytes")
        at_least("rag.max_new_tokens", self.max_new_tokens, 1, "tokens")
