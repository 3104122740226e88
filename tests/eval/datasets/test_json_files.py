"""Reading JSON: what is wrong is told with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from blend.errors import InvalidInput
from blend.eval.datasets import jsonfile, load

GOOD = b'{"question": "q?", "answers": ["a"], "ctxs": [{"text": "t"}]}'


def put(directory: Path, content: bytes, name: str = "bad.json") -> Path:
    path = directory / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b'[\n{"a": 1},\n{"a": }\n]', "line 3, column 7"),
        (b"", "line 1"),
        (b"[1, 2", "line 1, column 6"),
        (b"[]\n[]\n", "line 2, column 1"),
        (b'{"a": 1}\n\n{"a"', "line 3, column 5"),
    ],
)
def test_wrong_json_is_told_with_its_line(tmp_path: Path, content: bytes, line: str) -> None:
    with pytest.raises(InvalidInput, match=rf"bad\.json, {line}"):
        jsonfile.read(put(tmp_path, content))


def test_wrong_json_in_a_file_of_lines_is_told_with_its_line(tmp_path: Path) -> None:
    path = put(tmp_path, GOOD + b"\n\n" + GOOD + b'\r\n{"question": oops}\n', "bad.jsonl")
    with pytest.raises(InvalidInput, match=r"bad\.jsonl, line 4, column 14"):
        load(str(path))


def test_bytes_that_are_not_utf8_are_told_with_their_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"bad\.json, line 2: .*xff.*UTF-8"):
        jsonfile.read(put(tmp_path, b'["a",\n"\xff"]'))
    with pytest.raises(InvalidInput, match=r"line 1: .*UTF-8"):
        jsonfile.read(put(tmp_path, "[1]".encode("utf-16")))


@pytest.mark.parametrize(
    "content", [b"[" * 200_000, b'{"a":' * 200_000, b"[" + b"9" * 5000 + b"]"], ids=["lists", "objects", "digits"]
)
@pytest.mark.parametrize("name", ["bad.json", "bad.jsonl"])
def test_what_the_parser_gives_up_on_is_refused(tmp_path: Path, content: bytes, name: str) -> None:
    with pytest.raises(InvalidInput, match=r"bad\.json"):
        jsonfile.read(put(tmp_path, content, name))


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    assert jsonfile.read(put(tmp_path, b"\xef\xbb\xbf[1]")) == [1]
    assert jsonfile.read(put(tmp_path, b"\xef\xbb\xbf1\n2", "marked.jsonl")) == [1, 2]


def test_one_document_a_line_is_seen_whatever_the_suffix(tmp_path: Path) -> None:
    content = GOOD + b"\n" + GOOD + b"\n"
    assert jsonfile.read(put(tmp_path, content)) == jsonfile.read(put(tmp_path, content, "good.jsonl"))
    assert jsonfile.read(put(tmp_path, b'["\xe2\x80\xa8"]\n', "separator.jsonl")) == [["\u2028"]]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="can be read"):
        jsonfile.read(tmp_path)
