"""``blend-store``: what a store holds, whether it is whole, how fast it is."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from blend.errors import BlendError, InvalidInput, NotFound, StoreError
from blend.sizes import parse_size
from blend.store.base import Tier
from blend.store.key import Namespace, ObjectKey, content_key
from blend.store.layout import Header, new_generation
from blend.store.show import Bars, print_found, print_json, print_table
from blend.store.target import Target
from blend.store.tenants import Quotas, TenantUsage
from blend.store.tiered import TieredStore

_EXAMPLES = """\
examples:
  blend-store ls ~/.cache/blend/store --limit 20
  blend-store stat ~/.cache/blend/server --json
  blend-store verify mooncake://127.0.0.1:50051
  blend-store namespaces ~/.cache/blend/store
  blend-store drop ~/.cache/blend/store acme --yes
  blend-store gc ~/.cache/blend/store --to 8GiB
  blend-store bench mooncake://10.0.0.7:50051 --health 10.0.0.7:9003 --shape 7b

TARGET is a data directory of the store or of a server, or mooncake://host:port with the master's address.
NAMESPACE is a tag: 12 hex digits of a tenant, or 18 of a tenant and a model. Where a directory keeps its secret, it may
be a tenant's name, unless that looks like a tag.
Exit status: 0 all is well, 1 the store cannot be used, or objects are corrupt or cannot be removed, 2 wrong arguments,
130 interrupted.
"""
SHAPES = {"smollm2": (30, 3, 64), "7b": (32, 8, 128)}
"""Layers, KV heads and head size of objects to measure with; of 256 tokens they have 5.6 and 32 MiB in 16 bits."""


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
    try:
        return parse_size(text)
    except InvalidInput as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not {error.allowed}") from error


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="blend-store",
        description="Tells what a store holds, whether it is whole, and how fast it is.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Target, argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        made.add_argument("target", metavar="TARGET", help="a data directory, or mooncake://host:port")
        made.add_argument("--health", metavar="HOST:PORT", help="the master's admin pages (default: its port 9003)")
        made.add_argument("--prefix", default="blend", help="of names in Mooncake (default: %(default)s)")
        made.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
        made.set_defaults(run=run)
        return made

    ls = command("ls", _ls, "list the objects: key, bytes, tokens, shape")
    ls.add_argument("--namespace", metavar="NAMESPACE", help="list the objects of this one (default: of all)")
    ls.add_argument("--limit", type=_count, help="list no more than this (default: all)")
    ls.add_argument("--keys-only", action="store_true", help="read no headers: keys alone, much faster")
    command("stat", _stat, "count objects and bytes")
    command("namespaces", _namespaces, "list the namespaces: tag of tenant and model, objects, bytes")
    drop = command("drop", _drop, "remove every object of a namespace")
    drop.add_argument("namespace", metavar="NAMESPACE", help="a tag, or a tenant's name")
    drop.add_argument("--yes", action="store_true", help="do it; without this it is only said what would go")
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
    with target.tier() as tier, Bars(arguments.json) as track:
        for key in track(_listed(target, tier, arguments)[: arguments.limit], "reading headers"):
            row = {"key": str(key)} if arguments.keys_only else _row(tier, key)
            if row is not None:
                rows.append(row)
    if arguments.json:
        print_json({"target": target.name, "objects": rows})
        return 0
    columns = ["key"] if arguments.keys_only else ["key", "bytes", "tokens", "layers", "dtype", "problem"]
    title = f"{_counted(rows, 'object')} in {target.name}"
    _print_whole(title, columns, [[str(row.get(name, "")) for name in columns] for row in rows])
    return 0


def _print_whole(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, or plain lines where it would cut a key: one has to come out in a piece to be copied."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    if sum(widths) + 3 * len(widths) + 1 <= shutil.get_terminal_size().columns:
        print_table(title, columns, rows)
        return
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in (columns, *rows))
    sys.stdout.write("\n".join([title, *lines]) + "\n")


def _listed(target: Target, tier: Tier, arguments: argparse.Namespace) -> list[ObjectKey]:
    keys = target.keys(tier)
    if arguments.namespace is None:
        return keys
    tag = target.tag(arguments.namespace)
    return [key for key in keys if key.within(tag)]


def _counted(rows: Sequence[object], unit: str) -> str:
    return f"{len(rows)} {unit}" if len(rows) == 1 else f"{len(rows)} {unit}s"


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
            "namespace": key.namespace,
        }


def _stat(target: Target, arguments: argparse.Namespace) -> int:
    with target.tier() as tier:
        keys, quotas = target.keys(tier), target.quotas()
        found = {
            "target": target.name,
            "objects": len(keys),
            "conditioned": sum(key.conditioned for key in keys),
            **target.usage(tier),
            "tenants": {usage.tenant: _of_tenant(usage, quotas) for usage in tier.tenants()},
        }
    print_found(found, arguments.json)
    return 0


def _of_tenant(usage: TenantUsage, quotas: Quotas) -> dict[str, int | None]:
    return {"used_bytes": usage.used_bytes, "quota_bytes": quotas.limit(usage.tenant)}


def _namespaces(target: Target, arguments: argparse.Namespace) -> int:
    with target.tier() as tier, TieredStore([tier]) as store:
        rows = [
            {"namespace": found.tag, "objects": usage.objects, "bytes": usage.nbytes}
            for found in store.namespaces()
            for usage in found.tiers.values()
        ]
    if arguments.json:
        print_json({"target": target.name, "namespaces": rows})
        return 0
    table = [[row["namespace"], f"{row['objects']:,}", f"{row['bytes']:,}"] for row in rows]
    print_table(f"{_counted(rows, 'namespace')} in {target.name}", ["namespace", "objects", "bytes"], table)
    return 0


def _drop(target: Target, arguments: argparse.Namespace) -> int:
    tag = target.tag(arguments.namespace)
    with target.tier() as tier, Bars(arguments.json) as track, TieredStore([tier]) as store:
        if not arguments.yes:
            sizes = [nbytes for key, nbytes in tier.sizes() if key.within(tag)]
            found = {"target": target.name, "namespace": tag, "would_remove": len(sizes), "bytes": sum(sizes)}
            print_found(found, arguments.json)
            sys.stderr.write("blend-store: nothing was removed; give --yes to remove these objects\n")
            return 2
        dropped = store.drop(tag, lambda keys: track(keys, "dropping"))
    found = {
        "target": target.name,
        "namespace": tag,
        "removed": dropped.objects,
        "freed_bytes": dropped.tiers[tier.name].nbytes - dropped.lingering_bytes,
        "problems": dict(dropped.left),
    }
    print_found(found, arguments.json)
    return 1 if dropped.left else 0


def _verify(target: Target, arguments: argparse.Namespace) -> int:
    """Read everything. The tiers themselves set aside or remove what fails."""
    with target.tier() as tier:
        found = _check_all(target, tier, arguments)
    print_found(found, arguments.json)
    return 1 if found["problems"] else 0


def _check_all(target: Target, tier: Tier, arguments: argparse.Namespace) -> dict[str, Any]:
    problems: dict[str, str] = {}
    objects = nbytes = 0
    with Bars(arguments.json) as track:
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
        print_found({"target": target.name, "removed": len(found["problems"]), "kept": found["whole"]}, arguments.json)
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
    print_found(found, arguments.json)
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
    with target.tier() as tier, Bars(arguments.json) as track:
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
    print_found(found, arguments.json)
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


if __name__ == "__main__":
    sys.exit(main())
