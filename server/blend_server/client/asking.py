"""The command ``blend-client ask``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from blend.errors import InvalidInput
from blend.types import METHODS, Answer, Plan, Token
from blend_server import convert
from blend_server.client import show
from blend_server.client.api import Client
from blend_server.client.failures import ServiceError
from blend_server.client.messages import AnswerEvent
from blend_server.plain import plain
from blend_server.proto.blend.v1 import blend_pb2 as pb


def add_flags(ask: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    ask.add_argument("question", metavar="QUESTION")
    ask.add_argument("-k", type=int, metavar="N", help="how many passages (default: the server's setting)")
    ask.add_argument("--max-new-tokens", type=int, metavar="N", help="longest answer (default: the server's setting)")
    ask.add_argument("--passages", action="store_true", help="show the passages' text")
    ask.add_argument("--order-seed", type=int, metavar="SEED", help="put the passages in the random order of this seed")
    ask.add_argument("--compare-full", action="store_true", help="run a full prefill, too, and compare")
    ask.add_argument("--details", action="store_true", help="print the whole report instead of its line")
    ask.add_argument(
        "--html", metavar="FILE", help="also write a page: each token, each chunk's tier, the time to first token"
    )
    ask.add_argument("--positions", action="store_true", help="with --details or --json, list the recomputed positions")
    plan = ask.add_argument_group("plan")
    plan.add_argument("--method", default="auto", help=f"{', '.join(METHODS)} (default: auto)")
    plan.add_argument("--ratio", type=float, help="share of cached tokens to recompute, 0 to 1, for a named method")
    plan.add_argument("--max-charged", type=float, metavar="RATIO", help="cap on the charged share, 0 to 1")
    plan.add_argument("--max-kl", type=float, metavar="NATS", help="quality target of method auto")
    plan.add_argument("--variant", default="best", help="plain, conditioned or best (default: best)")


def ask(client: Client, arguments: argparse.Namespace, out: Console, err: Console) -> int:
    """Ask, and print what comes as it comes; returns the exit status.

    Raises:
        InvalidInput: an argument cannot be used.
        ServiceError: the server refuses or fails the call.
    """
    page = None if arguments.html is None else _target(arguments.html)
    plan = Plan(arguments.method, arguments.ratio, arguments.max_charged, arguments.max_kl, variant=arguments.variant)
    events = client.answer(
        arguments.question,
        timeout=arguments.timeout,
        k=arguments.k,
        plan=plan,
        max_new_tokens=arguments.max_new_tokens,
        compare_full=arguments.compare_full,
        positions=arguments.positions or page is not None,
        tokens=page is not None,
        passage_order_seed=arguments.order_seed,
    )
    found, prompt, said = pb.Passages(), pb.PromptTokens(), ""
    for event in _in_time(events, arguments.timeout):
        if isinstance(event, pb.Passages):
            found = event
            if not arguments.json:
                show.passages(out, found.passages, texts=arguments.passages)
                out.print()
        elif isinstance(event, pb.PromptTokens):
            prompt = event
        elif isinstance(event, Token):
            if not arguments.json:
                shown = event.text if said.strip() else event.text.lstrip()
                out.print(Text(show.safe(shown), style="bold"), end="")
            said += event.text
        else:
            _print(event, found, said, arguments, out)
            if page is not None:
                _write(page, client, arguments.question, found, prompt, event)
                err.print(Text(f"page: {show.safe(str(page))}", style="dim"))
    return 0


def _in_time(events: Iterable[AnswerEvent], timeout: float | None) -> Iterator[AnswerEvent]:
    """The events; where the time is up before the answer has ended, the error says how far it had come."""
    begun = False
    try:
        for event in events:
            begun = begun or isinstance(event, Token)
            yield event
    except ServiceError as error:
        if error.code != "DEADLINE_EXCEEDED" or timeout is None:
            raise
        what = "the answer was not complete" if begun else "no answer had begun"
        raise ServiceError(error.code, f"{what} within {timeout:g} s", request_id=error.request_id) from error


def _print(answer: Answer, found: pb.Passages, said: str, arguments: argparse.Namespace, out: Console) -> None:
    """Print what is left to say once the answer is complete; ``said`` was printed before."""
    if not arguments.positions:  # then they came for the page alone
        answer = replace(answer, report=replace(answer.report, recomputed_positions=None))
    if arguments.json:
        show.as_json(out, {**plain(found), "answer": plain(convert.answer_to_proto(answer))})
        return
    rest = answer.text.removeprefix(said)
    ending = "" if answer.finish_reason == "stop" else " […]"
    if answer.finish_reason == "deadline":
        ending += f" ({show.ENDINGS['deadline']})"
    out.print(Text.assemble((show.safe(rest), "bold"), (ending, "dim")))
    out.print()
    if arguments.details:
        show.details(out, answer.report, found.retrieve_ms)
    else:
        show.report(out, answer.report)


def _target(path: str) -> Path:
    """Where the page goes; known to be no use before anything is asked.

    Raises:
        InvalidInput: there is no such directory, or the path is one.
    """
    target = Path(path)
    if not target.parent.is_dir() or target.is_dir():
        raise InvalidInput("html", path, "a file in a directory that exists")
    return target


def _write(
    target: Path, client: Client, question: str, found: pb.Passages, prompt: pb.PromptTokens, answer: Answer
) -> None:
    from blend_server.client import explain  # its template engine is for pages alone

    stats = client.stats()
    engine = stats.engine
    origin = f"{engine.model}, {engine.dtype} on {engine.device}; blend {stats.version} at {client.address}"
    html = explain.page(explain.Explained(question, found, prompt, answer, origin))
    try:
        target.write_text(html, encoding="utf-8")
    except OSError as error:
        raise InvalidInput("html", str(target), f"a file that can be written ({error.strerror})") from error
