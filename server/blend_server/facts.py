"""What the service tells of documents, of the engine and of itself, as messages.

Apart from :mod:`blend_server.convert`, which a client needs, too: these types bring torch and faiss.
"""

from __future__ import annotations

from dataclasses import fields

from blend.rag import DocumentInfo, LibraryStats, Passage
from blend.stats import EngineStats
from blend.versions import Environment
from blend_server.conditioning import Counts
from blend_server.plain import struct
from blend_server.proto.blend.v1 import blend_pb2 as pb


def document_to_proto(info: DocumentInfo) -> pb.DocumentInfo:
    """The message for a document of the catalog."""
    message = pb.DocumentInfo(
        id=info.id, title=info.title, chunks=info.chunks, content_bytes=info.nbytes, sha256=info.sha256
    )
    message.created_at.FromMicroseconds(int(info.created * 1e6))
    message.updated_at.FromMicroseconds(int(info.updated * 1e6))
    return message


def passage_to_proto(passage: Passage) -> pb.Passage:
    """The message for a retrieved passage."""
    return pb.Passage(
        document_id=passage.document_id,
        title=passage.title,
        text=passage.text,
        score=passage.score,
        ordinal=passage.ordinal,
        tokens=len(passage.chunk),
        key=passage.content_key,
    )


def corpus_to_proto(stats: LibraryStats, counts: Counts) -> pb.CorpusStats:
    """The message for a library's figures, and for how many of its chunks are stored behind others."""
    return pb.CorpusStats(
        documents=stats.documents,
        content_bytes=stats.nbytes,
        chunks=stats.chunks,
        tokens=stats.tokens,
        outdated=stats.outdated,
        conditioned=counts.conditioned,
        to_condition=counts.waiting,
    )


def engine_to_proto(stats: EngineStats) -> pb.EngineStats:
    """The message for an engine's figures."""
    tiers = [
        pb.TierStats(
            name=tier.name,
            objects=tier.objects,
            used_bytes=tier.used_bytes,
            capacity_bytes=tier.capacity_bytes,
            down=tier.down,
        )
        for tier in stats.tiers
    ]
    return pb.EngineStats(
        model=stats.model,
        dtype=stats.dtype,
        device=stats.device,
        layers=stats.layers,
        requests=int(stats.counters.get("requests", 0)),
        tiers=tiers,
        details=struct(stats.as_dict()),
    )


def engine_to_proto_for(tenant: str, answered: int, stats: EngineStats) -> pb.EngineStats:
    """The message for what an engine has done for one tenant, and holds for it; nothing of others."""
    own = {usage.tier: usage for usage in stats.tenants if usage.name == tenant}
    tiers = []
    for tier in stats.tiers:
        usage = own.get(tier.name)
        held, quota = (usage.used_bytes, usage.quota_bytes or 0) if usage is not None else (0, 0)
        tiers.append(pb.TierStats(name=tier.name, used_bytes=held, capacity_bytes=quota, down=tier.down))
    return pb.EngineStats(
        model=stats.model,
        dtype=stats.dtype,
        device=stats.device,
        layers=stats.layers,
        requests=answered,
        tiers=tiers,
    )


def environment_to_proto(found: Environment, *, budgets: bool) -> pb.Environment:
    """The message for what the server runs on, with the tiers' budgets only where they are asked for."""
    values = {field.name: getattr(found, field.name) for field in fields(found) if field.name != "tiers"}
    message = pb.Environment(**{name: value for name, value in values.items() if value is not None})
    if budgets:
        for tier in found.tiers:
            message.tiers.add(tier=tier.tier, capacity_bytes=tier.capacity_bytes)
    return message
