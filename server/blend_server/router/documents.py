"""The same documents on every engine.

Of one owner's documents one change is under way at a time. It is noted in the journal first, then an engine that serves
takes it (the *lead*, which computes and stores the KV), then all the others that serve (which find it stored). An
engine that fails, or is away, is not asked about that owner any more until it has caught up: it is given what waits for
it in the journal, and then its list of documents is compared with the journal's.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import grpc

from blend.errors import BlendError, Unauthenticated
from blend_server.auth import ANYONE, Gate
from blend_server.places import Places
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.router.calls import Call, NoEngine
from blend_server.router.engine_documents import NotTaken, Outcome, apply, listed
from blend_server.router.journal import Change, Journal
from blend_server.router.link import Link, Metadata
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
_MOST_FAILURES = 3
"""After how many an engine that is behind is not given a document any more that none has taken: it may be what kills it."""
_BUSY_TRIES = 6
_BUSY_SECONDS = 0.2

# An engine that answers so has not taken a change; after anything else it may have.
_REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


_DOUBT = (
    "; but an engine that failed in the middle of it may have taken it, so that it may come to pass later: delete the "
    "document if it must not"
)


class _Different(NoEngine):
    """An engine holds other documents than it should."""


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
            self._tend(owner)
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
                self._tend(owner)
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
        """
        stages: asyncio.Queue[pb.IngestProgress | None] = asyncio.Queue()
        await self.readable(call)
        task = self._task(self._change(call, document_id, document, stages.put_nowait))
        task.add_done_callback(lambda _: stages.put_nowait(None))
        while (stage := await stages.get()) is not None:
            yield stage
        yield (await task).progress

    async def delete(self, call: Call, document_id: str) -> Outcome:
        """Have every engine delete a document; returns what the lead said."""
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
                    self._behind(owner, link, error)
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
                if error.code() in _REFUSALS:
                    await self._refused(link, change, failure)
                    raise _refusal(error, failure) from error
                failure = error
            except NoEngine as error:
                failure = error
            else:
                return link, outcome, await self._noted(link, change, outcome, failure)
            self._behind(owner, link, failure)
            await self._gate.recheck(call.who)
        raise NoEngine(
            f"no engine could finish the change of document {change.id!r}; it may come to pass later, and can be sent "
            f"again: {_said(failure)}"
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
            await self._take(link, change, call.metadata)
        except Exception as error:  # noqa: BLE001 - whatever it was, the engine may lack the document
            self._behind(owner, link, error)

    async def _take(self, link: Link, change: Change, metadata: Metadata) -> bool:
        """Have an engine take a change that must be taken, or that nobody is known to have taken.

        Returns:
            whether it is the first engine to take it.

        Raises:
            AioRpcError: it failed.
            NoEngine: it refused what another engine has taken.
        """
        for attempt in range(_BUSY_TRIES):
            try:
                outcome = await apply(link, change, metadata, _ignore)
                break
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED or attempt == _BUSY_TRIES - 1:
                    raise
            await asyncio.sleep(_BUSY_SECONDS * 2**attempt)
        if outcome.taken:
            return await self._threads.call(self._journal.applied, change.number, link.name, outcome.held)
        if not await self._threads.call(self._journal.skipped, change.number, link.name):
            failed = outcome.progress.failed
            said = f"engine {link.name} refuses document {change.id!r}, which others hold: {failed.message}"
            raise NotTaken(said, failed.code)
        return False

    # ------------------------------------------------------------------------------------------ catching up

    def _tend(self, owner: Owner) -> None:
        """Begin to bring up each engine that serves and is behind, where there are credentials for it."""
        if owner.credentials is None:
            return
        now, era = _now(), sum(link.era for link in self._links)
        for link in self._links:
            wanted = link.serving and owner.name not in link.current and link.name not in owner.catching_up
            if wanted and owner.may_try(link.name, now, era):
                task = self._task(self._catch_up(owner, link))
                owner.catching_up[link.name] = task
                task.add_done_callback(partial(_forget, owner.catching_up, link.name))

    async def _catch_up(self, owner: Owner, link: Link) -> None:
        era, used = link.era, owner.credentials
        try:
            while True:
                async with owner.lock:
                    change = await self._threads.call(self._journal.next, owner.name, link.name)
                    if change is None:
                        await self._compare(owner, link)
                        owner.failures.clear()
                        if link.era == era:
                            link.current.add(owner.name)
                            link.behind.pop(owner.name, None)
                            logger.info("event=current engine=%s tenant=%s", link.name, owner.name)
                        return
                # Outside of the lock: the engine is asked nothing meanwhile, and the others go on.
                used = owner.credentials
                first = await self._catch_up_with(owner, link, change)
                owner.shorten_pauses(_now())
                if first:
                    async with owner.lock:  # behind whoever is being compared, or it would count as current again
                        self._doubt_others(owner, link)
        except Exception as error:  # noqa: BLE001 - whatever it was, it may come again at once
            # A call that is lost is tried again soon. But a comparison lists all documents, and a document costs its KV.
            owner.pause(link.name, _now(), longer=isinstance(error, (_Different, NotTaken)))
            if _unauthenticated(error) and owner.credentials is used:
                owner.credentials = None  # the next caller's will do
            if link.era == era:
                self._behind(owner, link, error)

    async def _catch_up_with(self, owner: Owner, link: Link, change: Change) -> bool:
        """Have an engine take a change that waits for it; one that none has taken is given up after some failures.

        Returns:
            whether it is the first engine to take it.

        Raises:
            Unauthenticated: nobody may be asked.
            AioRpcError, NoEngine: it failed.
        """
        metadata = await self._metadata(owner)
        try:
            return await self._take(link, change, metadata)
        except Exception as error:
            refused = isinstance(error, grpc.aio.AioRpcError) and error.code() in _REFUSALS
            if not (refused or change.applied or change.document is None):
                owner.failures[change.number] += 1
                if (failures := owner.failures[change.number]) >= _MOST_FAILURES:
                    del owner.failures[change.number]
                    await self._threads.call(self._journal.give_up, change)
                    logger.warning(
                        "event=given_up tenant=%s document=%r failures=%d", owner.name, change.id, failures
                    )
            raise

    async def _metadata(self, owner: Owner) -> Metadata:
        """Return what proves to engines who is calling, once the gate still says that it is this owner.

        Raises:
            Unauthenticated: it proves that no more.
        """
        found = owner.credentials
        if found is None:
            raise Unauthenticated("engines catch up with the token of this tenant's next caller")
        await self._gate.recheck(found.who)
        return found.metadata

    def _doubt_others(self, owner: Owner, link: Link) -> None:
        """Have the others looked at again: one that refused a change which this engine has taken must have it."""
        for other in self._links:
            if other is not link:
                other.current.discard(owner.name)

    async def _compare(self, owner: Owner, link: Link) -> None:
        """Check that an engine holds what it should; where nobody knows what that is, that all engines hold the same.

        Raises:
            NoEngine: it does not, or nobody can tell.
        """
        wanted = await self._threads.call(self._journal.documents, owner.name)
        if wanted is None:
            away = [other.name for other in self._links if not other.serving]
            if away:
                raise NoEngine(
                    f"every engine has to be there once before a tenant's documents are known; away: {', '.join(away)}"
                )
            wanted = await listed(link, await self._metadata(owner))
            for other in self._links:
                if other is not link and await listed(other, await self._metadata(owner)) != wanted:
                    raise _Different(
                        f"engines {link.name} and {other.name} hold different documents, and the router does not know "
                        "which are right: make them equal, or begin with none"
                    )
            await self._threads.call(self._journal.adopt, owner.name, wanted)
            return
        found = await listed(link, await self._metadata(owner))
        if found != wanted:
            missing = sum(found.get(document_id) != held for document_id, held in wanted.items())
            extra = sum(document_id not in wanted for document_id in found)
            raise _Different(
                f"its documents are not those of the router's journal: {missing} are missing or different, {extra} are "
                "too many; ingest what is missing through the router once more, and delete the rest on the engine"
            )

    def _behind(self, owner: Owner, link: Link, error: Exception | None) -> None:
        why = _said(error)
        if link.behind.get(owner.name) != why:
            logger.warning("event=behind engine=%s tenant=%s reason=%s", link.name, owner.name, why)
        link.current.discard(owner.name)
        link.behind[owner.name] = why

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


def _forget(tasks: dict[str, asyncio.Task[None]], name: str, _: asyncio.Task[None]) -> None:
    del tasks[name]


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


def _unauthenticated(error: Exception) -> bool:
    by_engine = isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED
    return by_engine or isinstance(error, Unauthenticated)


def _said(error: Exception | None) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) if isinstance(error, BlendError) else type(error).__name__
