"""The engine: chunks go in once, prompts are answered from their KV. The path itself is in ``pipeline.py``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Literal

import torch

from blend.admission import Admission
from blend.chunks import ChunkCache
from blend.config import EngineConfig
from blend.errors import Closed, InvalidInput, InvalidPlan, InvalidPrompt
from blend.misses import Misses
from blend.model import source, support
from blend.model.decoder import Decoder
from blend.model.fingerprint import fingerprint
from blend.model.tokenizer import Detokenizer
from blend.pipeline import Pipeline, Request, at_first_token
from blend.recompute import assemble, calibration, machine, planner
from blend.recompute.prefill import Repair
from blend.recompute.scratch import Scratch, Shapes
from blend.recompute.streams import pinned_for
from blend.scheduler import Turns
from blend.stats import Counters, EngineStats, NamespaceStats, tenant_stats
from blend.store import LAYOUT_VERSION, Dropped, Stored, open_store
from blend.store.key import model_of, tenant_of
from blend.types import (
    Answer,
    Chunk,
    Plan,
    Prefill,
    Prompt,
    Report,
    Token,
    as_token_ids,
)

DEFAULT_NAMESPACE = "default"


class Engine:
    """Answers prompts from chunk KV that was computed beforehand. Thread-safe; also a context manager.

    Args:
        config: all settings; defaults give the embedded model with a host and a disk tier.

    Raises:
        ModelError: the model cannot be found, fetched, trusted or supported.
        TierUnavailable: the store's directory cannot be used.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        loaded = source.load(self.config.model, dtype=self.config.dtype, device=self.config.device)
        self.tokenizer = loaded.tokenizer
        self.decoder = Decoder(loaded.model, self.config.kernels)
        support.check(self.decoder)
        assemble.prepare(self.decoder.dtype, self.decoder.device)
        self.sink = self._sink()
        self.calibration = calibration.load(self.config.model, loaded.directory)
        text_config = loaded.model.config.get_text_config(decoder=True)
        self.model_fingerprint = fingerprint(
            loaded.directory,
            loaded.model.config.to_dict(),
            tokenizer=self.tokenizer.digest,
            dtype=str(self.decoder.dtype),
            sink=self.sink,
            layout_version=LAYOUT_VERSION,
            rope=getattr(text_config, "rope_parameters", None) or {},
        )
        measured = None
        if self.calibration is not None:
            measured = self.calibration.prefill_on(machine.describe(self.decoder.device, self.decoder.dtype))
        self._speed = planner.PrefillSpeed(self.decoder, measured)
        self.store, secret = open_store(self.config.store, pinned_for(self.decoder.device))
        self._chunks = ChunkCache(
            self.decoder, self.sink, self.store, self.model_fingerprint, secret, self._speed, self.config.max_rows
        )
        self._counters = Counters()
        self._turns = Turns()
        scratch = Scratch(Shapes.of(self.decoder), self.config.max_rows)
        self._admission = Admission(self.decoder, self._chunks, self.calibration, scratch)
        self._pipeline = Pipeline(
            self.decoder,
            self._chunks,
            self.calibration,
            self._speed,
            self._turns,
            self.config.max_rows,
            self._admission.running,
        )
        self._misses = Misses(self._turns, self._chunks.key, self._encode)
        self._closed = False

    def _sink(self) -> tuple[int, ...]:
        if self.config.sink != "bos":
            ids = as_token_ids(self.config.sink)  # type: ignore[arg-type]
            if ids and max(ids) >= self.decoder.vocab_size:
                raise InvalidInput("sink", max(ids), f"token ids below {self.decoder.vocab_size}")
            if len(ids) >= self.decoder.max_positions:
                raise InvalidInput(
                    "sink", f"{len(ids)} tokens", f"fewer than the context's {self.decoder.max_positions}"
                )
            return ids
        first = self.tokenizer.bos_or_template_start()
        return () if first is None else (first,)

    # ------------------------------------------------------------------ text

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Return the token ids of plain text. Nothing in it is parsed as a control token, and none is added."""
        return self.tokenizer.encode(text)

    def tokenize_template(self, text: str) -> tuple[int, ...]:
        """Return the token ids of trusted template text, its control tokens parsed; none is added."""
        return self.tokenizer.encode_template(text)

    # ---------------------------------------------------------------- chunks

    def precompute(
        self,
        chunks: Iterable[Chunk],
        behind: Sequence[Sequence[Chunk]] | None = None,
        *,
        namespace: str = DEFAULT_NAMESPACE,
    ) -> list[str]:
        """Encode chunks that are not stored yet and store them; returns their content keys.

        Args:
            behind: for each chunk the related chunks that it is encoded behind (its ``conditioned`` variant).
            namespace: whose chunks these are.

        Raises:
            PromptTooLong: a chunk exceeds the model's context.
            ResourceExhausted, StoreError: no tier took a chunk.
        """
        wanted = list(chunks)
        for chunk in wanted:
            if not isinstance(chunk, Chunk):
                raise InvalidPrompt("chunks", chunk, "Chunk values")
        related: Sequence[Sequence[Chunk]] = [()] * len(wanted) if behind is None else behind
        if len(related) != len(wanted):
            raise InvalidInput("behind", f"{len(related)} entries", f"one for each of the {len(wanted)} chunks")
        keys, writes = [], []
        for chunk, others in zip(wanted, related, strict=True):
            with self._turns.turn():
                key = self._chunks.key(chunk, namespace)
                self.store.known.learn(namespace)
                self._misses.want(key)
                writes.append(self._encode(chunk, namespace, others))
                keys.append(key)
        for write in writes:  # while one chunk is written to lower tiers, the next ones are computed
            if write is not None:
                write.settled()
        return keys

    def _encode(self, chunk: Chunk, namespace: str, behind: Sequence[Chunk] = ()) -> Stored | None:
        write, computed = self._chunks.encode(chunk, namespace, behind)
        if computed:
            self._counters.add("precomputed")
        return write

    def content_key(self, chunk: Chunk, *, namespace: str = DEFAULT_NAMESPACE) -> str:
        """Return the key of a chunk: its tokens, the model and the namespace, keyed with the namespace's secret."""
        return self._chunks.key(chunk, namespace)

    def missing(self, chunks: Iterable[Chunk], *, namespace: str = DEFAULT_NAMESPACE) -> list[Chunk]:
        """Return those chunks that do not seem to be stored. A hint: only a request knows."""
        return [c for c in chunks if not self._chunks.has(c, namespace)]

    def forget(self, chunks: Iterable[Chunk], *, namespace: str = DEFAULT_NAMESPACE) -> int:
        """Remove chunks from every tier, and whatever was encoded behind them; returns how many objects went.

        A request that is running or waiting does not bring them back.
        """
        return self.forget_keys([self._chunks.key(c, namespace) for c in chunks])

    def forget_keys(self, keys: Iterable[str]) -> int:
        """Remove chunks by the content keys that :meth:`precompute` returned, whatever model they were made with."""
        gone = set(keys)
        with self._turns.turn():
            self._misses.forget(gone)
            return self._chunks.forget(gone)

    def namespaces(self) -> tuple[NamespaceStats, ...]:
        """Return what every namespace has in each tier, what other models left included; in order of their tags.

        Namespaces that neither the settings nor a call to this engine has named are told by their tags alone.
        """
        model = model_of(self._chunks.namespace(DEFAULT_NAMESPACE).tag)
        return tuple(
            NamespaceStats(
                name=self.store.known.name(tenant_of(usage.tag)),
                tag=usage.tag,
                current=model_of(usage.tag) == model,
                tiers=usage.tiers,
            )
            for usage in self.store.namespaces()
        )

    def drop_namespace(self, name: str) -> Dropped:
        """Remove every chunk of a namespace from every tier, whatever model it was made with.

        A request that is running or waiting does not bring them back; what it holds goes when it ends. What is not
        known by name can be dropped by its tag: ``engine.store.drop(tag)``.

        Raises:
            InvalidInput: not a usable name.
        """
        self._chunks.namespace(name)
        with self._turns.turn():
            self._misses.drop(name)
            tag = self.store.known.learn(name)
            self._chunks.disown(tag)
        return self.store.drop(tag)  # requests need not wait for that

    def _finished(self, request: Request, report: Report) -> None:
        """Take note of a request that has reached its first token."""
        self._counters.finished(report)
        if self.config.recompute_misses:
            self._misses.queue(request, report)

    # --------------------------------------------------------------- answers

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 64,
        plan: Plan | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        compare_full: bool = False,
        positions: bool = False,
    ) -> Answer:
        """Return the greedy answer with its report. Arguments and errors are those of :meth:`stream`."""
        events = self.stream(
            prompt,
            max_new_tokens=max_new_tokens,
            plan=plan,
            namespace=namespace,
            compare_full=compare_full,
            positions=positions,
        )
        for event in events:
            if isinstance(event, Answer):
                return event
        raise RuntimeError("the stream ended without an answer")

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 64,
        plan: Plan | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        compare_full: bool = False,
        positions: bool = False,
        arrived: float | None = None,
    ) -> Iterator[Token | Answer]:
        """Answer greedily, token by token; the last event is the :class:`Answer`. Closing the iterator cancels.

        Args:
            max_new_tokens: most tokens of the answer.
            plan: how to prefill; ``None`` is ``Plan()``, that is ``auto``.
            compare_full: also run the prompt at full prefill, after the answer, and report how close it was.
            positions: report the recomputed positions.
            arrived: reading of :func:`time.perf_counter` that TTFT counts from; ``None`` is now.

        Raises:
            InvalidPlan, InvalidPrompt, PromptTooLong, ResourceExhausted: at once, before anything runs.
            ResourceExhausted: also when its turn comes, if others have taken the memory meanwhile.
            Closed: the engine was closed.
        """
        if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
            raise InvalidInput("max_new_tokens", max_new_tokens, "an integer of 1 or more")
        request = self._admit(prompt, plan, namespace, max_new_tokens, arrived, compare_full)
        return self._stream(request, max_new_tokens, compare_full, positions)

    def _stream(
        self, request: Request, max_new_tokens: int, compare_full: bool, positions: bool
    ) -> Iterator[Token | Answer]:
        with self._turns.request():
            state = self._pipeline.prefill(request, positions)
            detokenizer = Detokenizer(self.tokenizer)
            token = int(state.logits.argmax())
            report = at_first_token(state.report, request)
            self._finished(request, report)
            produced: list[int] = []
            while token not in self.tokenizer.eos_ids and len(produced) < max_new_tokens:
                produced.append(token)
                self._counters.add("new_tokens")
                yield Token(token, detokenizer.push(token))
                if len(produced) < max_new_tokens:
                    token = self._pipeline.next(state.canvas, token, len(request.prompt) + len(produced) - 1)
            finish: Literal["stop", "length"] = "stop" if token in self.tokenizer.eos_ids else "length"
            if compare_full:
                report = replace(report, comparison=self._pipeline.compare(state))
        yield Answer(self.tokenizer.decode(produced), tuple(produced), finish, report)

    def prefill(
        self,
        prompt: Prompt,
        plan: Plan | None = None,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        reserve: int = 0,
        compare_full: bool = False,
        positions: bool = False,
        repair: Repair | None = None,
    ) -> Prefill:
        """Prefill a prompt and return the last position's logits, the canvas and the report.

        Args:
            reserve: room on the canvas for that many further tokens.
            repair: a method that is none of the engine's, for evaluation. It is given what ``reuse`` would leave as
                it is, so that is what the plan has to name.

        Other arguments and the errors are those of :meth:`stream`.
        """
        request = self._admit(prompt, plan, namespace, reserve, compared=compare_full)
        if repair is not None:
            if request.plan.method != "reuse":
                raise InvalidPlan("method", request.plan.method, "reuse, where a repair is given")
            request = replace(request, repair=repair)
        state = self._pipeline.prefill(request, positions)
        report = at_first_token(state.report, state.request)
        self._finished(state.request, report)
        if compare_full:
            report = replace(report, comparison=self._pipeline.compare(state))
        return Prefill(state.logits, state.canvas, report)

    def score(
        self,
        prompt: Prompt,
        continuation_ids: Sequence[int],
        plan: Plan | None = None,
        *,
        namespace: str = DEFAULT_NAMESPACE,
    ) -> torch.Tensor:
        """Return log-probabilities ``[T, V]`` float32 at each of the T tokens of a given continuation.

        Row t is the distribution from which ``continuation_ids[t]`` would be drawn, the tokens before it forced.
        """
        ids = as_token_ids(continuation_ids)
        self._admission.check_ids("continuation_ids", ids)
        state = self._pipeline.prefill(self._admit(prompt, plan, namespace, len(ids) - 1), positions=False)
        return self.continuation(Prefill(state.logits, state.canvas, state.report), ids)

    def continuation(self, prefill: Prefill, continuation_ids: Sequence[int]) -> torch.Tensor:
        """Return what :meth:`score` returns, from a prefill whose canvas has room for all but the last token."""
        ids = as_token_ids(continuation_ids)
        self._admission.check_ids("continuation_ids", ids)
        start, end = prefill.report.tokens, prefill.report.tokens + len(ids) - 1
        if end > prefill.canvas.length:
            raise InvalidInput("continuation_ids", f"{len(ids)} tokens", f"{prefill.canvas.length - start + 1} at most")
        logits = prefill.logits[None]
        if len(ids) > 1:
            logits = torch.cat((logits, self._pipeline.extend(prefill.canvas, start, ids[:-1])))
        return logits.log_softmax(dim=-1)

    def greedy(self, prefill: Prefill, max_new_tokens: int) -> tuple[int, ...]:
        """Return the greedy answer's token ids from a prefill whose canvas has room for all but the last one."""
        room = prefill.canvas.length - prefill.report.tokens + 1
        if not 0 < max_new_tokens <= room:
            raise InvalidInput("max_new_tokens", max_new_tokens, f"1 to {room}, for which the canvas has room")
        produced: list[int] = []
        token = int(prefill.logits.argmax())
        while token not in self.tokenizer.eos_ids and len(produced) < max_new_tokens:
            produced.append(token)
            if len(produced) < max_new_tokens:
                token = self._pipeline.next(prefill.canvas, token, prefill.report.tokens + len(produced) - 1)
        return tuple(produced)

    # ------------------------------------------------------------- the path

    def _admit(
        self,
        prompt: Prompt,
        plan: Plan | None,
        namespace: str,
        reserve: int,
        arrived: float | None = None,
        compared: bool = False,
    ) -> Request:
        if self._closed:
            raise Closed("the engine is closed")
        request = self._admission.admit(prompt, plan, namespace, reserve, arrived, compared)
        self.store.known.learn(namespace)
        return request

    # --------------------------------------------------------------- upkeep

    def stats(self) -> EngineStats:
        """Return counts since start, the model's shape and the store's tiers."""
        d = self.decoder
        return EngineStats(
            model=self.config.model,
            model_fingerprint=self.model_fingerprint,
            device=str(d.device),
            dtype=str(d.dtype).removeprefix("torch."),
            kernels=d.kernels.backend,
            layers=d.layers,
            kv_bytes_per_token=2 * d.layers * d.kv_heads * d.head_dim * d.dtype.itemsize,
            max_positions=d.max_positions,
            calibrated=self.calibration is not None,
            waiting=self._turns.waiting,
            counters=self._counters.snapshot(),
            background=self._misses.counts(),
            scratch=self._admission.scratch(),
            tiers=self.store.tier_stats(),
            loads=self.store.load_stats(),
            writes=self.store.write_stats(),
            tenants=tenant_stats(self.store),
        )

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until no background precompute is left (``timeout`` in seconds); returns whether that is so."""
        return self._misses.wait_idle(timeout)

    def close(self) -> None:
        """Let the running step finish, stop the background thread and close the store. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        self._turns.close()
        self._misses.close()
        self._chunks.close()
        self.store.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
