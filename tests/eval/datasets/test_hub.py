"""Data sets through the library ``datasets``: directories for real, the hub played."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from blend.errors import InvalidInput, NotFound
from blend.eval.datasets import load
from tests.eval.datasets.conftest import Write
from tests.eval.datasets.test_formats import HOTPOT_ON_THE_HUB, MUSIQUE

library = pytest.importorskip("datasets", reason="the extra `eval` is not installed")


class Hub:
    """Stands for the hub: one data set with these splits."""

    def __init__(self, rows: list[dict[str, Any]], splits: list[str]) -> None:
        self.rows = rows
        self.splits = splits
        self.asked: list[tuple[str, Any, Any, Any]] = []

    def get_dataset_split_names(self, name: str, config: str | None, revision: str | None) -> list[str]:
        if name != "owner/name":
            raise library.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")
        return self.splits

    def load_dataset(self, name: str, config: str | None, *, split: str, revision: str | None) -> Any:
        self.asked.append((name, config, split, revision))
        return library.Dataset.from_list(self.rows)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    played = Hub([HOTPOT_ON_THE_HUB], ["train", "validation"])
    monkeypatch.setattr(library, "get_dataset_split_names", played.get_dataset_split_names)
    monkeypatch.setattr(library, "load_dataset", played.load_dataset)
    return played


def test_the_validation_split_is_taken_first(hub: Hub) -> None:
    (example,) = load("owner/name?config=distractor&revision=v1").examples
    assert hub.asked == [("owner/name", "distractor", "validation", "v1")]
    assert example.id == "5a8b" and [p.gold for p in example.passages] == [True, False, True]


def test_a_split_can_be_named(hub: Hub) -> None:
    load("owner/name", split="train")
    assert hub.asked == [("owner/name", None, "train", None)]
    with pytest.raises(InvalidInput, match=r"split: got 'trian'; allowed: train \(the nearest\)"):
        load("owner/name", split="trian")


def test_of_unusual_splits_one_must_be_named(hub: Hub) -> None:
    hub.splits = ["easy", "hard"]
    with pytest.raises(InvalidInput, match="split: got None; allowed: one of: easy, hard"):
        load("owner/name")
    hub.splits = ["only"]
    assert load("owner/name").examples and hub.asked[-1][2] == "only"


def test_lists_of_objects_are_read_too(hub: Hub) -> None:
    hub.rows = [MUSIQUE]
    (example,) = load("owner/name").examples
    assert example.answers == ("second", "2nd") and [p.gold for p in example.passages] == [False, True]


def test_fields_are_mapped(hub: Hub) -> None:
    hub.rows = [{"q": "q?", "a": "x", "docs": ["one"]}]
    fields = {"question": "q", "answers": "a", "passages": "docs"}
    assert load("owner/name", fields=fields).examples[0].answers == ("x",)
    with pytest.raises(InvalidInput, match="owner/name, validation, record 1"):
        load("owner/name")


def test_what_is_not_there(hub: Hub) -> None:
    with pytest.raises(NotFound, match="owner/other"):
        load("owner/other")
    with pytest.raises(InvalidInput, match=r"option: got 'conf'; allowed: config \(the nearest\)"):
        load("owner/name?conf=x")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionError("Couldn't reach it\nat all"), NotFound),
        (ValueError("Config name is missing."), InvalidInput),
        (RuntimeError("Dataset scripts are no longer supported"), InvalidInput),
    ],
)
def test_errors_of_the_library_are_told_in_a_line(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(library, "load_dataset", fails)
    with pytest.raises(kind, match=str(error).split("\n")[0]) as caught:
        load("owner/name")
    assert "\n" not in str(caught.value)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InvalidInput, match=r"blendkv\[eval\]"):
        load("owner/name")


def test_a_directory_in_the_hubs_layout(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    write([MUSIQUE], "set/test.jsonl")
    (example,) = load(str(tmp_path / "set")).examples
    assert example.answers == ("second", "2nd") and [p.gold for p in example.passages] == [False, True]
    (tmp_path / "empty").mkdir()
    with pytest.raises((NotFound, InvalidInput), match="empty"):
        load(str(tmp_path / "empty"))


def test_offline_says_that_the_hub_is_not_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(NotFound, match="blend-tests/none"):
        load("blend-tests/none")
