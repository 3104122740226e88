"""Which documents are taken, and how they look from then on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from blend.config import RagConfig
from blend.errors import InvalidDocument

MAX_ID_CHARS = 256

# Control characters that no text needs: all of C0 but tab, line ends, vertical tab, form feed and escape.
_CONTROL = re.compile(r"[\x01-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_CONTROL_SHARE = 0.01


@dataclass(frozen=True)
class Source:
    """A document that passed :func:`validate_document`. ``title`` is one line and may be empty."""

    id: str
    title: str
    text: str


def validate_id(document_id: str) -> str:
    """Return ``document_id`` if it is 1 to 256 printable characters and not blank.

    Ids are never used as file names, so slashes, dots and the like are ordinary characters.

    Raises:
        InvalidDocument: it is not such an id.
    """
    allowed = f"1 to {MAX_ID_CHARS} printable characters"
    if not isinstance(document_id, str) or not document_id.strip():
        raise InvalidDocument("document id", document_id, allowed)
    if len(document_id) > MAX_ID_CHARS:
        raise InvalidDocument("document id", f"{document_id[:32]}… ({len(document_id)} characters)", allowed)
    if not document_id.isprintable():
        raise InvalidDocument("document id", document_id, allowed)
    return document_id


def validate_document(document_id: str, title: str | None, text: str | bytes, config: RagConfig) -> Source:
    """Return the document as it is stored: text as ``str``, white space in the title reduced to single spaces.

    Args:
        document_id: see :func:`validate_id`.
        title: may be ``None`` or empty.
        text: a ``str``, or bytes of UTF-8 with or without a byte order mark.
        config: gives the largest size.

    Raises:
        InvalidDocument: the id is not allowed; the text is empty, blank, binary, not UTF-8 or too large; the
            title holds NUL or characters that UTF-8 cannot express.
    """
    document_id = validate_id(document_id)
    if not isinstance(text, (str, bytes)):
        raise InvalidDocument("text", type(text).__name__, "str, or bytes of UTF-8")
    limit = config.max_document_bytes
    _check_size(text, limit)
    text = _decoded(text)
    _check_size(text, limit)
    if not text.strip():
        raise InvalidDocument("text", "an empty or blank document", "text that says something")
    return Source(document_id, _clean_title(title, limit), text)


def _check_size(text: str | bytes, limit: int) -> None:
    # A str takes at least a byte a character, so the cheap test comes first.
    size = len(text)
    if isinstance(text, str) and size <= limit:
        size = len(text.encode("utf-8", "surrogatepass"))
    if size > limit:
        raise InvalidDocument("text", f"{size} bytes", f"at most {limit} bytes of UTF-8 (rag.max_document_bytes)")


def _decoded(text: str | bytes) -> str:
    """``text`` as a str that UTF-8 can express and that is no binary data."""
    allowed = "text in UTF-8"
    nul = text.find(b"\0") if isinstance(text, bytes) else text.find("\0")
    if nul >= 0:
        raise InvalidDocument("text", f"binary data (NUL at {nul})", allowed)
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        decoded.encode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{error.object[error.start]:02x} at {error.start}, which is not UTF-8"
        raise InvalidDocument("text", found, allowed) from error
    except UnicodeEncodeError as error:
        found = f"the lone surrogate U+{ord(error.object[error.start]):04X} at {error.start}"
        raise InvalidDocument("text", found, allowed) from error
    controls = len(_CONTROL.findall(decoded))
    if controls > _CONTROL_SHARE * len(decoded):
        raise InvalidDocument("text", f"binary data ({controls} control characters)", allowed)
    return decoded


def _clean_title(title: str | None, limit: int) -> str:
    allowed = f"text of at most {limit} bytes, without NUL and lone surrogates"
    if title is None:
        return ""
    if not isinstance(title, str) or "\0" in title:
        raise InvalidDocument("title", title, allowed)
    try:
        size = len(title.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InvalidDocument("title", title, allowed) from error
    if size > limit:
        raise InvalidDocument("title", f"{size} bytes", allowed)
    return " ".join(title.split())
