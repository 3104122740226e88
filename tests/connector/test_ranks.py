"""Ranks in step with one another: the first one's clock, and one report of what both did."""

# ruff: noqa: E402 - nothing of vLLM is imported where it is not installed

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.connector.conftest import require_vllm

require_vllm()

from blend.connector.vllm.jobs import Outcomes, Report
from blend.connector.vllm.tasks import Pace, Task, checkpoint, rows_at_once
from blend.model.shards import ELSEWHERE, Shards
from blend.types import ChunkReport

pytestmark = pytest.mark.slow  # importing vLLM alone takes seconds


class Follower(Shards):
    """The second of two; the first one says what it is told to."""

    size, rank = 2, 1

    def __init__(self, *said: int) -> None:
        self.said = list(said)

    def first(self, value: int) -> int:
        return self.said.pop(0)


def test_a_follower_stops_where_the_first_does() -> None:
    done: list[int] = []

    def work() -> None:
        for step in range(4):
            done.append(step)
            checkpoint()

    task = Task(work, Pace(Follower(False, True, False, True)))
    assert not task.go_on(0.0)  # its own clock would have stopped it at once
    assert done == [0, 1]
    assert not task.go_on(1e6)
    assert done == [0, 1, 2, 3]
    assert task.go_on(0.0)


def test_a_follower_takes_as_many_rows_as_the_first() -> None:
    found: list[int] = []
    task = Task(lambda: found.append(rows_at_once(512)), Pace(Follower(77)))
    assert task.go_on(1e6)
    assert found == [77]


def test_one_report_of_what_two_did() -> None:
    hit = ChunkReport("a", 0, 10, "hit", tier="host", nbytes=100)
    lacking = ChunkReport("b", 10, 10, "miss", reason=ELSEWHERE)
    failed = ChunkReport("c", 10, 10, "failed", tier="disk", reason="checksum")
    mine = Report("head", "as asked", 0, 20, 10, 1, 11, 0.1, (hit, lacking), load_ms=3.0, select_ms=1.0, recompute_ms=5)
    theirs = replace(mine, chunks=(replace(hit, key="d", nbytes=100), failed), load_ms=9.0, recompute_ms=4.0)
    told = Outcomes(frozenset("r"), reports=(("r", mine),)).beside(Outcomes(frozenset("r"), reports=(("r", theirs),)))
    assert told.ended == {"r"}
    ((_, report),) = told.reports
    assert report.chunks == (replace(hit, nbytes=200), replace(failed, key="b"))
    assert (report.load_ms, report.select_ms, report.recompute_ms) == (9.0, 1.0, 5)


def test_blocks_that_one_could_not_fill_are_not_filled() -> None:
    one, other = Outcomes(frozenset("r")), Outcomes(frozenset("r"), failed=frozenset("r"))
    assert one.beside(other).failed == other.beside(one).failed == {"r"}
