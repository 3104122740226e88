"""What a client gives an engine that the connector runs in: token ids, and a request to blend beside them.

Needs neither that engine nor torch. The request travels as ``kv_transfer_params``, which vLLM takes from the Python
API and from the OpenAI-compatible one::

    made = build_prompt([header, chunk, other, question], Plan("query", ratio=0.15))
    llm.generate({"prompt_token_ids": made["prompt_token_ids"]},
                 SamplingParams(extra_args={"kv_transfer_params": made["kv_transfer_params"]}))

It names the chunks by where they stand, with a digest of their tokens: a prompt that was cut short or tokenized again
on its way is found out. Or it leaves finding known chunks to the engine (:func:`ask_to_recognise`), whatever the prompt
was made of.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypedDict, TypeGuard

from blend.config import MAX_TENANT
from blend.errors import InvalidInput, InvalidPrompt
from blend.types import Chunk, Part, Plan, Prompt, Segment, Text

KEY = "blend"
"""The entry of ``kv_transfer_params`` that is blend's own."""
VERSION = 1
DEFAULT_TENANT = "default"
MAX_SEAM = 4096
"""Most tokens of a chunk on either side of the part of it that a prompt has."""
_SEAM = f"a list of at most {MAX_SEAM} token ids below 2**32"
_FIELDS = frozenset(("version", "plan", "segments", "recognise", "tenant", "strict", "positions"))
_SEGMENT = frozenset(("start", "end", "digest", "before", "after"))


class Finder(Protocol):
    """What finds known chunks, such as a :class:`blend.connector.recognise.Recogniser`."""

    def find(self, tenant: str, token_ids: Sequence[int]) -> list[tuple[int, Part]]:
        """Return position and part of each of the tenant's known chunks in a prompt, in order."""


class BlendPrompt(TypedDict):
    """What :func:`build_prompt` returns; both entries are plain values that JSON holds."""

    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any]


@dataclass(frozen=True)
class BlendRequest:
    """What a client asks for, checked against the prompt's tokens.

    Args:
        prompt: chunks, or parts of them, where the client named or the engine found them, plain text everywhere else.
        plan: how to prefill.
        tenant: whose chunks these are.
        strict: whether the request is to fail where it cannot be blended, instead of running at full prefill.
        positions: whether the report lists positions.
    """

    prompt: Prompt
    plan: Plan
    tenant: str
    strict: bool
    positions: bool = False

    @property
    def end(self) -> int:
        """The position behind the last chunk: from there on all is the question."""
        return max(start + len(part) for start, part in self.prompt.parts())


def build_prompt(
    segments: Iterable[Segment],
    plan: Plan | None = None,
    *,
    tenant: str = DEFAULT_TENANT,
    strict: bool = False,
    positions: bool = False,
) -> BlendPrompt:
    """Return the token ids of a prompt, and the request to blend it.

    Args:
        segments: chunks, parts of chunks and texts in the order of the prompt, at least one that is no text.
        plan: how to prefill; ``None`` is ``Plan()``, that is ``auto``.
        tenant: whose chunks these are (the engine's ``namespace``).
        strict: have the engine refuse the request where it cannot blend it, instead of a full prefill.
        positions: have the report list the positions that were selected and recomputed.

    Raises:
        InvalidPrompt: no segments, something else among them, or no chunk.
        InvalidInput: another argument is wrong.
    """
    prompt = segments if isinstance(segments, Prompt) else Prompt(segments)
    named = [_wire(start, part) for start, part in prompt.parts()]
    if not named:
        raise InvalidPrompt("segments", "no chunks", "at least one Chunk or Part")
    wire = {**_common(plan, tenant, strict, positions), "segments": named}
    return {"prompt_token_ids": list(prompt.token_ids), "kv_transfer_params": {KEY: wire}}


def _wire(start: int, part: Part) -> dict[str, Any]:
    """What a segment is on its way: ``before`` and ``after`` are the chunk's tokens that the prompt does not have."""
    found: dict[str, Any] = {"start": start, "end": start + len(part), "digest": digest(part.token_ids)}
    ids = part.chunk.token_ids
    missing = {"before": list(ids[: part.first]), "after": list(ids[part.end :])}
    return found | {name: tokens for name, tokens in missing.items() if tokens}


def digest(token_ids: Sequence[int]) -> str:
    """Hex digest (blake2b, 16 bytes) of token ids."""
    packed = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return hashlib.blake2b(packed, digest_size=16).hexdigest()


def ask_to_recognise(
    plan: Plan | None = None,
    *,
    tenant: str = DEFAULT_TENANT,
    strict: bool = False,
    positions: bool = False,
) -> dict[str, Any]:
    """Return ``kv_transfer_params`` that have the engine find known chunks in a prompt by itself.

    The prompt goes with it as text or as token ids, like any other. Known are the chunks that the tenant's requests
    have named, and those in the store; where none of them is found, there is nothing to blend.

    Args:
        plan, tenant, strict, positions: as in :func:`build_prompt`.

    Raises:
        InvalidInput: an argument is wrong.
    """
    return {KEY: {**_common(plan, tenant, strict, positions), "recognise": True}}


def _common(plan: Plan | None, tenant: str, strict: bool, positions: bool) -> dict[str, Any]:
    chosen = Plan() if plan is None else plan
    if not isinstance(chosen, Plan):
        raise InvalidInput("plan", plan, "a Plan")
    return {
        "version": VERSION,
        "plan": {name: value for name, value in asdict(chosen).items() if value is not None},
        "tenant": _tenant(tenant),
        "strict": _flag("strict", strict),
        "positions": _flag("positions", positions),
    }


def parse(params: object, token_ids: Sequence[int], known: Finder | None = None) -> BlendRequest | None:
    """Return what ``kv_transfer_params`` ask for a prompt of these token ids.

    ``None`` if that is nothing of blend, or if ``known`` chunks are to be found and there are none. Where none are
    known at all, a request for it is refused.

    Raises:
        InvalidInput: a field is missing, unknown or of a wrong kind.
        InvalidPlan: the plan is not valid.
        InvalidPrompt: segments overlap, are out of order, run past the prompt's end, or are not its tokens.
    """
    if params is None or not isinstance(params, Mapping) or KEY not in params:
        return None
    wire = _fields(KEY, params[KEY], _FIELDS, required=("version",))
    if wire["version"] != VERSION or isinstance(wire["version"], bool):
        raise InvalidInput(f"{KEY}.version", wire["version"], str(VERSION))
    plan, tenant = _plan(wire.get("plan", {})), _tenant(wire.get("tenant", DEFAULT_TENANT))
    strict, positions = (_flag(name, wire.get(name, False)) for name in ("strict", "positions"))
    recognise = _flag("recognise", wire.get("recognise", False))
    if recognise == ("segments" in wire):
        raise InvalidInput(KEY, "both" if recognise else "neither", "segments, or recognise as true")
    if not recognise:
        return BlendRequest(_laid_out(_named(wire["segments"], token_ids), token_ids), plan, tenant, strict, positions)
    if known is None:
        raise InvalidInput("recognise", True, "false: this engine is not set to recognise chunks")
    return recognised(known, token_ids, plan, tenant, strict, positions)


def recognised(
    known: Finder,
    token_ids: Sequence[int],
    plan: Plan,
    tenant: str,
    strict: bool = False,
    positions: bool = False,
) -> BlendRequest | None:
    """Return a request to blend the tenant's known chunks in a prompt; ``None`` where it has none."""
    found = known.find(tenant, token_ids)
    return BlendRequest(_laid_out(found, token_ids), plan, tenant, strict, positions) if found else None


def wants_strict(params: object) -> bool:
    """Whether a request, which may be wrong in other ways, asks to be refused rather than served without blending."""
    wire = params.get(KEY) if isinstance(params, Mapping) else None
    return isinstance(wire, Mapping) and wire.get("strict") is True


def _named(wire: object, token_ids: Sequence[int]) -> list[tuple[int, Part]]:
    """Return the segments that a client named: positions, and parts of chunks."""
    if not isinstance(wire, Sequence) or isinstance(wire, str) or not wire:
        raise InvalidPrompt("segments", wire, "a list of at least one segment")
    found: list[tuple[int, Part]] = []
    at = 0
    for number, entry in enumerate(wire):
        name = f"segments[{number}]"
        fields = _fields(name, entry, _SEGMENT, required=("start", "end"))
        start, end = fields["start"], fields["end"]
        if not _is_int(start) or not _is_int(end) or not 0 <= start < end:
            raise InvalidPrompt(name, (start, end), "integers with 0 <= start < end")
        if start < at:
            raise InvalidPrompt(name, (start, end), f"a start of {at} or more, where the segment before it ends")
        if end > len(token_ids):
            raise InvalidPrompt(name, (start, end), f"an end of at most {len(token_ids)}, the prompt's length")
        tokens = token_ids[start:end]
        if "digest" in fields and fields["digest"] != digest(tokens):
            raise InvalidPrompt(f"{name}.digest", fields["digest"], "the digest of the prompt's tokens there")
        before, after = (_list(f"{name}.{which}", fields.get(which, [])) for which in ("before", "after"))
        found.append((start, Part(Chunk((*before, *tokens, *after)), len(before), len(before) + len(tokens))))
        at = end
    return found


def _laid_out(parts: Iterable[tuple[int, Part]], token_ids: Sequence[int]) -> Prompt:
    """Return the prompt of these token ids with parts of chunks, in order, where they are, and text everywhere else."""
    segments: list[Segment] = []
    at = 0
    for start, part in parts:
        if at < start:
            segments.append(Text(token_ids[at:start]))
        segments.append(part.chunk if len(part) == len(part.chunk) else part)
        at = start + len(part)
    if at < len(token_ids):
        segments.append(Text(token_ids[at:]))
    return Prompt(segments)


def _plan(wire: object) -> Plan:
    fields = _fields("plan", wire, frozenset(Plan.__dataclass_fields__))
    return Plan(**fields)


def _fields(name: str, wire: object, known: frozenset[str], required: Sequence[str] = ()) -> Mapping[str, Any]:
    if not isinstance(wire, Mapping):
        raise InvalidInput(name, wire, "an object")
    if unknown := sorted(str(field) for field in wire if field not in known):
        raise InvalidInput(name, ", ".join(unknown), f"no other fields than {', '.join(sorted(known))}")
    if missing := [field for field in required if field not in wire]:
        raise InvalidInput(name, f"no {', '.join(missing)}", f"an object with {', '.join(required)}")
    return wire


def _tenant(value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_TENANT:
        raise InvalidInput("tenant", value, f"a name of 1 to {MAX_TENANT} characters")
    return value


def _list(name: str, value: object) -> list[int]:
    if not isinstance(value, list) or len(value) > MAX_SEAM:
        raise InvalidInput(name, value if not isinstance(value, list) else f"{len(value)} tokens", _SEAM)
    if wrong := [token for token in value if not _is_int(token) or not 0 <= token < 1 << 32]:
        raise InvalidPrompt(name, wrong[0], _SEAM)
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(name, value, "true or false")
    return value


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
