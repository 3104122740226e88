"""Documents that another model, tokenizer or chunk size was used for are brought up to date in the background."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from blend.errors import BlendError, Closed, ResourceExhausted
from blend.store.key import PLAIN, ObjectKey
from blend.types import Chunk
from blend_server.engines import ServedEngine
from blend_server.interceptors import status_of
from blend_server.places import RETRY_SECONDS

if TYPE_CHECKING:
    from blend_server.tenants import Tenant

logger = logging.getLogger("blend_server")

# Documents of one tenant before the next tenant has its turn: each turn may need it to be opened.
_TURN = 16
_TELL_SECONDS = 60.0


@dataclass
class _Backlog:
    """What is left to do of one tenant's documents, and what came of the others."""

    tenant: str
    left: deque[str]
    told: float
    renewed: int = 0
    failed: int = 0


class Reindexing:
    """Processes stored documents again, one after another, the tenants in turns.

    Nothing is written down of how far it came: what is not done is still outdated in the catalog, and the next start
    goes on with it. Belongs to the event loop's thread.

    Args:
        use: gives a tenant, open inside the ``with`` block.
        engine: tells present content keys from others.
    """

    def __init__(self, use: Callable[[str], AbstractAsyncContextManager[Tenant]], engine: ServedEngine) -> None:
        self._use = use
        self._engine = engine

    async def run(self, tenants: Sequence[str]) -> None:
        """Return once every document of these tenants was processed as it would be now, or has failed.

        Opening a tenant forgets the KV that an earlier run left behind, so each of them is opened. What ends this
        before its time is logged: nobody waits for it.
        """
        try:
            await self._run(tenants)
        except Exception:  # calls are served all the same
            logger.exception("event=reindexing_ended")

    async def _run(self, tenants: Sequence[str]) -> None:
        waiting = deque([found for name in tenants if (found := await self._found(name)) is not None])
        while waiting:
            backlog = waiting.popleft()
            if await self._turn(backlog):
                waiting.append(backlog)
            self._tell(backlog)

    def _tell(self, backlog: _Backlog) -> None:
        """Log how far a tenant is, once a while and at the end."""
        now = monotonic()
        if backlog.left and now - backlog.told < _TELL_SECONDS:
            return
        backlog.told = now
        event = "reindexing" if backlog.left else "reindexed"
        counts = (backlog.renewed, backlog.failed, len(backlog.left))
        logger.info("event=%s tenant=%s renewed=%d failed=%d left=%d", event, backlog.tenant, *counts)

    async def _found(self, name: str) -> _Backlog | None:
        """What there is to do for a tenant; ``None``: nothing, or its documents cannot be used."""
        while True:
            try:
                async with self._use(name) as tenant:
                    ids = await tenant.threads.call(self._to_renew, tenant)
            except ResourceExhausted:  # others are being served
                await asyncio.sleep(RETRY_SECONDS)
                continue
            except BlendError as error:
                # One tenant's damaged files are no reason to leave the others; its own calls will say so.
                logger.warning("event=tenant_unusable tenant=%s code=%s", name, status_of(error).code.name)
                return None
            if not ids:
                return None
            logger.info("event=reindexing tenant=%s left=%d", name, len(ids))
            return _Backlog(name, deque(ids), monotonic())

    def _to_renew(self, tenant: Tenant) -> tuple[str, ...]:
        some = self._engine.content_key(Chunk((0,)), namespace=tenant.name)
        return tenant.library.to_renew(ObjectKey(some, PLAIN).namespace)

    async def _turn(self, backlog: _Backlog) -> bool:
        """Process some of a tenant's documents; return whether some are left."""
        try:
            async with self._use(backlog.tenant) as tenant:
                ingestion = tenant.ingestion
        except ResourceExhausted:
            await asyncio.sleep(RETRY_SECONDS)
            return True
        except BlendError as error:
            logger.warning("event=tenant_unusable tenant=%s code=%s", backlog.tenant, status_of(error).code.name)
            return False
        # Used no longer, it may be closed for a tenant that somebody waits for: then this goes on in the next turn.
        for _ in range(min(_TURN, len(backlog.left))):
            name = backlog.left[0]
            try:
                await ingestion.renew(name)
            except Closed:
                await asyncio.sleep(RETRY_SECONDS)
                return True
            except Exception as error:  # noqa: BLE001 - one document must not keep the others from being used
                code = status_of(error).code.name
                logger.warning("event=reindex_failed tenant=%s document=%r code=%s", backlog.tenant, name, code)
                backlog.failed += 1
            else:
                backlog.renewed += 1
            backlog.left.popleft()
        return bool(backlog.left)
