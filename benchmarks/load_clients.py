"""Client processes that put a server under load, and what each of their requests saw.

They speak the protocol with nothing but the generated stubs, as a client in another language would.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from time import perf_counter, sleep
from typing import Any

import grpc

from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.proto.blend.v1.blend_pb2_grpc import BlendServiceStub

PROCESSES = 4
"""Client processes: together they keep some dozens of streams going without being what is measured."""


_START_SECONDS = 0.5


@dataclass(frozen=True)
class Ask:
    """A question as it is asked: with so many passages, by this method, for so many tokens."""

    question: str
    k: int
    method: str
    tokens: int
    ratio: float = 0.15

    def message(self) -> pb.AnswerRequest:
        """The request."""
        plan = pb.Plan(method=self.method)
        if self.method not in ("full", "reuse", "prefix"):
            plan.ratio = self.ratio
        return pb.AnswerRequest(
            question=self.question, k=self.k, plan=plan, max_new_tokens=self.tokens, want_positions=True
        )


@dataclass(frozen=True)
class Load:
    """How requests come: ``streams`` of them at a time, one after another, or so many a second whatever happens.

    New ones begin until so many have begun or so many seconds are over; each is waited for. Every ``cancelled``-th is
    left at its first token.
    """

    streams: int = 1
    per_second: float | None = None
    count: int | None = None
    seconds: float | None = None
    cancelled: int | None = None


@dataclass(frozen=True)
class Seen:
    """What a client saw of one request. Times are readings of a clock that all processes of the machine share.

    ``ask`` is the place of what was asked, ``stamps`` when each token came, ``code`` how the call ended.
    """

    ask: int
    began: float
    ended: float
    code: str
    message: str
    stamps: tuple[float, ...]
    passages: bytes
    answer: bytes

    @property
    def ttft(self) -> float:
        """Seconds from the call to its first token."""
        return self.stamps[0] - self.began

    @property
    def seconds(self) -> float:
        """Seconds from the call to its end."""
        return self.ended - self.began

    def final(self) -> pb.FinalAnswer:
        """The answer with its report."""
        return pb.FinalAnswer.FromString(self.answer)


def drive(address: str, asks: Sequence[Ask], load: Load) -> list[Seen]:
    """Put a server under load from several processes; returns what they saw in the order in which it began."""
    processes = max(1, min(PROCESSES, load.streams if load.per_second is None else PROCESSES))
    shares = [load.streams // processes + (place < load.streams % processes) for place in range(processes)]
    running = [_pool().submit(_run, address, asks, load, place, shares) for place in range(processes)]
    return sorted((one for future in running for one in future.result()), key=lambda one: one.began)


@cache
def _pool() -> ProcessPoolExecutor:
    """The client processes, for the whole benchmark: what starting them takes is not load."""
    pool = ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn"))
    for ready in [pool.submit(sleep, _START_SECONDS) for _ in range(PROCESSES)]:  # so long that each has one
        ready.result()
    return pool


def _run(address: str, asks: Sequence[Ask], load: Load, place: int, shares: Sequence[int]) -> list[Seen]:
    return asyncio.run(_clients(address, asks, load, place, shares))


async def _clients(address: str, asks: Sequence[Ask], load: Load, place: int, shares: Sequence[int]) -> list[Seen]:
    processes, seen = len(shares), list[Seen]()
    end = None if load.seconds is None else perf_counter() + load.seconds
    numbers = itertools.takewhile(
        lambda number: (load.count is None or number < load.count) and (end is None or perf_counter() < end),
        itertools.count(place, processes),
    )
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = BlendServiceStub(channel)  # type: ignore[no-untyped-call]

        async def one(number: int) -> None:
            left = load.cancelled is not None and number % load.cancelled == 0
            seen.append(await _ask(stub, number % len(asks), asks[number % len(asks)], left))

        if load.per_second is None:
            await asyncio.gather(*(_one_after_another(numbers, one) for _ in range(shares[place])))
        else:
            await _at_a_rate(numbers, one, load.per_second)
    return seen


async def _one_after_another(numbers: Iterator[int], one: Any) -> None:
    for number in numbers:
        await one(number)


async def _at_a_rate(numbers: Iterator[int], one: Any, per_second: float) -> None:
    start, running = perf_counter(), list[asyncio.Task[None]]()
    for number in numbers:
        await asyncio.sleep(max(0.0, start + number / per_second - perf_counter()))
        running.append(asyncio.ensure_future(one(number)))
    await asyncio.gather(*running)


async def _ask(stub: Any, place: int, ask: Ask, left: bool) -> Seen:
    began, stamps, passages, answer = perf_counter(), list[float](), b"", b""
    code, message = "OK", ""
    call = stub.Answer(ask.message())
    try:
        async for event in call:
            kind = event.WhichOneof("event")
            if kind == "token":
                stamps.append(perf_counter())
                if left:
                    call.cancel()
            elif kind == "passages":
                passages = event.passages.SerializeToString()
            else:
                answer = event.answer.SerializeToString()
    except grpc.aio.AioRpcError as error:
        code, message = error.code().name, error.details() or ""
    except asyncio.CancelledError:
        if not left:
            raise
        code = "CANCELLED"
    return Seen(place, began, perf_counter(), code, message, tuple(stamps), passages, answer)
