"""What a client gives an engine that the connector runs in: token ids, and a request to blend beside them.

Needs neither that engine nor torch. The request travels as ``kv_transfer_params``, which vLLM takes from the Python
API and from the OpenAI-compatible one::

    made = build_prompt([header, chunk, other, question], Plan("query", ratio=0.15))
    llm.generate({"prompt_token_ids": made["prompt_token_ids"]},
                 SamplingParams(extra_args={"kv_transfer_params": made["kv_transfer_params"]}))

It names the chunks by where they stand, with a digest of their tokens: a prompt that was cut short or tokenized again
on its way is found out.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict, TypeGuard

from blend.config import MAX_TENANT
from blend.errors import InvalidInput, InvalidPrompt
from blend.types import Chunk, Plan, Prompt, Segment, Text

KEY = "blend"
"""The entry of ``kv_transfer_params`` that is blend's own."""
VERSION = 1
DEFAULT_TENANT = "default"
_FIELDS = frozenset(("version", "plan", "segments", "tenant", "strict", "positions"))
_SEGMENT = frozenset(("start", "end", "digest"))


class BlendPrompt(TypedDict):
    """What :func:`build_prompt` returns; both entries are plain values that JSON holds."""

    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any]


@dataclass(frozen=True)
class BlendRequest:
    """What a client asks for, checked against the prompt's tokens.

    Args:
        prompt: chunks where the client named them, plain text everywhere else.
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
        return max(end for _, end, segment in self.prompt.spans() if isinstance(segment, Chunk))


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
        segments: chunks and texts in the order of the prompt, at least one chunk among them.
        plan: how to prefill; ``None`` is ``Plan()``, that is ``auto``.
        tenant: whose chunks these are (the engine's ``namespace``).
        strict: have the engine refuse the request where it cannot blend it, instead of a full prefill.
        positions: have the report list the positions that were selected and recomputed.

    Raises:
        InvalidPrompt: no segments, something else among them, or no chunk.
        InvalidInput: another argument is wrong.
    """
    prompt = segments if isinstance(segments, Prompt) else Prompt(segments)
    chosen = Plan() if plan is None else plan
    if not isinstance(chosen, Plan):
        raise InvalidInput("plan", plan, "a Plan")
    spans = [(start, end, s) for start, end, s in prompt.spans() if isinstance(s, Chunk)]
    if not spans:
        raise InvalidPrompt("segments", "no chunks", "at least one Chunk")
    wire = {
        "version": VERSION,
        "plan": {name: value for name, value in asdict(chosen).items() if value is not None},
        "segments": [{"start": start, "end": end, "digest": digest(s.token_ids)} for start, end, s in spans],
        "tenant": _tenant(tenant),
        "strict": _flag("strict", strict),
        "positions": _flag("positions", positions),
    }
    return {"prompt_token_ids": list(prompt.token_ids), "kv_transfer_params": {KEY: wire}}


def digest(token_ids: Sequence[int]) -> str:
    """Hex digest (blake2b, 16 bytes) of token ids."""
    packed = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return hashlib.blake2b(packed, digest_size=16).hexdigest()


def parse(params: object, token_ids: Sequence[int]) -> BlendRequest | None:
    """Return what ``kv_transfer_params`` ask for a prompt of these token ids; ``None`` if nothing of blend.

    Raises:
        InvalidInput: a field is missing, unknown or of a wrong kind.
        InvalidPlan: the plan is not valid.
        InvalidPrompt: segments overlap, are out of order, run past the prompt's end, or are not its tokens.
    """
    if params is None or not isinstance(params, Mapping) or KEY not in params:
        return None
    wire = _fields(KEY, params[KEY], _FIELDS, required=("version", "segments"))
    if wire["version"] != VERSION or isinstance(wire["version"], bool):
        raise InvalidInput(f"{KEY}.version", wire["version"], str(VERSION))
    return BlendRequest(
        prompt=Prompt(_segments(wire["segments"], token_ids)),
        plan=_plan(wire.get("plan", {})),
        tenant=_tenant(wire.get("tenant", DEFAULT_TENANT)),
        strict=_flag("strict", wire.get("strict", False)),
        positions=_flag("positions", wire.get("positions", False)),
    )


def wants_strict(params: object) -> bool:
    """Whether a request, which may be wrong in other ways, asks to be refused rather than served without blending."""
    wire = params.get(KEY) if isinstance(params, Mapping) else None
    return isinstance(wire, Mapping) and wire.get("strict") is True


def _segments(wire: object, token_ids: Sequence[int]) -> list[Segment]:
    if not isinstance(wire, Sequence) or isinstance(wire, str) or not wire:
        raise InvalidPrompt("segments", wire, "a list of at least one segment")
    found: list[Segment] = []
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
        if at < start:
            found.append(Text(token_ids[at:start]))
        found.append(Chunk(tokens))
        at = end
    if at < len(token_ids):
        found.append(Text(token_ids[at:]))
    return found


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


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(name, value, "true or false")
    return value


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
