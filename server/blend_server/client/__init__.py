"""Clients of ``blend.v1.BlendService``: :class:`Client`, :class:`AsyncClient`, and the command ``blend-client``."""

from __future__ import annotations

from blend_server.client.aio import AsyncClient
from blend_server.client.api import Client
from blend_server.client.command import main
from blend_server.client.credentials import Tls
from blend_server.client.failures import ServiceError
from blend_server.client.messages import AnswerEvent, AnswerOptions, Document
from blend_server.client.retries import Retries

__all__ = [
    "AnswerEvent",
    "AnswerOptions",
    "AsyncClient",
    "Client",
    "Document",
    "Retries",
    "ServiceError",
    "Tls",
    "main",
]
