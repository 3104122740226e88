"""The queue of requests to be compared, without a model: which go in, in what order, and what is dropped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from blend.config import ShadowConfig
from blend.pipeline import Request, State
from blend.serving.job import Job
from blend.serving.steps import Prefill, Steps, do
from blend.shadow.quality import Quality
from blend.shadow.record import TripRecord
from blend.shadow.shadows import Shadows
from blend.types import Comparison, Plan, Prompt, Report, Text, Timings
from tests.serving.fakes import FakeDecoder, Memory, busy, canvas, idle, wait_until

ROWS = 30


class Watched:
    """Shadows over a scheduler without a model. Comparing takes a prompt's rows; the KL is the first logit."""

    def __init__(self, free: int = 1, **settings: Any) -> None:
        config = ShadowConfig(**{"share": 1.0, "window": 1000, **settings})
        self.decoder, self.memory = FakeDecoder(), Memory(free)
        self.scheduler = idle(self.decoder, shared_rows=40)
        self.quality = Quality(config, TripRecord(None, ""))
        self.shadows = Shadows(config, self.scheduler, self.compare, lambda _: self.memory.shared(), self.quality)

    def compare(self, token_ids: torch.Tensor, logits: torch.Tensor) -> Steps[Comparison]:
        yield from do(Prefill(canvas(), token_ids, torch.arange(len(token_ids)), shared=False))
        if logits[0] < 0:
            raise ZeroDivisionError("a fault in a comparison")
        return Comparison(1.0, float(logits[0]), True)

    def offer(
        self,
        *kls: int,
        mode: str = "query",
        cached: int = 20,
        comparison: Comparison | None = None,
        plan: Plan = Plan(),  # noqa: B008 - it is frozen
    ) -> None:
        """Offer requests that will be found to have these KLs, all of them before the first is compared."""

        def steps(kl: int) -> Steps[None]:
            request = Request(Prompt([Text([1] * ROWS)]), plan, "a", ROWS, 0.0, id=f"r{kl}")
            report = Report(mode, "", ROWS, cached, 10, 0, 0.1, 0.1, 0.1, (), Timings(), 0.0, comparison=comparison)
            logits = torch.tensor([float(kl), 0.0])
            self.shadows.offer(State(request, canvas(), torch.ones(ROWS, dtype=torch.int64), logits, report), report)
            return
            yield

        with busy(self.scheduler):
            jobs = [self.scheduler.submit(Job(steps(kl), "a")) for kl in kls]
        for job in jobs:
            self.scheduler.wait(job)

    def figures(self) -> dict[str, int]:
        """Those counts that are not 0."""
        found = self.shadows.stats()
        counts = {name: getattr(found, name) for name in ("run", "failed", "dropped", "pending", "broken")}
        return {name: count for name, count in counts.items() if count}

    def close(self) -> None:
        self.scheduler.close()
        self.shadows.close()
        self.scheduler.join()


@pytest.fixture
def watched() -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def make(**settings: Any) -> Watched:
        made.append(Watched(**settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_they_are_compared_one_after_another_in_order(
    watched: Callable[..., Watched], caplog: pytest.LogCaptureFixture
) -> None:
    one = watched()
    with caplog.at_level(logging.INFO):
        one.offer(1, 2, 3)
        assert one.shadows.wait_idle(30)
    told = [record.getMessage().split()[1] for record in caplog.records if "event=compared" in record.getMessage()]
    assert told == ["request_id=r1", "request_id=r2", "request_id=r3"]
    assert one.figures() == {"run": 3}
    assert one.memory.free == 1
    assert one.memory.taken == 3
    assert [len(rows) for rows in one.decoder.passes] == [1] * 9, "slices of 10 rows, never two prompts at once"


def test_a_share_of_them_is_compared(watched: Callable[..., Watched]) -> None:
    one = watched(share=0.1, backlog=100)
    one.offer(*[1] * 1000)
    assert one.shadows.wait_idle(60)
    assert abs(one.figures()["run"] - 100) <= 1


def test_what_was_computed_at_full_prefill_is_not(watched: Callable[..., Watched]) -> None:
    one = watched()
    one.offer(1, mode="full", cached=0)
    one.offer(1, mode="prefix")
    one.offer(1, mode="reuse", cached=0)
    assert one.shadows.wait_idle(30)
    assert one.figures() == {}
    assert one.decoder.passes == []


def test_what_was_compared_on_demand_is_not_run_again(watched: Callable[..., Watched]) -> None:
    one = watched(max_kl=0.3, least=2)
    one.offer(1, 2, comparison=Comparison(3.0, 0.5, False))
    wait_until(lambda: one.shadows.stats().tripped)
    assert one.decoder.passes == []
    found = one.shadows.stats()
    assert (found.run, found.methods["auto"].compared, found.methods["auto"].agreed) == (0, 2, 0)
    assert "0.500" in found.reason
    assert found.since is not None


def test_whoever_asks_for_comparisons_does_not_choose_what_counts(watched: Callable[..., Watched]) -> None:
    one = watched(share=0.0, max_kl=0.3, least=2)
    one.offer(*range(1, 9), comparison=Comparison(3.0, 0.5, False))
    assert one.shadows.wait_idle(30) and not one.shadows.stats().tripped and not one.quality.methods()


@pytest.mark.parametrize("limits", [{"max_kl": 100.0}, {"max_charged": 0.01}])
def test_limits_of_a_plans_own_do_not_stop_auto(watched: Callable[..., Watched], limits: dict[str, float]) -> None:
    one = watched(max_kl=0.3, least=2)
    one.offer(1, 2, 3, plan=Plan("auto", **limits))
    assert one.shadows.wait_idle(30) and not one.shadows.stats().tripped
    assert one.quality.methods().keys() == {"auto_limited"}


def test_what_was_answered_before_a_reset_does_not_count_after_it(watched: Callable[..., Watched]) -> None:
    one = watched(max_kl=0.3, least=1)
    before = one.quality.era
    one.quality.reset()
    one.quality.take("r1", "auto", 20, Comparison(3.0, 0.5, False), before)
    assert not one.shadows.stats().tripped
    one.quality.take("r2", "auto", 20, Comparison(3.0, 0.5, False), one.quality.era)
    assert one.shadows.stats().tripped


def test_what_does_not_fit_into_the_backlog_is_dropped(watched: Callable[..., Watched]) -> None:
    one = watched(backlog=3)
    one.offer(*range(1, 11))
    assert one.shadows.wait_idle(30)
    assert one.figures() == {"run": 4, "dropped": 6}
    assert one.quality.methods()["auto"].kl_sum == 1 + 2 + 3 + 4


def test_what_there_is_no_memory_for_is_dropped(watched: Callable[..., Watched]) -> None:
    one = watched(free=0)
    one.offer(1, 2)
    assert one.shadows.wait_idle(30)
    assert one.figures() == {"dropped": 2}
    assert one.decoder.passes == []


def test_an_error_is_counted_and_stops_neither_auto_nor_the_others(
    watched: Callable[..., Watched], caplog: pytest.LogCaptureFixture
) -> None:
    one = watched(max_kl=0.3, least=1)
    one.offer(0, -1, 0)
    assert one.shadows.wait_idle(30)
    assert one.figures() == {"run": 2, "failed": 1}
    assert not one.shadows.stats().tripped
    assert one.memory.free == 1
    assert any("event=compare_failed request_id=r-1" in record.getMessage() for record in caplog.records)


def test_closed_with_some_pending_they_are_dropped_and_nothing_hangs() -> None:
    one, going, gate = Watched(), threading.Event(), threading.Event()

    def hold() -> None:
        going.set()
        assert gate.wait(60)

    one.decoder.before = hold
    one.offer(1, 2, 3)
    assert going.wait(30)
    closing = threading.Thread(target=one.close)
    closing.start()
    wait_until(lambda: not one.scheduler.alive)
    gate.set()
    closing.join(60)
    assert one.shadows.wait_idle(30)
    assert one.figures() == {"dropped": 3}
    assert one.memory.free == 1


def test_once_closed_it_takes_no_more(watched: Callable[..., Watched]) -> None:
    one = watched()
    one.shadows.close()
    one.offer(1, 2)
    assert one.shadows.wait_idle(30)
    assert one.figures() == {"dropped": 2}
