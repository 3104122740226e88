"""Bearer tokens: made, hashed, checked. ``python -m blend_server.tokens`` makes one."""

from __future__ import annotations

import argparse
import base64
import binascii
import hashlib
import hmac
import json
import os
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from blend.errors import BlendError, InvalidConfig, InvalidInput

ROLES = ("reader", "writer", "admin")
"""What a caller may do, each what those before it may, and more."""
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
"""A token's id, or a tenant's name, which is a directory's, too."""
NAMES = "1 to 63 lower-case letters, digits, dashes and underscores, the first a letter or a digit"

_PREFIX = "blend"
_SECRET_NBYTES = 32
_SALT_NBYTES = 16
_COST, _BLOCK, _PARALLEL = 1 << 14, 8, 1
_MOST_COST, _MOST_BLOCK, _MOST_PARALLEL = 1 << 17, 16, 4
_HASH = re.compile(r"scrypt\$(\d{1,6})\$(\d{1,2})\$(\d{1,2})\$([A-Za-z0-9_-]{11,86})\$([A-Za-z0-9_-]{43})", re.ASCII)
_MAX_DAYS = 36_500


@dataclass(frozen=True)
class Hash:
    """What is kept of a token's secret: scrypt (RFC 7914) of it with a salt of its own."""

    cost: int
    block: int
    parallel: int
    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, secret: str, cost: int = _COST) -> Hash:
        """Hash a secret with a new salt; ``cost`` is scrypt's N, a power of two."""
        salt = secrets.token_bytes(_SALT_NBYTES)
        return cls(cost, _BLOCK, _PARALLEL, salt, _scrypt(secret, cost, _BLOCK, _PARALLEL, salt))

    @classmethod
    def parse(cls, text: str) -> Hash:
        """Read what ``str`` of a hash gives.

        Raises:
            InvalidInput: it is none, or would take too much memory or time to check.
        """
        allowed = "a line that python -m blend_server.tokens printed: scrypt$N$r$p$salt$digest"
        if (match := _HASH.fullmatch(text)) is None:
            raise InvalidInput("hash", "…", allowed)
        cost, block, parallel = (int(match[n]) for n in (1, 2, 3))
        if not (2 <= cost <= _MOST_COST and cost & (cost - 1) == 0 and 1 <= block <= _MOST_BLOCK):
            raise InvalidInput("hash", f"N={cost}, r={block}", f"N a power of two to {_MOST_COST}, r to {_MOST_BLOCK}")
        if not 1 <= parallel <= _MOST_PARALLEL:
            raise InvalidInput("hash", f"p={parallel}", f"p from 1 to {_MOST_PARALLEL}")
        try:
            salt, digest = _from_base64(match[4]), _from_base64(match[5])
        except binascii.Error:
            raise InvalidInput("hash", "…", allowed) from None
        return cls(cost, block, parallel, salt, digest)

    def matches(self, secret: str) -> bool:
        """Whether this is the hash of ``secret``. Takes tens of milliseconds and 16 MiB of memory."""
        found = _scrypt(secret, self.cost, self.block, self.parallel, self.salt)
        return hmac.compare_digest(found, self.digest)

    def __str__(self) -> str:
        return f"scrypt${self.cost}${self.block}${self.parallel}${_base64(self.salt)}${_base64(self.digest)}"


def make(token_id: str) -> tuple[str, Hash]:
    """Return a new token of that id, ``blend.ID.SECRET`` with 256 random bits, and its secret's hash.

    Raises:
        InvalidInput: the id is none.
    """
    if not NAME.fullmatch(token_id):
        raise InvalidInput("id", token_id, NAMES)
    secret = secrets.token_urlsafe(_SECRET_NBYTES)
    return f"{_PREFIX}.{token_id}.{secret}", Hash.of(secret)


def split(token: str) -> tuple[str, str] | None:
    """Return a token's id and secret, or ``None`` for what is no token."""
    prefix, _, rest = token.partition(".")
    token_id, _, secret = rest.partition(".")
    if prefix != _PREFIX or not NAME.fullmatch(token_id) or not secret or len(secret) > 256 or not secret.isascii():
        return None
    return token_id, secret


def main(argv: Sequence[str] | None = None) -> int:
    """Make a token: its entry for the access file goes to standard output, the token itself to a file.

    Returns the exit status: 0, or 2 for a wrong argument or a file that cannot be written.
    """
    parser = argparse.ArgumentParser(
        "python -m blend_server.tokens",
        description="Makes a bearer token. Prints its entry for the access file, under `tokens:`, which holds a hash.",
    )
    parser.add_argument("--id", required=True, help=f"the token's name in files and logs: {NAMES}")
    parser.add_argument("--tenant", default="default", help="whose documents it gives access to (default: default)")
    parser.add_argument(
        "--role",
        choices=ROLES,
        default="reader",
        help="what it allows: reader asks, writer ingests and deletes, too, admin does all of that and sees the whole"
        " server's figures (default: reader)",
    )
    parser.add_argument("--days", type=int, metavar="N", help="how long it is valid (default: without end)")
    parser.add_argument("--out", required=True, metavar="FILE", help="a new file for the token, mode 0600")
    arguments = parser.parse_args(argv)
    try:
        entry = _entry(arguments.id, arguments.tenant, arguments.role, arguments.days, Path(arguments.out))
    except BlendError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2
    sys.stdout.write(entry)
    return 0


def _entry(token_id: str, tenant: str, role: str, days: int | None, out: Path) -> str:
    if not NAME.fullmatch(tenant):
        raise InvalidConfig("--tenant", tenant, NAMES)
    if days is not None and not 1 <= days <= _MAX_DAYS:
        raise InvalidConfig("--days", days, f"1 to {_MAX_DAYS}")
    token, hashed = make(token_id)
    try:
        with open(out, "x", encoding="ascii", opener=lambda path, how: os.open(path, how, 0o600)) as file:
            file.write(f"{token}\n")
    except FileExistsError:
        raise InvalidConfig("--out", str(out), "a file that is not there yet") from None
    except OSError as error:
        raise InvalidConfig("--out", f"{out}, {error.strerror}", "a new file that can be written") from error
    entry = {"id": token_id, "hash": str(hashed), "tenant": tenant, "role": role}
    lines = [f"{name}: {json.dumps(value)}" for name, value in entry.items()]  # JSON's strings are YAML's, too
    if days is not None:
        lines.append(f"expires: {datetime.now(timezone.utc) + timedelta(days=days):%Y-%m-%dT%H:%M:%SZ}")
    return "  - " + "\n    ".join(lines) + "\n"


def _scrypt(secret: str, cost: int, block: int, parallel: int, salt: bytes) -> bytes:
    memory = 256 * cost * block + (1 << 20)
    return hashlib.scrypt(secret.encode(), salt=salt, n=cost, r=block, p=parallel, maxmem=memory, dklen=32)


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _from_base64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


if __name__ == "__main__":
    sys.exit(main())
