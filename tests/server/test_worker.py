"""The engine's threads: order, bound, streams, cancellation, end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack

import pytest
import pytest_asyncio

from blend.errors import Closed, ResourceExhausted
from blend_server.worker import Worker


def held(gate: threading.Event) -> Iterator[bool]:
    """An iterator that keeps its thread until the gate opens."""
    yield gate.wait(10)


@pytest_asyncio.fixture
async def worker() -> AsyncGenerator[Worker, None]:
    made = Worker("test-engine", max_queue=2, streams=2)
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
async def test_streams_run_side_by_side_and_calls_beside_them(worker: Worker) -> None:
    both = threading.Barrier(2, timeout=10)
    names: set[str] = set()

    def items() -> Iterator[int]:
        names.add(threading.current_thread().name)
        both.wait()
        yield 1
        both.wait()
        yield 2

    async def drawn() -> list[int]:
        return [item async for item in worker.stream(items())]

    first, second = asyncio.ensure_future(drawn()), asyncio.ensure_future(drawn())
    assert await worker.call(lambda: "free") == "free"
    assert await first == await second == [1, 2]
    assert len(names) == 2
    assert all(name.startswith("test-engine-stream") for name in names)


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
async def test_a_stream_gives_items_in_order_while_the_loop_goes_on(worker: Worker) -> None:
    gate = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        gate.wait(10)
        yield 2

    seen = []
    async for item in worker.stream(items()):
        seen.append(item)
        await asyncio.sleep(0)  # the loop is free while the thread waits
        gate.set()
    assert seen == [1, 2]


@pytest.mark.asyncio
async def test_a_stream_raises_what_its_iterator_raises_after_the_items_before(worker: Worker) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise LookupError("gone")

    stream = aiter(worker.stream(items()))
    assert await anext(stream) == 1
    with pytest.raises(LookupError, match="gone"):
        await anext(stream)


@pytest.mark.asyncio
async def test_cancelling_a_stream_closes_its_generator_at_the_next_item(worker: Worker) -> None:
    produced: list[int] = []
    closed = threading.Event()
    gate = threading.Semaphore(0)

    def items() -> Iterator[int]:
        try:
            for n in range(1000):
                produced.append(n)
                yield n
                gate.acquire(timeout=10)
        finally:
            closed.set()

    stream = worker.stream(items())
    async for _ in stream:
        break
    stream.cancel()
    gate.release(1000)
    assert await asyncio.to_thread(closed.wait, 10)
    assert len(produced) <= 2
    assert await worker.call(lambda: "free") == "free"


@pytest.mark.asyncio
async def test_a_stream_that_is_cancelled_while_it_waits_never_begins(worker: Worker) -> None:
    gate = threading.Event()
    begun: list[int] = []

    def items() -> Iterator[int]:
        begun.append(1)
        yield 1

    blockers = [worker.stream(held(gate)) for _ in range(2)]
    stream = worker.stream(items())
    stream.cancel()
    gate.set()
    assert [item async for item in stream] == []
    for blocker in blockers:
        assert [item async for item in blocker] == [True]
    assert not begun


@pytest.mark.asyncio
async def test_a_stream_knows_how_long_it_waited(worker: Worker) -> None:
    gate = threading.Event()
    blockers = [worker.stream(held(gate)) for _ in range(2)]
    stream = worker.stream(iter([1]))
    await asyncio.sleep(0.05)
    gate.set()
    assert [item async for item in stream] == [1]
    assert stream.waited_ms >= 45
    for blocker in blockers:
        assert [item async for item in blocker] == [True]


@pytest.mark.asyncio
async def test_closing_ends_the_thread_and_refuses_requests() -> None:
    worker = Worker("closing", max_queue=1)
    await worker.call(lambda: None)
    assert [item async for item in worker.stream(iter([1]))] == [1]
    assert any(t.name.startswith("closing") for t in threading.enumerate())
    await worker.close()
    assert not any(t.name.startswith("closing") for t in threading.enumerate())
    with pytest.raises(Closed), worker.admit():
        pass
