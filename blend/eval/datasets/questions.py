"""What a data set consists of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True)
class Passage:
    """One retrieved passage, a chunk of the prompt. ``title`` may be empty.

    ``gold`` says that the data set names it as evidence of the answer; where a data set names none, all are False.
    """

    title: str
    text: str
    gold: bool = False


@dataclass(frozen=True)
class Example:
    """A question, its accepted answers (alternatives), and its passages in the order of the prompt."""

    id: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]


@dataclass(frozen=True)
class Dataset:
    """Questions that are evaluated.

    Attributes:
        name: what it was loaded by.
        digest: of its examples, see :func:`digest`.
        examples: at least one; their ids differ.
        dropped: what the whole data set holds and cannot be used, by reason. ``no question``, ``no answers`` and
            ``no passages`` count questions; ``blank passages`` counts passages, whose questions stay if they have
            others.
    """

    name: str
    digest: str
    examples: tuple[Example, ...]
    dropped: Mapping[str, int]


@dataclass(frozen=True)
class Found:
    """What a reader made of a source.

    Attributes:
        examples: every question, those included that cannot be used.
        corpus: where the examples' further passages are retrieved from; empty if they have all of theirs.
    """

    examples: list[Example]
    corpus: tuple[Passage, ...] = ()


def digest(examples: Iterable[Example]) -> str:
    """Return the hex SHA-256 over the examples in their order: ids, questions, answers and passages."""
    made = hashlib.sha256()
    for example in examples:
        passages = [[p.title, p.text, p.gold] for p in example.passages]
        line = json.dumps([example.id, example.question, example.answers, passages], ensure_ascii=False)
        made.update(line.encode("utf-8") + b"\n")
    return made.hexdigest()


def spread(items: Sequence[_T], limit: int | None) -> Sequence[_T]:
    """Return ``limit`` of the items, spread evenly over them, or all if there are no more."""
    if limit is None or limit >= len(items):
        return items
    return [items[i * len(items) // limit] for i in range(limit)]
