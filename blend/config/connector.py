"""The connector in another engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar

from blend.config.checks import at_least, one_of
from blend.config.engine import EngineConfig
from blend.config.mooncake import MooncakeConfig
from blend.config.residency import ResidencyConfig, ResidencySource
from blend.config.store import StoreConfig
from blend.errors import InvalidConfig

_Settings = TypeVar("_Settings")


@dataclass(frozen=True)
class ConnectorConfig:
    """The connector in another engine: its own part of that engine's configuration.

    Args:
        model: what the native engine would call the model, where that is another name than the engine's own: a model's
            shipped calibration goes by it.
        sink: see :class:`EngineConfig`.
        kernels: see :class:`EngineConfig`.
        scratch_tokens: longest prompt that is blended, for one is laid out on a canvas of its own; ``None`` means
            the engine's longest.
        step_share: time that blending may take of an engine's step in which other requests are under way, as a share of
            the time that the step's forward pass takes.
        capture_queue: most missing chunks that wait to be encoded, which is done while no request is under way; 0 has
            none encoded.
        reset_removes: whether a reset of the connector's cache, which the engine asks for before it sleeps as well,
            removes every chunk of the model from every tier. For those who change its weights in place.
        recognise: for whom known chunks are found in a prompt that does not name them: for nobody (``off``), for a
            request that asks for it (``asked``), or for every one that brings no cache salt of its own, by the default
            plan and tenant (``always``).
        store: the tiered store. Each tensor-parallel rank has one of its own for its part of every chunk; ranks on one
            machine share the directory and the disk tier's budget.
    """

    model: str | None = None
    sink: str | tuple[int, ...] = "bos"
    kernels: Literal["auto", "torch", "triton", "reference"] = "auto"
    scratch_tokens: int | None = None
    step_share: float = 0.75
    capture_queue: int = 256
    reset_removes: bool = False
    recognise: Literal["off", "asked", "always"] = "asked"
    store: StoreConfig = field(default_factory=StoreConfig)

    def __post_init__(self) -> None:
        if self.scratch_tokens is not None:
            at_least("scratch_tokens", self.scratch_tokens, 1, "tokens")
        if isinstance(self.step_share, bool) or not isinstance(self.step_share, (int, float)):
            raise InvalidConfig("step_share", self.step_share, "a number")
        if not 0 < self.step_share <= 100:
            raise InvalidConfig("step_share", self.step_share, "a number above 0, at most 100")
        at_least("capture_queue", self.capture_queue, 0, "chunks")
        one_of("recognise", self.recognise, ("off", "asked", "always"))
        EngineConfig(kernels=self.kernels, sink=self.sink)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ConnectorConfig:
        """Return the settings that plain values from JSON name; ``store.secret`` is hexadecimal there.

        Raises:
            InvalidConfig: an unknown name, or a value that is not allowed.
        """
        found = dict(values)
        store = dict(found.pop("store", {}))
        if isinstance(store.get("secret"), str):
            store["secret"] = _from_hex(store["secret"])
        if store.get("mooncake") is not None:
            store["mooncake"] = _made("store.mooncake", MooncakeConfig, store["mooncake"])
        if store.get("residency") is not None:
            store["residency"] = _residency(store["residency"])
        if isinstance(found.get("sink"), list):
            found["sink"] = tuple(found["sink"])
        return _made("connector", cls, {**found, "store": _made("store", StoreConfig, store)})

    def values(self) -> dict[str, Any]:
        """Return the settings as the plain values that :meth:`of` takes."""
        found = asdict(self)
        store = found["store"]
        store["secret"] = None if self.store.secret is None else self.store.secret.hex()
        store["directory"] = None if self.store.directory is None else str(self.store.directory)
        return found


def _made(name: str, kind: type[_Settings], values: Mapping[str, Any]) -> _Settings:
    known = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    if unknown := [value for value in values if value not in known]:
        raise InvalidConfig(name, ", ".join(map(str, unknown)), f"the settings {', '.join(known)}")
    return kind(**values)


def _residency(values: Mapping[str, Any]) -> ResidencyConfig:
    sources = tuple(_made("store.residency.sources", ResidencySource, source) for source in values.get("sources", ()))
    return _made("store.residency", ResidencyConfig, {**values, "sources": sources})


def _from_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidConfig("store.secret", "…", "hexadecimal digits") from None
