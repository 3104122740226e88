"""Synthetic questions: facts hidden in a long text about nothing, in the manner of RULER (Hsieh et al., 2024).

``needle-single``: one key, one value. ``needle-multikey``: other keys with values of their own beside it.
``needle-multivalue``: one key with several values, all of which are asked for. ``needle-variables``: a chain of
variables, each set to the one before, beside a second chain; asked for are all variables with the first one's value.
Where several things are asked for, the one accepted answer names all, with commas between, in the text's order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from blend.errors import InvalidInput
from blend.eval.datasets.questions import Example, Found, Passage, spread
from blend.names import unknown

NEEDLES = 4
"""Keys, values, or variables of a chain, where a kind has several."""

_DEFAULTS = {"tokens": 4000, "count": 20}
_MOST = {"tokens": 10_000_000, "count": 100_000}
_LEAST_TOKENS = 64  # of one passage, so that its needles and some text about nothing fit
_CHARS_PER_TOKEN = 5.1  # of these sentences with SmolLM2's tokenizer

_KEY_FIRST = "amber azure brisk calm civic coral dusky eager fabled gentle hollow ivory jolly keen lunar mellow".split()
_KEY_LAST = "badger bison condor cricket falcon ferret gecko heron ibis jackal lemur marten newt otter puffin".split()
_WHICH = (
    "old quiet narrow bright distant wooden empty gray warm lonely broad humble hidden dusty green tall steep silver "
    "faded crooked plain windy shallow early"
).split()
_WHAT = (
    "bridge garden harbor meadow mill orchard road tower valley village window river stable barn field lantern "
    "chapel market forest cellar ladder kettle wagon fence"
).split()
_DOES = (
    "stands waits rests leans opens turns fades shines lies sleeps shakes settles drifts glows lingers belongs"
).split()
_WHERE = "near behind below above beside beyond under before".split()
_WHEN = (
    "in the morning,at noon,after the rain,in late summer,on market days,during the harvest,when the bells ring,"
    "through the winter,as the light fails,while nobody looks,before the snow,every other week"
).split(",")


@dataclass(frozen=True)
class _Task:
    """What is hidden, in the text's order, each with whether the question is about it."""

    needles: list[tuple[str, bool]]
    question: str
    answer: str


def read(kind: str, options: Mapping[str, str], passages: int, seed: int, limit: int | None) -> Found:
    """Return made-up questions: the same ones for the same arguments, everywhere.

    Args:
        kind: one of :data:`KINDS`.
        options: ``tokens``, about how many a question's passages have together (default 4000, estimated from
            characters); ``count``, how many questions (default 20).
        passages: passages a question has, of about equal length.
        seed: of everything.
        limit: as many of them are made, spread evenly over all; ``None`` for all.

    Raises:
        InvalidInput: an unknown option, or a number out of its range.
    """
    tokens, count = _numbers(kind, options)
    if tokens < passages * _LEAST_TOKENS:
        least = f"at least {passages * _LEAST_TOKENS}: {_LEAST_TOKENS} for each of {passages} passages"
        raise InvalidInput(f"{kind}, tokens", tokens, least)
    return Found([_example(kind, number, tokens, passages, seed) for number in spread(range(count), limit)])


def _numbers(kind: str, options: Mapping[str, str]) -> tuple[int, int]:
    for name, value in options.items():
        if name not in _DEFAULTS:
            raise unknown(f"{kind}, option", name, _DEFAULTS)
        if not (value.isascii() and value.isdecimal() and len(value) < 10 and 1 <= int(value) <= _MOST[name]):
            raise InvalidInput(f"{kind}, {name}", value, f"a whole number from 1 to {_MOST[name]}")
    tokens, count = (int(options.get(name, default)) for name, default in _DEFAULTS.items())
    return tokens, count


def _example(kind: str, number: int, tokens: int, passages: int, seed: int) -> Example:
    chance = random.Random(f"{kind}/{seed}/{tokens}/{passages}/{number}")
    task = KINDS[kind](chance)
    places = sorted(chance.randrange(passages) for _ in task.needles)
    asked = [i for i, (_, is_asked) in enumerate(task.needles) if is_asked]
    if len(asked) == 1:  # one needle is asked for: over the questions, it lies equally often in each passage
        places[asked[0]] = number % passages
    found = []
    for place in range(passages):
        needles = [needle for needle, at in zip(task.needles, places, strict=True) if at == place]
        text = _text([sentence for sentence, _ in needles], tokens / passages, chance)
        found.append(Passage("", text, any(is_asked for _, is_asked in needles)))
    return Example(f"{kind}-{number}", task.question, (task.answer,), tuple(found))


def _text(needles: list[str], tokens: float, chance: random.Random) -> str:
    """The needles, in their order, among as many sentences as make about that many tokens."""
    room = tokens * _CHARS_PER_TOKEN - sum(len(needle) + 1 for needle in needles)
    sentences = []
    for sentence in _sentences(chance):
        room -= len(sentence) + 1
        if room < -len(sentence) / 2:
            break
        sentences.append(sentence)
    positions = sorted(chance.randrange(len(sentences) + 1) for _ in needles)
    for position, needle in reversed(list(zip(positions, needles, strict=True))):
        sentences.insert(position, needle)
    return " ".join(sentences)


def _sentences(chance: random.Random) -> Iterator[str]:
    pick = chance.choice
    while True:
        one, other = chance.sample(_WHAT, 2)
        yield f"The {pick(_WHICH)} {one} {pick(_DOES)} {pick(_WHERE)} the {pick(_WHICH)} {other} {pick(_WHEN)}."


def _facts(chance: random.Random, keys: int, values: int) -> list[tuple[str, str]]:
    """Distinct keys with distinct numbers of seven digits: ``values`` for each key."""
    numbers = iter(chance.sample(range(1_000_000, 10_000_000), keys * values))
    names = chance.sample([f"{first} {last}" for first in _KEY_FIRST for last in _KEY_LAST], keys)
    return [(name, str(next(numbers))) for name in names for _ in range(values)]


def _fact(key: str, value: str) -> str:
    return f"A secret number of the {key} is {value}."


def _one_of(chance: random.Random, keys: int) -> _Task:
    facts = _facts(chance, keys, 1)
    key, value = facts[0]
    chance.shuffle(facts)
    needles = [(_fact(*fact), fact[0] == key) for fact in facts]
    return _Task(needles, f"What is the secret number of the {key}?", value)


def _single(chance: random.Random) -> _Task:
    return _one_of(chance, 1)


def _multikey(chance: random.Random) -> _Task:
    return _one_of(chance, NEEDLES)


def _multivalue(chance: random.Random) -> _Task:
    facts = _facts(chance, 1, NEEDLES)
    question = f"What are all {NEEDLES} secret numbers of the {facts[0][0]}? List them with commas between."
    return _Task([(_fact(*fact), True) for fact in facts], question, ", ".join(value for _, value in facts))


def _variables(chance: random.Random) -> _Task:
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    names: list[str] = []
    while len(names) < 2 * NEEDLES:
        name = "".join(chance.choice(letters) for _ in range(5))
        names += [name] if name not in names else []
    chains = (names[:NEEDLES], names[NEEDLES:])
    values = chance.sample(range(10_000, 100_000), len(chains))
    turns = [0, 1] * NEEDLES
    chance.shuffle(turns)
    done = [0, 0]
    needles = []
    for chain in turns:
        at = done[chain]
        source = f"the value of variable {chains[chain][at - 1]}" if at else f"the value {values[chain]}"
        needles.append((f"Variable {chains[chain][at]} is set to {source}.", chain == 0))
        done[chain] += 1
    question = f"Which {NEEDLES} variables have the value {values[0]}? List them with commas between."
    return _Task(needles, question, ", ".join(chains[0]))


KINDS: Mapping[str, Callable[[random.Random], _Task]] = {
    "needle-single": _single,
    "needle-multikey": _multikey,
    "needle-multivalue": _multivalue,
    "needle-variables": _variables,
}
"""The kinds by name."""
