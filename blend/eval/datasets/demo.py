"""The demo corpus that ships with the package: documents about one imagined place, and questions about them."""

from __future__ import annotations

import json
import random
from pathlib import Path

from blend.eval.datasets.questions import Example, Found, Passage

_DIRECTORY = Path(__file__).parents[1] / "demo"


def read(passages: int, seed: int) -> Found:
    """Return its questions: the evidence among other documents, ``passages`` in all, in seeded order."""
    texts = {}
    for path in sorted((_DIRECTORY / "documents").glob("*.txt")):
        title, _, text = path.read_text("utf-8").partition("\n")
        texts[path.stem] = (title.strip(), text.strip())
    found = []
    for row in json.loads((_DIRECTORY / "questions.json").read_text("utf-8")):
        chance = random.Random(f"{seed}/{row['id']}")
        gold = [Passage(*texts[stem], gold=True) for stem in row["documents"]]
        others = [Passage(*text) for stem, text in texts.items() if stem not in row["documents"]]
        chosen = gold + chance.sample(others, max(0, min(len(others), passages - len(gold))))
        chance.shuffle(chosen)
        found.append(Example(row["id"], row["question"], tuple(row["answers"]), tuple(chosen)))
    return Found(found)
