"""Names of stored things: what a chunk's KV depends on, turned into keys that say nothing about the text.

A *content key* stands for tokens within a namespace. An *object key* is one variant of it: computed with the sink
alone before it (``plain``), or behind declared neighbours (``c`` and 16 hex digits). Both are keyed digests, so that
whoever sees file names or network keys cannot test guesses about a tenant's documents.

::

    content key   11 bytes   keyed digest of the tokens, with a key of this tenant and this model
                   6 bytes   tenant tag: keyed digest of the tenant's name
                   3 bytes   model tag: keyed digest of the model's fingerprint

So a key alone tells whose it is: the last 9 bytes are the *namespace tag*, the first 6 of those the tenant's. Without
the secret the tags say which objects belong together, and nothing of names or texts. They stand last, since names are
spread over directories by how they begin. Tags sort objects for listing, dropping and quotas; what may be read is
decided by the digest, which depends on everything, and by the comparison of the header that follows.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from blend.errors import InvalidInput

CONTENT_NBYTES = 20
"""Bytes of a content key; its text is twice as many hex digits."""
TENANT_NBYTES = 6
"""Bytes of a tenant tag: among 100,000 tenants two have the same one with a chance of 2e-5."""
MODEL_NBYTES = 3
"""Bytes of a model tag."""
PLAIN = "plain"
"""The variant that was computed behind the sink alone."""

_TENANT_AT = 2 * (CONTENT_NBYTES - TENANT_NBYTES - MODEL_NBYTES)
_MODEL_AT = 2 * (CONTENT_NBYTES - MODEL_NBYTES)
_CONTENT = re.compile(rf"[0-9a-f]{{{2 * CONTENT_NBYTES}}}")
_TAG = re.compile(rf"[0-9a-f]{{{2 * TENANT_NBYTES}}}(?:[0-9a-f]{{{2 * MODEL_NBYTES}}})?")
_VARIANT = re.compile(r"plain|c[0-9a-f]{16}")
_FINGERPRINT = re.compile(r"[0-9a-f]{16,128}")


@dataclass(frozen=True)
class Namespace:
    """Everything beside its tokens that a chunk's KV depends on, and whom it belongs to.

    Args:
        tenant: whose chunks these are, at most 256 characters; the empty string is a tenant like any other.
        fingerprint: lower-case hex digest of weights, configuration, tokenizer, KV dtype, RoPE, sink, shard …
        secret: at least 16 bytes that key every digest; shared by all who share a store.

    Raises:
        InvalidInput: a value is malformed.
    """

    tenant: str
    fingerprint: str
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _check_tenant(self.tenant)
        if not isinstance(self.fingerprint, str) or not _FINGERPRINT.fullmatch(self.fingerprint):
            raise InvalidInput("namespace.fingerprint", self.fingerprint, "16 to 128 lower-case hex digits")
        if not isinstance(self.secret, bytes) or len(self.secret) < 16:
            raise InvalidInput("namespace.secret", "…", "at least 16 bytes")

    @property
    def digest(self) -> bytes:
        """32 bytes that stand for this namespace; they go into every object's header."""
        return self._derive(b"blend namespace")

    @property
    def tag(self) -> str:
        """The namespace tag, 18 hex digits: the tenant's 12 and the model's 6. Content keys end with it."""
        model = _derive(self.secret, b"blend model tag", self.fingerprint)[:MODEL_NBYTES].hex()
        return tenant_tag(self.secret, self.tenant) + model

    @property
    def content_secret(self) -> bytes:
        """32 bytes that key the content keys of this namespace, and nothing else."""
        return self._derive(b"blend content")

    def _derive(self, purpose: bytes) -> bytes:
        return _derive(self.secret, purpose, self.tenant, self.fingerprint)


def _derive(secret: bytes, purpose: bytes, *texts: str) -> bytes:
    root = blake2b(secret, digest_size=64, person=b"blend secret").digest()
    state = blake2b(key=root, digest_size=32, person=purpose)
    for text in texts:
        raw = text.encode()
        state.update(struct.pack("<Q", len(raw)) + raw)
    return state.digest()


def _check_tenant(tenant: object) -> None:
    if not isinstance(tenant, str) or len(tenant) > 256 or not _encodable(tenant):
        raise InvalidInput("namespace.tenant", tenant, "text of at most 256 characters")


def tenant_tag(secret: bytes, tenant: str) -> str:
    """Return the 12 hex digits that stand for a tenant, whatever the model, in the store of that secret.

    Raises:
        InvalidInput: ``tenant`` is no text of at most 256 characters.
    """
    _check_tenant(tenant)
    return _derive(secret, b"blend tenant tag", tenant)[:TENANT_NBYTES].hex()


def tenant_of(tag: str) -> str:
    """Return the tenant tag that a namespace tag begins with."""
    return tag[: 2 * TENANT_NBYTES]


def model_of(tag: str) -> str:
    """Return the model tag that a namespace tag ends with, the same for all tenants of one secret."""
    return tag[2 * TENANT_NBYTES :]


def check_tag(field: str, tag: object) -> str:
    """Return ``tag`` if it is that of a tenant or of a namespace; raise :class:`InvalidInput` otherwise."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag):
        digits = 2 * TENANT_NBYTES
        raise InvalidInput(
            field, tag, f"{digits} (a tenant) or {digits + 2 * MODEL_NBYTES} (a namespace) lower-case hex digits"
        )
    return tag


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def content_key(namespace: Namespace, token_ids: Sequence[int]) -> str:
    """Return the content key of ``token_ids``: 40 hex digits, a keyed BLAKE2b over their count and the ids, then the
    namespace tag.

    Raises:
        InvalidInput: no ids, or one outside 0 to 2**32 - 1.
    """
    count = len(token_ids)
    if not count:
        raise InvalidInput("token_ids", "no tokens", "at least one token id")
    try:
        packed = struct.pack(f"<Q{count}I", count, *token_ids)
    except (struct.error, TypeError) as error:
        raise InvalidInput("token_ids", token_ids, "integers from 0 to 2**32 - 1") from error
    return blake2b(packed, key=namespace.content_secret, digest_size=_TENANT_AT // 2).hexdigest() + namespace.tag


def conditioned_variant(neighbours: Sequence[str]) -> str:
    """Return the variant of a chunk that was computed behind ``neighbours``, content keys in prompt order.

    Raises:
        InvalidInput: no neighbours, or one that is no content key.
    """
    if not neighbours:
        raise InvalidInput("neighbours", "none", "at least one content key")
    raw = b"".join(bytes.fromhex(check_content("neighbours", neighbour)) for neighbour in neighbours)
    return "c" + blake2b(raw, digest_size=8, person=b"blend neighbours").hexdigest()


def check_content(field: str, content: object) -> str:
    """Return ``content`` if it is a content key; raise :class:`InvalidInput` naming ``field`` otherwise."""
    if not isinstance(content, str) or not _CONTENT.fullmatch(content):
        raise InvalidInput(field, content, f"{2 * CONTENT_NBYTES} lower-case hex digits")
    return content


@dataclass(frozen=True, order=True, slots=True)
class ObjectKey:
    """The name of one stored object. ``str(key)`` is ``"<content>.<variant>"`` and safe as a file name.

    Raises:
        InvalidInput: ``content`` is not 40 lower-case hex digits, or ``variant`` neither ``plain`` nor ``c`` and
            16 lower-case hex digits.
    """

    content: str
    variant: str

    def __post_init__(self) -> None:
        check_content("key.content", self.content)
        if not isinstance(self.variant, str) or not _VARIANT.fullmatch(self.variant):
            raise InvalidInput("key.variant", self.variant, "'plain', or 'c' and 16 lower-case hex digits")

    def __str__(self) -> str:
        return f"{self.content}.{self.variant}"

    @property
    def conditioned(self) -> bool:
        """Whether this variant was computed behind neighbours."""
        return self.variant != PLAIN

    @property
    def tenant(self) -> str:
        """The tenant tag: 12 hex digits."""
        return self.content[_TENANT_AT:_MODEL_AT]

    @property
    def namespace(self) -> str:
        """The namespace tag: 18 hex digits, of tenant and model."""
        return self.content[_TENANT_AT:]

    def within(self, tag: str) -> bool:
        """Whether this object belongs to the tenant or the namespace that ``tag`` stands for."""
        return self.content.startswith(tag, _TENANT_AT)

    @classmethod
    def parse(cls, text: str) -> ObjectKey:
        """Return the key whose ``str()`` is ``text``; raise :class:`InvalidInput` where there is none."""
        content, dot, variant = text.partition(".")
        if not dot:
            raise InvalidInput("key", text, "<content>.<variant>")
        return cls(content, variant)
