"""From logits to tokens, and from tokens to text that ends before a stop string."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from blend.types import MIN_TEMPERATURE, Sampling


class Sampler:
    """Chooses one request's tokens, with a generator of its own.

    A token is drawn by one uniform number from the cumulative probabilities in the order of the vocabulary. So the
    same seed gives the same tokens whatever else is computed beside them: differences in the last bits of logits tell
    only where that number falls between two tokens, or where two tokens are next to equal at the edge of ``top_k`` or
    ``top_p``.

    Args:
        sampling: temperature, cuts and seed. Without a seed the tokens differ from time to time.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self._generator = torch.Generator().manual_seed(seed)
        self._uniform: float | None = None

    @property
    def greedy(self) -> bool:
        """Whether it takes the likeliest token always."""
        return self._sampling.temperature < MIN_TEMPERATURE

    def choose(self, logits: Tensor) -> int:
        """Return the next token's id from ``logits`` ``[V]`` float32."""
        token = self.propose(logits)
        self.taken()
        return token

    def propose(self, logits: Tensor) -> int:
        """Return what :meth:`choose` would. Until it is :meth:`taken`, it is drawn by the same number again."""
        if self.greedy:
            return int(logits.argmax())
        if self._uniform is None:
            self._uniform = float(torch.rand((), generator=self._generator, dtype=torch.float64))
        sums = self.probabilities(logits).double().cumsum(0)
        # Rounding may leave the last sum below the number that was drawn, or a cut token's sum equal to it.
        drawn = torch.searchsorted(sums, self._uniform * sums[-1], right=True)
        last = torch.searchsorted(sums, sums[-1])
        return int(torch.minimum(drawn, last))

    def taken(self) -> None:
        """Take note that the token is part of the answer: the next one is drawn by another number."""
        self._uniform = None

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return what tokens are drawn by, ``[V]`` float32, not scaled to a sum of 1; those that are cut are 0.

        The temperature comes first, then ``top_k``, then ``top_p`` (nucleus sampling; Holtzman et al., ICLR 2020), as
        in transformers.
        """
        chosen, size = self._sampling, len(logits)
        scaled = (logits - logits.max()) / chosen.temperature
        found = scaled.softmax(-1)
        if 0 < chosen.top_k < size:
            found = torch.where(found >= found.topk(chosen.top_k).values[-1], found, 0.0)
        if chosen.top_p < 1.0:
            # The others together have less than the share that is cut, so they need not be sorted.
            whole = float(found.double().sum())
            ranked = found[found >= (1.0 - chosen.top_p) * whole / size].sort(descending=True).values
            before = ranked.double().cumsum(0) - ranked
            kept = int((before < chosen.top_p * whole).sum())
            found = torch.where(found >= ranked[max(kept, 1) - 1], found, 0.0)
        return found


def choose(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Return what each of B requests' samplers proposes from ``[B, V]`` float32; only ids leave the device.

    The greedy ones are brought to the host together.
    """
    greedy = [i for i, sampler in enumerate(samplers) if sampler.greedy]
    likeliest = dict(zip(greedy, logits[greedy].argmax(-1).tolist(), strict=True)) if greedy else {}
    return [likeliest[i] if i in likeliest else sampler.propose(logits[i]) for i, sampler in enumerate(samplers)]


class StopText:
    """Text that ends before the first stop string. What may be the beginning of one is held back.

    Args:
        stop: the strings; none: text passes as it comes.

    Attributes:
        stopped: whether one was found.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Take the next piece; return what can be no part of a stop string any more. Nothing after one was found."""
        if self.stopped:
            return ""
        text = self._held + text
        found = min((at for at in map(text.find, self._stop) if at >= 0), default=-1)
        if found >= 0:
            self.stopped, self._held = True, ""
            return text[:found]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` are those that ``stop`` begins with, short of all of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
