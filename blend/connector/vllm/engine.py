"""vLLM as a service's engine: the calls of :class:`blend.Engine` that a service makes, answered by vLLM.

vLLM runs in processes of its own, with the connector inside; the store is there, too. This process has the tokenizer,
and makes the chunks' keys itself. Importing this module does not import vLLM: see :mod:`blend.connector.vllm.starting`.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import uuid
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from time import monotonic, perf_counter
from typing import Any, Literal, TypeVar, cast

from blend.config import EngineConfig, VllmEngineConfig
from blend.connector.client import DEFAULT_TENANT, build_prompt
from blend.connector.vllm.answers import Asked, report_of
from blend.connector.vllm.extension import value_of
from blend.connector.vllm.starting import arguments, started
from blend.errors import (
    BlendError,
    Closed,
    DeadlineExceeded,
    InvalidInput,
    InvalidPrompt,
    ModelUnsupported,
    PromptTooLong,
)
from blend.model import source
from blend.model.tokenizer import Tokenizer
from blend.recompute import calibration, planner
from blend.serving.draft import Draft
from blend.stats import Counters, EngineStats, Setup, TenantStats
from blend.store import LoadStats, Namespace, TierStats, WriteStats, content_key, store_secret
from blend.types import Answer, Chunk, Finish, Plan, Prompt, Sampling, Token

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_WRITTEN_SECONDS = 0.005
_CLOSE_SECONDS = 30.0
_MOST_FORGOTTEN = 100_000
_END = object()


class VllmEngine:
    """Answers prompts by vLLM, from the same stored chunks as :class:`blend.Engine`. Thread-safe.

    It has those of that class's methods that a service calls, with the same arguments and meaning. Three things
    differ: ``compare_full`` is refused, ``full_estimate_ms`` and ``predicted_ms`` stay 0, for nothing here knows them,
    and an answer's ``Timings.fetch`` stands for looking up, loading and placing.

    Args:
        config: model, dtype, sink, kernels and store; the rest is vLLM's own.
        vllm: what vLLM is given besides.

    Raises:
        InvalidConfig: an argument that vLLM does not have, or that is not to be given.
        ModelError: the model cannot be found, or vLLM or the connector cannot run it; the reason is said.
        TierUnavailable: the store's directory cannot be used.
    """

    def __init__(self, config: EngineConfig, vllm: VllmEngineConfig) -> None:
        self.config = config
        directory = source.resolve(config.model)
        self.tokenizer = Tokenizer.from_directory(directory, config.model)
        self.calibration = calibration.load(config.model, directory)
        self._secret = store_secret(config.store)
        self._counters = Counters()
        self._lock = threading.Lock()
        self._forgotten: dict[str, float] = {}
        self._closed = False
        given = arguments(config, vllm, directory, self._secret)
        with ExitStack() as undo:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="blend-vllm")
            self._thread.start()
            undo.callback(self._end_loop)
            self._llm = self._run(started(config.model, given))
            undo.callback(self._end_vllm)
            try:
                self._about: Mapping[str, Any] = self._call("blend_describe")
            except BlendError as error:
                raise ModelUnsupported(config.model, f"vLLM cannot blend: {error}") from error
            undo.pop_all()
        if (told := self._about["residency"]) is not None:
            _log.info("event=residency node=%s publish=%s replay=%s", *told)

    # ---------------------------------------------------------------- chunks

    def precompute(self, chunks: Iterable[Chunk], *, namespace: str = DEFAULT_TENANT) -> list[str]:
        """Encode chunks that are not stored yet and store them; returns their content keys.

        Raises:
            InvalidPrompt, PromptTooLong: a chunk has tokens that the model has not, or too many.
            ResourceExhausted, StoreError: no tier took a chunk.
        """
        wanted = list(chunks)
        for chunk in wanted:
            self._check_ids("chunk", chunk.token_ids)
            if (length := self._about["sink"] + len(chunk)) > self._about["max_positions"]:
                raise PromptTooLong(length, self._about["max_positions"], "chunk")
        keys, writes = [], []
        for chunk in wanted:
            key = self.content_key(chunk, namespace=namespace)
            with self._lock:
                self._forgotten.pop(key, None)
            computed, write = self._call("blend_encode", list(chunk.token_ids), namespace)
            if computed:
                self._counters.add("precomputed")
            if write is not None:
                writes.append(write)
            keys.append(key)
        for write in writes:
            self._run(self._written(write))
        return keys

    def content_key(self, chunk: Chunk, *, namespace: str = DEFAULT_TENANT) -> str:
        """Return the key of a chunk: the native engine's, for the same model, dtype, sink and store."""
        return content_key(Namespace(namespace, self._about["fingerprint"], self._secret), chunk.token_ids)

    def missing(self, chunks: Iterable[Chunk], *, namespace: str = DEFAULT_TENANT) -> list[Chunk]:
        """Return those chunks that do not seem to be stored. A hint: only a request knows."""
        asked = list(chunks)
        places = self._call("blend_missing", [list(chunk.token_ids) for chunk in asked], namespace)
        return [asked[place] for place in places]

    def forget_keys(self, keys: Iterable[str]) -> int:
        """Remove chunks by content key from every tier, and whatever was encoded behind them; returns how many objects.

        A request that is running or waiting does not bring them back.
        """
        gone, now = list(keys), perf_counter()
        with self._lock:
            for key in gone:
                self._forgotten.pop(key, None)
                self._forgotten[key] = now
            while len(self._forgotten) > _MOST_FORGOTTEN:
                del self._forgotten[next(iter(self._forgotten))]
        removed: int = self._call("blend_forget", gone)
        return removed

    # --------------------------------------------------------------- answers

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        plan: Plan | None = None,
        namespace: str = DEFAULT_TENANT,
        compare_full: bool = False,
        positions: bool = False,
        arrived: float | None = None,
        deadline: float | None = None,
        request_id: str | None = None,
    ) -> Iterator[Token | Answer]:
        """Answer token by token; the last event is the :class:`Answer`. Closing the iterator cancels.

        Arguments and errors are those of :meth:`blend.Engine.stream`, but for ``compare_full``; vLLM's logs know the
        request by its ``request_id`` with something unique behind it.

        Raises:
            InvalidInput: ``compare_full``: vLLM's answers are not held against a full prefill.
        """
        if compare_full:
            raise InvalidInput("compare_full", True, "false: vLLM's answers are not held against a full prefill")
        chosen = Sampling() if sampling is None else sampling
        if max_new_tokens is not None:
            chosen = replace(chosen, max_new_tokens=max_new_tokens)
        if deadline is not None and deadline <= monotonic():
            raise DeadlineExceeded("the deadline has passed")
        if self._closed:
            raise Closed("the engine is closed")
        self._check_ids("prompt", prompt.token_ids)
        capacity, most = len(prompt) + chosen.max_new_tokens, self._about["max_positions"]
        if capacity > most:
            raise PromptTooLong(capacity, most, "prompt with room for its answer")
        plan = Plan() if plan is None else plan
        chunks = [segment for segment in prompt.segments if isinstance(segment, Chunk)]
        asked = Asked(
            prompt,
            tuple(self.content_key(chunk, namespace=namespace) for chunk in chunks),
            planner.decide(plan, self.calibration),
            positions,
            self.calibration is not None,
            perf_counter() if arrived is None else arrived,
        )
        extra = None
        if chunks:
            made = build_prompt(prompt.segments, plan, tenant=namespace, positions=positions)
            extra = {"kv_transfer_params": made["kv_transfer_params"]}
        unique = uuid.uuid4().hex
        name = unique if request_id is None else f"{request_id}-{unique}"
        return self._stream(asked, chosen, extra, deadline, name)

    def _stream(
        self, asked: Asked, chosen: Sampling, extra: Mapping[str, Any] | None, deadline: float | None, name: str
    ) -> Iterator[Token | Answer]:
        outputs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        draft, late = Draft(self.tokenizer, chosen.stop), False
        ttft_ms, last = 0.0, cast(Any, None)
        work = self._generate(asked.prompt, chosen, extra, outputs, name)
        task = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while (output := outputs.get()) is not _END:
                if last is None:
                    ttft_ms = (perf_counter() - asked.arrived) * 1e3
                last = output
                for token in output.outputs[0].token_ids:
                    if token in self.tokenizer.eos_ids or draft.stopped:
                        break
                    self._counters.add("new_tokens")
                    yield draft.push(token)
                late = deadline is not None and deadline <= monotonic()
                if draft.stopped or late:
                    break
            else:
                task.result()
        finally:
            task.cancel()
            self._forget_again(asked)
        finish: Finish = "stop" if draft.stopped else "deadline" if late else _finish_reason(last)
        told = (last.kv_transfer_params or {}).get("blend")
        report = report_of(asked, told, last.num_cached_tokens or 0, _queue_ms(last), ttft_ms)
        self._counters.finished(report)
        yield Answer(draft.text(), tuple(draft.token_ids), finish, report)

    async def _generate(
        self,
        prompt: Prompt,
        chosen: Sampling,
        extra: Mapping[str, Any] | None,
        outputs: queue.SimpleQueue[Any],
        name: str,
    ) -> None:
        """Put vLLM's outputs into a queue, and :data:`_END` behind them, however that ends."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        params = SamplingParams(
            temperature=chosen.temperature,
            top_p=chosen.top_p,
            top_k=chosen.top_k,
            seed=chosen.seed,
            max_tokens=chosen.max_new_tokens,
            stop_token_ids=sorted(self.tokenizer.eos_ids),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra,
        )
        try:
            tokens = {"prompt_token_ids": list(prompt.token_ids)}
            async for output in self._llm.generate(tokens, params, name):
                outputs.put(output)
        except (EngineDeadError, EngineGenerateError) as error:
            raise Closed(f"vLLM failed: {error}") from error
        finally:
            outputs.put(_END)

    def _forget_again(self, asked: Asked) -> None:
        """Forget chunks that were forgotten while a request ran, which may have had them encoded anew."""
        with self._lock:
            stale = [key for key in asked.keys if self._forgotten.get(key, -1.0) >= asked.arrived]
        if stale:
            try:
                self._call("blend_forget", stale)
            except BlendError as error:  # no fault of the request that has ended
                _log.warning("%d chunks may have come back after they were forgotten: %s", len(stale), error)

    # --------------------------------------------------------------- upkeep

    def stats(self) -> EngineStats:
        """Return counts since start, the model's shape and the store's tiers; background work is vLLM's to count."""
        about, found = self._about, self._call("blend_stats")
        return EngineStats(
            model=self.config.model,
            model_fingerprint=about["fingerprint"],
            device=about["device"],
            dtype=about["dtype"],
            kernels=about["kernels"],
            layers=about["layers"],
            kv_bytes_per_token=about["kv_bytes_per_token"],
            max_positions=about["max_positions"],
            calibrated=self.calibration is not None,
            waiting=None,
            counters=self._counters.snapshot(),
            background={},
            scratch=None,
            tiers=tuple(TierStats(**stats) for stats in found["tiers"]),
            loads=LoadStats(**found["loads"]),
            writes=WriteStats(**found["writes"]),
            tenants=tuple(TenantStats(**stats) for stats in found["tenants"]),
            setup=Setup(**about["setup"]),
        )

    def reset_shadow(self) -> None:
        """Do nothing: no answer is held against a full prefill here, so nothing stops ``auto``."""

    @property
    def alive(self) -> bool:
        """Whether it takes requests: it was not closed, and vLLM has not died."""
        return not self._closed and not self._llm.errored

    def stop_background(self) -> None:
        """Do nothing: what waits in the background is vLLM's worker's, and ends with it."""

    def close(self) -> None:
        """End vLLM, which closes the store. Safe to call again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._run(self._called("blend_close", ()))
        except Closed as error:
            _log.warning("the store could not be closed: %s", error)
        self._end_vllm()
        self._end_loop()

    # ---------------------------------------------------------------- inside

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of :class:`~blend.connector.vllm.extension.ChunkCalls` in vLLM's worker.

        Raises:
            Closed: the engine was closed, or vLLM has died.
            BlendError: what the method raised.
        """
        if self._closed:
            raise Closed("the engine is closed")
        return self._run(self._called(method, arguments))

    async def _called(self, method: str, arguments: tuple[Any, ...]) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            (answer,) = await self._llm.collective_rpc(method, args=arguments)
        except EngineDeadError as error:
            raise Closed(f"vLLM failed: {error}") from error
        return value_of(answer)

    async def _written(self, write: int) -> None:
        while not await self._called("blend_written", (write,)):
            await asyncio.sleep(_WRITTEN_SECONDS)

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end_vllm(self) -> None:
        if (handler := self._llm.output_handler) is not None:  # or it would log the end as a fault
            self._loop.call_soon_threadsafe(handler.cancel)
        self._llm.shutdown(timeout=_CLOSE_SECONDS)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _check_ids(self, what: str, ids: tuple[int, ...]) -> None:
        if max(ids) >= self._about["vocab_size"]:
            raise InvalidPrompt(what, max(ids), f"token ids from 0 to {self._about['vocab_size'] - 1}")


def _finish_reason(output: Any) -> Literal["stop", "length"]:
    """Why an answer ended.

    Raises:
        Closed: vLLM gave up.
    """
    reason = None if output is None else output.outputs[0].finish_reason
    if reason not in ("stop", "length"):
        raise Closed(f"vLLM ended the request before its answer was whole ({reason})")
    found: Literal["stop", "length"] = reason
    return found


def _queue_ms(output: Any) -> float:
    """How long a request waited in vLLM's queue, in milliseconds; 0 where its statistics are off."""
    times = output.metrics
    return max(0.0, times.scheduled_ts - times.queued_ts) * 1e3 if times is not None else 0.0
