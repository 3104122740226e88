"""The admin pages of a Mooncake master: is it well, what does it hold."""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import dataclass

from blend.errors import TierUnavailable

MAX_PAGE_NBYTES = 1 << 30
"""Most bytes that are read of one page: a listing of ten million keys."""


@dataclass(frozen=True)
class Segments:
    """What the owners of a Mooncake store lend it: how many they are, and their bytes."""

    segments: int
    used_bytes: int
    capacity_bytes: int


def fetch(address: str, path: str, seconds: float) -> bytes:
    """Return a page of the admin server at ``address``, ``host:port``.

    Raises:
        TierUnavailable: it does not answer, or not with this page.
    """
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=seconds)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read(MAX_PAGE_NBYTES)
    except (OSError, http.client.HTTPException) as error:
        raise TierUnavailable(f"the master's page http://{address}{path}: {error or type(error).__name__}") from error
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        raise TierUnavailable(f"the master's page http://{address}{path}: status {response.status}")
    return body


def sickness(address: str, seconds: float) -> str:
    """Return what is wrong with the master, by its health page; an empty string when it serves."""
    try:
        page = json.loads(fetch(address, "/health", seconds))
    except TierUnavailable as error:
        return str(error)
    except ValueError:
        return f"the master's page http://{address}/health is no JSON"
    if not isinstance(page, dict) or page.get("status") != "ok" or page.get("service_ready") is False:
        return f"the master's page http://{address}/health says {str(page)[:200]}"
    return ""


def unreachable(address: str, seconds: float) -> str:
    """Return why no connection can be made to ``address``; an empty string when one can."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), seconds).close()
    except OSError as error:
        return f"the master's RPC at {address}: {error or type(error).__name__}"
    return ""


def list_keys(address: str, seconds: float) -> list[str]:
    """Return the names of all objects that the master knows, of anybody's.

    Raises:
        TierUnavailable: the page cannot be read.
    """
    return fetch(address, "/get_all_keys", seconds).decode("utf-8", "replace").split()


def segments(address: str, seconds: float) -> Segments:
    """Return what the owners lend.

    Raises:
        TierUnavailable: the page cannot be read.
    """
    raw = fetch(address, "/get_segments_detail", seconds)
    try:
        found = json.loads(raw)["segments"]
        return Segments(
            segments=len(found),
            used_bytes=sum(int(part["allocator_used_bytes"]) for part in found),
            capacity_bytes=sum(int(part["size_bytes"]) for part in found),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise TierUnavailable(f"the master's page http://{address}/get_segments_detail: not as expected") from error
