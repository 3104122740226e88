"""The command ``blend-client``."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from blend.errors import BlendError, InvalidInput
from blend_server.client import asking, connection, files, show
from blend_server.client.api import Client
from blend_server.client.failures import ServiceError
from blend_server.client.messages import Document
from blend_server.plain import plain
from blend_server.proto.blend.v1 import blend_pb2 as pb

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_UNAVAILABLE = 4
EXIT_DENIED = 5
EXIT_INTERRUPTED = 130

_EXITS = {
    "INVALID_ARGUMENT": EXIT_USAGE,
    "NOT_FOUND": EXIT_NOT_FOUND,
    "UNAVAILABLE": EXIT_UNAVAILABLE,
    "RESOURCE_EXHAUSTED": EXIT_UNAVAILABLE,
    "DEADLINE_EXCEEDED": EXIT_UNAVAILABLE,
    "UNAUTHENTICATED": EXIT_DENIED,
    "PERMISSION_DENIED": EXIT_DENIED,
}

_EPILOG = """\
examples:
  blend-client ingest docs/ notes.txt
  blend-client ask "When was the lighthouse built?"
  blend-client ask "When was the lighthouse built?" --method query --ratio 0.15 --compare-full
  blend-client ask "When was the lighthouse built?" --html answer.html
  blend-client documents --json
  blend-client delete docs/old.md
  blend-client stats --address 127.0.0.1:50061
  blend-client stats --address blend.example:50061 --ca ca.pem --token-file ~/.blend-token

exit status:
  0 done; 1 failed (with ingest: some documents); 2 wrong argument; 3 no such document, or none at all;
  4 the server cannot be reached or is busy; 5 the token or certificate is not valid, or does not allow that;
  130 interrupted

environment:
  BLEND_TOKEN  the token, where there is no --token-file
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``blend-client`` with ``argv`` (default: the process's arguments); returns the exit status."""
    arguments = _parser().parse_args(argv)
    out, err = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        with connection.connect(arguments) as client:
            status: int = arguments.run(client, arguments, out, err)
            sys.stdout.flush()
            return status
    except ServiceError as error:
        return _refused(error, arguments.address, err)
    except BlendError as error:
        _complain(err, str(error))
        return EXIT_USAGE if isinstance(error, InvalidInput) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone; nothing is left to say, at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _refused(error: ServiceError, address: str, err: Console) -> int:
    if error.code == "UNAVAILABLE" and not error.request_id:
        _complain(
            err,
            f"cannot reach a server at {address} ({error}); start blend-server, or give its --address,"
            " or --tls / --ca if it serves TLS",
        )
    else:
        _complain(err, f"{error} [{error.code}]")
    return _EXITS.get(error.code, EXIT_FAILED)


def _complain(err: Console, message: str) -> None:
    err.print(Text.assemble(("blend-client: ", "bold red"), show.safe(message)))


# -------------------------------------------------------------------------------------------------- commands


def _ingest(client: Client, arguments: argparse.Namespace, out: Console, err: Console) -> int:
    paths = files.find(arguments.paths)
    if not paths:
        _complain(err, f"no {', '.join(files.SUFFIXES)} files in {', '.join(arguments.paths)}")
        return EXIT_USAGE
    limit = client.stats().limits.max_document_bytes
    started = perf_counter()
    with _Ingestion(len(paths), out, err, as_json=arguments.json) as shown:
        try:
            for progress in client.ingest(_readable(paths, limit, shown.unreadable)):
                shown.progress(progress)
        except KeyboardInterrupt:
            _complain(err, f"interrupted; {shown.outcomes['stored']} of {show.counted(len(paths), 'document')} stored")
            return EXIT_INTERRUPTED
    if not arguments.json:
        if shown.chunks:
            out.print(show.reuse(shown.chunks["reused"], shown.chunks["computed"]))
        counts = ", ".join(f"{shown.outcomes[o]} {o}" for o in ("stored", "unchanged", "failed") if shown.outcomes[o])
        out.print(f"{counts or 'nothing to do'} in {perf_counter() - started:.1f} s")
    return EXIT_FAILED if shown.outcomes["failed"] else 0


def _readable(paths: Sequence[str], limit: int, unreadable: Callable[[str, BlendError], None]) -> Iterator[Document]:
    """The documents in those files that can be read; the others are reported."""
    for path in paths:
        try:
            document = files.read(path, limit)
        except BlendError as error:
            unreadable(path, error)
            continue
        yield document


class _Ingestion:
    """Shows how documents get on: a bar for all of them, a line for each one that ends. Thread-safe."""

    def __init__(self, total: int, out: Console, err: Console, *, as_json: bool) -> None:
        self.outcomes: Counter[str] = Counter()
        self.chunks: Counter[str] = Counter()
        # A line for the bar's own terminal goes through the bar, which then stays below it.
        self._out, self._err, self._json = err if out.is_terminal and err.is_terminal else out, err, as_json
        self._lock = threading.Lock()
        self._bar = Progress(
            TextColumn("{task.fields[doing]}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=err,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not err.is_terminal,
        )
        self._all: TaskID = self._bar.add_task("", total=total, doing="documents")
        self._one: TaskID = self._bar.add_task("", total=None, doing="", visible=False)

    def __enter__(self) -> _Ingestion:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def unreadable(self, path: str, error: BlendError) -> None:
        """Take note of a file that cannot be sent."""
        name = path.encode("utf-8", "replace").decode("utf-8")
        self._end(name, "failed", {"document_id": name, "failed": {"code": "INVALID_ARGUMENT", "message": str(error)}})

    def progress(self, progress: pb.IngestProgress) -> None:
        """Take note of a document's progress."""
        name, stage = progress.document_id, progress.WhichOneof("stage") or ""
        if stage in ("stored", "unchanged", "failed"):
            values = plain(progress)
            del values["index"]
            self._end(name, stage, values)
        elif stage == "computed":
            done, total = progress.computed.done, progress.computed.total
            self._bar.update(self._one, doing=show.safe(name), completed=done, total=total, visible=True)
        else:
            self._bar.update(self._one, doing=show.safe(name), completed=0, total=None, visible=True)

    def _end(self, name: str, outcome: str, values: dict[str, Any]) -> None:
        with self._lock:
            self.outcomes[outcome] += 1
            for source in ("reused", "computed") if outcome != "failed" else ():
                self.chunks[source] += values[outcome][f"{source}_chunks"]
            self._bar.update(self._all, advance=1)
            self._bar.update(self._one, visible=False)
            if self._json:
                show.as_json(self._out, values)
            elif outcome == "failed":
                self._err.print(Text.assemble(("failed", "red"), f"     {show.safe(name)}: ", _why(values)))
            else:
                self._out.print(Text(f"{outcome:<9}  {show.safe(name)} ({_chunks(outcome, values[outcome])})"))


def _chunks(outcome: str, counts: dict[str, int]) -> str:
    """How many chunks there are, and how many were not what one would expect of the outcome."""
    odd = "reused" if outcome == "stored" else "computed"
    some = f", {counts[f'{odd}_chunks']} {odd}" if counts[f"{odd}_chunks"] else ""
    return show.counted(counts["chunks"], "chunk") + some


def _why(values: dict[str, Any]) -> str:
    return show.safe(values["failed"]["message"])


def _documents(client: Client, arguments: argparse.Namespace, out: Console, err: Console) -> int:
    count = 0
    for document in client.documents():
        count += 1
        if arguments.json:
            show.as_json(out, plain(document))
        else:
            figures = f"{show.counted(document.chunks, 'chunk')}, {show.size(document.content_bytes)}"
            out.print(Text.assemble(show.safe(document.id), (f"  {show.safe(document.title)}  {figures}", "dim")))
    if not count and not arguments.json:
        err.print("no documents")
    return 0


def _delete(client: Client, arguments: argparse.Namespace, out: Console, err: Console) -> int:
    status = 0
    for name in arguments.ids:
        try:
            dropped = client.delete(name)
        except ServiceError as error:
            if error.code != "NOT_FOUND":
                raise
            _complain(err, str(error))
            status = EXIT_NOT_FOUND
            continue
        except InvalidInput as error:
            _complain(err, str(error))
            status = status or EXIT_USAGE
            continue
        if arguments.json:
            show.as_json(out, {"id": name, "dropped_chunks": dropped})
        else:
            out.print(Text(f"deleted    {show.safe(name)} ({show.counted(dropped, 'chunk')} dropped)"))
    return status


def _stats(client: Client, arguments: argparse.Namespace, out: Console, err: Console) -> int:
    found = client.stats()
    if arguments.json:
        show.as_json(out, plain(found))
    else:
        show.stats(out, found)
    return 0


def _reset_quality(client: Client, arguments: argparse.Namespace, out: Console, err: Console) -> int:
    found = client.reset_quality()
    if arguments.json:
        show.as_json(out, plain(found))
    elif found.was_stopped:
        out.print(Text(f"auto blends again; it was stopped on {show.safe(found.since)}: {show.safe(found.reason)}"))
    else:
        out.print("auto was not stopped")
    return 0


# ---------------------------------------------------------------------------------------------------- parser


def _parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "blend-client",
        description="Puts documents into a blend server and asks it questions.",
        epilog=_EPILOG,
        formatter_class=layout,
    )
    _add_common(parser, **connection.DEFAULTS, json=False)
    # After the command the same options are taken, too; they must not undo with a default what came before it.
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    _add_common(common)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[..., int], summary: str, example: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"example:\n  {example}",
            parents=[common],
            formatter_class=layout,
        )
        added.set_defaults(run=run)
        return added

    ingest = command("ingest", _ingest, "send text and Markdown files", "blend-client ingest docs/ notes.txt")
    ingest.add_argument(
        "paths",
        nargs="+",
        metavar="FILE",
        help=f"a file, or a directory whose {', '.join(files.SUFFIXES)} files are sent, hidden files and directories"
        " in it left out; the path as given is the document's id, the first heading or the file's name its title",
    )
    asking.add_flags(
        command("ask", asking.ask, "ask a question", 'blend-client ask "Who runs the ferry?" --compare-full')
    )
    command("documents", _documents, "list the documents", "blend-client documents --json")
    delete = command("delete", _delete, "delete documents", "blend-client delete docs/old.md")
    delete.add_argument("ids", nargs="+", metavar="ID", help="a document's id, as `documents` shows it")
    command("stats", _stats, "show the server's figures", "blend-client stats --json")
    again = "let auto blend again after its quality stopped it"
    command("reset-quality", _reset_quality, again, "blend-client reset-quality")
    return parser


def _add_common(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    connection.add_flags(parser)
    parser.add_argument(
        "--json", action="store_true", help="print JSON: one object, or one a line, with the protocol's field names"
    )
    parser.set_defaults(**defaults)
