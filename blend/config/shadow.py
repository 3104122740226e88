"""Quality, watched while the service answers: a share of requests is also run at full prefill, later."""

from __future__ import annotations

from dataclasses import dataclass

from blend.config.checks import at_least, within
from blend.errors import InvalidConfig


@dataclass(frozen=True)
class ShadowConfig:
    """Which requests are compared with full prefill after their answer, and from what loss on ``auto`` is stopped.

    Args:
        share: of the requests that were blended, from 0 (none) to 1 (all).
        max_kl: most mean KL, in nats, between the first token at full prefill and as it was blended; where it is
            shown to be exceeded, ``auto`` runs full prefill until it is reset. ``None``: nothing is stopped.
        window: the last so many compared requests count.
        least: fewer compared requests than that stop nothing; at most ``window``.
        backlog: most requests that wait for their comparison; further ones go without.
        seed: which requests of a share are compared; the same one chooses the same among the same ids.

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
