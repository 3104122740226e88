"""Quality, watched while the service answers: a share of requests is also run at full prefill, later."""

from __future__ import annotations

from dataclasses import dataclass

from blend.config.checks import at_least, within
from blend.errors import InvalidConfig


@dataclass(frozen=True)
class ShadowConfig:
    """Which requests are compared with full prefill after their answer, and from what loss on ``auto`` is stopped.

    Args:
        share: of the answered requests that had something from the store in them, from 0 (none) to 1 (all).
        max_kl: most mean KL(full ‖ blended) of the first token, in nats, of what ``auto`` blended; where it is higher,
            or a KL is no number, ``auto`` runs full prefill until it is reset. ``None``: nothing is stopped.
        window: the mean is of the last so many compared requests.
        least: fewer of them do not stop ``auto``; at most ``window``.
        backlog: most requests that wait to be compared; further ones go without.
        seed: of the random choice.

    Raises:
        InvalidConfig: a value is not allowed, or not with the others.
    """

    share: float = 0.0
    max_kl: float | None = None
    window: int = 50
    least: int = 10
    backlog: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        within("shadow.share", self.share, 0, 1)
        if self.max_kl is not None:
            within("shadow.max_kl", self.max_kl, 0, 100)
        at_least("shadow.window", self.window, 1, "requests")
        at_least("shadow.least", self.least, 1, "requests")
        if self.least > self.window:
            raise InvalidConfig("shadow.least", self.least, f"at most shadow.window, which is {self.window}")
        at_least("shadow.backlog", self.backlog, 1, "requests")
        at_least("shadow.seed", self.seed, 0, "any number")
