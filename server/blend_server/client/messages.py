"""What the clients send and hand out: requests from arguments, values from events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict, TypeVar

from google.protobuf.message import Message

from blend.errors import InvalidInput
from blend.types import Answer, Plan, Sampling, Token
from blend_server import convert
from blend_server.client.failures import ServiceError
from blend_server.proto.blend.v1 import blend_pb2 as pb

_M = TypeVar("_M", bound=Message)

AnswerEvent: TypeAlias = pb.Passages | Token | pb.PromptTokens | Answer


@dataclass(frozen=True)
class Document:
    """A document to ingest: text, or its UTF-8 bytes, under an id of the caller's choice."""

    id: str
    content: str | bytes
    title: str = ""


class AnswerOptions(TypedDict, total=False):
    """How a question is answered; what is left out, or ``None``, is the server's to choose."""

    k: int | None
    """How many passages."""
    plan: Plan | None
    """How to prefill; ``None`` is method ``auto``."""
    max_new_tokens: int | None
    """Most tokens of the answer; ``None``: what ``sampling`` says, or without it the server."""
    sampling: Sampling | None
    """How tokens are chosen and when the answer ends; ``None`` is greedy."""
    compare_full: bool
    """Also run a full prefill and report how far the answer is from it."""
    positions: bool
    """Report the recomputed positions."""
    tokens: bool
    """Also hand out the prompt, token by token, before the answer."""
    passage_order_seed: int | None
    """Put the passages in a random order that this determines, not best first."""


def answer_request(
    question: str,
    *,
    k: int | None = None,
    plan: Plan | None = None,
    max_new_tokens: int | None = None,
    sampling: Sampling | None = None,
    compare_full: bool = False,
    positions: bool = False,
    tokens: bool = False,
    passage_order_seed: int | None = None,
) -> pb.AnswerRequest:
    """Return the request for a question; :class:`AnswerOptions` says what the options are.

    Raises:
        InvalidInput: no message can hold an argument.
    """
    chosen = {} if sampling is None else convert.sampling_to_proto(sampling)
    if max_new_tokens is not None:
        chosen["max_new_tokens"] = max_new_tokens
    return build(
        pb.AnswerRequest,
        question=question,
        k=k,
        plan=None if plan is None else convert.plan_to_proto(plan),
        **chosen,
        compare_full=compare_full,
        want_positions=positions,
        want_tokens=tokens,
        passage_order_seed=passage_order_seed,
    )


def answer_event(event: pb.AnswerEvent) -> AnswerEvent:
    """Return what an event of an answer holds."""
    kind = event.WhichOneof("event")
    if kind == "passages":
        return event.passages
    if kind == "prompt_tokens":
        return event.prompt_tokens
    return convert.token_from_proto(event.token) if kind == "token" else convert.answer_from_proto(event.answer)


def last_answer(events: Iterable[AnswerEvent]) -> Answer:
    """Return the answer that events end with.

    Raises:
        ServiceError: there is none.
    """
    answers = [event for event in events if isinstance(event, Answer)]
    if not answers:
        raise ServiceError("INTERNAL", "the server ended the stream without an answer")
    return answers[-1]


def build(kind: type[_M], **fields: Any) -> _M:
    """Return a message with those fields that are not ``None``.

    Raises:
        InvalidInput: a value does not fit its field: a number of more bits, text that is not Unicode.
    """
    message: _M = kind()
    for name, value in fields.items():
        if value is None:
            continue
        try:
            if isinstance(value, Message):
                getattr(message, name).CopyFrom(value)
            elif isinstance(value, tuple):
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        except (TypeError, ValueError) as error:
            raise InvalidInput(name, value, f"what the protocol can carry ({error})") from error
    return message
