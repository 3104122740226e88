import datetime

from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Variant(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VARIANT_UNSPECIFIED: _ClassVar[Variant]
    VARIANT_PLAIN: _ClassVar[Variant]
    VARIANT_CONDITIONED: _ClassVar[Variant]
    VARIANT_BEST: _ClassVar[Variant]

class SegmentKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEGMENT_KIND_UNSPECIFIED: _ClassVar[SegmentKind]
    SEGMENT_KIND_TEXT: _ClassVar[SegmentKind]
    SEGMENT_KIND_CHUNK: _ClassVar[SegmentKind]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE: _ClassVar[FinishReason]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_HIT: _ClassVar[Outcome]
    OUTCOME_MISS: _ClassVar[Outcome]
    OUTCOME_FAILED: _ClassVar[Outcome]
    OUTCOME_UNUSED: _ClassVar[Outcome]
VARIANT_UNSPECIFIED: Variant
VARIANT_PLAIN: Variant
VARIANT_CONDITIONED: Variant
VARIANT_BEST: Variant
SEGMENT_KIND_UNSPECIFIED: SegmentKind
SEGMENT_KIND_TEXT: SegmentKind
SEGMENT_KIND_CHUNK: SegmentKind
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_DEADLINE: FinishReason
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_HIT: Outcome
OUTCOME_MISS: Outcome
OUTCOME_FAILED: Outcome
OUTCOME_UNUSED: Outcome

class Document(_message.Message):
    __slots__ = ("id", "title", "content")
    ID_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    id: str
    title: str
    content: bytes
    def __init__(self, id: _Optional[str] = ..., title: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class IngestProgress(_message.Message):
    __slots__ = ("index", "document_id", "chunked", "embedded", "computed", "stored", "unchanged", "failed")
    class Chunked(_message.Message):
        __slots__ = ("chunks", "tokens")
        CHUNKS_FIELD_NUMBER: _ClassVar[int]
        TOKENS_FIELD_NUMBER: _ClassVar[int]
        chunks: int
        tokens: int
        def __init__(self, chunks: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...
    class Embedded(_message.Message):
        __slots__ = ("chunks",)
        CHUNKS_FIELD_NUMBER: _ClassVar[int]
        chunks: int
        def __init__(self, chunks: _Optional[int] = ...) -> None: ...
    class Computed(_message.Message):
        __slots__ = ("done", "total", "reused")
        DONE_FIELD_NUMBER: _ClassVar[int]
        TOTAL_FIELD_NUMBER: _ClassVar[int]
        REUSED_FIELD_NUMBER: _ClassVar[int]
        done: int
        total: int
        reused: int
        def __init__(self, done: _Optional[int] = ..., total: _Optional[int] = ..., reused: _Optional[int] = ...) -> None: ...
    class Stored(_message.Message):
        __slots__ = ("chunks", "dropped_chunks", "computed_chunks", "reused_chunks")
        CHUNKS_FIELD_NUMBER: _ClassVar[int]
        DROPPED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
        COMPUTED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
        REUSED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
        chunks: int
        dropped_chunks: int
        computed_chunks: int
        reused_chunks: int
        def __init__(self, chunks: _Optional[int] = ..., dropped_chunks: _Optional[int] = ..., computed_chunks: _Optional[int] = ..., reused_chunks: _Optional[int] = ...) -> None: ...
    class Unchanged(_message.Message):
        __slots__ = ("chunks", "computed_chunks", "reused_chunks")
        CHUNKS_FIELD_NUMBER: _ClassVar[int]
        COMPUTED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
        REUSED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
        chunks: int
        computed_chunks: int
        reused_chunks: int
        def __init__(self, chunks: _Optional[int] = ..., computed_chunks: _Optional[int] = ..., reused_chunks: _Optional[int] = ...) -> None: ...
    class Failed(_message.Message):
        __slots__ = ("code", "message")
        CODE_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        code: str
        message: str
        def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKED_FIELD_NUMBER: _ClassVar[int]
    EMBEDDED_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    index: int
    document_id: str
    chunked: IngestProgress.Chunked
    embedded: IngestProgress.Embedded
    computed: IngestProgress.Computed
    stored: IngestProgress.Stored
    unchanged: IngestProgress.Unchanged
    failed: IngestProgress.Failed
    def __init__(self, index: _Optional[int] = ..., document_id: _Optional[str] = ..., chunked: _Optional[_Union[IngestProgress.Chunked, _Mapping]] = ..., embedded: _Optional[_Union[IngestProgress.Embedded, _Mapping]] = ..., computed: _Optional[_Union[IngestProgress.Computed, _Mapping]] = ..., stored: _Optional[_Union[IngestProgress.Stored, _Mapping]] = ..., unchanged: _Optional[_Union[IngestProgress.Unchanged, _Mapping]] = ..., failed: _Optional[_Union[IngestProgress.Failed, _Mapping]] = ...) -> None: ...

class DocumentInfo(_message.Message):
    __slots__ = ("id", "title", "chunks", "content_bytes", "sha256", "created_at", "updated_at")
    ID_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    UPDATED_AT_FIELD_NUMBER: _ClassVar[int]
    id: str
    title: str
    chunks: int
    content_bytes: int
    sha256: str
    created_at: _timestamp_pb2.Timestamp
    updated_at: _timestamp_pb2.Timestamp
    def __init__(self, id: _Optional[str] = ..., title: _Optional[str] = ..., chunks: _Optional[int] = ..., content_bytes: _Optional[int] = ..., sha256: _Optional[str] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., updated_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ListDocumentsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListDocumentsResponse(_message.Message):
    __slots__ = ("documents", "next_page_token")
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    documents: _containers.RepeatedCompositeFieldContainer[DocumentInfo]
    next_page_token: str
    def __init__(self, documents: _Optional[_Iterable[_Union[DocumentInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetDocumentRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class DeleteDocumentRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class DeleteDocumentResponse(_message.Message):
    __slots__ = ("dropped_chunks",)
    DROPPED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    dropped_chunks: int
    def __init__(self, dropped_chunks: _Optional[int] = ...) -> None: ...

class RetrieveRequest(_message.Message):
    __slots__ = ("question", "k")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    question: str
    k: int
    def __init__(self, question: _Optional[str] = ..., k: _Optional[int] = ...) -> None: ...

class RetrieveResponse(_message.Message):
    __slots__ = ("passages",)
    PASSAGES_FIELD_NUMBER: _ClassVar[int]
    passages: _containers.RepeatedCompositeFieldContainer[Passage]
    def __init__(self, passages: _Optional[_Iterable[_Union[Passage, _Mapping]]] = ...) -> None: ...

class Passage(_message.Message):
    __slots__ = ("document_id", "title", "text", "score", "ordinal", "tokens", "key")
    DOCUMENT_ID_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    document_id: str
    title: str
    text: str
    score: float
    ordinal: int
    tokens: int
    key: str
    def __init__(self, document_id: _Optional[str] = ..., title: _Optional[str] = ..., text: _Optional[str] = ..., score: _Optional[float] = ..., ordinal: _Optional[int] = ..., tokens: _Optional[int] = ..., key: _Optional[str] = ...) -> None: ...

class AnswerRequest(_message.Message):
    __slots__ = ("question", "k", "plan", "max_new_tokens", "compare_full", "want_positions", "passage_order_seed", "temperature", "top_p", "top_k", "seed", "stop", "want_tokens")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPARE_FULL_FIELD_NUMBER: _ClassVar[int]
    WANT_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PASSAGE_ORDER_SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    WANT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    question: str
    k: int
    plan: Plan
    max_new_tokens: int
    compare_full: bool
    want_positions: bool
    passage_order_seed: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    want_tokens: bool
    def __init__(self, question: _Optional[str] = ..., k: _Optional[int] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., compare_full: _Optional[bool] = ..., want_positions: _Optional[bool] = ..., passage_order_seed: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., want_tokens: _Optional[bool] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("method", "ratio", "max_charged", "max_kl", "variant")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    MAX_CHARGED_FIELD_NUMBER: _ClassVar[int]
    MAX_KL_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    method: str
    ratio: float
    max_charged: float
    max_kl: float
    variant: Variant
    def __init__(self, method: _Optional[str] = ..., ratio: _Optional[float] = ..., max_charged: _Optional[float] = ..., max_kl: _Optional[float] = ..., variant: _Optional[_Union[Variant, str]] = ...) -> None: ...

class AnswerEvent(_message.Message):
    __slots__ = ("passages", "token", "answer", "prompt_tokens")
    PASSAGES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    passages: Passages
    token: Token
    answer: FinalAnswer
    prompt_tokens: PromptTokens
    def __init__(self, passages: _Optional[_Union[Passages, _Mapping]] = ..., token: _Optional[_Union[Token, _Mapping]] = ..., answer: _Optional[_Union[FinalAnswer, _Mapping]] = ..., prompt_tokens: _Optional[_Union[PromptTokens, _Mapping]] = ...) -> None: ...

class Passages(_message.Message):
    __slots__ = ("passages", "retrieve_ms")
    PASSAGES_FIELD_NUMBER: _ClassVar[int]
    RETRIEVE_MS_FIELD_NUMBER: _ClassVar[int]
    passages: _containers.RepeatedCompositeFieldContainer[Passage]
    retrieve_ms: float
    def __init__(self, passages: _Optional[_Iterable[_Union[Passage, _Mapping]]] = ..., retrieve_ms: _Optional[float] = ...) -> None: ...

class PromptTokens(_message.Message):
    __slots__ = ("texts", "segments")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    def __init__(self, texts: _Optional[_Iterable[str]] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("kind", "start", "tokens")
    KIND_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    kind: SegmentKind
    start: int
    tokens: int
    def __init__(self, kind: _Optional[_Union[SegmentKind, str]] = ..., start: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("token_id", "text")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    text: str
    def __init__(self, token_id: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class FinalAnswer(_message.Message):
    __slots__ = ("text", "token_ids", "finish_reason", "report", "usage")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: FinishReason
    report: Report
    usage: Usage
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "completion_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("mode", "reason", "tokens", "cached", "mandatory", "selected", "requested_ratio", "selected_ratio", "charged_ratio", "chunks", "timings", "full_estimate_ms", "warnings", "recomputed_positions", "comparison", "full_ms", "speedup", "predicted_ms", "predicted_kl")
    MODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    MANDATORY_FIELD_NUMBER: _ClassVar[int]
    SELECTED_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_RATIO_FIELD_NUMBER: _ClassVar[int]
    SELECTED_RATIO_FIELD_NUMBER: _ClassVar[int]
    CHARGED_RATIO_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    FULL_ESTIMATE_MS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    COMPARISON_FIELD_NUMBER: _ClassVar[int]
    FULL_MS_FIELD_NUMBER: _ClassVar[int]
    SPEEDUP_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_MS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_KL_FIELD_NUMBER: _ClassVar[int]
    mode: str
    reason: str
    tokens: int
    cached: int
    mandatory: int
    selected: int
    requested_ratio: float
    selected_ratio: float
    charged_ratio: float
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkReport]
    timings: Timings
    full_estimate_ms: float
    warnings: _containers.RepeatedScalarFieldContainer[str]
    recomputed_positions: Positions
    comparison: Comparison
    full_ms: float
    speedup: float
    predicted_ms: float
    predicted_kl: float
    def __init__(self, mode: _Optional[str] = ..., reason: _Optional[str] = ..., tokens: _Optional[int] = ..., cached: _Optional[int] = ..., mandatory: _Optional[int] = ..., selected: _Optional[int] = ..., requested_ratio: _Optional[float] = ..., selected_ratio: _Optional[float] = ..., charged_ratio: _Optional[float] = ..., chunks: _Optional[_Iterable[_Union[ChunkReport, _Mapping]]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., full_estimate_ms: _Optional[float] = ..., warnings: _Optional[_Iterable[str]] = ..., recomputed_positions: _Optional[_Union[Positions, _Mapping]] = ..., comparison: _Optional[_Union[Comparison, _Mapping]] = ..., full_ms: _Optional[float] = ..., speedup: _Optional[float] = ..., predicted_ms: _Optional[float] = ..., predicted_kl: _Optional[float] = ...) -> None: ...

class Positions(_message.Message):
    __slots__ = ("positions",)
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, positions: _Optional[_Iterable[int]] = ...) -> None: ...

class ChunkReport(_message.Message):
    __slots__ = ("key", "start", "tokens", "outcome", "tier", "variant", "payload_bytes", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: str
    start: int
    tokens: int
    outcome: Outcome
    tier: str
    variant: str
    payload_bytes: int
    reason: str
    def __init__(self, key: _Optional[str] = ..., start: _Optional[int] = ..., tokens: _Optional[int] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., tier: _Optional[str] = ..., variant: _Optional[str] = ..., payload_bytes: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_ms", "lookup_ms", "fetch_ms", "rotate_ms", "select_ms", "recompute_ms", "first_token_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_MS_FIELD_NUMBER: _ClassVar[int]
    FETCH_MS_FIELD_NUMBER: _ClassVar[int]
    ROTATE_MS_FIELD_NUMBER: _ClassVar[int]
    SELECT_MS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    lookup_ms: float
    fetch_ms: float
    rotate_ms: float
    select_ms: float
    recompute_ms: float
    first_token_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., lookup_ms: _Optional[float] = ..., fetch_ms: _Optional[float] = ..., rotate_ms: _Optional[float] = ..., select_ms: _Optional[float] = ..., recompute_ms: _Optional[float] = ..., first_token_ms: _Optional[float] = ...) -> None: ...

class Comparison(_message.Message):
    __slots__ = ("full_ms", "first_token_kl", "top1_agrees")
    FULL_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_KL_FIELD_NUMBER: _ClassVar[int]
    TOP1_AGREES_FIELD_NUMBER: _ClassVar[int]
    full_ms: float
    first_token_kl: float
    top1_agrees: bool
    def __init__(self, full_ms: _Optional[float] = ..., first_token_kl: _Optional[float] = ..., top1_agrees: _Optional[bool] = ...) -> None: ...

class ResetQualityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetQualityResponse(_message.Message):
    __slots__ = ("was_stopped", "since", "reason")
    WAS_STOPPED_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    was_stopped: bool
    since: str
    reason: str
    def __init__(self, was_stopped: _Optional[bool] = ..., since: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Stats(_message.Message):
    __slots__ = ("version", "started_at", "corpus", "queue", "engine", "limits", "environment")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    CORPUS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    version: str
    started_at: _timestamp_pb2.Timestamp
    corpus: CorpusStats
    queue: QueueStats
    engine: EngineStats
    limits: Limits
    environment: Environment
    def __init__(self, version: _Optional[str] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., corpus: _Optional[_Union[CorpusStats, _Mapping]] = ..., queue: _Optional[_Union[QueueStats, _Mapping]] = ..., engine: _Optional[_Union[EngineStats, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., environment: _Optional[_Union[Environment, _Mapping]] = ...) -> None: ...

class Environment(_message.Message):
    __slots__ = ("blend", "python", "torch", "transformers", "vllm", "mooncake", "platform", "cpu", "threads", "device", "engine", "model", "fingerprint", "tokenizer", "dtype", "layout_version", "rope", "tensor_parallel", "tiers", "protocol")
    class Budget(_message.Message):
        __slots__ = ("tier", "capacity_bytes")
        TIER_FIELD_NUMBER: _ClassVar[int]
        CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
        tier: str
        capacity_bytes: int
        def __init__(self, tier: _Optional[str] = ..., capacity_bytes: _Optional[int] = ...) -> None: ...
    BLEND_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    TORCH_FIELD_NUMBER: _ClassVar[int]
    TRANSFORMERS_FIELD_NUMBER: _ClassVar[int]
    VLLM_FIELD_NUMBER: _ClassVar[int]
    MOONCAKE_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    blend: str
    python: str
    torch: str
    transformers: str
    vllm: str
    mooncake: str
    platform: str
    cpu: str
    threads: int
    device: str
    engine: str
    model: str
    fingerprint: str
    tokenizer: str
    dtype: str
    layout_version: int
    rope: str
    tensor_parallel: int
    tiers: _containers.RepeatedCompositeFieldContainer[Environment.Budget]
    protocol: str
    def __init__(self, blend: _Optional[str] = ..., python: _Optional[str] = ..., torch: _Optional[str] = ..., transformers: _Optional[str] = ..., vllm: _Optional[str] = ..., mooncake: _Optional[str] = ..., platform: _Optional[str] = ..., cpu: _Optional[str] = ..., threads: _Optional[int] = ..., device: _Optional[str] = ..., engine: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., tokenizer: _Optional[str] = ..., dtype: _Optional[str] = ..., layout_version: _Optional[int] = ..., rope: _Optional[str] = ..., tensor_parallel: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[Environment.Budget, _Mapping]]] = ..., protocol: _Optional[str] = ...) -> None: ...

class CorpusStats(_message.Message):
    __slots__ = ("documents", "content_bytes", "chunks", "tokens", "outdated", "conditioned", "to_condition")
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTDATED_FIELD_NUMBER: _ClassVar[int]
    CONDITIONED_FIELD_NUMBER: _ClassVar[int]
    TO_CONDITION_FIELD_NUMBER: _ClassVar[int]
    documents: int
    content_bytes: int
    chunks: int
    tokens: int
    outdated: int
    conditioned: int
    to_condition: int
    def __init__(self, documents: _Optional[int] = ..., content_bytes: _Optional[int] = ..., chunks: _Optional[int] = ..., tokens: _Optional[int] = ..., outdated: _Optional[int] = ..., conditioned: _Optional[int] = ..., to_condition: _Optional[int] = ...) -> None: ...

class QueueStats(_message.Message):
    __slots__ = ("requests", "max_queue")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_FIELD_NUMBER: _ClassVar[int]
    requests: int
    max_queue: int
    def __init__(self, requests: _Optional[int] = ..., max_queue: _Optional[int] = ...) -> None: ...

class EngineStats(_message.Message):
    __slots__ = ("model", "dtype", "device", "layers", "requests", "tiers", "details")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    model: str
    dtype: str
    device: str
    layers: int
    requests: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    details: _struct_pb2.Struct
    def __init__(self, model: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., layers: _Optional[int] = ..., requests: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., details: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("name", "objects", "used_bytes", "capacity_bytes", "down")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    name: str
    objects: int
    used_bytes: int
    capacity_bytes: int
    down: str
    def __init__(self, name: _Optional[str] = ..., objects: _Optional[int] = ..., used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., down: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_document_bytes", "max_message_bytes", "default_k", "default_max_new_tokens", "context_tokens")
    MAX_DOCUMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_K_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_document_bytes: int
    max_message_bytes: int
    default_k: int
    default_max_new_tokens: int
    context_tokens: int
    def __init__(self, max_document_bytes: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., default_k: _Optional[int] = ..., default_max_new_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ...) -> None: ...
