"""What a client sends: it survives JSON, says what was meant, and is refused where it cannot be true."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from blend import Chunk, Part, Plan, Prompt, Text
from blend.connector.client import DEFAULT_TENANT, ask_to_recognise, build_prompt, parse, recognised, wants_strict
from blend.connector.recognise import Recogniser
from blend.errors import InvalidInput, InvalidPlan, InvalidPrompt

HEADER, FIRST, SECOND, QUESTION = Text([1, 2]), Chunk([10, 11, 12]), Chunk([20, 21]), Text([7, 8])
SEGMENTS = [HEADER, FIRST, SECOND, QUESTION]
IDS = Prompt(SEGMENTS).token_ids


def wire(**changes: Any) -> dict[str, Any]:
    made = json.loads(json.dumps(build_prompt(SEGMENTS, Plan("head", ratio=0.5))["kv_transfer_params"]))
    made["blend"].update(changes)
    return dict(made)


def test_a_request_survives_json_and_comes_back_as_it_was_meant() -> None:
    made = build_prompt(SEGMENTS, Plan("query", ratio=0.2, variant="plain"), tenant="acme", strict=True)
    sent = json.loads(json.dumps(made))
    assert tuple(sent["prompt_token_ids"]) == IDS
    found = parse(sent["kv_transfer_params"], sent["prompt_token_ids"])
    assert found is not None
    assert found.prompt == Prompt(SEGMENTS)
    assert found.plan == Plan("query", ratio=0.2, variant="plain")
    assert (found.tenant, found.strict, found.end) == ("acme", True, 7)


def test_a_part_of_a_chunk_travels_with_the_tokens_that_the_prompt_does_not_have() -> None:
    segments = [HEADER, Part(FIRST, 1, 3), Part(SECOND, 0, 1), SECOND, Part(FIRST, 1, 2), QUESTION]
    made = json.loads(json.dumps(build_prompt(segments)))
    found = parse(made["kv_transfer_params"], made["prompt_token_ids"])
    assert found is not None
    assert found.prompt == Prompt(segments)
    assert found.end == 8


def test_known_chunks_are_found_in_an_ordinary_prompt() -> None:
    recogniser = Recogniser(b"s" * 16, window=2, seam=1)
    params = json.loads(json.dumps(ask_to_recognise(Plan("head", ratio=0.5), tenant="acme", positions=True)))
    assert parse(params, IDS, recogniser) is None, "none is known"
    recogniser.learn("acme", (9, *FIRST.token_ids))
    recogniser.learn("acme", SECOND.token_ids)
    found = parse(params, IDS, recogniser)
    assert found is not None
    assert found.prompt == Prompt([HEADER, Part(Chunk((9, *FIRST.token_ids)), 1, 4), SECOND, QUESTION])
    assert (found.plan, found.tenant, found.strict, found.positions) == (Plan("head", ratio=0.5), "acme", False, True)
    assert recognised(recogniser, IDS, found.plan, "acme", positions=True) == found
    assert parse(params, QUESTION.token_ids, recogniser) is None
    assert parse(ask_to_recognise(), IDS, recogniser) is None, "another tenant"


def test_finding_chunks_takes_an_engine_that_does_and_no_named_ones() -> None:
    with pytest.raises(InvalidInput, match="not set to recognise"):
        parse(ask_to_recognise(), IDS)
    with pytest.raises(InvalidInput, match="segments, or recognise"):
        parse(wire(recognise=True), IDS)
    with pytest.raises(InvalidInput, match="segments, or recognise"):
        parse({"blend": {"version": 1, "recognise": False}}, IDS)


def test_defaults_are_the_automatic_plan_and_the_default_tenant() -> None:
    found = parse(build_prompt([FIRST])["kv_transfer_params"], FIRST.token_ids)
    assert found is not None
    assert (found.plan, found.tenant, found.strict) == (Plan(), DEFAULT_TENANT, False)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, "blend", 3])
def test_what_is_not_for_blend_is_none_of_its_business(params: object) -> None:
    assert parse(params, IDS) is None


def at(start: object, end: object, **more: object) -> dict[str, object]:
    return {"start": start, "end": end, **more}


@pytest.mark.parametrize(
    ("segments", "why"),
    [
        ([], "at least one"),
        ("chunks", "at least one"),
        ([at(2, 5), at(4, 7)], "a start of 5 or more"),
        ([at(5, 7), at(2, 5)], "a start of 7 or more"),
        ([at(2, 10)], "at most 9"),
        ([at(2, 2)], "start < end"),
        ([at(-1, 2)], "start < end"),
        ([at(2.0, 5)], "integers"),
        ([at(True, 5)], "integers"),
        ([at(2, 5, digest="00")], "digest of the prompt's tokens"),
    ],
)
def test_segments_that_cannot_be_true_are_refused(segments: object, why: str) -> None:
    with pytest.raises(InvalidPrompt, match=why):
        parse(wire(segments=segments), IDS)


def test_segments_that_disagree_with_the_prompts_tokens_are_refused() -> None:
    with pytest.raises(InvalidPrompt, match="digest"):
        parse(wire(), (*IDS[:3], 99, *IDS[4:]))
    with pytest.raises(InvalidPrompt, match="at most 6"):
        parse(wire(), IDS[:6])


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"plan": {"method": "head", "ratio": 1.5}}, InvalidPlan),
        ({"plan": {"method": "head", "ratio": -0.1}}, InvalidPlan),
        ({"plan": {"method": "head", "ratio": "0.1"}}, InvalidPlan),
        ({"plan": {"method": "head", "shares": 0.1}}, InvalidInput),
        ({"plan": "head"}, InvalidInput),
        ({"version": 2}, InvalidInput),
        ({"version": True}, InvalidInput),
        ({"tenant": ""}, InvalidInput),
        ({"tenant": "x" * 129}, InvalidInput),
        ({"strict": "yes"}, InvalidInput),
        ({"more": 1}, InvalidInput),
        ({"segments": [{"start": 2}]}, InvalidInput),
        ({"segments": [at(2, 5, key="k")]}, InvalidInput),
        ({"segments": [at(2, 5, before=9)]}, InvalidInput),
        ({"segments": [at(2, 5, after=[-1])]}, InvalidPrompt),
        ({"segments": [3]}, InvalidInput),
        ({"recognise": 1}, InvalidInput),
    ],
)
def test_fields_that_are_wrong_missing_or_unknown_are_refused(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        parse(wire(**changes), IDS)


@pytest.mark.parametrize(
    "build",
    [
        lambda: build_prompt([]),
        lambda: build_prompt([QUESTION]),
        lambda: build_prompt(["text"]),  # type: ignore[list-item]
        lambda: build_prompt(SEGMENTS, "query"),  # type: ignore[arg-type]
        lambda: build_prompt(SEGMENTS, tenant=""),
        lambda: ask_to_recognise("query"),  # type: ignore[arg-type]
        lambda: ask_to_recognise(tenant=""),
        lambda: ask_to_recognise(strict=1),  # type: ignore[arg-type]
        lambda: build_prompt(SEGMENTS, strict=1),  # type: ignore[arg-type]
    ],
)
def test_the_client_refuses_what_the_engine_would(build: Callable[[], object]) -> None:
    with pytest.raises(InvalidInput):
        build()


def test_strictness_is_known_of_a_request_that_is_wrong_otherwise() -> None:
    assert wants_strict(wire(strict=True, segments=[]))
    assert not wants_strict(wire(segments=[]))
    assert not wants_strict(None)


@pytest.mark.parametrize("ids", [[1 << 63], [-1], [1 << 32], [True], [0.5], "12", pytest.param([1] * 5000, id="many")])
def test_tokens_beside_a_part_are_checked(ids: object) -> None:
    prompt = Prompt([Text((1, 2)), Part(Chunk(range(10, 40)), 2, 28), Text((3,))])
    wire = build_prompt(prompt)["kv_transfer_params"]
    wire["blend"]["segments"][0]["before"] = ids
    with pytest.raises(InvalidInput, match="before"):
        parse(wire, prompt.token_ids)
