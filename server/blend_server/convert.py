"""Between blend's types and the messages of ``blend/v1/blend.proto``, both ways, and the checks at the edge."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

from blend.errors import InvalidDocument, InvalidInput, InvalidPlan, InvalidPrompt
from blend.types import (
    METHODS,
    Answer,
    ChunkReport,
    Comparison,
    Finish,
    Outcome,
    Plan,
    Prompt,
    Report,
    Sampling,
    Text,
    Timings,
    Token,
    Variant,
)
from blend_server.proto.blend.v1 import blend_pb2 as pb

MAX_QUESTION_BYTES = 1 << 20
MAX_PASSAGES = 1000
MAX_TITLE_CHARS = 1024

_VARIANTS: dict[pb.Variant, Variant] = {
    pb.VARIANT_UNSPECIFIED: "best",
    pb.VARIANT_PLAIN: "plain",
    pb.VARIANT_CONDITIONED: "conditioned",
    pb.VARIANT_BEST: "best",
}
_OUTCOMES: dict[Outcome, pb.Outcome] = {
    "hit": pb.OUTCOME_HIT,
    "miss": pb.OUTCOME_MISS,
    "failed": pb.OUTCOME_FAILED,
    "unused": pb.OUTCOME_UNUSED,
}
_FINISHES: dict[Finish, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
    "deadline": pb.FINISH_REASON_DEADLINE,
}

_K = TypeVar("_K")
_V = TypeVar("_V")


# ------------------------------------------------------------------------------------------------ requests


def title(text: str) -> str:
    """The title of a document; short enough for a page of documents to fit into a message.

    Raises:
        InvalidDocument: it is too long.
    """
    if len(text) > MAX_TITLE_CHARS:
        raise InvalidDocument("title", f"{len(text)} characters", f"at most {MAX_TITLE_CHARS} characters")
    return text


def question(text: str) -> str:
    """The question of a request; whether it says anything is for the library to check.

    Raises:
        InvalidPrompt: it is longer than any model would take.
    """
    if (size := len(text.encode("utf-8"))) > MAX_QUESTION_BYTES:
        raise InvalidPrompt("question", f"{size} bytes", f"at most {MAX_QUESTION_BYTES} bytes")
    return text


def count(request: Message, field: str, default: int, *, most: int | None = None) -> int:
    """The number in ``request``'s optional ``field``, or ``default`` where it is absent.

    Raises:
        InvalidInput: the number is below 1, or above ``most``.
    """
    value: int = getattr(request, field) if request.HasField(field) else default
    if value < 1 or (most is not None and value > most):
        allowed = "1 or more" if most is None else f"1 to {most}"
        raise InvalidInput(field, value, f"{allowed}, or absent for {default}")
    return value


def plan_from_proto(message: pb.Plan) -> Plan:
    """The plan that ``message`` stands for; an absent message gives the default plan.

    Only methods that ship may be named: others that the engine may know are for evaluation.

    Raises:
        InvalidPlan: an unknown or evaluation-only method, an unknown variant, a number out of its range or of no
            meaning with the method.
    """
    method = message.method or "auto"
    if method not in METHODS:
        raise InvalidPlan("plan.method", method, ", ".join(METHODS))
    if message.variant not in _VARIANTS:
        raise InvalidPlan("plan.variant", message.variant, "plain, conditioned or best")
    try:
        return Plan(
            method,
            ratio=_optional(message, "ratio"),
            max_charged=_optional(message, "max_charged"),
            max_kl=_optional(message, "max_kl"),
            variant=_VARIANTS[message.variant],
        )
    except InvalidPlan as error:
        raise InvalidPlan(f"plan.{error.field}", error.value, error.allowed) from error


def plan_to_proto(plan: Plan) -> pb.Plan:
    """The message for ``plan``."""
    numbers = {"ratio": plan.ratio, "max_charged": plan.max_charged, "max_kl": plan.max_kl}
    present: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    return pb.Plan(method=plan.method, variant=_last_key(_VARIANTS, plan.variant), **present)


def sampling_from_proto(request: pb.AnswerRequest, max_new_tokens: int) -> Sampling:
    """How ``request`` wants tokens to be chosen; absent fields mean greedy, and ``max_new_tokens`` tokens.

    Raises:
        InvalidInput: a value is out of its range.
    """
    names = ("temperature", "top_p", "top_k", "seed")
    given = {name: getattr(request, name) for name in names if request.HasField(name)}
    length = count(request, "max_new_tokens", max_new_tokens)
    return Sampling(**given, stop=tuple(request.stop), max_new_tokens=length)


def sampling_to_proto(sampling: Sampling) -> dict[str, Any]:
    """The fields of :class:`pb.AnswerRequest` that stand for ``sampling``."""
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop": sampling.stop,
        "max_new_tokens": sampling.max_new_tokens,
    }
    return fields if sampling.seed is None else {**fields, "seed": sampling.seed}


# ------------------------------------------------------------------------------------------------- answers


def token_to_proto(token: Token) -> pb.Token:
    """The message for one generated token."""
    return pb.Token(token_id=token.token_id, text=token.text)


def token_from_proto(message: pb.Token) -> Token:
    """The generated token that ``message`` stands for."""
    return Token(message.token_id, message.text)


def prompt_to_proto(prompt: Prompt, pieces: Callable[[Iterable[int]], Iterable[str]]) -> pb.PromptTokens:
    """The message for a prompt; ``pieces`` gives the texts of a segment's tokens."""
    message = pb.PromptTokens()
    for start, end, segment in prompt.spans():
        kind = pb.SEGMENT_KIND_TEXT if isinstance(segment, Text) else pb.SEGMENT_KIND_CHUNK
        message.segments.add(kind=kind, start=start, tokens=end - start)
        message.texts.extend(pieces(segment.token_ids))
    return message


def answer_to_proto(answer: Answer) -> pb.FinalAnswer:
    """The message for a finished answer and its report."""
    return pb.FinalAnswer(
        text=answer.text,
        token_ids=answer.token_ids,
        finish_reason=_FINISHES[answer.finish_reason],
        report=report_to_proto(answer.report),
        usage=pb.Usage(
            prompt_tokens=answer.usage.prompt_tokens,
            cached_tokens=answer.usage.cached_tokens,
            completion_tokens=answer.usage.completion_tokens,
        ),
    )


def answer_from_proto(message: pb.FinalAnswer) -> Answer:
    """The finished answer that ``message`` stands for."""
    finish = _last_key(_FINISHES, message.finish_reason)
    return Answer(message.text, tuple(message.token_ids), finish, report_from_proto(message.report))


def report_to_proto(report: Report) -> pb.Report:
    """The message for ``report``, with the figures that follow from others filled in."""
    message = pb.Report(
        mode=report.mode,
        reason=report.reason,
        tokens=report.tokens,
        cached=report.cached,
        mandatory=report.mandatory,
        selected=report.selected,
        requested_ratio=report.requested_ratio,
        selected_ratio=report.selected_ratio,
        charged_ratio=report.charged_ratio,
        chunks=[_chunk_to_proto(chunk) for chunk in report.chunks],
        timings=_timings_to_proto(report.timings),
        full_estimate_ms=report.full_estimate_ms,
        warnings=report.warnings,
        full_ms=report.full_ms,
        speedup=report.speedup,
        predicted_ms=report.predicted_ms,
    )
    if report.predicted_kl is not None:
        message.predicted_kl = report.predicted_kl
    if report.recomputed_positions is not None:
        message.recomputed_positions.CopyFrom(pb.Positions(positions=report.recomputed_positions))
    if (comparison := report.comparison) is not None:
        message.comparison.CopyFrom(
            pb.Comparison(
                full_ms=comparison.full_ms,
                first_token_kl=comparison.first_token_kl,
                top1_agrees=comparison.top1_agrees,
            )
        )
    return message


def report_from_proto(message: pb.Report) -> Report:
    """The report that ``message`` stands for."""
    positions, comparison = message.recomputed_positions, message.comparison
    return Report(
        mode=message.mode,
        reason=message.reason,
        tokens=message.tokens,
        cached=message.cached,
        mandatory=message.mandatory,
        selected=message.selected,
        requested_ratio=message.requested_ratio,
        selected_ratio=message.selected_ratio,
        charged_ratio=message.charged_ratio,
        chunks=tuple(_chunk_from_proto(chunk) for chunk in message.chunks),
        timings=_timings_from_proto(message.timings),
        full_estimate_ms=message.full_estimate_ms,
        warnings=tuple(message.warnings),
        recomputed_positions=tuple(positions.positions) if message.HasField("recomputed_positions") else None,
        comparison=(
            Comparison(comparison.full_ms, comparison.first_token_kl, comparison.top1_agrees)
            if message.HasField("comparison")
            else None
        ),
        predicted_ms=message.predicted_ms,
        predicted_kl=_optional(message, "predicted_kl"),
    )


def _chunk_to_proto(chunk: ChunkReport) -> pb.ChunkReport:
    message = pb.ChunkReport(
        key=chunk.key,
        start=chunk.start,
        tokens=chunk.tokens,
        outcome=_OUTCOMES[chunk.outcome],
        payload_bytes=chunk.nbytes,
        reason=chunk.reason,
    )
    if chunk.tier is not None:
        message.tier = chunk.tier
    if chunk.variant is not None:
        message.variant = chunk.variant
    return message


def _chunk_from_proto(message: pb.ChunkReport) -> ChunkReport:
    return ChunkReport(
        key=message.key,
        start=message.start,
        tokens=message.tokens,
        outcome=_last_key(_OUTCOMES, message.outcome),
        tier=_optional(message, "tier"),
        variant=_optional(message, "variant"),
        nbytes=message.payload_bytes,
        reason=message.reason,
    )


def _timings_to_proto(timings: Timings) -> pb.Timings:
    return pb.Timings(
        queue_ms=timings.queue,
        lookup_ms=timings.lookup,
        fetch_ms=timings.fetch,
        rotate_ms=timings.rotate,
        select_ms=timings.select,
        recompute_ms=timings.recompute,
        first_token_ms=timings.first_token,
    )


def _timings_from_proto(message: pb.Timings) -> Timings:
    return Timings(
        queue=message.queue_ms,
        lookup=message.lookup_ms,
        fetch=message.fetch_ms,
        rotate=message.rotate_ms,
        select=message.select_ms,
        recompute=message.recompute_ms,
        first_token=message.first_token_ms,
    )


def _optional(message: Message, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _last_key(mapping: Mapping[_K, _V], value: _V) -> _K:
    """The last key of ``mapping`` with that value.

    Raises:
        InvalidInput: there is none; the other side speaks a newer version of the protocol.
    """
    for key in reversed(list(mapping)):
        if mapping[key] == value:
            return key
    raise InvalidInput("enum", value, ", ".join(str(v) for v in mapping.values()))
