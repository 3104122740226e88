"""From a name to questions: where they come from, in what format, and which of them are taken."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from blend.errors import InvalidInput, NotFound
from blend.eval.datasets import cacheblend, demo, hotpot, hub, jsonfile, musique, needle, retrieval, squad
from blend.eval.datasets import fields as mapped
from blend.eval.datasets.questions import Dataset, Example, Found, digest, spread
from blend.eval.datasets.records import Record
from blend.names import unknown

NAMES = ("demo", *needle.KINDS)
"""The data sets that need no file."""


class _Format(NamedTuple):
    name: str
    recognises: Callable[[Record], bool]
    read: Callable[[Iterable[Record]], Found]


_FORMATS = (
    _Format("CacheBlend's (ctxs)", cacheblend.recognises, cacheblend.read),
    _Format("SQuAD's (paragraphs with qas)", squad.recognises_articles, squad.read_articles),
    _Format("MuSiQue's (paragraphs)", musique.recognises, musique.read),
    _Format("HotpotQA's and 2WikiMultihopQA's (context with titles)", hotpot.recognises, hotpot.read),
    _Format("SQuAD's on the hub (context)", squad.recognises, squad.read),
)


def load(
    name: str,
    *,
    passages: int = 8,
    limit: int | None = None,
    seed: int = 0,
    fields: Mapping[str, str] | None = None,
    split: str | None = None,
    retriever: retrieval.Retriever | None = None,
) -> Dataset:
    """Load a data set.

    Args:
        name: one of

            - ``demo``, the corpus that ships with the package;
            - ``needle-single``, ``needle-multikey``, ``needle-multivalue`` or ``needle-variables``, made up; with
              options as in ``needle-single?tokens=4000&count=20``;
            - a JSON file, or one with a document a line: CacheBlend's format, SQuAD's, HotpotQA's,
              2WikiMultihopQA's, MuSiQue's, or any other with ``fields``;
            - a hub id ``owner/name``, or a directory in the hub's layout, of these formats; with options as in
              ``hotpotqa/hotpot_qa?config=distractor``.
        passages: passages a question gets, its gold ones among them, where the source leaves the choice (the demo,
            needles, SQuAD); other formats bring their own, and keep all.
        limit: take that many of the questions that can be used, spread evenly; ``None`` takes all.
        seed: of what is made up, and of the choice and order of passages where the source leaves them.
        fields: which field is what, by paths such as ``{"answers": "a.text"}``: see
            :func:`blend.eval.datasets.fields.read`.
        split: of a data set on the hub; by default its validation split where it has one.
        retriever: finds the further passages of a SQuAD question; by default the project's own embedding model
            and index.

    Raises:
        NotFound: no such file, or none on the hub.
        InvalidInput: an unknown name, wrong JSON (with its line), a missing field (with its record), no question
            that can be used, or an argument out of its range.
        ModelError: the embedding model is needed, and cannot be used.
    """
    _check(passages, limit, seed, fields)
    found = _found(name, passages, limit, seed, fields, split)
    usable, dropped = _usable(_with_distinct_ids(found.examples))
    if not usable:
        counts = ", ".join(f"{times} {reason}" for reason, times in dropped.items())
        raise InvalidInput(name, counts or "no questions", "at least one question with an answer and a passage")
    chosen = spread(usable, limit)
    if found.corpus:
        corpus = [passage for passage in found.corpus if passage.text.strip()]
        chosen = retrieval.fill(chosen, corpus, passages, seed, retriever or retrieval.EmbeddingRetriever())
    return Dataset(name, digest(chosen), tuple(chosen), dropped)


def _check(passages: int, limit: int | None, seed: int, fields: Mapping[str, str] | None) -> None:
    for what, number in (("passages", passages), ("limit", 1 if limit is None else limit)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise InvalidInput(what, number, "a whole number of 1 or more")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise InvalidInput("seed", seed, "a whole number")
    mapped.check(fields or {})


def _found(
    name: str, passages: int, limit: int | None, seed: int, fields: Mapping[str, str] | None, split: str | None
) -> Found:
    if not isinstance(name, str) or not name:
        raise InvalidInput("dataset", name, f"a file, a hub id, or one of: {', '.join(NAMES)}")
    base, _, query = name.partition("?")
    if base in NAMES:
        _refuse(name, fields=fields, split=split)
        options = _options(name, query)
        if base in needle.KINDS:
            return needle.read(base, options, passages, seed, limit)
        _refuse(name, options=options)
        return demo.read(passages, seed)
    if os.path.isfile(name):
        _refuse(name, split=split)
        records = _file(Path(name))
    elif os.path.isdir(base) or hub.is_id(base):
        records = hub.records(base, _options(name, query), split)
    else:
        raise _absent(name, base)
    return _read(name, records, fields)


def _file(path: Path) -> list[Record]:
    document = jsonfile.read(path)
    rows = document
    if isinstance(document, dict):
        lists = {field: value for field, value in document.items() if isinstance(value, list)}
        rows = lists["data"] if "data" in lists else (next(iter(lists.values())) if len(lists) == 1 else None)
    if not isinstance(rows, list):
        raise InvalidInput(str(path), type(document).__name__, "a list of questions, or an object with one such list")
    return [Record(f"{path}, record {i}", row) for i, row in enumerate(rows, 1)]


def _read(name: str, records: list[Record], fields: Mapping[str, str] | None) -> Found:
    if fields or not records:
        return mapped.read(records, fields or {})
    first = records[0]
    for known in _FORMATS:
        if known.recognises(first):
            return known.read(records)
    formats = "; ".join(known.name for known in _FORMATS)
    raise InvalidInput(first.place, f"fields {first.names}", f"a format of these: {formats}; or a map of its fields")


def _options(name: str, query: str) -> dict[str, str]:
    if not query:
        return {}
    try:
        return dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True))
    except ValueError as error:
        raise InvalidInput("dataset", name, "options as in needle-single?tokens=4000&count=20") from error


def _refuse(name: str, **given: Any) -> None:
    for what, value in given.items():
        if value:
            raise InvalidInput(what, value, f"none for {name}")


def _absent(name: str, base: str) -> InvalidInput | NotFound:
    """The error for a name that is nothing: a path that is not there, or a word with a slip."""
    if os.sep in base or Path(base).suffix:
        return NotFound("data set file", name)
    return unknown("dataset", base, (*NAMES, "a JSON file", "a hub id"))


def _usable(examples: Sequence[Example]) -> tuple[list[Example], dict[str, int]]:
    """The examples that can be used, without their blank passages and answers; and what was left out."""
    usable = []
    dropped: Counter[str] = Counter()
    for example in examples:
        answers = tuple(dict.fromkeys(answer.strip() for answer in example.answers if answer.strip()))
        passages = tuple(passage for passage in example.passages if passage.text.strip())
        dropped["blank passages"] += len(example.passages) - len(passages)
        if not example.question.strip():
            dropped["no question"] += 1
        elif not answers:
            dropped["no answers"] += 1
        elif not passages:
            dropped["no passages"] += 1
        else:
            usable.append(replace(example, answers=answers, passages=passages))
    return usable, {reason: times for reason, times in dropped.items() if times}


def _with_distinct_ids(examples: Sequence[Example]) -> list[Example]:
    """The examples with their places as ids where they have none, and a number behind an id that comes again."""
    names = [example.id or str(i) for i, example in enumerate(examples)]
    taken, seen = set(names), set()
    numbers: defaultdict[str, Iterator[int]] = defaultdict(lambda: count(2))
    found = []
    for name, example in zip(names, examples, strict=True):
        distinct = name
        if name in seen:
            distinct = next(other for n in numbers[name] if (other := f"{name}#{n}") not in taken)
        taken.add(distinct)
        seen.add(name)
        found.append(replace(example, id=distinct))
    return found
