"""The thread for the engine's calls, the bound before it, and answers on an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Any

import pytest
import pytest_asyncio

from blend.errors import Closed, ResourceExhausted
from blend.serving.job import Job
from blend.serving.stream import AnswerStream, Channel
from blend.types import Answer, Report, Timings, Token
from blend_server.threads import Share, Threads
from blend_server.worker import AnswerEvents, Worker

REPORT = Report("full", "", 3, 0, 3, 0, 1.0, 1.0, 1.0, (), Timings(), 0.0)
ANSWER = Answer("", (1, 2), "length", REPORT)


class Cancels:
    """Stands for the engine: notes what is cancelled."""

    def __init__(self) -> None:
        self.channel = Channel(lambda: None)
        self.job: Job[Answer] = Job(iter(()), "")  # type: ignore[arg-type]
        self.job.done.add_done_callback(self.channel.end)
        self.cancelled: list[Job[Any]] = []
        self.stream = AnswerStream(self.channel, self.job, self.cancelled.append)

    def put(self, number: int) -> None:
        self.channel.put(Token(number, ""))


@pytest.fixture
def engine() -> Cancels:
    return Cancels()


@pytest_asyncio.fixture
async def worker() -> AsyncGenerator[Worker, None]:
    made = Worker("test-engine", max_queue=2)
    yield made
    await made.close()


@pytest.mark.asyncio
async def test_calls_run_in_order_in_one_named_thread(worker: Worker) -> None:
    seen: list[int] = []

    def job(number: int) -> str:
        seen.append(number)
        return threading.current_thread().name

    names = await asyncio.gather(*(worker.call(job, n) for n in range(20)))
    assert seen == list(range(20))
    assert len(set(names)) == 1
    assert names[0].startswith("test-engine")


@pytest.mark.asyncio
async def test_an_error_reaches_the_caller(worker: Worker) -> None:
    def job() -> None:
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        await worker.call(job)


@pytest.mark.asyncio
async def test_one_request_may_run_and_max_queue_may_wait(worker: Worker) -> None:
    with ExitStack() as held:
        for _ in range(3):
            held.enter_context(worker.admit())
        assert worker.requests == 3
        with pytest.raises(ResourceExhausted, match="2 requests wait"), worker.admit():
            pass
    with worker.admit():
        assert worker.requests == 1
    assert worker.requests == 0


@pytest.mark.asyncio
async def test_events_come_in_order_from_another_thread_while_the_loop_goes_on(engine: Cancels) -> None:
    gate = threading.Event()

    def generate() -> None:
        engine.put(1)
        gate.wait(10)
        engine.put(2)
        engine.job.done.set_result(ANSWER)

    thread = threading.Thread(target=generate)
    thread.start()
    seen: list[Token | Answer] = []
    async for event in aiter(AnswerEvents(engine.stream)):
        seen.append(event)
        await asyncio.sleep(0)  # the loop is free while the engine computes
        gate.set()
    thread.join()
    assert seen == [Token(1, ""), Token(2, ""), ANSWER]
    assert engine.cancelled == []


@pytest.mark.asyncio
async def test_what_came_before_anybody_listened_is_not_lost(engine: Cancels) -> None:
    engine.put(1)
    engine.job.done.set_result(ANSWER)
    assert [event async for event in aiter(AnswerEvents(engine.stream))] == [Token(1, ""), ANSWER]


@pytest.mark.asyncio
async def test_an_error_comes_after_the_events_before_it(engine: Cancels) -> None:
    engine.put(1)
    engine.job.done.set_exception(LookupError("gone"))
    generated = aiter(AnswerEvents(engine.stream))
    assert await anext(generated) == Token(1, "")
    with pytest.raises(LookupError, match="gone"):
        await anext(generated)


@pytest.mark.asyncio
async def test_an_answer_that_is_generated_has_ended_though_nobody_has_read_it(engine: Cancels) -> None:
    events = AnswerEvents(engine.stream)
    engine.put(1)
    await asyncio.sleep(0.01)
    assert not events.ended.done()
    engine.put(2)
    engine.job.done.set_result(ANSWER)
    await asyncio.wait_for(events.ended, 10)
    assert [event async for event in aiter(events)] == [Token(1, ""), Token(2, ""), ANSWER]


@pytest.mark.asyncio
async def test_an_answer_that_failed_or_was_cancelled_has_ended() -> None:
    failed, left = Cancels(), Cancels()
    events = [AnswerEvents(failed.stream), AnswerEvents(left.stream)]
    failed.job.done.set_exception(LookupError("gone"))
    events[1].cancel()
    await asyncio.wait_for(asyncio.gather(*(stream.ended for stream in events)), 10)
    with pytest.raises(LookupError, match="gone"):
        await anext(aiter(events[0]))
    assert [event async for event in aiter(events[1])] == []


@pytest.mark.asyncio
async def test_items_of_an_iterator_have_ended_though_nobody_has_read_them(worker: Worker) -> None:
    stream = worker.stream(iter([Token(1, ""), ANSWER]))
    await asyncio.wait_for(stream.ended, 10)
    assert [event async for event in aiter(stream)] == [Token(1, ""), ANSWER]


@pytest.mark.asyncio
async def test_ending_the_iteration_cancels_the_generation(engine: Cancels) -> None:
    engine.put(1)
    generated = aiter(AnswerEvents(engine.stream))
    assert await anext(generated) == Token(1, "")
    await generated.aclose()
    assert engine.cancelled == [engine.job]
    engine.put(2)  # nobody listens, nobody minds
    assert engine.stream.take() == []


@pytest.mark.asyncio
async def test_a_cancelled_reader_cancels_the_generation(engine: Cancels) -> None:
    async def read() -> None:
        async with aclosing(aiter(AnswerEvents(engine.stream))) as generated:
            async for _ in generated:
                pass

    task = asyncio.ensure_future(read())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.cancelled == [engine.job]


@pytest.mark.asyncio
async def test_closing_ends_the_thread_and_refuses_requests() -> None:
    worker = Worker("closing", max_queue=1)
    await worker.call(lambda: None)
    assert any(t.name.startswith("closing") for t in threading.enumerate())
    await worker.close()
    assert not any(t.name.startswith("closing") for t in threading.enumerate())
    with pytest.raises(Closed), worker.admit():
        pass


@pytest.mark.asyncio
async def test_a_cancelled_call_gives_its_share_of_the_threads_back_when_its_function_has_ended() -> None:
    threads, go_on = Threads("shared", 3), threading.Event()
    share = Share(threads, 2)
    begun: list[int] = []

    def job() -> None:
        begun.append(1)
        go_on.wait(30)

    for _ in range(5):
        call = asyncio.ensure_future(share.call(job))
        await asyncio.sleep(0.02)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert len(begun) == 2
    assert await asyncio.wait_for(threads.call(lambda: "free"), 10) == "free"
    go_on.set()
    assert await asyncio.wait_for(share.call(lambda: "again"), 10) == "again"
    await threads.close()


@pytest.mark.asyncio
async def test_an_error_in_a_share_reaches_the_caller() -> None:
    def job() -> None:
        raise LookupError("gone")

    threads = Threads("shared", 1)
    share = Share(threads, 1)
    for _ in range(2):
        with pytest.raises(LookupError, match="gone"):
            await share.call(job)
    await threads.close()
