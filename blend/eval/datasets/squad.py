"""SQuAD's formats (Rajpurkar et al., 2016; XQuAD and SQuAD 2.0 too): a question belongs to one paragraph.

As published, a file is a list of articles: ``title``, ``paragraphs: [{context, qas: [{id, question, answers}]}]``. On
the hub, a record is one question: ``id``, ``title``, ``context``, ``question``, ``answers``. Either way a question's
further passages are retrieved from all paragraphs of the file.
"""

from __future__ import annotations

from collections.abc import Iterable

from blend.eval.datasets.questions import Example, Found, Passage
from blend.eval.datasets.records import Record


def recognises_articles(record: Record) -> bool:
    """Whether a record is an article with paragraphs."""
    return "paragraphs" in record and "question" not in record


def recognises(record: Record) -> bool:
    """Whether a record is one question with its paragraph."""
    return "context" in record and isinstance(record.get("context"), str)


def read_articles(records: Iterable[Record]) -> Found:
    """Return the questions, each with its own paragraph, and all paragraphs as the corpus."""
    examples, corpus = [], []
    for article in records:
        title = article.text("title") if "title" in article else ""
        for paragraph in article.parts("paragraphs"):
            passage = Passage(title, paragraph.text("context"))
            corpus.append(passage)
            examples += [_example(question, passage) for question in paragraph.parts("qas")]
    return Found(examples, tuple(dict.fromkeys(corpus)))


def read(records: Iterable[Record]) -> Found:
    """Return the questions, each with its own paragraph, and all paragraphs as the corpus."""
    examples, corpus = [], []
    for record in records:
        passage = Passage(record.text("title") if "title" in record else "", record.text("context"))
        corpus.append(passage)
        examples.append(_example(record, passage))
    return Found(examples, tuple(dict.fromkeys(corpus)))


def _example(record: Record, passage: Passage) -> Example:
    # SQuAD 2.0 leaves the answers of a question that has none empty, XQuAD on the hub stores them as lists of columns.
    answers = tuple(record.texts("answers.text")) if record.get("answers") else ()
    gold = Passage(passage.title, passage.text, gold=True)
    return Example(record.text("id") if "id" in record else "", record.text("question"), answers, (gold,))
