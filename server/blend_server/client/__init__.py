"""A client of ``blend.v1.BlendService``: the class :class:`Client` and the command ``blend-client``."""

from __future__ import annotations

from blend_server.client.api import Client, Document, ServiceError
from blend_server.client.command import main
from blend_server.client.credentials import Tls

__all__ = ["Client", "Document", "ServiceError", "Tls", "main"]
