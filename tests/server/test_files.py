"""Files as documents."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from blend.errors import InvalidDocument, NotFound
from blend_server.client import files

LIMIT = 1 << 20


def test_a_directory_gives_its_text_files_in_order_and_named_files_are_kept(tmp_path: Path) -> None:
    for name in ("b.md", "a.TXT", "sub/c.markdown", "sub/d.png", "e.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    named = str(tmp_path / "e.py")
    found = files.find([str(tmp_path), named, named, "missing.md"])
    assert [os.path.relpath(path, tmp_path) for path in found[:3]] == [
        "a.TXT",
        "b.md",
        os.path.join("sub", "c.markdown"),
    ]
    assert found[3:] == [named, "missing.md"]


def test_hidden_files_are_left_out_unless_they_are_named(tmp_path: Path) -> None:
    for name in ("a.md", ".b.md", ".git/c.md", "sub/.venv/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("text")
    hidden = [str(tmp_path / ".b.md"), str(tmp_path / ".git")]
    assert files.find([str(tmp_path)]) == [str(tmp_path / "a.md")]
    assert files.find(hidden) == [str(tmp_path / ".b.md"), str(tmp_path / ".git" / "c.md")]


def test_a_document_has_the_path_as_given_and_its_first_heading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("guide.md").write_text("\ufeffintro\n\n## The *harbour* guide ##\n\n# Later\n", encoding="utf-8")
    document = files.read("./guide.md", LIMIT)
    assert document.id == "./guide.md"
    assert document.title == "The *harbour* guide"
    assert document.content == Path("guide.md").read_bytes()


@pytest.mark.parametrize(
    ("content", "title"),
    [
        (b"# One\ntext", "One"),
        (b"#One\n#\n# \n", ""),
        (b"```sh\n# a comment\n```\n# Real\n", "Real"),
        (b"no heading", ""),
        (b"\xff\xfe# x", ""),
        (b"####### seven", ""),
        (b"# " + b"x" * 500, "x" * 200),
        (b"The Ferry\n\nIt leaves at nine.\n", "The Ferry"),
        (b"The Ferry\r\n\r\nIt leaves at nine.\n# Times\n", "Times"),
        (b"Only this\n\n", ""),
        (b"x" * 81 + b"\n\ntext", ""),
        (b"\n\ntext", ""),
    ],
)
def test_titles(content: bytes, title: str) -> None:
    assert files.title(content) == title


def test_a_file_without_a_heading_is_called_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("text")
    assert files.read(str(tmp_path / "notes.txt"), LIMIT).title == "notes.txt"


def test_files_that_cannot_be_documents(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such file"):
        files.read(str(tmp_path / "missing"), LIMIT)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidDocument, match="'named pipe'; allowed: a regular file"):
        files.read(str(tmp_path / "pipe"), LIMIT)
    (tmp_path / "link").symlink_to("gone.txt")
    with pytest.raises(NotFound, match="no such linked file: 'gone.txt'"):
        files.read(str(tmp_path / "link"), LIMIT)
    (tmp_path / "large").write_bytes(b"x" * (LIMIT + 1))
    with pytest.raises(InvalidDocument, match="1048577 bytes"):
        files.read(str(tmp_path / "large"), LIMIT)
