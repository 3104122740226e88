"""Text and Markdown files as documents."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from blend.errors import InvalidDocument, NotFound
from blend_server.client.messages import Document

SUFFIXES = (".md", ".markdown", ".txt")
"""Files that are taken from a directory; a file that is named itself may be called anything."""

_HEADING = re.compile(r"#{1,6}\s+(?P<title>.*?)\s*#*\s*")
_FENCE = ("```", "~~~")
_TITLE_BYTES = 64 * 1024
_MAX_TITLE = 200
_MAX_FIRST_LINE = 80


def find(paths: Iterable[str]) -> list[str]:
    """The files that ``paths`` name, each once, in order; of a directory all text and Markdown files below it.

    Hidden files and directories (``.git``, say) are left out where they are not named themselves.

    A path that does not exist is kept, so that it fails as a document of its own.
    """
    found: dict[str, None] = {}
    for path in paths:
        if not os.path.isdir(path):
            found[path] = None
            continue
        for directory, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            texts = (name for name in sorted(names) if name.lower().endswith(SUFFIXES) and not name.startswith("."))
            found.update((os.path.join(directory, name), None) for name in texts)
    return list(found)


def read(path: str, limit: int) -> Document:
    """The document in a file: its id is ``path`` as given, its title as in :func:`title`, else the file's name.

    The bytes are not decoded: whether they are text is for the server to say.

    Raises:
        NotFound: there is no such file, or a link to it only.
        InvalidDocument: it is no regular file, cannot be read, or is larger than ``limit`` bytes.
    """
    try:
        if not os.path.isfile(path):
            if os.path.exists(path):
                raise InvalidDocument("file", _kind(path), "a regular file")
            if os.path.islink(path):
                raise NotFound("linked file", os.readlink(path))
            raise NotFound("file", path)
        if (size := os.path.getsize(path)) > limit:
            raise InvalidDocument("file", f"{size} bytes", f"at most {limit} bytes (split the document)")
        content = Path(path).read_bytes()
    except OSError as error:
        raise InvalidDocument("file", error.strerror, "a file that can be read") from error
    return Document(path, content, title(content) or os.path.basename(path))


def _kind(path: str) -> str:
    """What kind of thing that is no regular file ``path`` names."""
    mode = os.stat(path).st_mode
    kinds = {stat.S_IFDIR: "directory", stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")


def title(content: bytes) -> str:
    """The title of a text; an empty string if there is none.

    That is its first Markdown heading outside of fenced code, or else a short first line that stands by itself.
    """
    lines = content[:_TITLE_BYTES].decode("utf-8-sig", "replace").splitlines()
    fenced = False
    for line in lines:
        if line.lstrip().startswith(_FENCE):
            fenced = not fenced
        elif not fenced and (match := _HEADING.fullmatch(line)) and match["title"]:
            return match["title"][:_MAX_TITLE]
    first, second = (line.strip() for line in (*lines, "", "")[:2])
    alone = not second and any(line.strip() for line in lines[1:])
    return first if alone and len(first) <= _MAX_FIRST_LINE and not first.startswith(_FENCE) else ""
