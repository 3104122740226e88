"""The flags of ``blend-client`` that say which server, and how to reach it."""

from __future__ import annotations

import argparse
import os
from types import MappingProxyType

from blend.config import ServerConfig
from blend.errors import InvalidInput
from blend_server.client.api import TIMEOUT, Client
from blend_server.client.credentials import Tls, read_token
from blend_server.client.retries import MAX_ATTEMPTS, Retries

DEFAULTS = MappingProxyType(
    {
        "address": ServerConfig.address,
        "timeout": None,
        "retries": Retries.attempts - 1,
        "token_file": None,
        "tls": False,
        "ca": None,
        "cert": None,
        "key": None,
    }
)
"""What the flags are where they are not given."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags, without their defaults."""
    parser.add_argument(
        "--address", metavar="HOST:PORT", help=f"where the server listens (default: {DEFAULTS['address']})"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help=f"how long a call may take with all its tries (default: {TIMEOUT:.0f}; for ask no limit: with one, an"
        " answer that has begun by then is cut off, and another fails); sending documents has no limit",
    )
    parser.add_argument(
        "--retries",
        type=int,
        metavar="N",
        help="how often a call is tried again where the server cannot be reached, or is too busy"
        f" (default: {DEFAULTS['retries']})",
    )
    parser.add_argument("--token-file", metavar="FILE", help="a file with the token (default: $BLEND_TOKEN, if set)")
    parser.add_argument("--tls", action="store_true", help="encrypt the connection; the next three flags do so, too")
    parser.add_argument("--ca", metavar="FILE", help="whose signature the server's certificate must have, in PEM")
    parser.add_argument("--cert", metavar="FILE", help="the client's own certificate in PEM, if the server wants one")
    parser.add_argument("--key", metavar="FILE", help="its private key in PEM")


def connect(arguments: argparse.Namespace) -> Client:
    """A client of the server that the flags name.

    Raises:
        InvalidInput: a flag's value cannot be used.
    """
    token = os.environ.get("BLEND_TOKEN") or None
    if arguments.token_file is not None:
        token = read_token(arguments.token_file)
    if not 0 <= arguments.retries < MAX_ATTEMPTS:
        raise InvalidInput("retries", arguments.retries, f"an integer from 0 to {MAX_ATTEMPTS - 1}")
    timeout = TIMEOUT if arguments.timeout is None else arguments.timeout
    files = (arguments.ca, arguments.cert, arguments.key)
    tls = Tls(*files) if arguments.tls or any(file is not None for file in files) else None
    retries = Retries(attempts=1 + arguments.retries)
    return Client(arguments.address, timeout=timeout, token=token, tls=tls, retries=retries)
