"""Long work in the gaps: cut into slices, with memory of its own that it gives up for requests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from blend.errors import Cancelled, Closed, ResourceExhausted
from blend.recompute.canvas import Canvas
from blend.serving.job import Job
from blend.serving.sampling import Sampler
from blend.serving.scheduler import Scheduler
from blend.serving.steps import Decode, Prefill, Steps, do
from blend.types import Sampling
from tests.serving.fakes import FakeDecoder, Memory, busy, canvas, idle, wait_until


@pytest.fixture
def decoder() -> FakeDecoder:
    return FakeDecoder()


@pytest.fixture
def scheduler(decoder: FakeDecoder) -> Iterator[Scheduler]:
    made = idle(decoder, shared_rows=40)
    yield made
    made.close()
    made.join()


def prompt(rows: int, own: Canvas) -> Steps[int]:
    """A prompt of so many rows; returns the last one's position."""
    logits = yield from do(Prefill(own, torch.zeros(rows, dtype=torch.int64), torch.arange(rows), shared=False))
    return int(logits.argmax())


def decoding(tokens: int) -> Steps[None]:
    own, sampler = canvas(10**6), Sampler(Sampling())
    for position in range(tokens):
        yield Decode(own, 0, position, sampler)


def served(decoder: FakeDecoder, own: Canvas) -> list[str]:
    """Passes in order: rows of ``own``, or ``others``."""
    return [str(one[0][2]) if one[0][0] is own else "others" for one in decoder.passes]


def test_a_prompt_goes_in_slices_and_a_request_waits_for_one_at_most(
    scheduler: Scheduler, decoder: FakeDecoder
) -> None:
    own, asked = canvas(), list[Job[None]]()

    def arrives() -> None:
        if len(decoder.passes) == 2:
            asked.append(scheduler.submit(Job(decoding(3), "a", room=Memory())))

    decoder.before = arrives
    assert scheduler.wait(scheduler.submit_background(Job(prompt(45, own)), 60)) == 44
    assert served(decoder, own) == ["10", "10", "10", "others", "others", "others", "10", "5"]


def test_with_requests_always_under_way_a_slice_goes_when_its_patience_is_over(
    scheduler: Scheduler, decoder: FakeDecoder
) -> None:
    own = canvas()
    request = scheduler.submit(Job(decoding(10**6), "a", room=Memory()))
    wait_until(lambda: decoder.passes)
    scheduler.wait(scheduler.submit_background(Job(prompt(30, own)), 0.02))
    order = served(decoder, own)
    places = [number for number, what in enumerate(order) if what == "10"]
    assert len(places) == 3
    assert all(later - earlier > 1 for earlier, later in pairwise(places)), "each one waits anew"
    scheduler.cancel(request)


def test_slices_in_the_background_are_nobody_s_share(scheduler: Scheduler, decoder: FakeDecoder) -> None:
    scheduler.wait(scheduler.submit_background(Job(prompt(20, canvas()), "a"), 60))
    scheduler.wait(scheduler.submit(Job(decoding(2), "a", room=Memory())))
    assert scheduler.alive


def test_memory_is_taken_when_it_begins_and_given_back_at_its_end(scheduler: Scheduler, decoder: FakeDecoder) -> None:
    memory, failing = Memory(), canvas()
    with busy(scheduler):
        job = scheduler.submit_background(Job(prompt(20, canvas()), room=memory), 60)
    scheduler.wait(job)
    assert (memory.free, memory.taken) == (1, 1)
    decoder.failing = failing
    with pytest.raises(RuntimeError, match="a bad canvas"):
        scheduler.wait(scheduler.submit_background(Job(prompt(20, failing), room=memory), 60))
    assert (memory.free, memory.taken) == (1, 2)


def test_without_memory_it_does_not_begin_and_does_not_wait(scheduler: Scheduler, decoder: FakeDecoder) -> None:
    with pytest.raises(ResourceExhausted, match="no memory for work in the background"):
        scheduler.wait(scheduler.submit_background(Job(prompt(20, canvas()), room=Memory(free=0)), 60))
    assert decoder.passes == []


@pytest.mark.parametrize("others", [0, 1])
def test_it_gives_its_memory_to_a_request_that_needs_it(
    scheduler: Scheduler, decoder: FakeDecoder, others: int
) -> None:
    memory, own, asked = Memory(free=1 + others), canvas(), list[Job[None]]()

    def arrives() -> None:
        if len(decoder.passes) == 1:
            asked.extend(scheduler.submit(Job(decoding(2), "a", room=memory.shared())) for _ in range(1 + others))

    decoder.before = arrives
    with pytest.raises(ResourceExhausted, match="a request needed the memory"):
        scheduler.wait(scheduler.submit_background(Job(prompt(100, own), room=memory.shared()), 60))
    for job in asked:
        scheduler.wait(job)
    assert served(decoder, own)[:2] == ["10", "10"]
    assert memory.free == 1 + others


@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_what_ends_before_its_time_gives_its_memory_back(decoder: FakeDecoder, how: str) -> None:
    scheduler, memory = idle(decoder), Memory()
    job = Job(prompt(10**6, canvas(10**6)), room=memory)
    scheduler.submit_background(job, 60)
    wait_until(lambda: len(decoder.passes) > 2)
    if how == "cancelled":
        scheduler.cancel(job)
    else:
        scheduler.close()
    with pytest.raises(Cancelled if how == "cancelled" else Closed):
        job.done.result(30)
    assert memory.free == 1
    scheduler.close()
    scheduler.join()


def test_what_was_never_begun_has_no_memory_to_give_back(decoder: FakeDecoder) -> None:
    scheduler, memory = idle(decoder), Memory()
    with busy(scheduler):
        job = scheduler.submit_background(Job(prompt(10, canvas()), room=memory), 60)
        scheduler.cancel(job)
    with pytest.raises(Cancelled):
        job.done.result(30)
    assert (memory.free, memory.taken) == (1, 0)
    scheduler.close()
    scheduler.join()


def test_room_that_raises_fails_its_own_job_alone(scheduler: Scheduler) -> None:
    class Faulty(Memory):
        def take(self, last: bool) -> bool:
            raise ZeroDivisionError

    with busy(scheduler):
        bad = scheduler.submit_background(Job(prompt(10, canvas()), room=Faulty()), 60)
        good = scheduler.submit_background(Job(prompt(10, canvas()), room=Memory()), 60)
    with pytest.raises(ZeroDivisionError):
        scheduler.wait(bad)
    assert scheduler.wait(good) == 9
