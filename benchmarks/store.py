"""What the store costs beside the plainest way to move the same bytes, measured in the same run.

- host: filling a canvas from leases, keys rotated, against memcpy of the same bytes;
- disk: get, cold and warm page cache, and put, against ``dd`` of the same file and the same fsync;
- mooncake: get and put against the raw zero-copy calls of its own client, one owner in another process;
- layers: time to layer 0 of ten chunks against loading all of their layers;
- keys: a disk tier of a million objects: memory a key, look-up, start-up; and a residency index of as many;
- precompute: what storing chunks adds to the time of computing them.

    python benchmarks/store.py
    python benchmarks/store.py --quick --only host,disk --no-gate

Prints a table, then one JSON line. Exit status: 0 when every figure holds or with ``--no-gate``, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from blend import Chunk, Engine, EngineConfig, StoreConfig, versions
from blend.config import GiB, MiB
from blend.helper import Helper
from blend.recompute.assemble import Assembly, Piece
from blend.recompute.canvas import Canvas
from blend.recompute.kernels.dispatch import kernels
from blend.recompute.rope import Rotation
from blend.store import (
    DiskTier,
    Header,
    HostTier,
    Lease,
    Namespace,
    ObjectKey,
    Tier,
    TieredStore,
    content_key,
    new_generation,
)
from blend.store.buffers import Buffer, allocate
from blend.store.health import segments, sickness
from blend.store.mooncake import MooncakeConfig, library, mooncake_tier
from blend.store.residency import Event, ResidencyIndex
from blend.store.stored import Stored

SHAPES = {"smollm2": (30, 3, 64), "7b": (32, 8, 128)}
TOKENS = 256
CHUNKS = 10
BLOCKS = ("bs=1M", "bs=8M")
"""The ways of ``dd``; each figure is set against the one that is faster on the whole."""
NAMESPACE = Namespace("benchmark", "0f" * 16, b"a secret of a benchmark")
OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
print(store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1]), flush=True)
sys.stdin.read()
store.close()
"""


class Figures:
    """What was measured, and whether it holds."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(
        self, name: str, value: float, unit: str, *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """Note a value and, where it has one, its bound."""
        holds = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
        bound = f">= {at_least:g}" if at_least is not None else f"<= {at_most:.4g}" if at_most is not None else ""
        self.rows.append({"name": name, "value": round(value, 4), "unit": unit, "bound": bound, "holds": holds})

    def ratio(self, name: str, ours: float, plain: float, nbytes: int, bound: float) -> None:
        """Note how fast ``nbytes`` went here and plainly, in seconds, and the ratio of both rates."""
        self.add(f"{name}: rate", nbytes / ours / 1e9, "GB/s")
        self.add(f"{name}: plain rate", nbytes / plain / 1e9, "GB/s")
        self.add(f"{name}: ratio", plain / ours, "", at_least=bound)


def objects(shape: str, count: int, dtype: str = "bfloat16") -> list[tuple[Header, np.ndarray[Any, Any]]]:
    """Sealed objects of random bytes, each with memory of its own."""
    layers, kv_heads, head_dim = SHAPES[shape]
    rng, generation, made = np.random.default_rng(0), new_generation(), []
    for number in range(count):
        ids = (number, *range(1, TOKENS))
        key = ObjectKey(content_key(NAMESPACE, ids), "plain")
        header = Header(key, NAMESPACE.digest, ids, layers, kv_heads, head_dim, dtype, generation, position=1)
        # Small halves, for bytes that are no numbers would slow the arithmetic down.
        payload = rng.integers(0x3C00, 0x3F00, header.payload_nbytes // 2, np.uint16).view(np.uint8)
        made.append((header.sealed(payload), payload))
    return made


def seconds(call: Callable[[], object]) -> float:
    """How long one call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def used(nbytes: int) -> memoryview:
    """Memory that has been written to before, as the host tier's has when an object is read into it."""
    memory = allocate(nbytes)
    memory[:] = 1
    return memory.data


def lease_of(tier: Tier, header: Header) -> Lease:
    """A lease on an object that must be there."""
    lease = tier.get(header.key)
    if lease is None:
        raise SystemExit(f"{tier.name}: {header.key} was put, and is gone")
    return lease


def host(shape: str, figures: Figures, rounds: int) -> None:
    """Fill a canvas from host leases, every key turned; against copying the same bytes."""
    layers, kv_heads, head_dim = SHAPES[shape]
    made = objects(shape, CHUNKS)
    canvas = Canvas(layers, kv_heads, CHUNKS * TOKENS, head_dim, torch.bfloat16, torch.device("cpu"))
    rotation = Rotation(10_000.0 ** -torch.arange(0, 1, 2 / head_dim), "half")
    nbytes = sum(header.payload_nbytes for header, _ in made)
    target = np.asarray(used(nbytes))
    with contextlib.closing(Helper("placing")) as helper, HostTier(2 * nbytes + 64 * MiB) as tier:
        for header, payload in made:
            tier.put(header, payload)

        def fill() -> None:
            pieces = [Piece(n * TOKENS, TOKENS, 1) for n in range(CHUNKS)]
            assembly = Assembly(canvas, pieces, [rotation] * layers, kernels(canvas.k.device), helper)
            with contextlib.ExitStack() as stack:
                leases = [stack.enter_context(lease_of(tier, header)) for header, _ in made]
                whole = [torch.frombuffer(lease.payload(), dtype=torch.bfloat16) for lease in leases]
                kv = [flat.view(layers, 2, kv_heads, TOKENS, head_dim).unbind() for flat in whole]
                for layer in range(layers):
                    assembly.put(layer, [chunk[layer] for chunk in kv])

        def copy() -> None:
            at = 0
            for header, _ in made:
                with lease_of(tier, header) as lease:
                    view = lease.payload()
                    target[at : at + len(view)] = np.frombuffer(view, np.uint8)
                    at += len(view)

        fill()
        copy()
        times = [(seconds(fill), seconds(copy)) for _ in range(rounds)]
    figures.ratio(
        f"host {shape}: filling a canvas", *(median(column) for column in zip(*times, strict=True)), nbytes, 0.6
    )


def dd(*arguments: str) -> float:
    """Seconds that ``dd`` says its transfer took."""
    run = subprocess.run(
        ["dd", *arguments], capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}
    )
    found = re.search(r"copied, ([0-9.e+-]+) s", run.stderr)
    if found is None:
        raise SystemExit(f"dd said nothing of its time: {run.stderr}")
    return float(found[1])


def drop_pages(path: Path) -> None:
    """Ask the kernel to forget a file's pages."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk(shape: str, figures: Figures, rounds: int, where: Path) -> None:
    """Put and get whole objects; against ``dd`` of the same sizes on the same file system."""
    made = objects(shape, max(rounds, 3))
    nbytes = made[0][0].object_nbytes
    room = used(nbytes)
    times: dict[str, list[list[float]]] = {"put with fsync": [], "get, cold": [], "get, warm": []}  # ours, then dd's
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as memory:
        origin = Path(memory) / "origin"
        origin.write_bytes(os.urandom(nbytes))
        plain = where / "plain"
        with DiskTier(where / shape, 64 * GiB, fsync=True) as tier:
            for header, payload in made:
                tier.put(header, payload)
            for header, _ in made:  # the page cache has memory then, as dd's has that writes one file again and again
                tier.remove(header.key)
            for header, payload in made:
                put = seconds(lambda: tier.put(header, payload))  # noqa: B023
                plainly = [f"if={origin}", f"of={plain}", "conv=fsync"]
                times["put with fsync"].append([put, *(dd(*plainly, block) for block in BLOCKS)])
            for header, _ in made:
                path = where / shape / "objects" / header.key.content[:2] / str(header.key)

                def get(header: Header = header) -> None:
                    with lease_of(tier, header) as lease:
                        lease.payload(room[: header.payload_nbytes])

                def cold(call: Callable[[], float], path: Path = path) -> float:
                    drop_pages(path)
                    return call()

                plainly = [f"if={path}", "of=/dev/null"]
                ways = [[*plainly, block] for block in BLOCKS]
                ways.append([*plainly, BLOCKS[-1], "iflag=direct"])
                times["get, cold"].append(
                    [cold(lambda: seconds(get)), *(cold(lambda way=way: dd(*way)) for way in ways)]  # type: ignore[misc]
                )
                best = [min(dd(*plainly, block) for _ in range(3)) for block in BLOCKS]
                times["get, warm"].append([min(seconds(get) for _ in range(3)), *best])
        plain.unlink()
    for name, taken in times.items():
        ours, *theirs = (median(column) for column in zip(*taken, strict=True))
        figures.ratio(f"disk {shape}: {name}", ours, min(theirs), nbytes, 0.8)


def layers_first(shape: str, figures: Figures, where: Path) -> None:
    """Ten chunks loaded from disk as a request has them loaded: when layer 0 of all is there, and when all is.

    By a store that has served before: its thread runs, and its memory has been used.

    Beside it, the same ten read one after another, each with one call: the other way that one layout allows.
    """
    made = objects(shape, CHUNKS + 1)
    other, *made = made
    keys, depth = [header.key for header, _ in made], SHAPES[shape][0]
    directory = where / f"layers-{shape}"
    with DiskTier(directory, 64 * GiB, fsync=False) as tier:
        for header, payload in [other, *made]:
            tier.put(header, payload)

    whole = used(made[0][0].payload_nbytes)

    def fresh(state: str) -> TieredStore:
        if state == "cold":
            for path in (directory / "objects").rglob("*.plain"):
                drop_pages(path)
        room = sum(header.object_nbytes for header, _ in made) + 64 * MiB
        store = TieredStore([HostTier(room), DiskTier(directory, 64 * GiB, fsync=False)])
        for header, payload in made:
            store.tiers[0].put(header, payload)
        for header, _ in made:
            store.tiers[0].remove(header.key)
        with store.load([other[0].key]) as loads:
            loads[other[0].key].payload()
        store.wait_idle()
        store.tiers[0].remove(other[0].key)
        return store

    def by_layer(store: TieredStore) -> tuple[float, float]:
        begin = time.perf_counter()
        with store.load(keys) as loads:
            for lease in loads.values():
                lease.layer(0)
            first = time.perf_counter() - begin
            for lease in loads.values():
                lease.layer(depth - 1)
            return first, time.perf_counter() - begin

    def by_payload(store: TieredStore) -> float:
        disk = store.tiers[1]
        begin = time.perf_counter()
        for header, _ in made:
            with lease_of(disk, header) as lease:
                lease.payload(whole[: header.payload_nbytes])
        return time.perf_counter() - begin

    for state in ("cold", "warm"):
        taken = []
        for _ in range(5):
            with fresh(state) as store:
                first, full = by_layer(store)
            with fresh(state) as store:
                taken.append((first, full, by_payload(store)))
        first, full, plainly = (median(column) for column in zip(*taken, strict=True))
        figures.add(f"layers {shape}, {state}: all, by layer", full * 1e3, "ms")
        figures.add(f"layers {shape}, {state}: all, by payload", plainly * 1e3, "ms")
        bound = 2 / depth * full * 1e3 + 1
        figures.add(f"layers {shape}, {state}: layer 0", first * 1e3, "ms", at_most=bound)


@contextlib.contextmanager
def cluster(nbytes: int) -> Iterator[tuple[str, str]]:
    """A master and one owner of ``nbytes``, as processes; yields the addresses of RPC and admin pages."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None:
        raise SystemExit("Mooncake is not installed: pip install 'blendkv[mooncake]', or leave it out with --only")
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    rpc, admin = (f"127.0.0.1:{port}" for port in ports)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    master = subprocess.Popen(
        [
            str(Path(spec.origin).parent / "mooncake_master"),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={ports[0]}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={ports[1]}",
        ],
        **quiet,
    )
    owner = None
    try:
        until(lambda: not sickness(admin, 1.0))
        owner = subprocess.Popen([sys.executable, "-c", OWNER, rpc, str(nbytes)], stdin=subprocess.PIPE, **quiet)
        until(lambda: segments(admin, 1.0).capacity_bytes >= nbytes)
        yield rpc, admin
    finally:
        for process in (owner, master):
            if process is not None:
                process.kill()
                process.wait()


def until(condition: Callable[[], bool]) -> None:
    """Wait at most 30 s for something to hold."""
    end = time.monotonic() + 30
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("Mooncake did not start within 30 s")
        time.sleep(0.05)


def mooncake(shape: str, figures: Figures, rounds: int, rpc: str, admin: str) -> None:
    """Put registered memory and get views; against the client's own calls on registered memory."""
    made = objects(shape, 4)
    nbytes = made[0][0].object_nbytes
    config = MooncakeConfig(
        rpc, health=admin, prefix=f"bench-{shape}", staging_bytes=max(8 * nbytes, 64 * MiB), connect_seconds=20
    )
    raw = library()()
    if raw.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", rpc):
        raise SystemExit("Mooncake: the raw client cannot join")
    room = np.ones(nbytes, np.uint8)
    raw.register_buffer(room.ctypes.data, nbytes)

    def raw_put(name: str) -> None:
        if raw.batch_put_from([name], [room.ctypes.data], [nbytes]) != [0]:
            raise SystemExit("Mooncake: a raw put failed")

    def raw_get(name: str) -> None:
        if raw.batch_get_into([name], [room.ctypes.data], [nbytes]) != [nbytes]:
            raise SystemExit("Mooncake: a raw get failed")

    times: dict[str, list[tuple[float, float]]] = {"put": [], "get": []}
    with mooncake_tier(config) as tier:
        for _, payload in made:
            tier.register(payload)
        for number in range(rounds + 1):  # the first one warms up
            for place_, (header, payload) in enumerate(made):
                name = f"raw-{shape}-{place_}"
                put = seconds(lambda: tier.put(header, payload)), seconds(lambda: raw_put(name))  # noqa: B023
                get = seconds(lambda: lease_of(tier, header).payload()), seconds(lambda: raw_get(name))  # noqa: B023
                if number:
                    times["put"].append(put)
                    times["get"].append(get)
                tier.remove(header.key)
                raw.remove(name, True)
    raw.close()
    for name, taken in times.items():
        ours, theirs = (median(column) for column in zip(*taken, strict=True))
        figures.ratio(f"mooncake {shape}: {name}", ours, theirs, nbytes, 0.8)


def many_keys(figures: Figures, count: int, where: Path) -> None:
    """A disk tier of many tiny objects, opened by a process of its own, and a residency index of as many keys.

    All but a thousand of the files have their size and no content: start-up looks at no more than that.
    """
    directory = where / "keys"
    DiskTier(directory, 64 * GiB, fsync=False).close()
    ids = (1, 2)
    model = Header(
        ObjectKey(content_key(NAMESPACE, ids), "plain"), NAMESPACE.digest, ids, 1, 1, 8, "bfloat16", new_generation()
    )
    for prefix in range(256):
        (directory / "objects" / f"{prefix:02x}").mkdir(mode=0o700, exist_ok=True)
    for number in range(count):
        content = f"{number * 0x9E3779B97F4A7C15 % (1 << 64):016x}{number:024x}"
        path = f"{directory}/objects/{content[:2]}/{content}.plain"
        fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        os.ftruncate(fd, model.object_nbytes)
        os.close(fd)
    with DiskTier(directory, 1 << 60, fsync=False) as tier:
        for number in range(1000):
            ids = (number, 7)
            header = Header(
                ObjectKey(content_key(NAMESPACE, ids), "plain"), NAMESPACE.digest, ids, 1, 1, 8, "bfloat16", bytes(16)
            )
            payload = bytes(header.payload_nbytes)
            tier.put(header.sealed(payload), payload)
    run = subprocess.run(
        [sys.executable, __file__, "--open", str(directory)], check=True, capture_output=True, text=True
    )
    found = json.loads(run.stdout)
    figures.add(f"keys {count:,}: start-up", found["startup_s"], "s", at_most=60.0)
    figures.add(f"keys {count:,}: memory a key", found["bytes_a_key"], "bytes", at_most=400.0 * 1.5)
    figures.add(f"keys {count:,}: look-up p99", found["contains_p99_us"], "µs", at_most=50.0 * 1.5)
    figures.add(f"keys {count:,}: lease p99", found["get_p99_us"], "µs")
    residency(figures, count)


def open_many(directory: str) -> None:
    """Open a directory and print what that cost; in a process of its own, for its memory to be told apart."""
    page = os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    before, begin = resident(), time.perf_counter()
    with DiskTier(directory, 1 << 60, fsync=False) as tier:
        startup = time.perf_counter() - begin
        after = resident()
        keys = list(tier.keys())
        sample = np.random.default_rng(0).permutation(len(keys))[:20_000]
        contains = [seconds(lambda: tier.contains(keys[at])) for at in sample]  # noqa: B023
        real = [content_key(NAMESPACE, (number, 7)) for number in range(1000)]
        gets = [seconds(lambda: tier.get(ObjectKey(content, "plain"))) for content in real]  # noqa: B023
    found = {
        "startup_s": startup,
        "bytes_a_key": (after - before) / len(keys),
        "contains_p99_us": float(np.quantile(contains, 0.99)) * 1e6,
        "get_p99_us": float(np.quantile(gets, 0.99)) * 1e6,
    }
    print(json.dumps(found))


def residency(figures: Figures, count: int) -> None:
    """Ask an index of many entries, on eight nodes, for the best node for 20 chunks."""
    index, rng = ResidencyIndex(), np.random.default_rng(0)
    keys = [ObjectKey(f"{number:040x}", "plain") for number in range(count)]
    owners = rng.integers(0, 8, count)
    for node in range(8):
        index.apply(
            f"node{node}", [Event("stored", keys[at], "host", 5_900_000) for at in np.flatnonzero(owners == node)]
        )
    times = []
    for _ in range(2000):
        wanted = [keys[at] for at in rng.integers(0, count, 20)]
        times.append(seconds(lambda: index.best(wanted)))  # noqa: B023
    figures.add(f"residency {len(index):,}: best node for 20 chunks, median", median(times) * 1e6, "µs")
    figures.add(f"residency {len(index):,}: best node for 20 chunks, p99", float(np.quantile(times, 0.99)) * 1e6, "µs")


def precompute(figures: Figures, where: Path, rounds: int) -> None:
    """What storing chunks adds to computing them, ten a call, until all of them are on the disk.

    Both tiers are small and soon full, so that every put evicts, and none waits for memory that is used for the first
    time.
    """
    store = StoreConfig(host_bytes=128 * MiB, disk_bytes=256 * MiB, directory=where / "engine")
    numbers = iter(range(1000, 1_000_000))

    def batch() -> list[Chunk]:
        return [Chunk(range(start, start + TOKENS)) for start in islice(numbers, CHUNKS)]

    with Engine(EngineConfig(store=store)) as engine:

        def keep_nothing(header: Header, payload: Buffer) -> Stored:
            stored = Stored()
            for event in (stored.copied, stored.readable, stored.durable):
                event.set_result(True)
            return stored

        for _ in range(5):
            engine.precompute(batch())
        times = []
        for _ in range(rounds):  # both in turn: the machine's speed drifts
            whole = seconds(lambda: engine.precompute(batch()))
            with mock.patch.object(engine.store, "put_async", keep_nothing):
                times.append((whole, seconds(lambda: engine.precompute(batch()))))
    whole, alone = (median(column) / CHUNKS for column in zip(*times, strict=True))
    figures.add("precompute smollm2: a chunk of 256 tokens, stored", whole * 1e3, "ms")
    figures.add("precompute smollm2: a chunk of 256 tokens, computed alone", alone * 1e3, "ms")
    figures.add("precompute smollm2: what storing adds", median(w / a for w, a in times) - 1, "", at_most=0.05)


def machine() -> dict[str, Any]:
    """The machine's name for tables."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return {"cpu": name, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__}


def arguments() -> argparse.Namespace:
    """The command line."""
    parts = "host,disk,layers,mooncake,keys,precompute"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=parts, help="parts to run (default: %(default)s)")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="object sizes (default: %(default)s)")
    parser.add_argument("--directory", type=Path, help="where files go (default: the temporary directory)")
    parser.add_argument("--keys", type=int, help="objects of the part keys (default: 1,000,000; 20,000 with --quick)")
    parser.add_argument("--quick", action="store_true", help="few rounds, for trying")
    parser.add_argument("--no-gate", action="store_true", help="exit with 0 whatever the figures are")
    parser.add_argument("--open", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.only, args.shapes = args.only.split(","), args.shapes.split(",")
    for name, value, allowed in (("--only", args.only, parts.split(",")), ("--shapes", args.shapes, list(SHAPES))):
        if not set(value) <= set(allowed):
            parser.error(f"{name}: got {','.join(value)}; allowed: {','.join(allowed)}")
    return args


def run(args: argparse.Namespace, where: Path) -> Figures:
    """Run what is wanted, telling on stderr how far it is."""
    figures, rounds = Figures(), 2 if args.quick else 9

    def begin(part: str) -> bool:
        if part in args.only:
            print(f"{part} ...", file=sys.stderr)
        return part in args.only

    for shape in args.shapes:
        if begin("host"):
            host(shape, figures, rounds)
        if begin("disk"):
            disk(shape, figures, rounds, where)
        if begin("layers"):
            layers_first(shape, figures, where)
    if begin("mooncake"):
        with cluster(GiB) as (rpc, admin):
            for shape in args.shapes:
                mooncake(shape, figures, rounds, rpc, admin)
    if begin("keys"):
        many_keys(figures, args.keys or (20_000 if args.quick else 1_000_000), where)
    if begin("precompute"):
        precompute(figures, where, rounds)
    return figures


def main() -> int:
    """Measure, print, and say whether everything holds."""
    args = arguments()
    if args.open:
        open_many(args.open)
        return 0
    os.environ.setdefault("GLOG_minloglevel", "3")
    with tempfile.TemporaryDirectory(dir=args.directory) as where:
        figures = run(args, Path(where))
    about = machine()
    table = Table(title=f"the store on {about['cpu']}, {about['cores']} cores")
    for column in ("figure", "value", "unit", "bound", ""):
        table.add_column(column, justify="left" if column in ("figure", "unit") else "right")
    for row in figures.rows:
        verdict = "" if not row["bound"] else "ok" if row["holds"] else "MISSED"
        table.add_row(row["name"], f"{row['value']:,.3f}", row["unit"], row["bound"], verdict)
    Console().print(table)
    holds = all(row["holds"] for row in figures.rows)
    print(
        json.dumps(
            {
                "benchmark": "store",
                "machine": about,
                "environment": versions.as_json(),
                "holds": holds,
                "figures": figures.rows,
            }
        )
    )
    return 0 if holds or args.no_gate else 1


if __name__ == "__main__":
    sys.exit(main())
