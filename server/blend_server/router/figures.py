"""The figures of several engines as those of one service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blend_server.plain import struct
from blend_server.proto.blend.v1 import blend_pb2 as pb


def merged(engines: Mapping[str, pb.Stats], router: Mapping[str, Any] | None) -> pb.Stats:
    """Return the figures of engines that hold the same documents, by their names.

    Requests and queues are sums, tiers are called ``ENGINE/TIER``, limits are the lowest, corpus and model are the
    first engine's, and ``started_at`` is the earliest.

    Args:
        router: what an administrator is told beside each engine's own details; ``None`` for other callers.
    """
    every = list(engines.values())
    result = pb.Stats()
    result.CopyFrom(every[0])
    result.started_at.CopyFrom(min((stats.started_at for stats in every), key=lambda at: (at.seconds, at.nanos)))
    result.queue.requests = sum(stats.queue.requests for stats in every)
    result.queue.max_queue = sum(stats.queue.max_queue for stats in every)
    result.engine.requests = sum(stats.engine.requests for stats in every)
    for limit in pb.Limits.DESCRIPTOR.fields:
        setattr(result.limits, limit.name, min(getattr(stats.limits, limit.name) for stats in every))
    del result.engine.tiers[:]
    for name, stats in engines.items():
        for tier in stats.engine.tiers:
            result.engine.tiers.add().CopyFrom(tier)
            result.engine.tiers[-1].name = f"{name}/{tier.name}"
    result.engine.ClearField("details")
    if router is not None:
        result.engine.details.CopyFrom(struct({"router": router}))
        for name, stats in engines.items():
            result.engine.details.fields[name].struct_value.CopyFrom(stats.engine.details)
    return result
