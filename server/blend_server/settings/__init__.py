"""The settings of the command ``blend-server``: from flags, the environment, a file and the defaults, in this order.

A setting goes by its place below :class:`~blend.config.ServerConfig`, such as ``engine.store.host_bytes``. That is its
key in the file; :mod:`~blend_server.settings.table` gives it a flag, and by it a variable.
"""

from __future__ import annotations

from blend_server.settings.command import parser
from blend_server.settings.errors import Refused
from blend_server.settings.reading import Settings, read
from blend_server.settings.showing import shown

__all__ = ["Refused", "Settings", "parser", "read", "shown"]
