"""``blend-store``: what a store holds, whether it is whole, how fast it is."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from blend.errors import BlendError, InvalidInput, NotFound, StoreError
from blend.store.base import Tier
from blend.store.key import Namespace, ObjectKey, content_key
from blend.store.layout import Header, new_generation
from blend.store.target import Target

_EXAMPLES = """\
examples:
  blend-store ls ~/.cache/blend/store --limit 20
  blend-store stat ~/.cache/blend/server --json
  blend-store verify mooncake://127.0.0.1:50051
  blend-store gc ~/.cache/blend/store --to 8GiB
  blend-store bench mooncake://10.0.0.7:50051 --health 10.0.0.7:9003 --shape 7b

TARGET is a data directory of the store or of a server, or mooncake://host:port with the master's address.
Exit status: 0 all is well, 1 the store cannot be used or objects are corrupt, 2 wrong arguments, 130 interrupted.
"""
_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]iB)?", re.IGNORECASE)
SHAPES = {"smollm2": (30, 3, 64), "7b": (32, 8, 128)}
"""Layers, KV heads and head size of objects to measure with; of 256 tokens they have 5.6 and 32 MiB in 16 bits."""

T = TypeVar("T")
Track = Callable[[Sequence[T], str], Iterable[T]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``blend-store`` with ``argv`` (default: the process's arguments); return the exit status."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr, format="%(message)s")
    os.environ.setdefault("GLOG_minloglevel", "3")  # Mooncake's own log, which goes to stderr
    try:
        target = Target.parse(arguments.target, arguments.health, arguments.prefix)
        return int(arguments.run(target, arguments))
    except (InvalidInput, NotFound) as error:
        sys.stderr.write(f"blend-store: {error}\n")
        return 2
    except (BlendError, OSError) as error:
        sys.stderr.write(f"blend-store: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def size(text: str) -> int:
    """Return a number of bytes from text such as ``512MiB``."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 512MiB or 1.5GiB")
    return int(float(found[1]) * _UNITS[(found[2] or "").upper()])


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="blend-store", description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Target, argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.add_argument("target", metavar="TARGET", help="a data directory, or mooncake://host:port")
        made.add_argument("--health", metavar="HOST:PORT", help="the master's admin pages (default: its port 9003)")
        made.add_argument("--prefix", default="blend", help="of names in Mooncake (default: %(default)s)")
        made.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
        made.set_defaults(run=run)
        return made

    ls = command("ls", _ls, "list the objects: key, bytes, tokens, shape")
    ls.add_argument("--limit", type=_count, help="list no more than this (default: all)")
    ls.add_argument("--keys-only", action="store_true", help="read no headers: keys alone, much faster")
    command("stat", _stat, "count objects and bytes")
    command("verify", _verify, "read every object and check every byte; what is corrupt is set aside, or removed")
    gc = command("gc", _gc, "remove what dead writers left and what was set aside; in Mooncake, what is corrupt")
    gc.add_argument(
        "--to", type=size, metavar="SIZE", help="of a directory: remove the oldest objects too, down to SIZE"
    )
    bench = command("bench", _bench, "put, get and remove objects of random bytes; the rates in GB/s")
    bench.add_argument("--objects", type=_count, default=16, help="how many (default: %(default)s)")
    bench.add_argument("--tokens", type=_count, default=256, help="tokens of each (default: %(default)s)")
    bench.add_argument("--shape", choices=sorted(SHAPES), default="smollm2", help="of a layer (default: %(default)s)")
    return parser


def _ls(target: Target, arguments: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    with target.tier() as tier, _Progress(arguments) as track:
        for key in track(target.keys(tier)[: arguments.limit], "reading headers"):
            row = {"key": str(key)} if arguments.keys_only else _row(tier, key)
            if row is not None:
                rows.append(row)
    if arguments.json:
        _print_json({"target": target.name, "objects": rows})
        return 0
    columns = ["key"] if arguments.keys_only else ["key", "bytes", "tokens", "layers", "dtype", "problem"]
    _print_table(
        f"{len(rows)} objects in {target.name}", columns, [[row.get(name, "") for name in columns] for row in rows]
    )
    return 0


def _row(tier: Tier, key: ObjectKey) -> dict[str, Any] | None:
    try:
        lease = tier.get(key)
    except StoreError as error:
        return {"key": str(key), "problem": str(error)}
    if lease is None:
        return None  # removed since it was listed
    with lease:
        header = lease.header
        return {
            "key": str(key),
            "bytes": header.object_nbytes,
            "tokens": header.tokens,
            "layers": header.layers,
            "kv_heads": header.kv_heads,
            "head_dim": header.head_dim,
            "dtype": header.dtype,
            "position": header.position,
            "neighbours": len(header.neighbours),
            "namespace": header.namespace.hex()[:16],
        }


def _stat(target: Target, arguments: argparse.Namespace) -> int:
    with target.tier() as tier:
        keys = target.keys(tier)
        found = {
            "target": target.name,
            "objects": len(keys),
            "conditioned": sum(key.conditioned for key in keys),
            **target.usage(tier),
        }
    _print(found, arguments)
    return 0


def _verify(target: Target, arguments: argparse.Namespace) -> int:
    """Read everything. The tiers themselves set aside or remove what fails."""
    with target.tier() as tier:
        found = _check_all(target, tier, arguments)
    _print(found, arguments)
    return 1 if found["problems"] else 0


def _check_all(target: Target, tier: Tier, arguments: argparse.Namespace) -> dict[str, Any]:
    problems: dict[str, str] = {}
    objects = nbytes = 0
    with _Progress(arguments) as track:
        for key in track(target.keys(tier), "verifying"):
            try:
                lease = tier.get(key)
                if lease is None:
                    continue
                with lease:
                    for layer in range(lease.header.layers):
                        lease.layer(layer)
                    objects, nbytes = objects + 1, nbytes + lease.header.object_nbytes
            except StoreError as error:
                problems[str(key)] = str(error)
    return {"target": target.name, "whole": objects, "bytes": nbytes, "problems": problems}


def _gc(target: Target, arguments: argparse.Namespace) -> int:
    if target.path is None:
        if arguments.to is not None:
            raise InvalidInput("--to", arguments.to, "a directory as target: Mooncake evicts by itself")
        with target.tier() as tier:
            found = _check_all(target, tier, arguments)
        _print({"target": target.name, "removed": len(found["problems"]), "kept": found["whole"]}, arguments)
        return 0
    with target.tier() as tier:
        before, aside = tier.stats(), target.quarantined_bytes()
    budget = before.used_bytes - aside if arguments.to is None else min(arguments.to, before.used_bytes - aside)
    with target.tier(max(budget, 1)) as tier:
        after = tier.stats()
    found = {
        "target": target.name,
        "removed": before.objects - after.objects,
        "kept": after.objects,
        "quarantined_removed": before.quarantined - after.quarantined,
        "freed_bytes": before.used_bytes - after.used_bytes,
        "used_bytes": after.used_bytes,
    }
    _print(found, arguments)
    return 0


def _bench(target: Target, arguments: argparse.Namespace) -> int:
    layers, kv_heads, head_dim = SHAPES[arguments.shape]
    namespace = Namespace("blend-store bench", os.urandom(16).hex(), os.urandom(16))
    payload = np.random.default_rng().integers(
        0, 256, 2 * layers * kv_heads * head_dim * arguments.tokens * 2, dtype=np.uint8
    )
    headers = []
    for number in range(arguments.objects):
        ids = (number, *range(arguments.tokens - 1))
        key = ObjectKey(content_key(namespace, ids), "plain")
        header = Header(key, namespace.digest, ids, layers, kv_heads, head_dim, "float16", new_generation())
        headers.append(header.sealed(payload))
    times: dict[str, list[float]] = {"put": [], "get": [], "remove": []}
    with target.tier() as tier, _Progress(arguments) as track:
        try:
            for header in track(headers, "put"):
                times["put"].append(_timed(partial(tier.put, header, payload)))
            for header in track(headers, "get"):
                times["get"].append(_timed(partial(_read, tier, header.key)))
        finally:
            for header in track(headers, "remove"):
                times["remove"].append(_timed(partial(tier.remove, header.key)))
    nbytes = headers[0].object_nbytes
    found = {"target": target.name, "objects": len(headers), "object_bytes": nbytes}
    for name, taken in times.items():
        if name != "remove":
            found[f"{name}_gb_per_s"] = round(nbytes * len(taken) / sum(taken) / 1e9, 3)
        found[f"{name}_median_ms"] = round(median(taken) * 1e3, 3)
    _print(found, arguments)
    return 0


def _timed(call: Callable[[], object]) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin


def _read(tier: Tier, key: ObjectKey) -> None:
    lease = tier.get(key)
    if lease is None:
        raise NotFound("object", f"{key}, which has just been put")
    with lease:
        lease.payload()


class _Progress:
    """Progress bars on stderr, where somebody looks at it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._progress = Progress(
            console=Console(stderr=True), disable=arguments.json or not sys.stderr.isatty(), transient=True
        )

    def __enter__(self) -> Track[Any]:
        self._progress.start()
        return lambda items, text: self._progress.track(items, total=len(items), description=text)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def _print(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    if arguments.json:
        _print_json(found)
        return
    rows = [
        [name.replace("_", " "), f"{value:,}" if isinstance(value, int) else value] for name, value in found.items()
    ]
    problems = found.get("problems")
    if problems is not None:
        rows = [row for row in rows if row[0] != "problems"] + [["problems", len(problems)], *problems.items()]
    _print_table("", ["", ""], rows, header=False)


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], header: bool = True) -> None:
    table = Table(title=title or None, show_header=header)
    for name in columns:
        table.add_column(name, justify="left" if name in ("", "key", "problem", "dtype") else "right", overflow="fold")
    for row in rows:
        table.add_row(*(str(value) for value in row))
    Console(file=sys.stdout).print(table)


def _print_json(found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    sys.exit(main())
