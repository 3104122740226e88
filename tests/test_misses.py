"""What requests missed is computed later, once, and not at all where it was forgotten meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter

import pytest

from blend import misses
from blend.misses import Misses
from blend.pipeline import Request
from blend.serving.scheduler import Scheduler
from blend.types import Chunk, ChunkReport, Outcome, Plan, Prompt, Report, Text, Timings
from tests.serving.fakes import busy, idle

CHUNKS = [Chunk([n]) for n in (1, 2, 3)]


def key(chunk: Chunk, namespace: str) -> str:
    return f"{namespace}:{chunk.token_ids[0]}"


@dataclass
class Later:
    """Misses, what they had computed, and the thread that they are computed in."""

    scheduler: Scheduler
    computed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.misses = Misses(self.scheduler, key, lambda chunk, namespace: self.computed.append(key(chunk, namespace)))


@pytest.fixture
def later() -> Iterator[Later]:
    made = Later(idle())
    yield made
    made.scheduler.close()
    made.misses.close()
    made.scheduler.join()


def missed(*outcomes: Outcome, namespace: str = "a", arrived: float | None = None) -> tuple[Request, Report]:
    """A request with a chunk for each outcome, and its report."""
    prompt = Prompt([*CHUNKS[: len(outcomes)], Text([9])])
    chunks = tuple(
        ChunkReport(key(chunk, namespace), start, 1, outcome)
        for start, (chunk, outcome) in enumerate(zip(CHUNKS, outcomes, strict=False))
    )
    report = Report("reuse", "", len(prompt), 0, len(prompt), 0, 0.0, 0.0, 0.0, chunks, Timings(*[0.0] * 7), 0.0)
    return Request(
        prompt, Plan("reuse"), namespace, len(prompt), perf_counter() if arrived is None else arrived
    ), report


def test_misses_and_faults_are_computed_once(later: Later) -> None:
    with busy(later.scheduler):
        later.misses.queue(*missed("miss", "hit", "failed"))
        later.misses.queue(*missed("miss", "unused"))
    assert later.misses.wait_idle(30)
    assert later.computed == ["a:1", "a:3"]
    assert later.misses.counts() == {"done": 2, "failed": 0, "dropped": 0, "joined": 1, "waiting": 0}


def test_what_was_forgotten_since_the_request_came_is_not(later: Later) -> None:
    early = perf_counter()
    with busy(later.scheduler):
        later.misses.queue(*missed("miss", "miss", "miss"))
        later.misses.forget({"a:1", "a:2"})
        later.misses.queue(*missed("miss", arrived=early))
        later.misses.want("a:2")
        later.misses.queue(*missed("hit", "miss", arrived=early))
    assert later.misses.wait_idle(30)
    assert later.computed == ["a:3", "a:2"]
    later.misses.queue(*missed("miss"))
    assert later.misses.wait_idle(30)
    assert later.computed == ["a:3", "a:2", "a:1"]


def test_nor_is_what_is_of_a_namespace_that_was_dropped(later: Later) -> None:
    early = perf_counter()
    with busy(later.scheduler):
        later.misses.queue(*missed("miss", namespace="gone"))
        later.misses.drop("gone")
        later.misses.queue(*missed("miss", "miss", namespace="gone", arrived=early))
        later.misses.queue(*missed("miss"))
    later.misses.queue(*missed("hit", "miss", namespace="gone"))
    assert later.misses.wait_idle(30)
    assert later.computed == ["a:1", "gone:2"]


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first(later: Later, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "_LIMIT", 2)
    early = perf_counter()
    for name in ("a:1", "a:2", "a:1", "a:3"):
        later.misses.forget({name})
    later.misses.queue(*missed("miss", "miss", "miss", arrived=early))
    assert later.misses.wait_idle(30)
    assert later.computed == ["a:2"]
