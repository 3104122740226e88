"""Access files for tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from blend_server.tokens import Hash, split


class Accounts:
    """An access file, and the tokens that it lists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Any] = {"tokens": [], "certificates": [], "tenants": {}}

    def token(self, name: str, tenant: str, role: str, **more: Any) -> str:
        """Add a token, of a hash that is quick to check."""
        token = f"blend.{name}.secret-of-{name}"
        parts = split(token)
        assert parts is not None
        made = Hash.of(parts[1], cost=2)
        self.entries["tokens"].append({"id": name, "hash": str(made), "tenant": tenant, "role": role, **more})
        return token

    def write(self) -> Path:
        """Put the file in place at once, as a deployment would."""
        new = self.path.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(yaml.safe_dump(self.entries), encoding="utf-8")
        os.replace(new, self.path)
        return self.path
