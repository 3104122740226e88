"""The engine: chunks go in once, prompts are answered from their KV. The path itself is in ``pipeline.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from time import monotonic
from types import TracebackType
from typing import TypeVar

import torch

from blend.admission import Admission, Room
from blend.chunks import ChunkCache
from blend.config import EngineConfig
from blend.encoding import CONTEXT
from blend.errors import Closed, InvalidInput, InvalidPlan
from blend.keeping import Keeping
from blend.model import source, support
from blend.model.decoder import Decoder
from blend.model.fingerprint import fingerprint
from blend.pipeline import Pipeline, Request
from blend.recompute import assemble, calibration, machine, planner
from blend.recompute.prefill import Repair
from blend.recompute.scratch import Scratch, Shapes
from blend.recompute.streams import pinned_for
from blend.serving.job import Job
from blend.serving.passes import Passes
from blend.serving.scheduler import Scheduler
from blend.serving.shares import Shares
from blend.serving.steps import Steps
from blend.serving.stream import AnswerStream, Channel
from blend.shadow.quality import Quality
from blend.shadow.record import Trip, TripRecord
from blend.shadow.shadows import Shadows
from blend.stats import Counters, EngineStats, NamespaceStats, setup_of, tenant_stats
from blend.store import LAYOUT_VERSION, Dropped, open_store
from blend.types import (
    Answer,
    Chunk,
    Plan,
    Prefill,
    Prompt,
    Report,
    Sampling,
    Text,
    as_token_ids,
)

DEFAULT_NAMESPACE = "default"

_T = TypeVar("_T")


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
            context=CONTEXT,
            rope=getattr(text_config, "rope_parameters", None) or {},
        )
        here = machine.describe(self.decoder.device, self.decoder.dtype)
        if self.calibration is not None and self.calibration.machine == here:
            self._speed = planner.PrefillSpeed(self.decoder, self.calibration.passes, self.calibration.loads)
        else:  # times of another machine say nothing here
            self._speed = planner.PrefillSpeed(self.decoder)
        self.store, secret = open_store(self.config.store, pinned_for(self.decoder.device))
        self._chunks = ChunkCache(
            self.decoder, self.sink, self.store, self.model_fingerprint, secret, self._speed, self.config.max_rows
        )
        kept = self.config.store.path if self.config.store.disk_bytes else None
        self._quality = Quality(self.config.shadow, TripRecord(kept, self.model_fingerprint))
        self._counters = Counters()
        scratch = Scratch(Shapes.of(self.decoder), self.config.max_rows)
        self._admission = Admission(self.decoder, self._chunks, self.calibration, scratch)
        shares = Shares()
        passes = Passes(self.decoder, shares, self._speed, self.config.max_rows, self.config.shared_rows)
        self._scheduler = Scheduler(passes, shares, self.config.max_running, self.config.max_waiting)
        self._pipeline = Pipeline(
            self.decoder,
            self.tokenizer,
            self._chunks,
            self.calibration,
            self._speed,
            self.config.max_rows,
            crowded=lambda: self._scheduler.crowded,
            stopped=lambda: self._quality.stopped,
            finished=self._finished,
            answered=lambda state, report: self._shadows.offer(state, report),
            replanned=lambda: self._counters.add("replanned"),
        )
        self._shadows = Shadows(
            self.config.shadow, self._scheduler, self._pipeline.compare, self._admission.room, self._quality
        )
        self._keeping = Keeping(self._scheduler, self._chunks, self.store, self._counters)
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

        A chunk has one ``conditioned`` variant: once another is stored, the one before is removed, and requests that
        hold it go on reading it. With it goes, for selectors, how far each of its tokens' values moved from those of
        the plain variant, which is computed for that where it is not stored.

        Args:
            behind: for each chunk the related chunks that it is encoded behind (its ``conditioned`` variant), the
                nearest last. It is encoded behind the last two, the two before them and so on, each time behind the
                sink as well, and the mean of that is stored.
            namespace: whose chunks these are.

        Raises:
            PromptTooLong: a chunk exceeds the model's context, by itself or behind two of the related ones that come
                together (cf. :meth:`longest_neighbour`).
            ResourceExhausted, StoreError: no tier took a chunk.
        """
        return self._keeping.precompute(chunks, behind, namespace)

    def content_key(self, chunk: Chunk, *, namespace: str = DEFAULT_NAMESPACE) -> str:
        """Return the key of a chunk: its tokens, the model and the namespace, keyed with the namespace's secret."""
        return self._chunks.key(chunk, namespace)

    def missing(self, chunks: Iterable[Chunk], *, namespace: str = DEFAULT_NAMESPACE) -> list[Chunk]:
        """Return those chunks that do not seem to be stored. A hint: only a request knows."""
        return [c for c in chunks if not self._chunks.has(c, namespace)]

    def behind(self, chunk: Chunk, *, namespace: str = DEFAULT_NAMESPACE) -> tuple[str, ...]:
        """Return the content keys that the stored ``conditioned`` variant of a chunk was encoded behind, in order.

        ``()`` where none is stored. A hint, cheap to ask for: a tier that fails or cannot tell counts as one that has
        none.
        """
        return self._chunks.behind(chunk, namespace)

    def longest_neighbour(self, tokens: int) -> int:
        """Return how many tokens a related chunk may have that a chunk of ``tokens`` tokens is encoded behind.

        Of such chunks any two fit into the model's context with it. 0 or less where none does.
        """
        return self._chunks.longest_neighbour(tokens)

    def forget(self, chunks: Iterable[Chunk], *, namespace: str = DEFAULT_NAMESPACE) -> int:
        """Remove chunks from every tier, and whatever was encoded behind them; returns how many objects went.

        A request that is running or waiting does not bring them back.
        """
        return self.forget_keys([self._chunks.key(c, namespace) for c in chunks])

    def forget_keys(self, keys: Iterable[str]) -> int:
        """Remove chunks by the content keys that :meth:`precompute` returned, whatever model they were made with."""
        return self._keeping.forget_keys(keys)

    def namespaces(self) -> tuple[NamespaceStats, ...]:
        """Return what every namespace has in each tier, what other models left included; in order of their tags.

        Namespaces that neither the settings nor a call to this engine has named are told by their tags alone.
        """
        return self._keeping.namespaces(DEFAULT_NAMESPACE)

    def drop_namespace(self, name: str) -> Dropped:
        """Remove every chunk of a namespace from every tier, whatever model it was made with.

        A request that is running or waiting does not bring them back; what it holds goes when it ends. What is not
        known by name can be dropped by its tag: ``engine.store.drop(tag)``.

        Raises:
            InvalidInput: not a usable name.
        """
        return self._keeping.drop_namespace(name)

    def _finished(self, request: Request, report: Report) -> None:
        """Take note of a request that has reached its first token."""
        self._counters.finished(report)
        if self.config.recompute_misses:
            self._keeping.misses.queue(request, report)

    # --------------------------------------------------------------- answers

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        plan: Plan | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        compare_full: bool = False,
        positions: bool = False,
        deadline: float | None = None,
        request_id: str | None = None,
    ) -> Answer:
        """Return the answer with its report. Arguments and errors are those of :meth:`stream`."""
        stream = self.stream(
            prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            plan=plan,
            namespace=namespace,
            compare_full=compare_full,
            positions=positions,
            deadline=deadline,
            request_id=request_id,
        )
        with stream:
            for event in stream:
                if isinstance(event, Answer):
                    return event
        raise RuntimeError("the stream ended without an answer")

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        plan: Plan | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        compare_full: bool = False,
        positions: bool = False,
        arrived: float | None = None,
        deadline: float | None = None,
        request_id: str | None = None,
    ) -> AnswerStream:
        """Answer token by token; the last event is the :class:`Answer`. Closing the stream cancels.

        The answer is generated whether or not the stream is read, together with those of other requests.

        Args:
            max_new_tokens: most tokens of the answer; ``None``: what ``sampling`` says.
            sampling: how tokens are chosen and when the answer ends; ``None`` is ``Sampling()``, that is greedy.
            plan: how to prefill; ``None`` is ``Plan()``, that is ``auto``.
            namespace: whose chunks are used; namespaces have equal shares of the engine.
            compare_full: also run the prompt at full prefill, after the answer, and report how close it was.
            positions: report the recomputed positions.
            arrived: reading of :func:`time.perf_counter` that TTFT counts from; ``None`` is now.
            deadline: reading of :func:`time.monotonic` at which the answer ends, however far it has come; ``None``:
                never.
            request_id: what logs call it: 1 to 128 printable ASCII characters without spaces.

        Raises:
            InvalidInput, InvalidPlan, InvalidPrompt, PromptTooLong, ResourceExhausted: at once, before anything runs.
            DeadlineExceeded: at once, where the first token would not come in time as far as can be known; from the
                stream, where it has not.
            ResourceExhausted: also from the stream, if others have taken the memory when its turn comes.
            Closed: the engine was closed.
        """
        chosen = Sampling() if sampling is None else sampling
        if not isinstance(chosen, Sampling):
            raise InvalidInput("sampling", sampling, "a Sampling")
        if max_new_tokens is not None:
            chosen = replace(chosen, max_new_tokens=max_new_tokens)
        if deadline is not None and not isinstance(deadline, (int, float)):
            raise InvalidInput("deadline", deadline, "a reading of time.monotonic()")
        request, room = self._admit(
            prompt, plan, namespace, chosen.max_new_tokens, arrived, compare_full, positions, request_id
        )
        channel = Channel(lambda: self._counters.add("new_tokens"))
        steps = self._pipeline.answer(request, chosen, channel.put)
        job = Job(steps, namespace, room=room, deadline=deadline, estimate_ms=self._estimate_ms(request))
        job.done.add_done_callback(channel.end)
        self._scheduler.submit(job)
        return AnswerStream(channel, job, self._scheduler.cancel)

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
        request, room = self._admit(prompt, plan, namespace, reserve, compared=compare_full, positions=positions)
        if repair is not None:
            if request.plan.method != "reuse":
                raise InvalidPlan("method", request.plan.method, "reuse, where a repair is given")
            request = replace(request, repair=repair)
        state = self._run(self._pipeline.prefilled(request), request, room)
        return Prefill(state.logits, state.canvas, state.report)

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
        request, room = self._admit(prompt, plan, namespace, len(ids) - 1)
        state = self._run(self._pipeline.prefill(request), request, room)
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
            following = self._run(self._pipeline.extend(prefill.canvas, start, ids[:-1]))
            logits = torch.cat((logits, following))
        return logits.log_softmax(dim=-1)

    def greedy(self, prefill: Prefill, max_new_tokens: int) -> tuple[int, ...]:
        """Return the greedy answer's token ids from a prefill whose canvas has room for all but the last one."""
        room = prefill.canvas.length - prefill.report.tokens + 1
        if not 0 < max_new_tokens <= room:
            raise InvalidInput("max_new_tokens", max_new_tokens, f"1 to {room}, for which the canvas has room")
        return self._run(self._pipeline.greedy(prefill.canvas, prefill.logits, prefill.report.tokens, max_new_tokens))

    def _admit(
        self,
        prompt: Prompt,
        plan: Plan | None,
        namespace: str,
        reserve: int,
        arrived: float | None = None,
        compared: bool = False,
        positions: bool = False,
        request_id: str | None = None,
    ) -> tuple[Request, Room]:
        if self._closed:
            raise Closed("the engine is closed")
        admitted = self._admission.admit(prompt, plan, namespace, reserve, arrived, compared, positions, request_id)
        self.store.known.learn(namespace)
        return admitted

    def _run(self, steps: Steps[_T], request: Request | None = None, room: Room | None = None) -> _T:
        """Have steps carried out and return what they come to."""
        tenant, estimate_ms = ("", 0.0) if request is None else (request.namespace, self._estimate_ms(request))
        return self._scheduler.wait(self._scheduler.submit(Job(steps, tenant, room=room, estimate_ms=estimate_ms)))

    def _estimate_ms(self, request: Request) -> float:
        """The least that a request's prefill will take: what may be in the store is counted as if it cost nothing."""
        prompt = request.prompt
        full_ms = self._speed.least_ms(len(prompt))
        if planner.decide(request.plan, self.calibration, self._quality.stopped).method == "full":
            return full_ms
        computed = sum(len(segment) for segment in prompt.segments if isinstance(segment, Text))
        return full_ms * computed / len(prompt)

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
            waiting=self._scheduler.waiting,
            counters=self._counters.snapshot(),
            background=self._keeping.misses.counts(),
            scratch=self._admission.scratch(),
            tiers=self.store.tier_stats(),
            loads=self.store.load_stats(),
            writes=self.store.write_stats(),
            tenants=tenant_stats(self.store),
            shadow=self._shadows.stats(),
            running=self._scheduler.running,
            setup=setup_of("native", d.model.config, self.tokenizer, d.shards),
        )

    def reset_shadow(self) -> Trip | None:
        """Let ``auto`` blend again after its quality stopped it (:class:`~blend.config.ShadowConfig`).

        Returns since when it was stopped, and why; ``None`` where it was not. What was compared till then does not
        stop it again.

        Raises:
            TierUnavailable: the store's directory does not let go of the record; ``auto`` stays stopped.
        """
        return self._quality.reset()

    @property
    def alive(self) -> bool:
        """Whether it takes requests: it was not closed, and its thread has not failed."""
        return not self._closed and self._scheduler.alive

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until no background work is left (``timeout`` in seconds); returns whether that is so."""
        end = None if timeout is None else monotonic() + timeout
        done = self._keeping.misses.wait_idle(timeout)
        return self._shadows.wait_idle(None if end is None else max(0.0, end - monotonic())) and done

    def stop_background(self) -> None:
        """Drop missed chunks that are still to be computed and requests that are to be compared, and take no more."""
        self._keeping.misses.close()
        self._shadows.close()

    def close(self) -> None:
        """Let the running step finish, end all work and close the store. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        self._scheduler.close()
        self._keeping.misses.close()
        self._shadows.close()
        self._chunks.close()
        self.store.close()
        self._scheduler.join()  # what waited for the store has been let go by now

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
