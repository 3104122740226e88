"""Messages as JSON."""

from __future__ import annotations

import json

from blend_server.plain import plain, struct
from blend_server.proto.blend.v1 import blend_pb2 as pb


def test_field_names_defaults_and_absence() -> None:
    values = plain(pb.ChunkReport(key="k", outcome=pb.OUTCOME_HIT, tier="host", payload_bytes=2**40))
    assert values == {
        "key": "k",
        "start": 0,
        "tokens": 0,
        "outcome": "hit",
        "tier": "host",
        "variant": None,
        "payload_bytes": 2**40,
        "reason": "",
    }


def test_of_a_oneof_only_the_field_that_is_set_appears() -> None:
    values = plain(pb.IngestProgress(index=3, document_id="a", embedded=pb.IngestProgress.Embedded(chunks=2)))
    assert values == {"index": 3, "document_id": "a", "embedded": {"chunks": 2}}


def test_nested_messages_enums_times_and_structs() -> None:
    stats = pb.Stats(engine=pb.EngineStats(details=struct({"a": (1, {"b": None}), "c": object})))
    stats.started_at.FromSeconds(0)
    values = plain(stats)
    assert values["started_at"] == "1970-01-01T00:00:00Z"
    assert json.dumps(values["engine"]["details"]["a"]) == '[1, {"b": null}]'
    assert plain(pb.FinalAnswer(finish_reason=pb.FINISH_REASON_LENGTH))["finish_reason"] == "length"
    assert plain(pb.FinalAnswer())["report"] is None


def test_the_result_is_always_json() -> None:
    report = pb.Report(speedup=float("inf"), requested_ratio=float("nan"), recomputed_positions=pb.Positions())
    values = json.loads(json.dumps(plain(report), allow_nan=False))
    assert values["speedup"] is None
    assert values["recomputed_positions"] == {"positions": []}
