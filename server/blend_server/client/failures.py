"""What goes wrong with a call, as one error."""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status as RpcStatus

from blend.errors import BlendError

# What grpc.aio says where a stream ends while it sends on it, whatever the server ended it with.
_LOST = "Internal error from Core"


class ServiceError(BlendError):
    """The service refused or failed a call, or could not be reached.

    ``code`` is the name of the gRPC status code, ``kind`` the server's error type (such as ``InvalidPlan``) and
    ``field`` the field to blame (both empty where unknown), ``request_id`` the call's id in the server's log, and
    ``retry_seconds`` is after how long the server thinks it worth while to try again, where it says so.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        kind: str = "",
        field: str = "",
        request_id: str = "",
        retry_seconds: float | None = None,
    ) -> None:
        self.code = code
        self.message = message
        self.kind = kind
        self.field = field
        self.request_id = request_id
        self.retry_seconds = retry_seconds
        super().__init__(message)


def service_error(error: grpc.RpcError) -> ServiceError:
    """Return what gRPC's error says."""
    metadata = dict(error.trailing_metadata() or ())
    if error.code() is grpc.StatusCode.INTERNAL and error.details() == _LOST:
        return ServiceError(grpc.StatusCode.UNAVAILABLE.name, "the stream ended while a message was being sent")
    return ServiceError(
        error.code().name,
        error.details() or error.code().name,
        kind=metadata.get("blend-error", ""),
        field=metadata.get("blend-field", ""),
        request_id=metadata.get("x-request-id", ""),
        retry_seconds=_retry_seconds(metadata.get("grpc-status-details-bin")),
    )


def _retry_seconds(details: bytes | None) -> float | None:
    """What a ``google.rpc.Status`` says of trying again."""
    status, retry = RpcStatus(), RetryInfo()
    try:
        status.ParseFromString(details or b"")
        found = any(detail.Unpack(retry) for detail in status.details)
    except DecodeError:  # another server's, on the way
        return None
    return float(retry.retry_delay.ToMilliseconds() / 1e3) if found else None
