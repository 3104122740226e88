"""The same documents on every engine.

Of one owner's documents one change is under way at a time. It is noted in the journal first, then an engine that serves
takes it (the *lead*, which computes and stores the KV), then all the others that serve (which find it stored). An
engine that fails, or is away, is not asked about that owner any more until it has caught up: it is given what waits for
it in the journal, and then its list of documents is compared with the journal's (:mod:`.catching_up`).
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import grpc

from blend_server.auth import ANYONE, Gate
from blend_server.places import Places
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.router.calls import Call, NoEngine
from blend_server.router.catching_up import CatchingUp
from blend_server.router.engine_documents import Outcome, apply, fell_behind, is_refusal, said
from blend_server.router.journal import Change, Journal
from blend_server.router.link import Link
from blend_server.router.owner import FIRST_SECONDS, Credentials, Owner
from blend_server.threads import Threads

logger = logging.getLogger("blend_server.router")

Told: TypeAlias = Callable[[pb.IngestProgress], None]
T = TypeVar("T")

_WAIT_SECONDS = 10.0
"""How long a call waits for an engine to catch up where no other can serve it."""
_CLOSE_SECONDS = 5.0
_MOST_CHANGES = 128
"""Documents in memory, each of a call of its own: the one under way, and those behind it."""

_DOUBT = "; but an engine that failed in the middle of it may have taken it, so that it may come to pass later"


class Documents:
    """Keeps the engines' documents alike. All methods belong to the event loop's thread.

    Args:
        links: all engines.
        journal: it is used in a thread of its own.
        gate: knows whether a caller is still let in.
        owners: those that need no credentials, for whom engines catch up before anyone asks.
    """

    def __init__(self, links: Sequence[Link], journal: Journal, gate: Gate, owners: Sequence[str] = ()) -> None:
        self._links = links
        self._journal = journal
        self._threads = Threads("blend-router-journal", 1)
        self._gate = gate
        self._owners = {name: Owner(name, Credentials(ANYONE, ())) for name in owners}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._catching_up = CatchingUp(links, journal, self._threads, gate, self._task)
        self._places = Places(_MOST_CHANGES, "too many documents wait for the engines")

    # ---------------------------------------------------------------------------------------------- reading

    async def readable(self, call: Call) -> list[Link]:
        """Return the engines that serve and hold exactly the documents of the caller's tenant.

        Raises:
            NoEngine: there is none, nor does one catch up in time.
        """
        owner = self._owner(call)
        given = call.seconds_left
        end = _now() + (_WAIT_SECONDS if given is None else min(given, _WAIT_SECONDS))
        while True:
            self._catching_up.tend(owner)
            found = self._ready(owner)
            left = end - _now()
            if found or not owner.catching_up or left <= 0:
                break
            await asyncio.wait(owner.catching_up.values(), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not found:
            raise self._nobody(owner)
        return found

    def serving(self) -> list[Link]:
        """Return the engines that serve, whatever documents they hold."""
        return [link for link in self._links if link.serving]

    async def status(self) -> dict[str, dict[str, Any]]:
        """Return of each engine whether it serves, its answers under way, and what it has not taken of whom."""
        waiting = await self._threads.call(self._journal.counts)
        return {
            link.name: {
                "serving": link.serving,
                "answers": link.in_flight,
                "waiting_changes": waiting[link.name],
                "behind": dict(link.behind),
            }
            for link in self._links
        }

    async def tend(self) -> None:
        """Have engines that are behind catch up, until cancelled."""
        while True:
            for owner in list(self._owners.values()):
                self._catching_up.tend(owner)
            await asyncio.sleep(FIRST_SECONDS)

    async def close(self) -> None:
        """Give the changes that are under way a moment; those that take longer stand in the journal."""
        for owner in self._owners.values():
            for task in owner.catching_up.values():
                task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_SECONDS)
        for left in self._tasks:
            left.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._threads.call(self._journal.close)
        await self._threads.close()

    # ---------------------------------------------------------------------------------------------- writing

    async def ingest(self, call: Call, document_id: str, document: bytes) -> AsyncGenerator[pb.IngestProgress, None]:
        """Have every engine take a document; yields the lead's progress, its last stage when all have taken it.

        Once begun it goes on even where the caller leaves.

        Raises:
            NoEngine: none may be asked, or all of them failed; then the document may come to pass later.
            AioRpcError: an engine refused the call.
            ResourceExhausted: too many documents wait, in memory or in the journal.
            Unauthenticated: the caller would not be let in now, having waited.
            TierUnavailable: the journal failed; the document may come to pass.
        """
        stages: asyncio.Queue[pb.IngestProgress | None] = asyncio.Queue()
        await self.readable(call)
        task = self._task(self._change(call, document_id, document, stages.put_nowait))
        task.add_done_callback(lambda _: stages.put_nowait(None))
        while (stage := await stages.get()) is not None:
            yield stage
        yield (await task).progress

    async def delete(self, call: Call, document_id: str) -> Outcome:
        """Have every engine delete a document; returns what the lead said.

        Once begun it goes on even where the caller leaves. What no engine could finish of the document is cancelled,
        whether or not an engine can be asked.

        Raises:
            NoEngine: none may be asked, or all of them failed; then the deletion may come to pass later.
            AioRpcError: an engine refused the call, or there is no such document (``NOT_FOUND``).
            ResourceExhausted: too many changes wait.
            Unauthenticated: the caller would not be let in now, having waited.
            TierUnavailable: the journal failed; the deletion may come to pass.
        """
        try:
            await self.readable(call)
        except NoEngine as error:
            if await self._cancel(call, document_id):
                raise NoEngine(f"{error}; what no engine could finish of {document_id!r} is cancelled") from error
            raise
        outcome = await asyncio.shield(self._task(self._change(call, document_id, None, _ignore)))
        if outcome.absent is not None:
            raise outcome.absent
        return outcome

    async def _cancel(self, call: Call, document_id: str) -> bool:
        """Have engines that serve again delete a document which they could not finish; returns whether there is one."""
        owner = self._owner(call)
        async with owner.lock:
            await self._gate.recheck(call.who)
            return await self._threads.call(self._journal.cancel, owner.name, document_id)

    async def _change(self, call: Call, document_id: str, document: bytes | None, told: Told) -> Outcome:
        owner = self._owner(call)
        async with AsyncExitStack() as held:
            held.enter_context(self._places.hold(owner.name))
            await held.enter_async_context(owner.lock)
            await self._gate.recheck(call.who)  # it may have waited for long
            targets = self._ready(owner)
            if not targets:
                raise self._nobody(owner)
            # Each document has its lead, so that what is computed is spread over the engines' own tiers.
            first = zlib.crc32(document_id.encode()) % len(targets)
            targets = targets[first:] + targets[:first]
            number = await self._threads.call(self._journal.begin, owner.name, document_id, document)
            change = Change(number, owner.name, document_id, document)
            try:
                lead, outcome, stands = await self._lead(owner, targets, change, call, told)
            except (grpc.aio.AioRpcError, NoEngine):
                raise  # the change is refused, or every engine is behind already
            except Exception as error:
                for link in targets:  # any of them may have taken it
                    fell_behind(link, owner.name, error, change.id)
                raise
            if stands:
                owner.shorten_pauses(_now())
                taken = replace(change, applied=True)
                others = [link for link in targets if link is not lead and owner.name in link.current]
                await asyncio.gather(*(self._follow(owner, link, taken, call) for link in others))
            return outcome

    async def _lead(
        self, owner: Owner, targets: Sequence[Link], change: Change, call: Call, told: Told
    ) -> tuple[Link, Outcome, bool]:
        """Have the first engine that can take a change; returns it, what came of it, and whether others are to follow.

        An engine that fails may have taken the change or not: it is given it again before it is asked anything.

        Raises:
            AioRpcError: the change is refused.
            NoEngine: every engine failed.
            Unauthenticated: one has failed, and the caller would not be let in now.
        """
        failure: Exception | None = None
        for link in targets:
            try:
                outcome = await apply(link, change, call.metadata, told)
            except grpc.aio.AioRpcError as error:
                if is_refusal(error):
                    await self._refused(link, change, failure)
                    raise _refusal(error, failure) from error
                failure = error
            except NoEngine as error:
                failure = error
            else:
                return link, outcome, await self._noted(link, change, outcome, failure)
            fell_behind(link, owner.name, failure, change.id)
            await self._gate.recheck(call.who)
        raise NoEngine(
            f"no engine could finish the change of document {change.id!r}; it may come to pass later, and can be sent "
            f"again: {said(failure)}"
        ) from failure

    async def _noted(self, link: Link, change: Change, outcome: Outcome, doubt: Exception | None) -> bool:
        """Write down what the lead has made of a change; returns whether the others are to follow."""
        if outcome.absent is not None:
            return await self._threads.call(self._journal.absent, change.number, link.name)
        if outcome.taken:
            await self._threads.call(self._journal.applied, change.number, link.name, outcome.held)
            return True
        await self._refused(link, change, doubt)
        if doubt is not None:
            outcome.progress.failed.message += _DOUBT
        return False

    async def _refused(self, link: Link, change: Change, doubt: Exception | None) -> None:
        """Forget a change that an engine does not take, unless another one that failed may have."""
        if doubt is None:
            await self._threads.call(self._journal.refused, change.number)
        else:
            await self._threads.call(self._journal.skipped, change.number, link.name)

    async def _follow(self, owner: Owner, link: Link, change: Change, call: Call) -> None:
        """Have one more engine take a change that the lead has taken; if it does not, it is behind."""
        try:
            await self._gate.recheck(call.who)
            await self._catching_up.take(link, change, call.metadata)
        except Exception as error:  # noqa: BLE001 - whatever it was, the engine may lack the document
            fell_behind(link, owner.name, error, change.id)

    # ------------------------------------------------------------------------------------------------ owners

    def _owner(self, call: Call) -> Owner:
        owner = self._owners.setdefault(call.owner, Owner(call.owner))
        # A reader's may list, a writer's may also catch up.
        if call.who.may("writer") or owner.credentials is None:
            owner.credentials = Credentials(call.who, call.credentials)
        return owner

    def _ready(self, owner: Owner) -> list[Link]:
        return [link for link in self._links if link.holds(owner.name)]

    def _nobody(self, owner: Owner) -> NoEngine:
        reasons = [f"{link.name}: {_reason(link, owner.name)}" for link in self._links]
        return NoEngine(f"no engine can serve this now; {'; '.join(reasons)}")

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Its caller, if still there, is told; if not, this is all that is left of it.
            logger.info("event=unfinished_change error=%s", type(error).__name__)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _ignore(_: pb.IngestProgress) -> None:
    """Progress that no caller is told of."""


def _refusal(error: grpc.aio.AioRpcError, doubt: Exception | None) -> grpc.aio.AioRpcError:
    """An engine's refusal as the caller is told it, who has to know where another engine may have taken the change."""
    if doubt is None:
        return error
    said = f"{error.details()}{_DOUBT}"
    return grpc.aio.AioRpcError(error.code(), error.initial_metadata(), error.trailing_metadata(), said)


def _reason(link: Link, owner: str) -> str:
    if not link.serving:
        return "not serving"
    return link.behind.get(owner, "catching up")
