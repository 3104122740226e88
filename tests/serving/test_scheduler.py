"""One thread for all work: passes that are shared, fairness, gaps, cancellation, deadlines, bounds, the end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import Any

import pytest
import torch

from blend.errors import Cancelled, Closed, DeadlineExceeded, ResourceExhausted
from blend.model.rows import Rows
from blend.serving.background import Background
from blend.serving.job import Job
from blend.serving.sampling import Sampler
from blend.serving.scheduler import Scheduler
from blend.serving.steps import Alone, Aside, Decode, Prefill, Steps, do
from blend.types import Sampling
from tests.serving.fakes import FakeDecoder, busy, canvas, idle, wait_until


class Place:
    """Room for a request, of which there is as much as ``free`` says."""

    def __init__(self, free: list[int] | None = None) -> None:
        self.free = [1] if free is None else free

    def take(self, last: bool) -> bool:
        if not self.free[0]:
            if last:
                raise ResourceExhausted("never")
            return False
        self.free[0] -= 1
        return True

    def give(self) -> None:
        self.free[0] += 1


@pytest.fixture
def decoder() -> FakeDecoder:
    return FakeDecoder()


@pytest.fixture
def opened(decoder: FakeDecoder) -> Iterator[Callable[..., Scheduler]]:
    made: list[Scheduler] = []

    def make(**settings: int) -> Scheduler:
        made.append(idle(decoder, **settings))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close()
        scheduler.join()


def prompt(rows: int, own: Any = None) -> Prefill:
    return Prefill(own or canvas(), torch.zeros(rows, dtype=torch.int64), torch.arange(rows))


def computing(rows: int, tokens: int = 0, own: Any = None) -> Steps[list[int]]:
    """A prompt of so many rows, then so many tokens."""
    own, sampler, found = own or canvas(), Sampler(Sampling()), list[int]()
    if rows:
        yield from do(prompt(rows, own))
    for position in range(rows, rows + tokens):
        found.append((yield from do(Decode(own, 0, position, sampler))))
    return found


def rows_of(decoder: FakeDecoder) -> list[list[int]]:
    return [[count for _, _, count in one] for one in decoder.passes]


def test_prompts_share_passes_with_those_who_decode(opened: Callable[..., Scheduler], decoder: FakeDecoder) -> None:
    scheduler = opened()
    with busy(scheduler):
        jobs = [scheduler.submit(Job(computing(rows, 4), "a")) for rows in (0, 0, 25, 7)]
    assert [scheduler.wait(job) for job in jobs] == [[0, 1, 2, 3], [0, 1, 2, 3], [25, 26, 27, 28], [7, 8, 9, 10]]
    assert rows_of(decoder)[:5] == [[1, 1, 10], [1, 1, 10], [1, 1, 5, 5], [1, 1, 1, 2], [1, 1]]


def test_a_prompt_that_nobody_waits_for_has_the_pass_to_itself(
    opened: Callable[..., Scheduler], decoder: FakeDecoder
) -> None:
    scheduler = opened()
    scheduler.wait(scheduler.submit(Job(computing(250), "a")))
    assert rows_of(decoder) == [[100], [100], [50]]


def test_more_who_decode_than_a_pass_has_rows_take_turns(
    opened: Callable[..., Scheduler], decoder: FakeDecoder
) -> None:
    scheduler = opened(max_rows=3)
    with busy(scheduler):
        jobs = [scheduler.submit(Job(computing(0, 3), "a")) for _ in range(5)]
        jobs.append(scheduler.submit(Job(computing(6), "a")))
    for job in jobs:
        scheduler.wait(job)
    assert max(map(sum, rows_of(decoder))) == 3
    assert all(count == [1, 1, 1] for count in rows_of(decoder)[:5])


def test_tenants_have_equal_shares_however_much_one_asks_for(
    opened: Callable[..., Scheduler], decoder: FakeDecoder
) -> None:
    scheduler = opened()
    mine = canvas()
    with busy(scheduler):
        flood = [scheduler.submit(Job(computing(40), "flood")) for _ in range(5)]
        job = scheduler.submit(Job(computing(40, own=mine), "small"))
    scheduler.wait(job)
    served = [any(own is mine for own, _, _ in one) for one in decoder.passes]
    assert served.count(True) == 4
    assert [i for i, mine_too in enumerate(served) if mine_too][-1] <= 7, "every second pass"
    for other in flood:
        scheduler.wait(other)


def test_the_next_to_begin_is_of_the_tenant_with_the_fewest_running(opened: Callable[..., Scheduler]) -> None:
    scheduler = opened(max_running=2, max_waiting=20)
    begun: list[str] = []

    def work(name: str) -> Steps[None]:
        begun.append(name)
        for _ in range(3):
            yield Alone(lambda: None)

    with busy(scheduler):
        jobs = [
            scheduler.submit(Job(work(name), name, room=Place()))
            for name in ("flood", "flood", "flood", "flood", "small", "small")
        ]
        assert scheduler.waiting == 6
        assert scheduler.crowded
    for job in jobs:
        scheduler.wait(job)
    assert begun[:2] == ["flood", "small"]
    assert begun.index("small", 2) <= 4


def test_what_has_the_model_to_itself_comes_between_passes(
    opened: Callable[..., Scheduler], decoder: FakeDecoder
) -> None:
    scheduler = opened()
    seen: list[int] = []

    def alone() -> Steps[int]:
        for _ in range(3):
            yield from do(Alone(lambda: seen.append(len(decoder.passes))))
        step = prompt(12)
        yield step
        assert step.took_ms >= 0
        assert step.waited_ms >= 0
        return step.left

    with busy(scheduler):
        decoding = scheduler.submit(Job(computing(0, 6), "a"))
        job = scheduler.submit(Job(alone(), "a"))
    assert scheduler.wait(job) == 0
    assert len(scheduler.wait(decoding)) == 6
    assert seen == [0, 1, 2], "a pass goes between two of them"


def test_a_prompt_that_shares_with_nobody(opened: Callable[..., Scheduler], decoder: FakeDecoder) -> None:
    scheduler = opened()

    def own() -> Steps[None]:
        yield Prefill(canvas(), torch.zeros(15, dtype=torch.int64), torch.arange(15), shared=False)

    with busy(scheduler):
        jobs = [scheduler.submit(Job(own(), "a")), scheduler.submit(Job(computing(0, 3), "a"))]
    for job in jobs:
        scheduler.wait(job)  # type: ignore[arg-type]
    assert rows_of(decoder) == [[10], [1], [5], [1], [1]]


def test_who_waits_aside_holds_nobody_up(opened: Callable[..., Scheduler]) -> None:
    scheduler, gate = opened(), threading.Event()

    def waiting() -> Steps[str]:
        yield from do(Aside(lambda: gate.wait(60)))
        return (yield from do(Aside(lambda: threading.current_thread().name)))

    job = scheduler.submit(Job(waiting(), "a", room=Place()))
    assert scheduler.wait(scheduler.submit(Job(computing(5, 2), "b", room=Place()))) == [5, 6]
    assert not job.done.done()
    gate.set()
    assert scheduler.wait(job).startswith("blend-load")


def test_one_bad_request_does_not_fail_those_in_its_pass(
    opened: Callable[..., Scheduler], decoder: FakeDecoder
) -> None:
    scheduler = opened()
    decoder.failing = canvas()
    with busy(scheduler):
        good = [scheduler.submit(Job(computing(4, 3), "a")) for _ in range(2)]
        bad = scheduler.submit(Job(computing(4, 3, own=decoder.failing), "a"))
    with pytest.raises(RuntimeError, match="a bad canvas"):
        scheduler.wait(bad)
    assert [scheduler.wait(job) for job in good] == [[4, 5, 6]] * 2


def test_one_bad_request_changes_no_token_of_those_in_its_pass(
    opened: Callable[..., Scheduler], decoder: FakeDecoder
) -> None:
    class Bad(Sampler):
        def propose(self, logits: torch.Tensor) -> int:
            raise MemoryError("no room for probabilities")

    def drawing(sampler: Sampler) -> Steps[list[int]]:
        own, found = canvas(), list[int]()
        for position in range(5):
            found.append((yield from do(Decode(own, 0, position, sampler))))
        return found

    scheduler, sampling = opened(), Sampling(temperature=50.0, seed=3)
    alone = scheduler.wait(scheduler.submit(Job(drawing(Sampler(sampling)), "a")))
    with busy(scheduler):
        good = scheduler.submit(Job(drawing(Sampler(sampling)), "a"))
        bad = scheduler.submit(Job(drawing(Bad(sampling)), "a"))
    with pytest.raises(MemoryError):
        scheduler.wait(bad)
    assert scheduler.wait(good) == alone


def test_an_error_is_raised_where_the_step_stands_and_can_be_handled_there(opened: Callable[..., Scheduler]) -> None:
    scheduler = opened()

    def careful() -> Steps[str]:
        try:
            yield from do(Alone(lambda: 1 / 0))
        except ZeroDivisionError as error:
            caught = str(error)
        try:
            yield from do(Aside(lambda: [][1]))
        except IndexError:
            return caught
        return ""

    assert scheduler.wait(scheduler.submit(Job(careful(), "a"))) == "division by zero"


def test_a_cancelled_request_ends_at_its_next_step_and_lets_go(
    opened: Callable[..., Scheduler], decoder: FakeDecoder
) -> None:
    scheduler, place, closed = opened(), Place(), threading.Event()

    def endless() -> Steps[None]:
        try:
            yield from computing(0, 10**6)
        finally:
            closed.set()

    job = scheduler.submit(Job(endless(), "a", room=place))
    wait_until(lambda: len(decoder.passes) > 3)
    scheduler.cancel(job)
    with pytest.raises(Cancelled):
        scheduler.wait(job)
    assert closed.is_set()
    assert place.free == [1]


@pytest.mark.parametrize("how", ["cancelled", "late", "failing"])
def test_a_request_that_ends_early_leaves_no_canvas_to_the_collector(
    how: str, opened: Callable[..., Scheduler], decoder: FakeDecoder
) -> None:
    scheduler, mine = opened(), canvas()
    held = weakref.ref(mine.k)
    job = Job(computing(0, 10**6, own=mine), "a", room=Place(), deadline=monotonic() + 0.2 if how == "late" else None)
    gc.disable()
    try:
        scheduler.submit(job)
        wait_until(lambda: len(decoder.passes) > 3)
        if how == "cancelled":
            scheduler.cancel(job)
        elif how == "failing":
            decoder.failing = mine
        error = job.done.exception(30)
        assert isinstance(error, (Cancelled, DeadlineExceeded, RuntimeError))
        decoder.passes.clear()
        decoder.failing = None
        del mine
        wait_until(lambda: held() is None)
    finally:
        gc.enable()


def test_one_that_is_cancelled_while_it_waits_never_begins(opened: Callable[..., Scheduler]) -> None:
    scheduler, begun = opened(), []

    def work() -> Steps[None]:
        begun.append(1)
        yield Alone(lambda: None)

    with busy(scheduler):
        job = scheduler.submit(Job(work(), "a", room=Place()))
        scheduler.cancel(job)
    with pytest.raises(Cancelled):
        scheduler.wait(job)
    assert not begun
    assert scheduler.waiting == 0


def test_one_that_is_cancelled_aside_lets_go_when_it_comes_back(opened: Callable[..., Scheduler]) -> None:
    scheduler, gate, order = opened(), threading.Event(), []

    def waiting() -> Steps[None]:
        try:
            yield Aside(lambda: (gate.wait(60), order.append("over")))
        finally:
            order.append("closed")

    job = scheduler.submit(Job(waiting(), "a"))
    wait_until(lambda: isinstance(job.step, Aside))
    scheduler.cancel(job)
    gate.set()
    with pytest.raises(Cancelled):
        scheduler.wait(job)
    assert order == ["over", "closed"]


def test_a_deadline_ends_work_and_says_so(opened: Callable[..., Scheduler], decoder: FakeDecoder) -> None:
    decoder.before = lambda: sleep(0.002)  # or the canvas would be full before
    scheduler = opened()
    job = scheduler.submit(Job(computing(0, 10**6), "a", deadline=monotonic() + 1))
    with pytest.raises(DeadlineExceeded):
        scheduler.wait(job)


def test_a_deadline_that_cannot_be_met_is_refused_at_once(opened: Callable[..., Scheduler]) -> None:
    scheduler = opened()
    with busy(scheduler):
        scheduler.submit(Job(computing(1), "a", room=Place(), estimate_ms=5_000))
        with pytest.raises(DeadlineExceeded, match="about 6000 ms"):
            scheduler.submit(Job(computing(1), "a", room=Place(), deadline=monotonic() + 5, estimate_ms=1_000))
        in_time = scheduler.submit(Job(computing(1), "a", room=Place(), deadline=monotonic() + 60, estimate_ms=1_000))
    scheduler.wait(in_time)


def test_a_deadline_is_held_against_a_tenant_s_share_not_against_others_floods(
    opened: Callable[..., Scheduler],
) -> None:
    scheduler = opened()

    def asked(tenant: str, seconds: float) -> Job[list[int]]:
        job = Job(computing(1), tenant, room=Place(), deadline=monotonic() + seconds, estimate_ms=1_000)
        return scheduler.submit(job)

    with busy(scheduler):
        jobs = [scheduler.submit(Job(computing(1), "flood", room=Place(), estimate_ms=20_000)) for _ in range(5)]
        with pytest.raises(DeadlineExceeded, match="about 101000 ms"):
            asked("flood", 90)
        with pytest.raises(DeadlineExceeded, match="about 2000 ms"):
            asked("small", 1.5)
        jobs += [asked("small", 60), asked("small", 60)]
        with pytest.raises(DeadlineExceeded, match="about 6000 ms"):
            asked("small", 5)
    for job in jobs:
        scheduler.wait(job)


def test_a_queue_that_is_full_refuses_with_a_hint(opened: Callable[..., Scheduler]) -> None:
    scheduler = opened(max_waiting=2)
    with busy(scheduler):
        jobs = [scheduler.submit(Job(computing(1), "a", room=Place(), estimate_ms=500)) for _ in range(2)]
        with pytest.raises(ResourceExhausted, match="2 requests wait") as raised:
            scheduler.submit(Job(computing(1), "a", room=Place()))
    assert raised.value.retry_seconds == 1.0
    for job in jobs:
        scheduler.wait(job)


def test_memory_is_waited_for_and_given_back(opened: Callable[..., Scheduler], decoder: FakeDecoder) -> None:
    scheduler, free = opened(), [1]
    with busy(scheduler):
        jobs = [scheduler.submit(Job(computing(3, 2), "a", room=Place(free))) for _ in range(3)]
    for job in jobs:
        scheduler.wait(job)
    assert max(len(one) for one in decoder.passes) == 1, "one after another"
    assert free == [1]
    with pytest.raises(ResourceExhausted, match="never"):
        scheduler.wait(scheduler.submit(Job(computing(1), "a", room=Place([0]))))


def test_background_work_goes_when_no_request_is_there(opened: Callable[..., Scheduler], decoder: FakeDecoder) -> None:
    scheduler, seen = opened(), []

    def later() -> Steps[None]:
        for _ in range(2):
            yield Alone(lambda: seen.append(len(decoder.passes)))

    with busy(scheduler):
        background = scheduler.submit_background(Job(later()), 60)
        request = scheduler.submit(Job(computing(0, 5), "a", room=Place()))
    scheduler.wait(request)
    scheduler.wait(background)
    assert seen == [5, 5]


def test_background_work_has_patience_but_not_for_ever(opened: Callable[..., Scheduler], decoder: FakeDecoder) -> None:
    scheduler = opened()
    request = scheduler.submit(Job(computing(0, 10**6), "a", room=Place()))
    begin = monotonic()

    def later() -> Steps[float]:
        return (yield from do(Alone(monotonic)))

    assert scheduler.wait(scheduler.submit_background(Job(later()), 0.05)) - begin >= 0.05
    assert not request.done.done()
    scheduler.cancel(request)


def test_background_work_that_is_due_first_goes_before_what_came_first(opened: Callable[..., Scheduler]) -> None:
    scheduler, seen = opened(), list[str]()
    request = scheduler.submit(Job(computing(0, 10**6), "a", room=Place()))

    def later(name: str, pieces: int) -> Steps[None]:
        for _ in range(pieces):
            yield Alone(lambda: seen.append(name))

    patient = scheduler.submit_background(Job(later("patient", 100)), 60)
    scheduler.wait(scheduler.submit_background(Job(later("pressing", 3)), 0.01))
    assert seen == ["pressing"] * 3
    patient.cancelled = True
    with pytest.raises(Cancelled):
        scheduler.wait(patient)
    scheduler.cancel(request)


def test_background_keys_are_bounded_deduplicated_and_survive_errors(opened: Callable[..., Scheduler]) -> None:
    scheduler, done = opened(), []

    def work(key: str) -> None:
        if key == "bad":
            raise ValueError(key)
        done.append(key)

    background = Background(scheduler, work, limit=3)
    with busy(scheduler):
        assert [background.submit(k) for k in ("bad", "a", "a", "b", "c")] == [True, True, True, True, False]
    assert background.wait_idle(10)
    assert done == ["a", "b"]
    assert (background.done, background.failed, background.dropped) == (2, 1, 1)
    with busy(scheduler):
        for key in ("d", "e", "f"):
            background.submit(key)
        background.discard(lambda key: key == "e")
    assert background.wait_idle(10)
    assert done == ["a", "b", "d", "f"]
    background.close()
    assert not background.submit("late")


def test_closing_ends_everything_and_refuses_what_comes(decoder: FakeDecoder) -> None:
    scheduler, gate = idle(decoder, max_running=2), threading.Event()
    before = threading.active_count()

    def waiting() -> Steps[None]:
        yield Aside(lambda: gate.wait(60))

    background = Background(scheduler, lambda key: None)
    running = scheduler.submit(Job(computing(0, 10**6), "a", room=Place()))
    aside = scheduler.submit(Job(waiting(), "a", room=Place()))
    queued = scheduler.submit(Job(computing(1), "a", room=Place()))
    background.submit("key")
    wait_until(lambda: isinstance(aside.step, Aside))
    scheduler.close()
    for job in (running, queued):
        with pytest.raises(Closed):
            scheduler.wait(job)  # type: ignore[arg-type]
    assert not aside.done.done()
    assert background.wait_idle(10)
    gate.set()
    scheduler.join()
    with pytest.raises(Closed):
        scheduler.wait(aside)
    with pytest.raises(Closed):
        scheduler.submit(Job(computing(1), "a"))
    with pytest.raises(Closed):
        scheduler.submit_background(Job(computing(1)), 1)
    assert threading.active_count() < before


def test_no_thread_to_wait_aside_ends_the_one_request(
    opened: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, ran = opened(), ["aside"]

    def waiting() -> Steps[str]:
        return (yield from do(Aside(lambda: str(len(ran)) + ran.pop())))

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        job = scheduler.submit(Job(waiting(), "a", room=Place()))
        with pytest.raises(ResourceExhausted, match="can't start new thread"):
            scheduler.wait(job)
    assert scheduler.wait(scheduler.submit(Job(waiting(), "a", room=Place()))) == "1aside"
    assert ran == [], "what was refused did not run"


class Faulty:
    """Room that raises what rooms should not."""

    def take(self, last: bool) -> bool:
        raise ZeroDivisionError

    def give(self) -> None:
        pass


def test_what_only_one_request_is_at_fault_for_ends_only_that_one(opened: Callable[..., Scheduler]) -> None:
    scheduler = opened()

    class BadRows(Decode):
        def rows(self) -> Rows:
            raise MemoryError("no rows")

    def bad() -> Steps[None]:
        yield BadRows(canvas(), 0, 0, Sampler(Sampling()))

    def stubborn() -> Steps[None]:
        try:
            yield from computing(0, 10**6)
        finally:
            raise ValueError("not in order")

    with busy(scheduler):
        good = [scheduler.submit(Job(computing(4, 5), "a", room=Place())) for _ in range(2)]
        failing = scheduler.submit(Job(bad(), "a", room=Place()))
        refused = scheduler.submit(Job(computing(1), "a", room=Faulty()))
        late = scheduler.submit(Job(stubborn(), "a", room=Place(), deadline=monotonic() + 0.05))
    with pytest.raises(MemoryError, match="no rows"):
        scheduler.wait(failing)
    with pytest.raises(ZeroDivisionError):
        scheduler.wait(refused)
    with pytest.raises((ValueError, DeadlineExceeded)):
        scheduler.wait(late)
    assert [scheduler.wait(job) for job in good] == [[4, 5, 6, 7, 8]] * 2
    assert scheduler.alive


def test_when_the_thread_fails_all_work_ends_and_nobody_hangs(
    decoder: FakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, gate, places = idle(decoder, max_running=2), threading.Event(), [Place() for _ in range(3)]

    def waiting() -> Steps[None]:
        yield Aside(lambda: gate.wait(60))

    def computing_later() -> Steps[None]:
        yield Alone(lambda: None)

    running = scheduler.submit(Job(computing(0, 10**6), "a", room=places[0]))
    aside = scheduler.submit(Job(waiting(), "a", room=places[1]))
    wait_until(lambda: isinstance(aside.step, Aside))
    queued = scheduler.submit(Job(computing(1), "a", room=places[2]))
    later = scheduler.submit_background(Job(computing_later()), 60)
    assert scheduler.alive

    def fail() -> None:
        raise ZeroDivisionError("a fault of the engine")

    monkeypatch.setattr(scheduler, "_begin", fail)
    wait_until(lambda: not scheduler.alive)
    for job in (running, queued, later):
        with pytest.raises(Closed, match="has failed: ZeroDivisionError$"):  # nothing of what it was about
            job.done.result(30)
    gate.set()
    with pytest.raises(Closed, match="has failed"):
        aside.done.result(30)
    with pytest.raises(Closed, match="has failed"):
        scheduler.call(lambda: None)
    assert [place.free for place in places] == [[1], [1], [2]]
    scheduler.close()
    scheduler.join()


def test_the_engine_s_thread_does_not_wait_for_itself(opened: Callable[..., Scheduler]) -> None:
    scheduler = opened()
    with pytest.raises(RuntimeError, match="own thread"):
        scheduler.call(lambda: scheduler.call(lambda: None))


def test_whoever_is_interrupted_while_it_waits_cancels(
    opened: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = opened()
    job = scheduler.submit(Job(computing(0, 10**6), "a"))

    def interrupted() -> None:
        sleep(0.02)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(job.done, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scheduler.wait(job)
    with pytest.raises(Cancelled):
        job.done.result(30)
