"""A process that the crash tests kill: ``python -m tests.rag.crash_child DIRECTORY {commit,loop}``.

``commit`` ingests two documents, saves, ingests a third and deletes the first, and then dies by SIGKILL before the
index is saved again. ``loop`` replaces and deletes documents until somebody kills it.
"""

from __future__ import annotations

import os
import signal
import sys

from blend.config import RagConfig
from blend.rag import Library
from blend.types import Chunk
from tests.rag.words import ByteTokenizer, WordEmbedder


def open_library(directory: str) -> Library:
    config = RagConfig(chunk_tokens=64)
    return Library(directory, config, ByteTokenizer(), WordEmbedder())


def key(chunk: Chunk) -> str:
    return f"key of {bytes(chunk.token_ids).decode()}"


def ingest(library: Library, document_id: str, text: str) -> None:
    prepared = library.embed(library.prepare(document_id, None, text))
    library.commit(prepared, [key(chunk) for chunk in prepared.chunks])


def text_of(name: str, version: int) -> str:
    """A document whose every sentence names its version, so that a mixture of two would show."""
    return " ".join(f"Sentence {i} of {name} in version {version}." for i in range(3 + version % 5))


def main(directory: str, mode: str) -> None:
    library = open_library(directory)
    if mode == "commit":
        ingest(library, "first", text_of("first", 1))
        ingest(library, "second", text_of("second", 1))
        library.close()
        library = open_library(directory)
        ingest(library, "third", text_of("third", 1))
        library.delete("first")
        os.kill(os.getpid(), signal.SIGKILL)
    version = 0
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        name = f"doc{version % 4}"
        ingest(library, name, text_of(name, version))
        if version % 5 == 4:
            library.delete(name)
        if version % 7 == 6:
            library.close()
            library = open_library(directory)
        version += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
