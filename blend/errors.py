"""Every error that blend raises on purpose, in one tree.

::

    BlendError
    ├── InvalidInput            bad argument; also a ValueError       → INVALID_ARGUMENT
    │   ├── InvalidConfig       a setting
    │   ├── InvalidPlan         a plan: method, ratio, variant
    │   ├── InvalidPrompt       a prompt or question
    │   │   └── PromptTooLong   does not fit the model's context
    │   └── InvalidDocument     a document, its id or title
    ├── NotFound                no such thing; also a LookupError     → NOT_FOUND
    ├── Unauthenticated         nobody knows who is calling           → UNAUTHENTICATED
    ├── PermissionDenied        the caller may not do that            → PERMISSION_DENIED
    ├── ResourceExhausted       a budget is used up                   → RESOURCE_EXHAUSTED
    ├── DeadlineExceeded        it cannot be done in time             → DEADLINE_EXCEEDED
    ├── Cancelled               nobody wants it any more              → CANCELLED
    ├── ModelError              a model cannot be used                → FAILED_PRECONDITION
    │   ├── ModelNotFound       no such name, directory or hub id
    │   ├── ModelUnavailable    it exists, but cannot be fetched now
    │   ├── ModelCorrupt        wrong digest, or half-written files
    │   └── ModelUnsupported    blend refuses it, and says why
    ├── StoreError              a fault in a tier; a request treats it as a miss → UNAVAILABLE
    │   ├── TierUnavailable     I/O failed
    │   ├── ObjectCorrupt       bytes that fail a check
    │   └── LeaseReleased       use of a view after its lease ended
    └── Closed                  use of an engine, tier or index after close → UNAVAILABLE
"""

from __future__ import annotations


class BlendError(Exception):
    """Base of every error raised on purpose by this package."""


class InvalidInput(BlendError, ValueError):
    """An argument is wrong. ``field`` names it, ``value`` is what came, ``allowed`` what may come."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        shown = repr(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{field}: got {shown}; allowed: {allowed}")


class InvalidConfig(InvalidInput):
    """A setting has a value outside what is allowed."""


class InvalidPlan(InvalidInput):
    """A plan names an unknown method, or a ratio outside its range."""


class InvalidPrompt(InvalidInput):
    """A prompt or question cannot be used."""


class PromptTooLong(InvalidPrompt):
    """A prompt, with room for its answer, exceeds the model's context. ``tokens`` and ``limit`` count tokens."""

    def __init__(self, tokens: int, limit: int, what: str = "prompt") -> None:
        self.tokens = tokens
        self.limit = limit
        super().__init__(what, f"{tokens} tokens", f"at most {limit} tokens (the model's context)")


class InvalidDocument(InvalidInput):
    """A document, its id or its title cannot be used."""


class NotFound(BlendError, LookupError):
    """Something that was asked for by name does not exist. ``what`` is its kind, ``name`` its name."""

    def __init__(self, what: str, name: str) -> None:
        self.what = what
        self.name = name
        super().__init__(f"no such {what}: {name!r}")


class Unauthenticated(BlendError):
    """A call came without credentials, or with ones that are not valid (any more)."""


class PermissionDenied(BlendError):
    """The caller is known, and may not do what it asks for."""


class ResourceExhausted(BlendError):
    """A budget (memory, disk, queue, quota) does not allow the request.

    ``retry_seconds`` is after how long it may be worth while to try again; ``None`` where waiting alone will not help.
    """

    def __init__(self, message: str, retry_seconds: float | None = None) -> None:
        self.retry_seconds = retry_seconds
        super().__init__(message)


class DeadlineExceeded(BlendError):
    """A request's deadline has passed, or would have before its first token."""


class Cancelled(BlendError):
    """A request was cancelled before its first token."""


class ModelError(BlendError):
    """A model cannot be used. ``model`` is the name it was asked for by."""

    def __init__(self, model: str, reason: str) -> None:
        self.model = model
        self.reason = reason
        super().__init__(f"model {model!r}: {reason}")


class ModelNotFound(ModelError):
    """There is no model of that name."""


class ModelUnavailable(ModelError):
    """The model may exist, but cannot be fetched now (no network, say)."""


class ModelCorrupt(ModelError):
    """The model's files are incomplete or fail their digest."""


class ModelUnsupported(ModelError):
    """The model runs in transformers, but blend cannot reproduce it exactly, and refuses it."""


class StoreError(BlendError):
    """A fault in a storage tier. During a request the chunk counts as missing."""


class TierUnavailable(StoreError):
    """A tier cannot be read or written: an I/O error, no space, no permission."""


class ObjectCorrupt(StoreError):
    """Stored bytes fail a check (magic, version, size, key or checksum)."""


class LeaseReleased(StoreError):
    """A lease was used after it had been released."""


class Closed(BlendError):
    """An engine, a tier or an index was used after it had been closed."""
