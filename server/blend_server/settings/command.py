"""The command line of ``blend-server``: its parser and its help."""

from __future__ import annotations

import argparse
from dataclasses import MISSING
from difflib import get_close_matches
from typing import Any, NoReturn

from blend.sizes import show_size
from blend_server.settings.places import PLACES
from blend_server.settings.sources import CONFIG_VARIABLE
from blend_server.settings.table import FLAGS, GROUPS, VARIABLES, Flag
from blend_server.settings.values import listed, stands_for

_DESCRIPTION = f"""\
Serves blend.v1.BlendService over gRPC: documents in, answers from precomputed KV out.

A setting comes from its flag; else from its variable; else from the file of --config; else it has its default.
A variable is {VARIABLES} and the flag's name in capitals, such as {VARIABLES}HOST_BYTES=8GiB; it is true or
false for a flag without a value, and has spaces between the values of a flag that may be repeated. The file is YAML
with the fields of blend.config.ServerConfig as keys, those without a flag too:

  address: 127.0.0.1:50061
  engine:
    model: smollm2-135m
    store: {{host_bytes: 8GiB, disk_bytes: 100GiB, secret_file: ./secret}}

Secrets are in files of their own. --check-config says what is wrong, or which values hold and where each is from.
"""
_EPILOG = """\
examples:
  blend-server
  blend-server --config blend-server.yaml --check-config
  BLEND_CONFIG=blend-server.yaml BLEND_SERVER_HOST_BYTES=8GiB blend-server --log-level debug
  blend-server --address 127.0.0.1:0 --data-dir ./data --ready-file ./address
  blend-server --address 0.0.0.0:50061 --tls-cert server.pem --tls-key server.key --access-file access.yaml
  blend-server --model Qwen/Qwen3-0.6B --dtype bfloat16 --host-bytes 8GiB --disk-bytes 100GiB
  blend-server --engine vllm --dtype bfloat16 --vllm-args '{"enforce_eager": true}'
  (umask 077; head -c 32 /dev/urandom >./secret)   # once; the same file for all servers that share chunks
  blend-server --mooncake 10.0.0.5:50051 --mooncake-segment-bytes 8GiB --secret-file ./secret

Without --tls-cert and --access-file the server neither encrypts nor asks who is calling, and listens on this machine
alone. SIGTERM and SIGINT stop it cleanly; a second one ends it at once.
"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the arguments; the nearest flag is told of one that there is not."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            near = get_close_matches(unknown[0].partition("=")[0], [flag.option for flag in FLAGS], n=1)
            told = f"; {near[0]} is the nearest" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{told}")
        return found

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        said = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
        self.exit(2, f"{self.prog}: {said.removeprefix('argument ')} (see --help)\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. It leaves values as texts, and what is not given out."""
    made = _Parser(
        "blend-server",
        usage="%(prog)s [--config FILE] [--check-config] [flags]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    settings = made.add_argument_group("settings")
    settings.add_argument("--config", metavar="FILE", help=f"settings in YAML (default: ${CONFIG_VARIABLE}, or none)")
    settings.add_argument(
        "--check-config",
        action="store_true",
        help="check all settings and the files that they name, show them with where they are from, and end",
    )
    for title, flags in GROUPS.items():
        group = made.add_argument_group(title)
        for flag in flags:
            _add(group, flag)
    return made


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    place = PLACES[flag.path]
    default = _default(flag)
    text = f"{flag.text} (default: {default})" if default else flag.text
    options: dict[str, Any] = {"dest": flag.name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if bool in place.kinds:
        group.add_argument(flag.option, action=argparse.BooleanOptionalAction, **options)
    else:
        action = "append" if listed(place) is not None else "store"
        group.add_argument(flag.option, action=action, metavar=stands_for(place), **options)


def _default(flag: Flag) -> str | None:
    """What is said of a flag's default."""
    if flag.default is not None:
        return flag.default
    if flag.words is not None:
        return next(word for word, value in flag.words.items() if value is PLACES[flag.path].default)
    place = PLACES[flag.path]
    if place.default is None or place.default is MISSING or place.default is False:
        return None
    return show_size(place.default) if place.size and isinstance(place.default, int) else str(place.default)
