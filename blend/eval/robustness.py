"""The same evidence told in other ways: in another order or place, and cut into other chunks.

Of one prompt come variations whose passages hold the same tokens; only their order and the borders between chunks
change, so that what differs between their answers comes from that alone.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

from blend.errors import InvalidInput
from blend.eval.datasets import Example
from blend.eval.prompts import Asked
from blend.eval.values import Level
from blend.names import unknown
from blend.rag.chunking import render_chunk
from blend.rag.sentences import sentence_ends, word_ends
from blend.types import Chunk, Prompt

EXPERIMENTS = ("order", "position", "boundary", "chunk-size", "count")
"""What can be varied; each is the ``condition`` of its records."""

POSITIONS = ("first", "middle", "last")

Encode = Callable[[str], tuple[int, ...]]
Build = Callable[[Sequence[Chunk], str], Prompt]


@dataclass(frozen=True)
class Options:
    """Which variations are made.

    Args:
        experiments: some of :data:`EXPERIMENTS`.
        orders: orders of the same chunks, that of the data among them.
        positions: where the gold passages go, some of :data:`POSITIONS`.
        chunk_sizes: tokens of a chunk, the last one of a prompt may have fewer.
        counts: chunks of a prompt, of equal size give or take a token.
        seed: of the orders.

    Raises:
        InvalidInput: an unknown name, with the nearest, or a number that is too small.
    """

    experiments: tuple[str, ...] = EXPERIMENTS
    orders: int = 4
    positions: tuple[str, ...] = POSITIONS
    chunk_sizes: tuple[int, ...] = (64, 128, 256, 512)
    counts: tuple[int, ...] = (2, 5, 10, 20)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.experiments:
            if name not in EXPERIMENTS:
                raise unknown("experiments", name, EXPERIMENTS)
        for name in self.positions:
            if name not in POSITIONS:
                raise unknown("positions", name, POSITIONS)
        if self.orders < 2:
            raise InvalidInput("orders", self.orders, "2 or more")
        for what, numbers in (("chunk_sizes", self.chunk_sizes), ("counts", self.counts)):
            for number in numbers:
                if number < 1:
                    raise InvalidInput(what, number, "1 or more")


def variations(
    example: Example, options: Options, encode: Encode, build: Build, dropped: Counter[str]
) -> Iterator[Asked]:
    """Yield the variations of an example, experiment by experiment.

    An example that an experiment cannot be made of is counted in ``dropped``, under the reason.

    Args:
        encode: token ids of a text.
        build: the prompt of chunks and a question.
        dropped: counts by reason; added to.
    """
    chunks = [Chunk(encode(render_chunk(p.title, p.text))) for p in example.passages]

    def told(condition: str, level: Level, order: int, told_as: Sequence[Chunk]) -> Asked:
        return Asked(example, build(told_as, example.question), condition, level, order)

    for condition in options.experiments:
        if condition == "order":
            if len(chunks) < 2:
                dropped["order: a single passage"] += 1
                continue
            for i, order in enumerate(orders(len(chunks), options.orders, f"{options.seed}/{example.id}")):
                yield told(condition, None, i, [chunks[j] for j in order])
        elif condition == "position":
            gold = [p.gold for p in example.passages]
            if not any(gold) or all(gold):
                dropped["position: no passage is known as gold beside others"] += 1
                continue
            for level in options.positions:
                yield told(condition, level, 0, [chunks[j] for j in placed(gold, level)])
        elif condition == "boundary":
            found = answer_cut(example, encode)
            if found is None:
                dropped["boundary: no gold passage holds an answer"] += 1
                continue
            place, at = found
            ids = chunks[place].token_ids
            halves = [Chunk(ids[:at]), Chunk(ids[at:])]
            yield told(condition, "whole", 0, chunks)
            yield told(condition, "split", 0, [*chunks[:place], *halves, *chunks[place + 1 :]])
        else:
            yield from _recut(condition, options, chunks, told, dropped)


def _recut(
    condition: str,
    options: Options,
    chunks: Sequence[Chunk],
    told: Callable[[str, Level, int, Sequence[Chunk]], Asked],
    dropped: Counter[str],
) -> Iterator[Asked]:
    ids = tuple(token for chunk in chunks for token in chunk.token_ids)
    for level in options.chunk_sizes if condition == "chunk-size" else options.counts:
        if len(ids) < level:
            dropped[f"{condition} {level}: the passages have fewer tokens"] += 1
            continue
        even = [i * len(ids) // level for i in range(level)]
        yield told(condition, level, 0, cut(ids, range(0, len(ids), level) if condition == "chunk-size" else even))


def orders(count: int, wanted: int, seed: str) -> list[tuple[int, ...]]:
    """Return different orders of ``count`` things, the present one first; as many as wanted, or as there are."""
    if wanted >= math.factorial(count):
        return list(permutations(range(count)))
    found = {tuple(range(count)): None}
    chance = random.Random(seed)
    while len(found) < wanted:
        found[tuple(chance.sample(range(count), count))] = None
    return list(found)


def placed(gold: Sequence[bool], position: str) -> list[int]:
    """Return the order that puts the gold passages ``first``, in the ``middle`` or ``last``; the others stay in order.

    An odd number of others has the larger half behind the middle.
    """
    evidence = [i for i, is_gold in enumerate(gold) if is_gold]
    others = [i for i, is_gold in enumerate(gold) if not is_gold]
    before = {"first": 0, "middle": len(others) // 2, "last": len(others)}[position]
    return others[:before] + evidence + others[before:]


def answer_cut(example: Example, encode: Encode) -> tuple[int, int] | None:
    """Return the gold passage that holds an answer, and the token at which its answer's sentence is cut in the middle.

    The cut is at the end of the word nearest the sentence's middle; in a sentence of one word, inside of it. ``None``
    where no gold passage holds any answer's text.
    """
    for i, passage in enumerate(example.passages):
        if not passage.gold:
            continue
        for answer in example.answers:
            held = re.search(re.escape(answer.strip()), passage.text, re.IGNORECASE) if answer.strip() else None
            if held is None:
                continue
            rendered = render_chunk(passage.title, passage.text)
            title = len(rendered) - len(render_chunk("", passage.text))
            before = encode(rendered[: title + _middle(passage.text, held.start())])
            return i, min(max(1, len(before)), len(encode(rendered)) - 1)
    return None


def _middle(text: str, at: int) -> int:
    """Return where to cut the sentence of the character ``at``: at the end of the word nearest its middle."""
    begin, end = 0, len(text)
    for stop in sentence_ends(text, 0, len(text)):
        if stop > at:
            end = stop
            break
        begin = stop
    middle = (begin + end) // 2
    # A word's end in this sense lies behind the space; the tokens of most vocabularies begin with it.
    ends = [len(text[:stop].rstrip()) for stop in word_ends(text, begin, end) if stop < end]
    return min(ends, key=lambda stop: abs(stop - middle), default=middle)


def cut(ids: Sequence[int], borders: Iterable[int]) -> list[Chunk]:
    """Return the chunks that begin at ``borders``, the first of which is 0."""
    starts = [*borders, len(ids)]
    return [Chunk(ids[start:end]) for start, end in pairwise(starts)]
