"""Hostile values in every field that the protocol has, found in its descriptors, so that new ones are tried, too."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from blend.config import RagConfig
from blend_server.client import Client, Document
from blend_server.interceptors import ERROR_KEY, FIELD_KEY
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.server import SERVICE_NAME, BlendServer
from tests.server.conftest import config

KiB = 1 << 10
MOST = 256 * KiB
"""Largest message of the server here."""
METHODS: dict[str, MethodDescriptor] = dict(pb.DESCRIPTOR.services_by_name["BlendService"].methods_by_name)

QUESTION = {"question": "When was the lighthouse built?"}
SANE: dict[str, list[dict[str, Any]]] = {
    "Document": [{"id": "hostile", "title": "A title", "content": b"The mill has two wheels."}],
    "RetrieveRequest": [QUESTION],
    "AnswerRequest": [
        {**QUESTION, "max_new_tokens": 2},
        {**QUESTION, "max_new_tokens": 2, "plan": pb.Plan(method="query", ratio=0.5)},
        {**QUESTION, "max_new_tokens": 4, "temperature": 1.0, "seed": 3, "compare_full": True, "want_positions": True},
    ],
    "GetDocumentRequest": [{"id": "light"}],
    "DeleteDocumentRequest": [{"id": "hostile"}],
}
"""What calls are served for; every other field is absent there."""

CALLS = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"}
"""What may become of a call, however hostile. RESOURCE_EXHAUSTED: the message is larger than the server takes."""

NO_FIELD = {"message", "prompt with room for its answer"}
"""What is to blame where no field is: bytes that are no message, and fields that are too much together."""

ALIASES = {"document id": "id", "text": "content"}

Steps = tuple[FieldDescriptor, ...]
Change = tuple[Steps, Any]
"""The path of a field through its messages, and the value that it gets."""


class Told(NamedTuple):
    """What a client is told in the end."""

    code: str
    field: str | None
    error: str | None
    message: str
    replies: list[bytes]


# --------------------------------------------------------------------------------------------- hostile values

INTEGERS = st.sampled_from([0, -1, 1, 2, 3, 1001, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)])
FLOATS = st.sampled_from([0.0, -0.0, 1.0, 0.5, -1.0, 1e-300, 1e300, -1e300, 101.0, math.nan, math.inf, -math.inf])
CHARACTERS = st.characters(codec="utf-8")
TEXTS = st.one_of(
    st.sampled_from(
        ["", " \n\t", "\0", "a\0b", "\x1b[2J\r\n", "\u202e\u200b\ufeff", "🦀" * 300, "<|end|><|start|>", "x" * 9]
    ),
    st.sampled_from(["../../etc/passwd", "%00%ff", "' OR 1=1 --", "auto", "psychic", "oracle", "query"]),
    st.sampled_from([9 * KiB, 70 * KiB]).map(lambda size: "why? " * (size // 5)),
    st.text(CHARACTERS, max_size=40),
)
DATA = st.one_of(
    st.binary(max_size=64), st.sampled_from([b"", b"\xff\xfe", b"\xef\xbb\xbf", b"x" * 9 * KiB]), TEXTS.map(str.encode)
)


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Hostile values of one entry of a field."""
    kind = FieldDescriptor
    if field.cpp_type in (kind.CPPTYPE_FLOAT, kind.CPPTYPE_DOUBLE):
        return FLOATS
    if field.cpp_type == kind.CPPTYPE_BOOL:
        return st.booleans()
    if field.cpp_type == kind.CPPTYPE_STRING:
        return DATA if field.type == kind.TYPE_BYTES else TEXTS
    if field.cpp_type == kind.CPPTYPE_ENUM:
        return st.sampled_from([*(v.number for v in field.enum_type.values), 99, -1, 2**31 - 1, -(2**31)])
    bits = 32 if field.cpp_type in (kind.CPPTYPE_INT32, kind.CPPTYPE_UINT32) else 64
    low = 0 if field.cpp_type in (kind.CPPTYPE_UINT32, kind.CPPTYPE_UINT64) else -(2 ** (bits - 1))
    return st.one_of(INTEGERS, st.integers(low, low + 2**bits - 1)).map(lambda n: min(max(n, low), low + 2**bits - 1))


def changes(message: Descriptor, path: Steps = ()) -> Iterator[tuple[Steps, st.SearchStrategy[Change]]]:
    """Every field of a message and of those in it, with its hostile values."""
    for field in message.fields:
        here = (*path, field)
        if field.message_type is None:
            one = values(field)
            many = st.one_of(st.lists(one, max_size=20), one.map(lambda value: [value] * 5000))
            yield here, st.tuples(st.just(here), many if field.is_repeated else one)
        else:
            assert not field.is_repeated, "no request has a list of messages; this has to learn how to make one"
            yield here, st.just((here, None))  # there, and empty
            yield from changes(field.message_type, here)


FIELDS: dict[str, st.SearchStrategy[Change]] = {
    ".".join((name, *(field.name for field in path))): change
    for name, method in METHODS.items()
    for path, change in changes(method.input_type)
}
"""Every field of every request, as ``Rpc.field.field``."""


def applied(message: Message, change: Change) -> None:
    """Give a field of a message its value."""
    path, value = change
    for step in path[:-1]:
        message = getattr(message, step.name)
    last = path[-1]
    if value is None:
        getattr(message, last.name).SetInParent()
    elif last.is_repeated:
        message.ClearField(last.name)
        getattr(message, last.name).extend(value)
    else:
        setattr(message, last.name, value)


def varint(number: int) -> bytes:
    low = number & 0x7F
    return bytes([low]) if number < 0x80 else bytes([low | 0x80]) + varint(number >> 7)


RAW: st.SearchStrategy[Callable[[bytes], bytes]] = st.one_of(
    st.floats(0, 1).map(lambda share: lambda data: data[: int(share * len(data))]),  # cut off
    st.tuples(st.floats(0, 0.999), st.binary(min_size=1, max_size=8)).map(
        lambda at: lambda data: data[: int(at[0] * len(data))] + at[1] + data[int(at[0] * len(data)) :]
    ),
    # Fields that nobody knows: a number, a text, one of each kind of wire.
    st.sampled_from([1000, 2**29 - 1]).map(lambda n: lambda data: data + varint(n << 3) + varint(7)),
    st.binary(max_size=40).map(lambda text: lambda data: data + varint(999 << 3 | 2) + varint(len(text)) + text),
    st.integers(0, 7).map(lambda wire: lambda data: data + varint(999 << 3 | wire) + struct.pack("<d", 1.0)),
    # A known field's number with another kind of wire, or a length beyond the end; groups that never end.
    st.integers(1, 15).flatmap(lambda n: st.integers(0, 5).map(lambda wire: lambda data: data + varint(n << 3 | wire))),
    st.integers(1, 15).map(lambda n: lambda data: data + varint(n << 3 | 2) + varint(2**31 - 1)),
    st.just(lambda data: b"\x0b" * 5000 + data),
    st.binary(max_size=200).map(lambda other: lambda data: other),
    st.just(lambda data: data + varint(998 << 3 | 2) + varint(300 * KiB) + bytes(300 * KiB)),  # more than is taken
)
"""What may be done to the bytes of a message."""


def sane(message: Descriptor) -> st.SearchStrategy[Message]:
    """Messages that are served."""
    return st.sampled_from(SANE.get(message.name, [{}])).map(lambda fields: GetMessageClass(message)(**fields))


def field_names(message: Descriptor, prefix: str = "") -> Iterator[str]:
    """The names that ``blend-field`` may have for a message."""
    for field in message.fields:
        yield prefix + field.name
        if field.message_type is not None:
            yield from field_names(field.message_type, f"{prefix}{field.name}.")


# ---------------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendServer]:
    """A server that takes small documents and messages only, so that what is taken costs little."""
    rag = RagConfig(chunk_tokens=128, neighbours=0, top_k=2, max_new_tokens=2, max_document_bytes=8 * KiB)
    directory = tmp_path_factory.mktemp("fuzzed")
    with BlendServer(config(tiny_model_dir, directory, rag=rag, max_message_bytes=MOST)) as made:
        with Client(made.address) as client:
            list(client.ingest([Document("light", "The lighthouse was built in 1888.", "Lighthouse")]))
        yield made


@pytest.fixture(scope="module")
def channel(server: BlendServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)]) as made:
        yield made


def told(channel: grpc.Channel, method: MethodDescriptor, data: bytes, **options: Any) -> Told:
    """Send bytes to an rpc, and return what came of it."""
    path = f"/{SERVICE_NAME}/{method.name}"
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    replies: list[bytes] = []
    try:
        reply = getattr(channel, kind)(path)(iter([data]) if method.client_streaming else data, timeout=60, **options)
        replies.extend(reply if method.server_streaming else [reply])
    except grpc.RpcError as error:
        trailing = dict(error.trailing_metadata() or ())
        return Told(error.code().name, trailing.get(FIELD_KEY), trailing.get(ERROR_KEY), error.details() or "", replies)
    return Told("OK", None, None, "", replies)


def served(server: BlendServer) -> None:
    """The server answers as before, and holds nothing of what it refused."""
    assert not server.failed.is_set()
    with Client(server.address) as client:
        assert client.ask("When was the lighthouse built?", max_new_tokens=2).report.tokens > 0
        assert client.stats().queue.requests == 0


def tried(channel: grpc.Channel, name: str, data: bytes) -> None:
    """Send bytes to an rpc: it is served, or refused in a way that says what was wrong."""
    method = METHODS[name]
    names = {*field_names(method.input_type), *NO_FIELD}
    got = told(channel, method, data)
    assert got.code in CALLS, got
    if got.code == "INVALID_ARGUMENT":
        assert got.field in names, got
        assert got.message.startswith(f"{got.field}: got "), got
        assert "allowed" in got.message, got
    if got.code == "RESOURCE_EXHAUSTED":
        assert len(data) > MOST, got
    for reply in got.replies:
        answered = GetMessageClass(method.output_type).FromString(reply)
        if isinstance(answered, pb.IngestProgress) and answered.HasField("failed"):
            assert answered.failed.code == "INVALID_ARGUMENT", answered
            blamed = answered.failed.message.partition(":")[0]
            assert ALIASES.get(blamed, blamed) in names, answered


def hostile(examples: int) -> settings:
    """So many examples, however long each takes."""
    phases = [Phase.explicit, Phase.generate, Phase.shrink]
    return settings(max_examples=examples, deadline=None, phases=phases, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("path", FIELDS)
def test_no_value_of_a_field_is_a_fault(server: BlendServer, channel: grpc.Channel, path: str) -> None:
    name, change = path.partition(".")[0], FIELDS[path]

    @hostile(20)
    @given(message=sane(METHODS[name].input_type), change=change)
    def alone(message: Message, change: Change) -> None:
        applied(message, change)
        tried(channel, name, message.SerializeToString())

    alone()
    served(server)


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].input_type.fields])
def test_no_values_of_several_fields_are_a_fault(server: BlendServer, channel: grpc.Channel, name: str) -> None:
    fields = [change for path, change in FIELDS.items() if path.startswith(f"{name}.")]

    @hostile(15)
    @given(message=sane(METHODS[name].input_type), made=st.lists(st.one_of(fields), min_size=2, max_size=6))
    def together(message: Message, made: list[Change]) -> None:
        for change in made:
            applied(message, change)
        tried(channel, name, message.SerializeToString())

    together()
    served(server)


@pytest.mark.parametrize("name", METHODS)
def test_no_bytes_are_a_fault(server: BlendServer, channel: grpc.Channel, name: str) -> None:
    @hostile(30)
    @given(message=sane(METHODS[name].input_type), change=RAW)
    def sent(message: Message, change: Callable[[bytes], bytes]) -> None:
        tried(channel, name, change(message.SerializeToString()))

    sent()
    served(server)
