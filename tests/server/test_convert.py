"""Types to messages and back; what a request may not hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blend.errors import InvalidInput, InvalidPlan, InvalidPrompt
from blend.recompute.select import methods
from blend.types import METHODS, PLAIN_METHODS, Answer, ChunkReport, Comparison, Plan, Report, Sampling, Timings, Token
from blend_server import convert
from blend_server.proto.blend.v1 import blend_pb2 as pb

counts = st.integers(0, 2**31 - 1)
shares = st.floats(0, 1)
times = st.floats(0, 1e9)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)

variants = st.sampled_from(["plain", "conditioned", "best"])
selecting = st.sampled_from([m for m in METHODS if m not in ("auto", *PLAIN_METHODS)])
plans = st.one_of(
    st.builds(Plan, st.sampled_from(PLAIN_METHODS), variant=variants),
    st.builds(Plan, selecting, ratio=st.none() | shares, max_charged=st.none() | shares, variant=variants),
    st.builds(Plan, max_charged=st.none() | shares, max_kl=st.none() | st.floats(0, 100), variant=variants),
)
chunk_reports = st.builds(
    ChunkReport,
    key=texts,
    start=counts,
    tokens=counts,
    outcome=st.sampled_from(["hit", "miss", "failed", "unused"]),
    tier=st.none() | texts,
    variant=st.none() | texts,
    nbytes=st.integers(0, 2**60),
    reason=texts,
)
reports = st.builds(
    Report,
    mode=texts,
    reason=texts,
    tokens=counts,
    cached=counts,
    mandatory=counts,
    selected=counts,
    requested_ratio=shares,
    selected_ratio=shares,
    charged_ratio=shares,
    chunks=st.lists(chunk_reports, max_size=3).map(tuple),
    timings=st.builds(Timings, times, times, times, times, times, times, times),
    full_estimate_ms=times,
    warnings=st.lists(texts, max_size=2).map(tuple),
    recomputed_positions=st.none() | st.lists(counts, max_size=5).map(tuple),
    comparison=st.none() | st.builds(Comparison, times, times, st.booleans()),
    predicted_ms=times,
    predicted_kl=st.none() | times,
)
answers = st.builds(
    Answer,
    texts,
    st.lists(counts, max_size=5).map(tuple),
    st.sampled_from(["stop", "length", "cancelled", "deadline"]),
    reports,
)


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@given(plans)
def test_a_plan_survives(plan: Plan) -> None:
    assert convert.plan_from_proto(over_the_wire(convert.plan_to_proto(plan))) == plan


@given(answers)
def test_an_answer_survives_with_every_field_of_its_report(answer: Answer) -> None:
    message = over_the_wire(convert.answer_to_proto(answer))
    assert convert.answer_from_proto(message) == answer
    assert message.report.full_ms == answer.report.full_ms
    assert message.report.speedup == answer.report.speedup


def test_a_token_survives() -> None:
    token = Token(17, " wörld")
    assert convert.token_from_proto(over_the_wire(convert.token_to_proto(token))) == token


def test_the_report_message_has_every_field_of_the_report() -> None:
    """A field that is added to the types must not silently be missing from the protocol.

    But for ``phases``: readings of a clock that is its process's own.
    """
    renamed, kept = {"nbytes": "payload_bytes"}, {"phases"}
    for kind, message in ((Report, pb.Report), (ChunkReport, pb.ChunkReport), (Comparison, pb.Comparison)):
        there = {field.name for field in message.DESCRIPTOR.fields}
        assert {renamed.get(name, name) for name in kind.__dataclass_fields__.keys() - kept} <= there
    assert {f"{name}_ms" for name in Timings.__dataclass_fields__} == {f.name for f in pb.Timings.DESCRIPTOR.fields}


@given(
    st.builds(
        Sampling,
        st.floats(0, 100),
        st.floats(0.01, 1),
        st.integers(0, 2**31 - 1),
        st.none() | st.integers(0, 2**63 - 1),
        st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9), max_size=3).map(tuple),
        st.integers(1, 2**31 - 1),
    )
)
def test_sampling_survives(sampling: Sampling) -> None:
    request = pb.AnswerRequest(**convert.sampling_to_proto(sampling))
    assert convert.sampling_from_proto(over_the_wire(request), 48) == sampling


def test_no_sampling_is_greedy_with_the_server_s_length() -> None:
    assert convert.sampling_from_proto(pb.AnswerRequest(), 48) == Sampling(max_new_tokens=48)


@pytest.mark.parametrize(
    "fields",
    [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"seed": -1}, {"stop": [""]}, {"max_new_tokens": 0}],
)
def test_wrong_sampling_is_refused_by_field(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as raised:
        convert.sampling_from_proto(pb.AnswerRequest(**fields), 48)
    assert raised.value.field == next(iter(fields))


def test_no_plan_is_the_default_plan() -> None:
    assert convert.plan_from_proto(pb.AnswerRequest().plan) == Plan()


def test_a_ratio_of_zero_is_not_an_absent_ratio() -> None:
    assert convert.plan_from_proto(pb.Plan(method="query", ratio=0.0)).ratio == 0.0
    assert convert.plan_from_proto(pb.Plan(method="query")).ratio is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"method": "clairvoyant"}, "plan.method"),
        ({"method": "oracle"}, "plan.method"),
        ({"method": "deviation-released"}, "plan.method"),
        ({"method": "query", "ratio": 1.01}, "plan.ratio"),
        ({"method": "query", "ratio": -0.01}, "plan.ratio"),
        ({"method": "query", "ratio": math.nan}, "plan.ratio"),
        ({"method": "query", "ratio": math.inf}, "plan.ratio"),
        ({"ratio": 0.2}, "plan.ratio"),
        ({"max_charged": 2.0}, "plan.max_charged"),
        ({"max_kl": -1.0}, "plan.max_kl"),
        ({"max_kl": math.nan}, "plan.max_kl"),
        ({"variant": 77}, "plan.variant"),
        ({"method": "full", "ratio": 0.2}, "plan.ratio"),
        ({"method": "reuse", "max_charged": 0.2}, "plan.max_charged"),
        ({"method": "query", "max_kl": 0.1}, "plan.max_kl"),
    ],
)
def test_a_wrong_plan_is_refused_by_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidPlan) as raised:
        convert.plan_from_proto(pb.Plan(**fields))
    assert raised.value.field == field
    assert raised.value.allowed


def test_a_question_has_a_limit_in_bytes() -> None:
    longest = "é" * (convert.MAX_QUESTION_BYTES // 2)
    assert convert.question(longest) == longest
    with pytest.raises(InvalidPrompt, match="question: got '1048577 bytes'"):
        convert.question(longest + "x")


def test_the_methods_that_are_served_are_those_that_ship() -> None:
    assert methods()[: len(METHODS)] == METHODS


def test_an_absent_number_is_the_default_and_a_zero_is_refused() -> None:
    assert convert.count(pb.RetrieveRequest(), "k", 5) == 5
    assert convert.count(pb.RetrieveRequest(k=7), "k", 5) == 7
    for wrong in (0, -3):
        with pytest.raises(InvalidInput, match="k: got"):
            convert.count(pb.RetrieveRequest(k=wrong), "k", 5)
    with pytest.raises(InvalidInput, match="1 to 1000"):
        convert.count(pb.ListDocumentsRequest(page_size=1001), "page_size", 100, most=1000)
