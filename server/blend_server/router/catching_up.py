"""Bringing up engines that are behind: what waits for them in the journal, then the comparison of their documents."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeAlias

import grpc

from blend.errors import Unauthenticated
from blend_server.auth import Gate
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.router.calls import NoEngine
from blend_server.router.engine_documents import NotTaken, apply, fell_behind, is_refusal, listed
from blend_server.router.journal import Change, Journal
from blend_server.router.link import Link, Metadata
from blend_server.router.owner import Owner
from blend_server.threads import Threads

logger = logging.getLogger("blend_server.router")

Begin: TypeAlias = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""Begins work that is waited for when the router stops."""

_MOST_FAILURES = 3
"""After how many by engines that are behind a document that none has taken is given up: it may be what kills them."""
_BUSY_TRIES = 6
_BUSY_SECONDS = 0.2


class _Different(NoEngine):
    """An engine holds other documents than it should."""


class CatchingUp:
    """Brings up engines that are behind. All methods belong to the event loop's thread.

    Args:
        links: all engines.
        journal: says what waits for whom, and what every engine should hold.
        threads: run the journal.
        gate: knows whether a caller is still let in.
        begin: begins the work of bringing up one engine.
    """

    def __init__(self, links: Sequence[Link], journal: Journal, threads: Threads, gate: Gate, begin: Begin) -> None:
        self._links = links
        self._journal = journal
        self._threads = threads
        self._gate = gate
        self._begin = begin

    def tend(self, owner: Owner) -> None:
        """Begin to bring up each engine that serves and is behind, where there are credentials for it."""
        if owner.credentials is None:
            return
        now = _now()
        owner.note_era(sum(link.era for link in self._links), now)
        for link in self._links:
            wanted = link.serving and owner.name not in link.current and link.name not in owner.catching_up
            if wanted and owner.may_try(link.name, now):
                task = self._begin(self._catch_up(owner, link))
                owner.catching_up[link.name] = task
                task.add_done_callback(partial(_forget, owner.catching_up, link.name))

    async def take(self, link: Link, change: Change, metadata: Metadata) -> bool:
        """Have an engine take a change that must be taken, or that nobody is known to have taken.

        Returns:
            whether it is the first engine to take it.

        Raises:
            AioRpcError: it failed.
            NoEngine: it failed, or refused what another engine has taken.
            TierUnavailable: the journal failed; the engine may have taken it.
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

    async def _catch_up(self, owner: Owner, link: Link) -> None:
        era, used, change = link.era, owner.credentials, None
        try:
            while True:
                async with owner.lock:
                    change = await self._threads.call(self._journal.next, owner.name, link.name)
                    used = owner.credentials
                    if change is None:
                        await self._compare(owner, link)
                        owner.failures.clear()
                        if link.era == era:
                            link.current.add(owner.name)
                            link.behind.pop(owner.name, None)
                            logger.info("event=current engine=%s tenant=%s", link.name, owner.name)
                        return
                # Outside of the lock: the engine is asked nothing meanwhile, and the others go on.
                first = await self._take_missed(owner, link, change)
                owner.shorten_pauses(_now())
                if first:
                    async with owner.lock:  # behind whoever is being compared, or it would count as current again
                        self._doubt_others(owner, link)
        except Exception as error:  # noqa: BLE001 - whatever it was, it may come again at once
            # A lost call is tried again soon. But a comparison lists all documents, and a document costs its KV.
            owner.pause(link.name, _now(), longer=isinstance(error, (_Different, NotTaken)))
            if _unauthenticated(error) and owner.credentials is used:
                owner.credentials = None  # the next caller's will do
            if link.era == era:
                fell_behind(link, owner.name, error, None if change is None else change.id)

    async def _take_missed(self, owner: Owner, link: Link, change: Change) -> bool:
        """Have an engine take a change that waits for it; a document that none takes is given up after some failures.

        Returns:
            whether it is the first engine to take it.

        Raises:
            Unauthenticated: there are no credentials to do so.
            AioRpcError, NoEngine, TierUnavailable: see :meth:`take`.
        """
        metadata = await self._metadata(owner)
        try:
            return await self.take(link, change, metadata)
        except (grpc.aio.AioRpcError, NoEngine) as error:
            if not (is_refusal(error) or change.applied or change.document is None):
                owner.failures[change.number] += 1
                if owner.failures[change.number] >= _MOST_FAILURES:
                    del owner.failures[change.number]
                    await self._give_up(change)
            raise

    async def _give_up(self, change: Change) -> None:
        if await self._threads.call(self._journal.give_up, change):
            logger.warning("event=given_up tenant=%s document=%r failures=%d", change.owner, change.id, _MOST_FAILURES)

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
            Unauthenticated: there are no credentials to ask it.
            AioRpcError: it could not be asked.
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


def _now() -> float:
    return asyncio.get_running_loop().time()


def _forget(tasks: dict[str, asyncio.Task[None]], name: str, _: asyncio.Task[None]) -> None:
    del tasks[name]


def _ignore(_: pb.IngestProgress) -> None:
    """Progress that no caller is told of."""


def _unauthenticated(error: Exception) -> bool:
    by_engine = isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED
    return by_engine or isinstance(error, Unauthenticated)
