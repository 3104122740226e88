"""What an operator sees of the gRPC service: metrics, logs, traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from blend.config.checks import is_listening, one_of
from blend.errors import InvalidConfig

LogFormat: TypeAlias = Literal["text", "json"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

LOG_FORMATS: tuple[str, ...] = get_args(LogFormat)
LOG_LEVELS: tuple[str, ...] = get_args(LogLevel)
_LISTENING = "host:port with a port from 0 to 65535"
_COLLECTOR = "the address of an OTLP/gRPC collector, such as http://127.0.0.1:4317, or https://..."


@dataclass(frozen=True)
class OperationsConfig:
    """What an operator sees.

    Args:
        metrics_address: ``host:port`` of a page of Prometheus metrics over plain HTTP, without authentication; port 0
            takes a free one, ``None`` has no page. It tells of all tenants.
        log_format: ``text`` is a line of ``key=value`` pairs, ``json`` an object a line.
        log_level: the least severe messages that are logged: ``debug``, ``info``, ``warning`` or ``error``.
        traces: where spans are sent: the URL of an OpenTelemetry collector that takes OTLP over gRPC. It needs the
            extra ``blendkv[otel]``; ``None`` makes no spans.

    Raises:
        InvalidConfig: a value is malformed.
    """

    metrics_address: str | None = None
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
    traces: str | None = None

    def __post_init__(self) -> None:
        if self.metrics_address is not None and not is_listening(self.metrics_address):
            raise InvalidConfig("operations.metrics_address", self.metrics_address, _LISTENING)
        one_of("operations.log_format", self.log_format, LOG_FORMATS)
        one_of("operations.log_level", self.log_level, LOG_LEVELS)
        if self.traces is not None and not _is_collector(self.traces):
            raise InvalidConfig("operations.traces", self.traces, _COLLECTOR)


def _is_collector(value: object) -> bool:
    if not isinstance(value, str) or not value.isprintable() or " " in value:
        return False
    scheme, _, rest = value.partition("://")
    return scheme in ("http", "https") and bool(rest.strip("/"))
