"""What a task or thread is working for, for logs. It imports nothing, so that everything may import it."""

from __future__ import annotations

from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="-")
"""The id of the call that this task serves."""

tenant: ContextVar[str] = ContextVar("tenant", default="")
"""Whose call it is, once that is known."""

trace_id: ContextVar[str] = ContextVar("trace_id", default="")
"""The id of the call's trace, 32 hex digits, where there is one."""
