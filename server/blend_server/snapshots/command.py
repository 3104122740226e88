"""The command ``blend-snapshot``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from blend.errors import BlendError, InvalidInput, NotFound
from blend_server.client.show import size as size_of
from blend_server.snapshots.creating import create
from blend_server.snapshots.manifest import Manifest
from blend_server.snapshots.restoring import inspect, restore

_EPILOG = """\
examples:
  blend-snapshot create ~/.cache/blend/server monday.blend.tar
  blend-snapshot create /srv/blend monday.blend.tar --with-kv
  blend-snapshot show monday.blend.tar --json
  blend-snapshot restore monday.blend.tar /srv/blend-restored

A snapshot holds all texts of all tenants, and the secret that keys the names of stored KV: keep it as you keep those.
Exit status: 0 done, 1 a file is damaged or cannot be read or written, 2 wrong arguments, 130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``blend-snapshot`` with ``argv`` (default: the process's arguments); return the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        manifest: Manifest = arguments.run(arguments)
    except (InvalidInput, NotFound) as error:
        sys.stderr.write(f"blend-snapshot: {error}\n")
        return 2
    except BlendError as error:
        sys.stderr.write(f"blend-snapshot: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    shown = json.dumps(manifest.plain()) if arguments.json else _text(manifest)
    sys.stdout.write(f"{shown}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "blend-snapshot",
        description="Saves the data directory of a server, running or not, in one file, and makes a new one of that.",
        epilog=_EPILOG,
        formatter_class=layout,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], Manifest], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        made.add_argument("--json", action="store_true", help="print what the snapshot holds as JSON")
        made.set_defaults(run=run)
        return made

    making = command("create", _create, "save a data directory; a server may be using it")
    making.add_argument("directory", metavar="DIR", type=Path, help="the data directory")
    making.add_argument("file", metavar="FILE", type=Path, help="the snapshot, which must not be there yet")
    making.add_argument("--with-kv", action="store_true", help="save the documents' stored KV, too (may be large)")
    making.add_argument("--store", metavar="DIR", type=Path, help="the store's directory (default: DIR/store)")
    showing = command("show", lambda found: inspect(found.file), "show what a snapshot holds, without checking it")
    showing.add_argument("file", metavar="FILE", type=Path, help="the snapshot")
    back = command("restore", _restore, "check a snapshot and make a data directory of it")
    back.add_argument("file", metavar="FILE", type=Path, help="the snapshot")
    back.add_argument("directory", metavar="DIR", type=Path, help="a directory that is missing or empty")
    back.add_argument("--without-kv", action="store_true", help="leave stored KV out; it is computed when it is needed")
    return parser


def _create(arguments: argparse.Namespace) -> Manifest:
    return create(arguments.directory, arguments.file, store=arguments.store, kv=arguments.with_kv)


def _restore(arguments: argparse.Namespace) -> Manifest:
    return restore(arguments.file, arguments.directory, kv=not arguments.without_kv)


def _text(manifest: Manifest) -> str:
    lines = [f"made {manifest.created} by blend {manifest.blend}"]
    for name, size in manifest.tenants.items():
        lines.append(f"tenant {name}: {size.documents} documents, {size.chunks} chunks, {size_of(size.nbytes)} of text")
    kv = manifest.kv
    lines.append("no KV" if kv is None else f"KV: {kv.objects} objects, {size_of(kv.nbytes)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
