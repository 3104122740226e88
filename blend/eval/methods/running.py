"""Runs any method on a prompt."""

from __future__ import annotations

from dataclasses import replace

from blend.engine import Engine
from blend.errors import InvalidInput, InvalidPlan, InvalidPrompt
from blend.eval.methods.oracle import Oracle, Progress, Reference
from blend.eval.methods.released import Released
from blend.names import unknown
from blend.recompute.planner import DEFAULT_RATIO
from blend.recompute.prefill import Repair
from blend.recompute.select import methods
from blend.types import EXACT_METHODS, Chunk, Plan, Prefill, Prompt, Variant

CLOSED_BOOK = "closed-book"

BASELINES = (CLOSED_BOOK, Released.name, Oracle.name)
"""Methods that only evaluation has. No plan may name them, and so the service refuses them."""


CONDITIONED = "@conditioned"
"""What ends the name of a method that runs over chunks which were encoded behind their neighbours."""


_ONE_VARIANT = ("auto", *EXACT_METHODS)


def names() -> tuple[str, ...]:
    """Return every method that :func:`prefill` runs, the engine's first, and over which variant of the chunks.

    ``query@conditioned`` runs ``query`` over conditioned chunks where they are stored, as ``auto`` does; without that
    ending all chunks are plain.
    """
    return (*methods(), *BASELINES, *(f"{name}{CONDITIONED}" for name in methods() if name not in _ONE_VARIANT))


def split(name: str) -> tuple[str, Variant]:
    """Return the method and the variant of chunks that one of :func:`names` stands for."""
    method, ending, _ = name.partition(CONDITIONED)
    return method, "best" if ending or method == "auto" else "plain"


def prefill(
    engine: Engine,
    method: str,
    ratio: float | None,
    prompt: Prompt,
    *,
    namespace: str,
    reserve: int = 0,
    capped: bool = False,
    positions: bool = False,
    reference: Reference | None = None,
    progress: Progress | None = None,
) -> Prefill:
    """Prefill a prompt with any method; what comes back goes on with ``engine.continuation`` and ``engine.greedy``.

    Args:
        method: one of :func:`names`.
        ratio: share of the cached tokens to select, 0 to 1; ``None`` is the engine's default for a method that
            selects, and all that the others take.
        namespace, reserve, positions: as for :meth:`blend.Engine.prefill`.
        capped: whether the ratio is a cap on the charge, a method's own probes included, for the engine's methods.
        reference: the same prompt at full prefill; ``oracle`` needs it.
        progress: told by ``oracle`` how far it is.

    The report of ``closed-book`` is that of the shorter prompt. No reusable token is computed for it, so it is
    charged nothing.

    Raises:
        InvalidPlan: no such method, or a ratio that is out of range or means nothing to it.
        InvalidInput: ``oracle`` without a reference of this prompt.
        InvalidPrompt: ``closed-book`` of a prompt that is nothing but passages.
    """
    if method not in names():
        raise unknown("method", method, names(), InvalidPlan)
    if method == CLOSED_BOOK:
        return _closed_book(engine, ratio, prompt, namespace, reserve, positions)
    base, variant = split(method)
    plan = Plan(base, ratio, max_charged=ratio if capped else None, variant=variant)
    if base not in BASELINES:
        return engine.prefill(prompt, plan, namespace=namespace, reserve=reserve, positions=positions)
    share = DEFAULT_RATIO if plan.ratio is None else plan.ratio
    repair: Repair
    if method == Released.name:
        repair = Released(prompt, engine.sink, share)
    elif reference is None:
        raise InvalidInput("reference", reference, f"the prompt at full prefill, which {method} compares with")
    else:
        full = engine.continuation(reference.prefill, reference.answer_ids)
        repair = Oracle(reference, full, share, progress=progress)
    reuse = Plan("reuse", variant=variant)
    return engine.prefill(prompt, reuse, namespace=namespace, reserve=reserve, positions=positions, repair=repair)


def closed_book(prompt: Prompt) -> Prompt:
    """Return the prompt without its passages: what the model knows by itself.

    Raises:
        InvalidPrompt: nothing is left.
    """
    return Prompt(segment for segment in prompt.segments if not isinstance(segment, Chunk))


def _closed_book(
    engine: Engine, ratio: float | None, prompt: Prompt, namespace: str, reserve: int, positions: bool
) -> Prefill:
    if ratio is not None:
        raise InvalidPlan("ratio", ratio, f"none with method {CLOSED_BOOK}, which reuses nothing")
    if not isinstance(prompt, Prompt):
        raise InvalidPrompt("prompt", prompt, "a Prompt")
    full = engine.prefill(closed_book(prompt), Plan("full"), namespace=namespace, reserve=reserve, positions=positions)
    report = replace(
        full.report,
        mode=CLOSED_BOOK,
        reason="the prompt without its passages",
        requested_ratio=0.0,
        selected_ratio=0.0,
        charged_ratio=0.0,
    )
    return replace(full, report=report)
