"""What each tenant of the access file has asked for."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection

from blend.types import Usage


class TenantCounts:
    """Calls and tokens of each tenant. Thread-safe. Whoever is not in the access file any more is forgotten."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[tuple[str, str]] = Counter()
        self._tokens: Counter[tuple[str, str]] = Counter()

    def called(self, tenant: str, code: str) -> None:
        """Count a call that has ended with that gRPC status code."""
        with self._lock:
            self._calls[tenant, code] += 1

    def answered(self, tenant: str, usage: Usage) -> None:
        """Count the tokens of an answer."""
        with self._lock:
            self._tokens[tenant, "prompt"] += usage.prompt_tokens
            self._tokens[tenant, "cached"] += usage.cached_tokens
            self._tokens[tenant, "generated"] += usage.completion_tokens

    def snapshot(self, names: Collection[str]) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
        """Return calls by tenant and code, and tokens by tenant and kind, of these tenants; forget all others."""
        with self._lock:
            for counts in (self._calls, self._tokens):
                for key in [key for key in counts if key[0] not in names]:
                    del counts[key]
            return dict(self._calls), dict(self._tokens)
