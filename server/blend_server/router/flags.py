"""The flags of ``blend-router``, and the settings that they stand for."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from blend.config import ResidencySource, SecurityConfig, TlsConfig
from blend.errors import InvalidConfig, InvalidInput
from blend.sizes import parse_size, show_size
from blend_server.client.credentials import Tls
from blend_server.router.config import EngineAddress, RouterConfig

_EPILOG = """\
examples:
  blend-router --engine a=127.0.0.1:50061 --engine b=127.0.0.1:50062
  blend-router --engine a=10.0.0.7:50061,tcp://10.0.0.7:5557,tcp://10.0.0.7:5558 --engine b=... \\
      --engine-ca ca.pem --access-file access.yaml --tls-cert router.pem --tls-key router.key --address 0.0.0.0:50060

NAME is the engine's --residency-node; what may follow its address is where it publishes (--residency-publish), and
where its last events can be asked for (--residency-replay). Without them an answer goes to the engine with the fewest
under way. SIGTERM and SIGINT stop the router cleanly.
"""
_MOST = (1 << 31) - 1


def config(arguments: argparse.Namespace) -> RouterConfig:
    """The settings that the arguments stand for.

    Raises:
        InvalidConfig: a value is not allowed, or not with the others.
    """
    return RouterConfig(
        engines=tuple(_engine(text) for text in arguments.engine),
        address=arguments.address,
        data_dir=arguments.data_dir,
        lead=arguments.lead,
        journal_bytes=arguments.journal_bytes,
        max_message_bytes=arguments.max_message_bytes,
        drain_seconds=arguments.drain_seconds,
        tls=_engine_tls(arguments),
        security=SecurityConfig(
            tls=_tls(arguments), access_file=arguments.access_file, insecure_listen=arguments.insecure_listen
        ),
    )


def _engine(text: str) -> EngineAddress:
    name, equals, rest = text.partition("=")
    parts = rest.split(",")
    if not equals or len(parts) > 3:
        raise InvalidConfig("--engine", text, "NAME=HOST:PORT[,PUBLISH[,REPLAY]]")
    return EngineAddress(name, parts[0], ResidencySource(*parts[1:]) if len(parts) > 1 else None)


def _engine_tls(arguments: argparse.Namespace) -> Tls | None:
    files = (arguments.engine_ca, arguments.engine_cert, arguments.engine_key)
    if not arguments.engine_tls and all(file is None for file in files):
        return None
    try:
        return Tls(*files)
    except InvalidInput as error:
        raise InvalidConfig("--engine-cert, --engine-key", error.value, error.allowed) from error


def _tls(arguments: argparse.Namespace) -> TlsConfig | None:
    if arguments.tls_cert is None and arguments.tls_key is None:
        return None
    for flag, value in (("--tls-cert", arguments.tls_cert), ("--tls-key", arguments.tls_key)):
        if value is None:
            raise InvalidConfig(flag, None, "a file: encryption needs both --tls-cert and --tls-key")
    return TlsConfig(arguments.tls_cert, arguments.tls_key)


def _refusing(read: Callable[[str], int]) -> Callable[[str], int]:
    """``read``, whose errors the parser shows with the flag's name."""

    def checked(text: str) -> int:
        try:
            return read(text)
        except InvalidInput as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{error.field}: ")) from error

    return checked


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= _MOST):
        raise InvalidInput("count", text, f"a whole number from 0 to {_MOST}")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The command's parser."""
    base = RouterConfig((EngineAddress("a", "127.0.0.1:1"),))
    parser = argparse.ArgumentParser(
        "blend-router",
        description="One address for several blend-servers of one model, which all hold the same documents.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    count, size = _refusing(_count), _refusing(parse_size)
    message = _refusing(lambda text: parse_size(text, _MOST))

    def add(group: argparse._ArgumentGroup, flag: str, default: object, text: str, **options: object) -> None:
        shown = show_size(default) if options.get("metavar") == "SIZE" and isinstance(default, int) else default
        group.add_argument(flag, default=default, help=f"{text} (default: {shown})", **options)  # type: ignore[arg-type]

    serving = parser.add_argument_group("serving")
    add(serving, "--address", base.address, "where to listen; port 0 takes a free one", metavar="HOST:PORT")
    serving.add_argument("--data-dir", metavar="DIR", help=f"the journal (default: {base.path}; $BLEND_CACHE moves it)")
    kept = "documents that are kept for engines which are away"
    add(serving, "--journal-bytes", base.journal_bytes, kept, type=size, metavar="SIZE")
    add(serving, "--max-message-bytes", base.max_message_bytes, "largest gRPC message", type=message, metavar="SIZE")
    add(serving, "--drain-seconds", base.drain_seconds, "time for running calls at a stop", type=count, metavar="N")
    serving.add_argument("--ready-file", metavar="FILE", help="write the bound address here once it listens")
    add(serving, "--log-level", "info", "to stderr", choices=("debug", "info", "warning", "error"))

    engines = parser.add_argument_group("engines")
    engines.add_argument(
        "--engine",
        action="append",
        required=True,
        metavar="NAME=HOST:PORT[,PUBLISH[,REPLAY]]",
        help="an engine, and where it publishes residency events; to be repeated",
    )
    ahead = "answers that an engine may have under way beyond the least busy one, for the sake of what it holds"
    add(engines, "--lead", base.lead, ahead, type=count, metavar="N")
    engines.add_argument("--engine-tls", action="store_true", help="encrypt; the next three flags do so, too")
    signed = "whose signature the engines' certificates must have, in PEM"
    engines.add_argument("--engine-ca", metavar="FILE", help=signed)
    engines.add_argument("--engine-cert", metavar="FILE", help="the router's certificate for the engines, in PEM")
    engines.add_argument("--engine-key", metavar="FILE", help="its private key in PEM")

    security = parser.add_argument_group("who may call")
    security.add_argument("--tls-cert", metavar="FILE", help="the certificate that callers see, in PEM")
    security.add_argument("--tls-key", metavar="FILE", help="its private key in PEM; not readable by others")
    security.add_argument(
        "--access-file",
        metavar="FILE",
        help="that of the engines; callers prove who they are by tokens, which go on to the engines "
        "(default: everyone who reaches the address may do everything)",
    )
    security.add_argument(
        "--insecure-listen",
        action="store_true",
        help="listen beyond this machine even without encryption and an access file",
    )
    return parser
