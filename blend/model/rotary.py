"""Finding out how a model's keys turn with position: from the keys themselves, not from the model's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor, nn

from blend.errors import ModelUnsupported
from blend.recompute.rope import Pairing, Rotation

PROBE_TOKENS = 8
"""How many tokens a probe runs."""

Probe = Callable[[Sequence[int]], list[Tensor]]
"""Runs the same ``PROBE_TOKENS`` tokens from each given position on, as so many requests in one pass, and returns
each request's keys, ``[L, KVH, T, D]``."""

_NEAR = 509
_PAIRINGS: tuple[Pairing, ...] = ("half", "interleaved")
_LENGTH_DEPENDENT = ("dynamic", "longrope")
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def find_rotations(model: nn.Module, name: str, max_positions: int, probe: Probe) -> tuple[Rotation | None, ...]:
    """How each layer's keys turn, ``None`` for a layer whose keys don't; layers that turn alike share one object.

    The position self-test: the same tokens run from position 0 and from two others. Each layer's keys must be the
    first ones turned by frequencies that the model itself holds, or be the first ones as they are, and must not
    depend on how far another request of the pass reaches.

    Args:
        model: whose frequencies are looked for, among its modules' buffers.
        name: of the model, for errors.
        max_positions: the model's context.
        probe: shows the keys.

    Raises:
        ModelUnsupported: keys that depend on the position in another way: learned positions, say, or a rotation
            that depends on the total length.
    """
    _refuse_length_dependent(model, name)
    candidates: list[Rotation | None] = [None, *_model_rotations(model)]
    far = max(1, max_positions - PROBE_TOKENS)
    near = min(_NEAR, far)
    (alone,), (moved,), (beside, reaching) = probe([0]), probe([near]), probe([0, far])
    found = []
    for layer, keys in enumerate(alone):
        errors = [_difference(_turned(keys, candidate, near), moved[layer]) for candidate in candidates]
        best = min(range(len(errors)), key=errors.__getitem__)
        if not errors[best] <= _tolerance(keys.dtype, near):
            raise ModelUnsupported(
                name,
                f"keys of layer {layer} at position {near} are not those at position 0 turned by frequencies that the "
                f"model holds (relative difference {errors[best]:.1e}): learned or otherwise absolute positions "
                "cannot be moved",
            )
        rotation, most = candidates[best], _tolerance(keys.dtype, far)
        if not (
            _difference(keys, beside[layer]) <= most
            and _difference(_turned(keys, rotation, far), reaching[layer]) <= most
        ):
            raise ModelUnsupported(
                name,
                f"keys of layer {layer} turn in another way once position {far} is reached: rotations that depend on "
                "the total length cannot be reused",
            )
        found.append(rotation)
    return tuple(found)


def _model_rotations(model: nn.Module) -> list[Rotation]:
    """Every set of inverse frequencies that the model holds, in every pairing and either direction, each once."""
    found: list[Rotation] = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not name.endswith("inv_freq") or "original" in name or buffer.ndim != 1:
                continue
            for pairing, direction in product(_PAIRINGS, (1, -1)):
                rotation = Rotation(direction * buffer, pairing)
                if not any(rotation.same_turn(other) for other in found):
                    found.append(rotation)
    return found


def _refuse_length_dependent(model: nn.Module, name: str) -> None:
    parameters = getattr(getattr(model, "config", None), "rope_parameters", None) or {}
    groups = [parameters, *(v for v in parameters.values() if isinstance(v, dict))]
    for kind in (group.get("rope_type") for group in groups):
        if kind in _LENGTH_DEPENDENT:
            raise ModelUnsupported(
                name, f"rope type {kind!r}: its rotation depends on the total length, so keys cannot be moved"
            )


def _turned(keys: Tensor, rotation: Rotation | None, shift: int) -> Tensor:
    if rotation is None:
        return keys
    if rotation.dims > keys.shape[-1]:
        return torch.full_like(keys, float("nan"))
    return rotation.rotate(keys, shift)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Relative difference of two ``[KVH, T, D]``: each dimension counts alike, however large its values are.

    Trained keys hold much of their size in a few dimensions that hardly turn; a plain norm would see those alone.
    """
    ours, theirs = ours.double(), theirs.double()
    size = theirs.square().mean((0, 1))
    floor = size.mean() * 1e-3 + 1e-30
    return float(((ours - theirs).square().mean((0, 1)) / (size + floor)).mean().sqrt().nan_to_num(nan=float("inf")))


def _tolerance(dtype: torch.dtype, shift: int) -> float:
    """What a float32 angle at position ``shift`` may be off by, and what ``dtype`` loses in a whole model."""
    return _TOLERANCE[dtype] + shift * 2.0**-22
