"""The committed code is what the proto file says."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

import blend_server.proto
from blend_server.proto.blend.v1 import blend_pb2

ROOT = Path(blend_server.proto.__file__).parent


def test_the_generated_messages_are_those_of_the_proto_file(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc", reason="needs grpcio-tools")
    out = tmp_path / "set.bin"
    arguments = [f"--proto_path={ROOT}", f"--proto_path={Path(protoc.__file__).parent / '_proto'}"]
    assert protoc.main(["protoc", *arguments, f"--descriptor_set_out={out}", "blend/v1/blend.proto"]) == 0

    fresh = FileDescriptorSet.FromString(out.read_bytes()).file[0]
    committed = FileDescriptorProto()
    blend_pb2.DESCRIPTOR.CopyToProto(committed)
    for field in [f for message in fresh.message_type for f in message.field]:
        field.ClearField("json_name")
    for field in [f for message in committed.message_type for f in message.field]:
        field.ClearField("json_name")

    assert [m.name for m in committed.message_type] == [m.name for m in fresh.message_type]
    assert list(committed.service) == list(fresh.service)
    for mine, theirs in zip(committed.message_type, fresh.message_type, strict=True):
        assert list(mine.field) == list(theirs.field), mine.name


def test_the_protocol_has_its_canonical_name() -> None:
    assert blend_pb2.DESCRIPTOR.name == "blend/v1/blend.proto"
    assert blend_pb2.DESCRIPTOR.package == "blend.v1"
