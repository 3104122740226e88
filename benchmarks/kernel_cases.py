"""What of the Triton kernels is built without a GPU: calls of their wrappers on small tensors, few but enough.

A kernel is compiled anew for whatever its wrapper makes constant: head dimension, dtype, tile, layout, flags. All
their combinations are thousands. What decides over registers and shared memory is built whole: every tile that a
wrapper chooses, for 16 and for 32 bits, at every head dimension, on every architecture. The rest is spread over these
such that every two values meet at least once.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blend.recompute.kernels.batch import Batch
from blend.recompute.kernels.dispatch import Kernels, kernels
from blend.recompute.kernels.fit import shape
from blend.recompute.kernels.launch import Launch, collected
from blend.recompute.kernels.memory import Canvases, Memory, Pages
from blend.recompute.kernels.spans import Spans
from blend.recompute.kernels.stored import Stored, Turns
from blend.recompute.rope import Rotation

KERNELS = ("attend", "mass", "assemble", "commit", "deviation", "move")
"""Those that take longest to build first."""
CPU = torch.device("cpu")
KEYS = 2048
SIZES = {
    "dims": (64, 80, 96, 128, 256),
    "bits": (16, 32),
}
PLANS: dict[str, tuple[dict[str, Sequence[Any]], dict[str, Sequence[Any]]]] = {
    "attend": (
        {**SIZES, "pairs": (16, 64, 256)},
        {
            "group": (4, 3, 1),
            "paged": (False, True),
            "window": (False, True),
            "softcap": (False, True),
            "mask": (False, True),
            "split": (False, True),
        },
    ),
    "mass": (
        SIZES,
        {
            "group": (4, 3, 1),
            "window": (False, True),
            "softcap": (False, True),
            "mask": (False, True),
            "rounds": (1, 2),
        },
    ),
    "assemble": (
        {**SIZES, "pairing": ("half", "interleaved")},
        {
            "share": (1.0, 0.5, 0.0),
            "stored": ("same", "float8_e4m3fn", "int8"),
            "scaled": (False, True),
            "paged": (False, True),
        },
    ),
    "commit": (
        SIZES,
        {"score": (None, "key", "value", "both"), "paged": (False, True), "kv_heads": (8, 1)},
    ),
    "deviation": (SIZES, {"both": (False, True), "placed": (False, True)}),
    "move": (SIZES, {"share": (1.0, 0.5, 0.0), "pairing": ("half", "interleaved")}),
}
"""By kernel, what is combined in full with every architecture, and what is spread over that."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Case:
    """One call of the wrapper of ``kernel``, as it would be made on ``architecture``."""

    kernel: str
    architecture: int
    values: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """All that tells it from others."""
        told = (f"{name}={str(value).removeprefix('torch.')}" for name, value in self.values)
        return f"{self.kernel} {' '.join(told)} on sm_{self.architecture}"

    @property
    def size(self) -> tuple[int, int, int | None]:
        """What registers and shared memory follow: bits, head dimension, and pairs of row and head."""
        values = dict(self.values)
        return values["bits"], values["dims"], values.get("pairs")

    def launches(self) -> list[Launch]:
        """What the wrapper would launch."""
        values = dict(self.values)
        del values["bits"]
        with collected(self.architecture) as found:
            CALLS[self.kernel](kernels(CPU, "triton"), **values)
        return found


def cases(architectures: Sequence[int], names: Sequence[str] = KERNELS) -> list[Case]:
    """The calls to be compiled for these architectures and kernels, always the same."""
    found = []
    for kernel in names:
        whole, spread = PLANS[kernel]
        chosen = cover({"architecture": architectures, **whole}, {"dtype": DTYPES, **spread}, ALLOWED[kernel])
        for values in chosen:
            architecture = values.pop("architecture")
            found.append(Case(kernel, architecture, tuple(values.items())))
    return found


def cover(
    whole: Mapping[str, Sequence[Any]],
    spread: Mapping[str, Sequence[Any]],
    allowed: Callable[[dict[str, Any]], bool],
) -> list[dict[str, Any]]:
    """Each allowed combination of ``whole`` once, with values of ``spread`` chosen to meet as many others as can be."""
    met: Counter[Any] = Counter()
    names = (*whole, *spread)
    found = []
    for fixed in itertools.product(*whole.values()):
        rests = itertools.product(*spread.values())
        tries = [case for rest in rests if allowed(case := dict(zip(names, (*fixed, *rest), strict=True)))]
        if tries:
            best = max(tries, key=lambda case: _worth(case, met))
            met.update(pairs(best))
            found.append(best)
    return found


def pairs(case: Mapping[str, Any]) -> Iterator[Any]:
    """Every two values of a case, with their names."""
    return itertools.combinations(case.items(), 2)


def _worth(case: Mapping[str, Any], met: Counter[Any]) -> tuple[int, int]:
    """How many pairs are new, then how seldom the others are."""
    counts = [met[pair] for pair in pairs(case)]
    return counts.count(0), -sum(counts)


def _fits(case: Mapping[str, Any]) -> bool:
    return bool(case["dtype"].itemsize * 8 == case["bits"])


def _stored_so(case: Mapping[str, Any]) -> bool:
    return _fits(case) and (case["scaled"] or case["stored"] != "int8")


def _another_tile(case: Mapping[str, Any]) -> bool:
    """Whether ``pairs`` makes for another tile of attention than fewer do."""
    if not _fits(case):
        return False
    fewer = [count for count in PLANS["attend"][0]["pairs"] if count < case["pairs"]]
    tiles = [shape(case["dims"], case["dtype"], count, case["architecture"]) for count in (*fewer, case["pairs"])]
    return tiles[-1] not in tiles[:-1]


ALLOWED: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "attend": _another_tile,
    "mass": _fits,
    "assemble": _stored_so,
    "commit": _fits,
    "deviation": _fits,
    "move": _fits,
}


def _memory(dims: int, dtype: torch.dtype, kv_heads: int, paged: bool) -> Memory:
    if paged:
        pool = torch.zeros(2, KEYS // 16, 16, kv_heads, dims, dtype=dtype)
        return Pages([pool[0]], [pool[1]], torch.arange(KEYS // 16)[None])
    plain = torch.zeros(2, 1, kv_heads, KEYS, dims, dtype=dtype)
    return Canvases([plain[0]], [plain[1]])


def _attend(
    version: Kernels,
    *,
    dims: int,
    dtype: torch.dtype,
    pairs: int,
    group: int,
    paged: bool,
    window: bool,
    softcap: bool,
    mask: bool,
    split: bool,
) -> None:
    """Many processors and few rows, as in decoding, have the keys split."""
    rows = pairs // group
    positions = torch.arange(KEYS - rows, KEYS)
    batch = Batch(
        [positions],
        [torch.ones(KEYS, dtype=torch.bool)] if mask else None,
        processors=64 if split else 1,
    )
    query = torch.zeros(rows, 2 * group, dims, dtype=dtype).transpose(0, 1)
    version.attend(
        query,
        _memory(dims, dtype, 2, paged),
        0,
        batch,
        scale=0.1,
        window=KEYS - 256 if window else None,
        softcap=50.0 if softcap else None,
    )


def _mass(
    version: Kernels,
    *,
    dims: int,
    dtype: torch.dtype,
    group: int,
    window: bool,
    softcap: bool,
    mask: bool,
    rounds: int,
) -> None:
    from blend.recompute.kernels.mass import ROWS

    rows = ROWS * (rounds - 1) + 16
    version.mass(
        torch.zeros(2 * group, rows, dims, dtype=dtype),
        torch.zeros(2, KEYS, dims, dtype=dtype),
        torch.arange(KEYS - rows, KEYS),
        scale=0.1,
        window=64 if window else None,
        softcap=50.0 if softcap else None,
        visible=torch.ones(KEYS, dtype=torch.bool) if mask else None,
    )


def _assemble(
    version: Kernels,
    *,
    dims: int,
    dtype: torch.dtype,
    pairing: Any,
    share: float,
    stored: str,
    scaled: bool,
    paged: bool,
) -> None:
    kind = dtype if stored == "same" else getattr(torch, stored)
    payload = torch.zeros(1, 2, 2, 64, dims).to(kind)
    scales = [torch.ones(1, 2, 2, 64)] if scaled else None
    turns = None
    if share:
        turns = Turns.of(Rotation(torch.ones(int(dims * share) // 2), pairing), [5], CPU)
    target = torch.zeros(2, *((16, 16, 2, dims) if paged else (2, 256, dims)), dtype=dtype)
    version.assemble(Stored([payload], scales), 0, target[0], target[1], torch.arange(64), turns)


def _commit(version: Kernels, *, dims: int, dtype: torch.dtype, score: Any, paged: bool, kv_heads: int) -> None:
    fresh = torch.zeros(2, kv_heads, 64, dims, dtype=dtype)
    batch = Batch([torch.arange(64)])
    version.commit(fresh[0], fresh[1], _memory(dims, dtype, kv_heads, paged), 0, batch, score=score)


def _deviation(version: Kernels, *, dims: int, dtype: torch.dtype, both: bool, placed: bool) -> None:
    fresh, cached = torch.zeros(2, 2, 8, 64, dims, dtype=dtype)
    positions = torch.arange(64) if placed else None
    if both:
        version.deviation((fresh[0], fresh[1]), (cached[0], cached[1]), positions)
    else:
        version.deviation(fresh[0], cached[0], positions)


def _move(version: Kernels, *, dims: int, dtype: torch.dtype, share: float, pairing: Any) -> None:
    spans = Spans(((8, 100), (100, 120)), torch.ones(128))
    turns = Turns(*torch.zeros(2, 120, int(dims * share) // 2), pairing) if share else None
    version.move(torch.zeros(2, 128, dims, dtype=dtype), torch.zeros(2, 2, dims), spans, turns)


CALLS: dict[str, Callable[..., None]] = {
    "attend": _attend,
    "mass": _mass,
    "assemble": _assemble,
    "commit": _commit,
    "deviation": _deviation,
    "move": _move,
}
