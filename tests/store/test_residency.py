"""The index of who holds what, against a plain dictionary."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from blend.store.key import ObjectKey
from blend.store.residency import Candidate, Event, ResidencyIndex

KEYS = [ObjectKey(f"{number:040x}", "plain") for number in range(6)]
NODES = ["a", "b", "c"]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["stored", "removed"]),
            st.sampled_from(NODES),
            st.sampled_from(["host", "disk"]),
            st.integers(0, 5),
        ),
        st.tuples(st.just("drop"), st.sampled_from(NODES), st.just(""), st.just(0)),
    ),
    max_size=60,
)


@given(ACTIONS)
@settings(max_examples=200)
def test_it_says_what_was_told(actions: list[tuple[str, str, str, int]]) -> None:
    index = ResidencyIndex()
    held: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for kind, node, tier, number in actions:
        if kind == "drop":
            index.drop(node)
            held[node].clear()
            continue
        index.apply(node, [Event(kind, KEYS[number], tier, 100 + number)])  # type: ignore[arg-type]
        (held[node].add if kind == "stored" else held[node].discard)((tier, number))
    expected = []
    for node in NODES:
        numbers = {number for _, number in held[node]}
        if numbers:
            expected.append(Candidate(node, len(numbers), sum(100 + number for number in numbers)))
    expected.sort(key=lambda candidate: (-candidate.objects, -candidate.nbytes, candidate.node))
    assert index.best(KEYS) == expected


def test_the_node_with_most_of_what_is_asked_for_comes_first() -> None:
    index = ResidencyIndex()
    index.apply("a", [Event("stored", key, "disk", 10) for key in KEYS[:4]])
    index.apply("b", [Event("stored", key, "host", 10) for key in KEYS[2:]])
    index.apply("b", [Event("stored", KEYS[2], "disk", 10)])
    assert [(found.node, found.objects) for found in index.best(KEYS[3:6])] == [("b", 3), ("a", 1)]
    assert index.best([KEYS[0]]) == [Candidate("a", 1, 10)]
    assert index.best([ObjectKey("f" * 40, "plain")]) == []
    assert index.nodes() == ("a", "b")


def test_what_is_told_twice_or_was_never_there_changes_nothing() -> None:
    index = ResidencyIndex()
    for _ in range(3):
        index.apply("a", [Event("stored", KEYS[0], "host", 10)])
        index.apply("a", [Event("removed", KEYS[1], "host")])
    assert index.best(KEYS) == [Candidate("a", 1, 10)]
    for _ in range(2):
        index.apply("a", [Event("removed", KEYS[0], "host")])
    assert index.best(KEYS) == []
    assert len(index) == 0


def test_it_is_bounded() -> None:
    index = ResidencyIndex(limit=2)
    index.apply("a", [Event("stored", key, "host", 10) for key in KEYS])
    assert (len(index), index.ignored) == (2, 4)
    index.apply("b", [Event("stored", KEYS[0], "host", 10)])
    assert [found.objects for found in index.best(KEYS)] == [2, 1]


def test_nodes_that_come_and_go_leave_nothing_behind() -> None:
    index = ResidencyIndex()
    index.apply("stays", [Event("stored", KEYS[0], "host", 10)])
    for number in range(600):
        index.apply(f"guest {number}", [Event("stored", key, "host", 10) for key in KEYS])
        index.drop(f"guest {number}")
    index.apply("last", [Event("stored", KEYS[1], "host", 20)])
    assert index.best(KEYS) == [Candidate("last", 1, 20), Candidate("stays", 1, 10)]
    assert index.nodes() == ("last", "stays")
    assert all(mask < 1 << 256 for mask, _ in index._entries.values())
