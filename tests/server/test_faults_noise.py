"""Bytes on the port that are no calls, from many connections at once: the next real call is answered."""

from __future__ import annotations

import random
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from blend.config import SecurityConfig, TlsConfig
from blend.types import Plan
from blend_server.client import Client, Document, Tls
from blend_server.server import BlendServer
from tests.server.certificates import Authority

LIGHT = Document("light", "The lighthouse was built in 1888.", "Lighthouse")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NOISE = random.Random(7)
SETTINGS, HEADERS, DATA, PING, CONTINUATION = 4, 1, 0, 6, 9


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """A frame of HTTP/2, which may lie about its length."""
    return (
        struct.pack(">I", len(payload) if length is None else length)[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )


HELLO = PREFACE + frame(SETTINGS, 0, 0, b"")
SENT: dict[str, Callable[[], bytes]] = {
    "10,000 random bytes": lambda: NOISE.randbytes(10_000),
    "nothing": lambda: b"",
    "another protocol": lambda: b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "a greeting of TLS": lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + NOISE.randbytes(300),
    "a preface, then noise": lambda: PREFACE + NOISE.randbytes(10_000),
    "settings, then noise": lambda: HELLO + NOISE.randbytes(10_000),
    "half a preface": lambda: PREFACE[:11],
    "frames of random kinds": lambda: (
        HELLO
        + b"".join(
            frame(NOISE.randrange(12), NOISE.randrange(256), NOISE.randrange(9), NOISE.randbytes(40)) for _ in range(99)
        )
    ),
    "a frame without its end": lambda: HELLO + frame(HEADERS, 4, 1, b"\x82", 2**24 - 1),
    "headers that are no headers": lambda: HELLO + frame(HEADERS, 5, 1, NOISE.randbytes(2000)),
    "headers without an end": lambda: (
        HELLO + frame(HEADERS, 0, 1, b"\x82\x86\x84") + frame(CONTINUATION, 0, 1, b"\x00\x01a\x7f" + b"x" * 127) * 500
    ),
    "data of no call": lambda: HELLO + frame(DATA, 1, 7, NOISE.randbytes(5000)),
    "a thousand pings": lambda: HELLO + frame(PING, 0, 0, b"12345678") * 1000,
}


def throw(address: tuple[str, int], data: bytes) -> None:
    """Send bytes, and listen for a moment to what is said to that."""
    with suppress(OSError), socket.create_connection(address, timeout=10) as connection:
        connection.settimeout(0.2)
        connection.sendall(data)
        while connection.recv(1 << 16):
            pass


def became(channel: grpc.Channel, **options: Any) -> str:
    """What became of a call to Retrieve with these options."""
    try:
        channel.unary_unary("/blend.v1.BlendService/Retrieve")(b"\x0a\x05When?", **options)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def place(server: BlendServer) -> tuple[str, int]:
    host, _, port = server.address.rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("what", SENT)
def test_noise_does_no_harm(tiny_server: BlendServer, client: Client, what: str) -> None:
    list(client.ingest([LIGHT]))
    events = client.answer("When was it built?", plan=Plan("query"), max_new_tokens=60)
    next(events)
    data = [SENT[what]() for _ in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: throw(place(tiny_server), one), data))
    *_, last = events  # whoever was being served is served on
    assert last.token_ids  # type: ignore[union-attr]
    with Client(tiny_server.address) as other:
        assert other.ask("When was it built?", max_new_tokens=2).report.tokens > 0
    assert not tiny_server.failed.is_set()


def test_connections_that_say_nothing_keep_nobody_out(tiny_server: BlendServer, client: Client) -> None:
    list(client.ingest([LIGHT]))
    with ExitStack() as stack:
        for count in range(200):
            connection = stack.enter_context(socket.create_connection(place(tiny_server), timeout=10))
            connection.sendall([b"", PREFACE[:5], PREFACE, HELLO][count % 4])
        with Client(tiny_server.address) as other:
            assert other.ask("When was it built?", max_new_tokens=2).report.tokens > 0
    with Client(tiny_server.address) as other:
        assert other.ask("When was it built?", max_new_tokens=2).report.tokens > 0


@pytest.mark.parametrize("timeout", [1e-9, 1e-3, 1e8])
def test_deadlines_of_any_length(tiny_server: BlendServer, client: Client, timeout: float) -> None:
    list(client.ingest([LIGHT]))
    with grpc.insecure_channel(tiny_server.address) as channel:
        assert became(channel, timeout=timeout) in ("OK", "DEADLINE_EXCEEDED")
    assert client.ask("When was it built?", max_new_tokens=2).report.tokens > 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("x-request-id", "x" * 4000),
        ("x-request-id", " ~ "),
        ("x-request-id-bin", b"\0\xff"),
        ("authorization", "Bearer"),
        ("authorization", "x" * 4000),
        ("grpc-encoding", "zstd"),
        ("content-type", "text/html"),
        ("traceparent", "00-zz-zz-zz"),
        ("traceparent", "00-" + "f" * 4000),
        ("tracestate", "=,=;" * 500),
        ("baggage", "a=%ff;b," * 200),
    ],
)
def test_metadata_of_any_kind(tiny_server: BlendServer, client: Client, key: str, value: Any) -> None:
    list(client.ingest([LIGHT]))
    with grpc.insecure_channel(tiny_server.address) as channel:
        assert became(channel, metadata=[(key, value)], timeout=30) not in ("INTERNAL", "DEADLINE_EXCEEDED")
    assert client.ask("When was it built?", max_new_tokens=2).report.tokens > 0


@pytest.fixture
def encrypted(tmp_path: Path, start: Callable[..., BlendServer]) -> Iterator[tuple[BlendServer, Client]]:
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.sign("server", "localhost")
    server = start(address="localhost:0", security=SecurityConfig(tls=TlsConfig(certificate, key)))
    with Client(server.address, tls=Tls(authority.path)) as client:
        yield server, client


def test_handshakes_that_stop_half_way_keep_nobody_out(encrypted: tuple[BlendServer, Client]) -> None:
    server, client = encrypted
    list(client.ingest([LIGHT]))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    hello = outgoing.read()
    with ExitStack() as stack:
        for count in range(100):
            connection = stack.enter_context(closing(socket.create_connection(place(server), timeout=10)))
            connection.sendall([b"", hello[:40], hello, hello + NOISE.randbytes(10_000), PREFACE][count % 5])
        threads = [
            threading.Thread(target=throw, args=(place(server), hello[:20] + NOISE.randbytes(500))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        assert client.ask("When was it built?", max_new_tokens=2).report.tokens > 0
        for thread in threads:
            thread.join()
    assert client.ask("When was it built?", max_new_tokens=2).report.tokens > 0
