"""How close a prefill stays to full prefill of the same prompt: same weights, same dtype, same tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blend.engine import Engine
from blend.errors import InvalidInput, ModelError
from blend.eval.metrics import identical, kl_rows, top1_rows
from blend.model.rows import LayerAttention, Observer, Rows
from blend.recompute import passes
from blend.recompute.kernels.batch import Batch
from blend.recompute.kernels.memory import Canvases
from blend.types import Prefill


@dataclass(frozen=True, eq=False)
class FullPrefill:
    """Full prefill of a prompt: what others are held against.

    ``answer`` is its greedy answer, ``forced`` that answer or, where it is empty, one end token: ``T`` tokens, whose
    log-probabilities ``[T, V]`` are ``logs``. ``question`` are the token ids that end the prompt behind its last
    chunk, and ``attention`` their attention outputs ``[L, H, R, D]``; ``None`` where nobody asks for them.
    """

    prefill: Prefill
    answer: tuple[int, ...]
    forced: tuple[int, ...]
    logs: Tensor
    question: tuple[int, ...]
    attention: Tensor | None


def full_prefill(
    engine: Engine, prefill: Prefill, question: Sequence[int], max_new_tokens: int, *, attention: bool
) -> FullPrefill:
    """Return what others are held against.

    Args:
        prefill: at full prefill; its canvas has room for all but the last of ``max_new_tokens``.
        question: token ids that end the prompt behind its last chunk.
        attention: whether attention outputs are wanted.
    """
    answer = engine.greedy(prefill, max_new_tokens)
    forced = answer or (min(engine.tokenizer.eos_ids),)
    logs = engine.continuation(prefill, forced)
    outputs = attention_outputs(engine, prefill, question) if attention else None
    return FullPrefill(prefill, answer, forced, logs, tuple(question), outputs)


def closeness(engine: Engine, prefill: Prefill, answer: Sequence[int], full: FullPrefill) -> dict[str, float]:
    """Return every metric against full prefill, by name; that of attention only where full prefill's outputs are there.

    Args:
        prefill: of the same prompt. Its canvas is written behind the prompt.
        answer: its own greedy answer.

    Raises:
        ModelError: a metric is not a finite number, for the model's own numbers are not.
    """
    logs = engine.continuation(prefill, full.forced)
    kl = kl_rows(full.logs, logs)
    found = {
        "first_kl": float(kl[0]),
        "answer_kl": float(kl.mean()),
        "top1": float(top1_rows(full.logs, logs).float().mean()),
        "same_answer": identical(full.answer, answer),
    }
    if full.attention is not None:
        found["attention_error"] = attention_error(full.attention, attention_outputs(engine, prefill, full.question))
    for name, value in found.items():
        if not math.isfinite(value):
            dtype = str(engine.decoder.dtype).removeprefix("torch.")
            reason = f"{name} of {prefill.report.mode} is {value}; its numbers may be too large for {dtype}"
            raise ModelError(engine.config.model, reason)
    return found


class _Outputs(Observer):
    """Keeps the attention outputs of the rows that it sees, layer by layer."""

    def __init__(self, engine: Engine) -> None:
        self._kernels = engine.decoder.kernels
        self.layers: list[Tensor] = []

    def after_write(
        self, layer: int, rows: Rows, query: Tensor, key: Tensor, value: Tensor, attention: LayerAttention
    ) -> Tensor:
        """Compute what attention would compute next."""
        output = self._kernels.attend(
            query.contiguous(),
            Canvases([rows.canvas.k], [rows.canvas.v]),
            layer,
            Batch([rows.positions], [rows.visible]),
            scale=attention.scale,
            window=attention.window,
            softcap=attention.softcap,
        )
        self.layers.append(output.float())
        return output


def attention_outputs(engine: Engine, prefill: Prefill, question: Sequence[int]) -> Tensor:
    """Return the attention outputs (the input of ``o_proj``) ``[L, H, R, D]`` float32 of a prompt's last R rows.

    The rows run again over the prefill's canvas, which takes as long as R further tokens, and nothing else.

    Args:
        question: the R token ids that end the prompt.

    Raises:
        InvalidInput: more tokens than the prompt has, or none.
    """
    tokens = prefill.report.tokens
    if not 0 < len(question) <= tokens:
        raise InvalidInput("question", f"{len(question)} tokens", f"1 to {tokens}, which the prompt has")
    device = engine.decoder.device
    positions = torch.arange(tokens - len(question), tokens, device=device)
    seen = _Outputs(engine)
    ids = torch.tensor(question, device=device)
    passes.unstopped(engine.decoder.forward([Rows(prefill.canvas, positions, ids, observer=seen)]))
    return torch.stack(seen.layers)


def attention_error(full: Tensor, other: Tensor) -> float:
    """Return the RMS of the difference over the RMS of full prefill's outputs, ``[L, H, R, D]``: mean over layers."""
    missed = (other - full).flatten(1).norm(dim=1)
    return float((missed / full.flatten(1).norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)).mean())
