"""Messages as JSON-able data, and the other way round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp


def struct(values: Mapping[str, Any]) -> Struct:
    """A ``google.protobuf.Struct`` of JSON-able ``values``; tuples become lists."""
    message = Struct()
    message.update(_jsonable(values))
    return message


def plain(message: Message) -> dict[str, Any]:
    """JSON-able data under the proto file's field names.

    Unlike ``MessageToDict``, integers of 64 bits stay numbers and fields with their default value are there;
    an absent ``optional`` field is ``None``, of a ``oneof`` only the field that is set appears, an enum's value
    is the last part of its name in lower case, a time is text in RFC 3339, and what JSON has no number for
    (infinity, NaN) is ``None``.
    """
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        oneof = field.containing_oneof
        if field.is_repeated:
            values[field.name] = [_plain_value(field, item) for item in value]
        elif not field.has_presence or message.HasField(field.name):
            values[field.name] = _plain_value(field, value)
        elif oneof is None or len(oneof.fields) == 1:
            values[field.name] = None
    return values


def _plain_value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        if isinstance(value, Timestamp):
            return value.ToJsonString()
        return _whole(MessageToDict(value)) if isinstance(value, Struct) else plain(value)
    if field.enum_type is not None:
        named = field.enum_type.values_by_number.get(value)
        return value if named is None else named.name.removeprefix(_enum_prefix(field.enum_type.name)).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _whole(value: Any) -> Any:
    """The same data with whole numbers as ints: a ``Struct`` knows only floats."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _enum_prefix(name: str) -> str:
    """``FinishReason`` → ``FINISH_REASON_``."""
    return "".join(f"_{c}" if c.isupper() else c.upper() for c in name).lstrip("_") + "_"


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
