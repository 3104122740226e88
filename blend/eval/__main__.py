"""``blend-eval``: what blended answers lose against full prefill, and what they save."""

from __future__ import annotations

import argparse
import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from types import ModuleType

from rich.console import Console

from blend.errors import BlendError
from blend.eval import commands
from blend.eval.settings import add_flags, build, flags
from blend.names import unknown

_WIDTH = 140  # of tables that go to a file or a pipe


def _commands() -> dict[str, ModuleType]:
    """Return the commands by name: the modules of :mod:`blend.eval.commands`."""
    names = sorted(info.name for info in pkgutil.iter_modules(commands.__path__))
    return {name: import_module(f"{commands.__name__}.{name}") for name in names}


def _parser(known: dict[str, ModuleType]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="blend-eval", description=_plain(__doc__))
    listed = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in known.items():
        command = listed.add_parser(
            name,
            help=module.HELP,
            description=_plain(module.__doc__),
            epilog=f"examples:\n{_indented(module.EXAMPLES)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add_flags(command, module.SETTINGS)
    return parser


def _plain(text: str | None) -> str:
    return (text or "").replace("``", "")


def _indented(text: str) -> str:
    return "".join(f"  {line}\n" if line else "\n" for line in text.splitlines())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0; 1 where a gate is not met; 2 for input that cannot be used; 130 where it was interrupted.
    """
    known = _commands()
    parsed, rest = _parser(known).parse_known_args(argv)
    given = vars(parsed)
    command = given.pop("command")
    module = known[command]
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # whatever the locale: what was measured must not be lost to a sign
    # Names and paths are printed as they are: no markup or emoji in them, no colour for their numbers.
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, markup=False, emoji=False, highlight=False)
    try:
        if rest:
            raise unknown(f"blend-eval {command}", rest[0].partition("=")[0], flags(module.SETTINGS))
        settings = build(module.SETTINGS, given)
        code: int = module.run(settings, console)
    except (BlendError, OSError) as error:
        sys.stderr.write(f"blend-eval: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("blend-eval: interrupted; with --results, the same command goes on from here\n")
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
