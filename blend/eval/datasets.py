"""Questions with passages, from files of known formats."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blend.errors import InvalidInput, NotFound

DEMO = Path(__file__).parent / "demo"
"""The demo corpus: documents and questions about one imagined place."""


@dataclass(frozen=True)
class Passage:
    """One retrieved passage; ``title`` may be empty."""

    title: str
    text: str


@dataclass(frozen=True)
class Example:
    """A question, its accepted answers, and its passages in the order of the prompt."""

    id: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]


def load(name: str, *, passages: int = 8, limit: int | None = None, seed: int = 0) -> list[Example]:
    """Load a data set.

    Args:
        name: ``demo``, or a JSON file: SQuAD-style (``data[].paragraphs[].qas[]``) or the CacheBlend format (a
            list of ``{question, answers, ctxs: [{title, text}]}``).
        passages: passages a question gets, its gold one among them, where the file leaves the choice.
        limit: take that many questions, spread evenly over the file; ``None`` takes all.
        seed: of the choice and order of passages.

    Raises:
        NotFound: no such file.
        InvalidInput: not JSON, or of no known format; the message names the place.
    """
    for what, count in (("passages", passages), ("limit", limit)):
        if count is not None and count < 1:
            raise InvalidInput(what, count, "1 or more")
    if name == "demo":
        return _spread(_demo(passages, seed), limit)
    path = Path(name)
    if not path.is_file():
        raise NotFound("data set (demo, or a JSON file)", name)
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(str(path), str(error), "a JSON file in UTF-8") from error
    reader: Callable[[Any, int, int], list[Example]]
    if isinstance(raw, dict) and isinstance(raw.get("data"), list):
        reader = _squad
    elif isinstance(raw, list):
        reader = _ctxs
    else:
        raise InvalidInput(str(path), type(raw).__name__, "SQuAD's format or a list of questions with ctxs")
    try:
        found = reader(raw, passages, seed)
    except (KeyError, TypeError, IndexError) as error:
        raise InvalidInput(str(path), f"{type(error).__name__}: {error}", "every field of its format") from error
    if not found:
        raise InvalidInput(str(path), "no questions", "at least one question")
    return _spread(found, limit)


def _spread(examples: list[Example], limit: int | None) -> list[Example]:
    if limit is None or limit >= len(examples):
        return examples
    return [examples[i * len(examples) // limit] for i in range(limit)]


def _squad(raw: dict[str, Any], passages: int, seed: int) -> list[Example]:
    """Gold passage among others of the same article first, then of other articles, in seeded order."""
    articles = [(a["title"], [p["context"] for p in a["paragraphs"]]) for a in raw["data"]]
    found = []
    for article, (title, contexts) in zip(raw["data"], articles, strict=False):
        for gold, paragraph in enumerate(article["paragraphs"]):
            for qa in paragraph["qas"]:
                chance = random.Random(f"{seed}/{qa['id']}")
                near = [Passage(title, c) for i, c in enumerate(contexts) if i != gold]
                far = [Passage(t, c) for t, cs in articles if t != title for c in cs]
                chance.shuffle(near)
                chosen = near[: passages - 1]
                chosen += chance.sample(far, min(len(far), passages - 1 - len(chosen)))
                chosen.append(Passage(title, contexts[gold]))
                chance.shuffle(chosen)
                answers = tuple(dict.fromkeys(a["text"] for a in qa["answers"]))
                found.append(Example(qa["id"], qa["question"], answers, tuple(chosen)))
    return found


def _ctxs(raw: list[Any], passages: int, seed: int) -> list[Example]:
    """The file's own passages, all of them, in the file's order. Answers may be nested one deep."""
    found = []
    for i, row in enumerate(raw):
        answers = [a for item in row["answers"] for a in (item if isinstance(item, list) else [item])]
        chosen = tuple(Passage(c.get("title") or "", c["text"]) for c in row["ctxs"])
        found.append(Example(str(row.get("id", i)), row["question"], tuple(answers), chosen))
    return found


def _demo(passages: int, seed: int) -> list[Example]:
    texts = {}
    for path in sorted((DEMO / "documents").glob("*.txt")):
        title, _, text = path.read_text("utf-8").partition("\n")
        texts[path.stem] = Passage(title.strip(), text.strip())
    found = []
    for row in json.loads((DEMO / "questions.json").read_text("utf-8")):
        chance = random.Random(f"{seed}/{row['id']}")
        gold = [texts[stem] for stem in row["documents"]]
        others = [p for stem, p in texts.items() if stem not in row["documents"]]
        chosen = gold + chance.sample(others, max(0, min(len(others), passages - len(gold))))
        chance.shuffle(chosen)
        found.append(Example(str(row["id"]), row["question"], tuple(row["answers"]), tuple(chosen)))
    return found
