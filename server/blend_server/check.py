"""Whether a server or a router serves, for a container's health check: ``python -m blend_server.check ADDRESS``.

With ``--ca`` the connection is encrypted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blend.errors import InvalidInput
from blend_server.client.credentials import Tls, channel_credentials
from blend_server.hosting import SERVICE_NAME

_SECONDS = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Ask once, for at most 5 seconds; returns 0 where it serves, else 1 and a line on standard error."""
    parser = argparse.ArgumentParser(
        "python -m blend_server.check",
        description="Asks once whether a server or a router serves, for a container's health check.",
        epilog="Exit status: 0 it serves, 1 it does not, or cannot be reached, 2 wrong arguments.",
    )
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="whose signature its certificate must have, in PEM")
    arguments = parser.parse_args(argv)
    try:
        if arguments.ca is None:
            channel = grpc.insecure_channel(arguments.address)
        else:
            channel = grpc.secure_channel(arguments.address, channel_credentials(Tls(arguments.ca)))
        with channel:
            request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_SECONDS).status
    except grpc.RpcError as error:
        sys.stderr.write(f"{arguments.address}: {error.code().name}: {error.details()}\n")
        return 1
    except InvalidInput as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if status != health_pb2.HealthCheckResponse.SERVING:
        sys.stderr.write(f"{arguments.address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
