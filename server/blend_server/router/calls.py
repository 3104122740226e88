"""One call of a caller's: who it is, what goes on to the engines with it, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import grpc

from blend.errors import InvalidInput, StoreError, Unauthenticated
from blend_server.auth import Caller, Gate
from blend_server.interceptors import REQUEST_ID_KEY, CallPlaces, InFlight, call_id_of, status_of
from blend_server.operations.context import request_id
from blend_server.router.link import Metadata

logger = logging.getLogger("blend_server.router")

ENGINE_KEY = "blend-engine"
"""Metadata in which the router names the engine that served a call."""

# What belongs to one connection, not to the call.
_HOP = re.compile(r"user-agent|te|content-type|:.*|grpc-(?!status-details-bin$).*")


class NoEngine(StoreError):
    """No engine can serve a call now."""


@dataclass(frozen=True)
class Call:
    """What a call brings.

    Args:
        owner: the tenant.
        who: who is calling.
        metadata: what goes on to the engines: all of the caller's, and the request's id.
        context: gRPC's.
    """

    owner: str
    who: Caller
    metadata: Metadata
    context: Any

    @property
    def seconds_left(self) -> float | None:
        """Until the caller's deadline; ``None`` where it has none."""
        left: float | None = self.context.time_remaining()
        return left

    @property
    def credentials(self) -> Metadata:
        """What proves who is calling, on its own."""
        return tuple(pair for pair in self.metadata if pair[0] == "authorization")


class Guard:
    """What is around every call: its id, who is calling, the log, errors as status codes, shutdown.

    Args:
        gate: tells who is calling. Behind the open gate no call may bring credentials, for it could not be told
            whose documents it means.
        in_flight: counts the calls.
    """

    def __init__(self, gate: Gate, in_flight: InFlight) -> None:
        self.gate = gate
        self._in_flight = in_flight
        self._places = CallPlaces(gate)

    @asynccontextmanager
    async def call(self, method: str, context: Any, *, greet: bool = True) -> AsyncGenerator[Call, None]:
        """Run a call inside; what is raised there ends it, an engine's own error just as the engine gave it.

        Args:
            greet: send the request's id at once; otherwise whoever serves the call sends initial metadata.
        """
        sent: Metadata = tuple(context.invocation_metadata() or ())
        call_id = call_id_of(sent)
        request_id.set(call_id)
        own: Metadata = ((REQUEST_ID_KEY, call_id),)
        context.set_trailing_metadata(own)
        start, code = perf_counter(), grpc.StatusCode.OK
        try:
            if greet:
                await context.send_initial_metadata(own)
            with self._in_flight.call():
                who = await self.gate.identify(context)
                who.require(method)
                passed = tuple((k, v) for k, v in handed_on(sent) if k != REQUEST_ID_KEY) + own
                call = Call(who.tenant, who, passed, context)
                self._check(call)
                with self._places.hold(who.tenant):
                    yield call
        except (asyncio.CancelledError, GeneratorExit):
            code = grpc.StatusCode.CANCELLED
            raise
        except grpc.aio.AioRpcError as error:
            code = error.code()
            trailing = handed_on(error.trailing_metadata() or ())
            known = any(key == REQUEST_ID_KEY for key, _ in trailing)
            await context.abort(code, error.details() or "", trailing if known else (*trailing, *own))
        except Exception as error:  # noqa: BLE001 - the edge: what is no error of blend's becomes INTERNAL
            status = status_of(error)
            code = status.code
            await context.abort(code, status.message, (*own, *status.metadata))
        finally:
            elapsed = (perf_counter() - start) * 1e3
            logger.info("rpc=%s request_id=%s code=%s ms=%.1f", method, call_id, code.name, elapsed)

    def _check(self, call: Call) -> None:
        if self.gate.many and not call.credentials:
            raise Unauthenticated("the router hands on tokens alone: a certificate proves nothing to the engines")
        if not self.gate.many and call.credentials:
            raise InvalidInput("authorization", "…", "none: the router was started without --access-file")


def handed_on(metadata: Iterable[tuple[str, str | bytes]]) -> Metadata:
    """Metadata without what belongs to one connection."""
    return tuple((key, value) for key, value in metadata if not _HOP.fullmatch(key))
