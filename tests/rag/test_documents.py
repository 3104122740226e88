"""What is taken as a document, and what the refusals say."""

from __future__ import annotations

import pytest

from blend.config import RagConfig
from blend.errors import InvalidDocument
from blend.rag.documents import validate_document

CONFIG = RagConfig(max_document_bytes=1000)


@pytest.mark.parametrize(
    "document_id", ["a", "a" * 256, "../../etc/passwd", "C:\\x", "/", "..", "with space", "名前", "a:b%00"]
)
def test_any_printable_id_is_allowed(document_id: str) -> None:
    assert validate_document(document_id, None, "text", CONFIG).id == document_id


@pytest.mark.parametrize("document_id", ["", " ", "a" * 257, "a\nb", "a\0b", "a\x1bb", "a\u202eb", "\ud800", 7, None])
def test_other_ids_are_not(document_id: str) -> None:
    with pytest.raises(InvalidDocument, match="document id.*1 to 256 printable"):
        validate_document(document_id, None, "text", CONFIG)


@pytest.mark.parametrize("text", ["", " \n\t ", "\u3000\u2028", b"", b" \n"])
def test_empty_and_blank_documents_are_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidDocument, match="blank"):
        validate_document("a", None, text, CONFIG)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"caf\xe9 au lait", "byte 0xe9 at 3, which is not UTF-8"),
        (b"%PDF-1.7\n\x00\x01", "NUL at 9"),
        ("text".encode("utf-16"), "NUL at 3"),
        ("a\0b", "NUL at 1"),
        ("\x01\x02\x03 and text", "3 control characters"),
        ("a\ud800b", "lone surrogate U\\+D800 at 1"),
        (["text"], "list"),
    ],
)
def test_what_is_no_text_is_refused(text: str | bytes, says: str) -> None:
    with pytest.raises(InvalidDocument, match=says):
        validate_document("a", None, text, CONFIG)


def test_size_counts_bytes() -> None:
    assert validate_document("a", None, "é" * 500, CONFIG)
    for text in ("é" * 501, ("é" * 501).encode(), "a" * 1001):
        with pytest.raises(InvalidDocument, match="100[12] bytes.*at most 1000 bytes"):
            validate_document("a", None, text, CONFIG)
    with pytest.raises(InvalidDocument, match="10485760 bytes.*at most 8388608 bytes"):
        validate_document("a", None, "a" * (10 << 20), RagConfig())


def test_text_is_kept_and_a_byte_order_mark_dropped() -> None:
    assert validate_document("a", None, b"\xef\xbb\xbfText \r\n\x1b[0m", CONFIG).text == "Text \r\n\x1b[0m"


def test_titles_become_one_line() -> None:
    assert validate_document("a", "  One\ntwo\t three ", "text", CONFIG).title == "One two three"
    assert validate_document("a", None, "text", CONFIG).title == ""
    assert validate_document("a", "<|im_end|>", "text", CONFIG).title == "<|im_end|>"
    for title in ("a\0", "\udfff", 3, "x" * 1001):
        with pytest.raises(InvalidDocument, match="title"):
            validate_document("a", title, "text", CONFIG)  # type: ignore[arg-type]
