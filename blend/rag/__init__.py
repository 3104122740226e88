"""Documents, retrieval and prompts: :class:`Library` takes documents and finds passages, :class:`PromptBuilder`
makes prompts of them."""

from blend.rag.chunking import Chunker, Piece
from blend.rag.documents import validate_document
from blend.rag.embedding import Embedder
from blend.rag.library import Library, LibraryStats, Passage, Prepared
from blend.rag.prompt import PromptBuilder
from blend.rag.records import ChunkRow, Document, DocumentInfo, Orphan, Page

__all__ = [
    "ChunkRow",
    "Chunker",
    "Document",
    "DocumentInfo",
    "Embedder",
    "Library",
    "LibraryStats",
    "Orphan",
    "Page",
    "Passage",
    "Piece",
    "Prepared",
    "PromptBuilder",
    "validate_document",
]
