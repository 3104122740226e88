"""``blend-router``: one address for several servers of one model, which all hold the same documents.

It speaks ``blend.v1.BlendService`` on both sides. Documents go to every engine, questions to the one whose own tiers
hold most of what they need; ``docs/deployment.md`` says what it promises.
"""

from __future__ import annotations

from blend_server.router.config import EngineAddress, RouterConfig

__all__ = ["EngineAddress", "RouterConfig"]
