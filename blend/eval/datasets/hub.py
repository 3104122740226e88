"""Data sets of the Hugging Face hub, and directories in its layout, through the library ``datasets``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from blend.errors import InvalidInput, NotFound
from blend.eval.datasets.records import Record
from blend.names import unknown

_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_OPTIONS = ("config", "revision")
_SPLITS = ("validation", "dev", "test", "train")


def is_id(name: str) -> bool:
    """Whether a name has the form of a hub id: ``owner/name``."""
    return _ID.fullmatch(name) is not None and not name.endswith((".json", ".jsonl", ".ndjson"))


def records(name: str, options: Mapping[str, str], split: str | None) -> list[Record]:
    """Return the records of one split.

    Args:
        name: a hub id or a directory. What is cached is read without a network.
        options: ``config``, one of the data set's configurations; ``revision``, a commit, tag or branch.
        split: by default, the first of validation, dev, test and train that there is, else the only one.

    Raises:
        NotFound: there is no such data set, or the hub cannot be reached.
        InvalidInput: an unknown option, configuration or split; files that the library cannot read, or that bring
            code; or the library is missing.
    """
    for option in options:
        if option not in _OPTIONS:
            raise unknown(f"{name}, option", option, _OPTIONS)
    try:
        import datasets
    except ImportError as error:
        raise InvalidInput("dataset", name, "a hub id where the extra is installed: blendkv[eval]") from error
    config, revision = (options.get(option) for option in _OPTIONS)
    with _told(name):
        names = datasets.get_dataset_split_names(name, config, revision=revision)
    chosen = _choose(name, names, split)
    with _told(name):
        rows = list(datasets.load_dataset(name, config, split=chosen, revision=revision))
    return [Record(f"{name}, {chosen}, record {i}", row) for i, row in enumerate(rows, 1)]


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Turns the libraries' errors into this package's."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (OSError, ImportError) as error:
        raise NotFound(f"data set ({_first_line(error)})", name) from error
    except (ValueError, RuntimeError, DatasetsError) as error:
        raise InvalidInput("dataset", name, f"one that can be loaded ({_first_line(error)})") from error


def _choose(name: str, names: list[str], split: str | None) -> str:
    if split is not None:
        if split not in names:
            raise unknown(f"{name}, split", split, names)
        return split
    for usual in _SPLITS:
        if usual in names:
            return usual
    if len(names) != 1:
        raise InvalidInput(f"{name}, split", split, f"one of: {', '.join(names)}")
    return names[0]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
