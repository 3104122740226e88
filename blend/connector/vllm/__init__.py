"""The connector for vLLM. Nothing of vLLM is imported before it is asked for: vLLM loads the plugin in every process.

Use it by name: ``kv_connector="BlendConnector"``, ``kv_connector_module_path="blend.connector.vllm"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blend.connector.vllm.connector import BlendConnector

__all__ = ["BlendConnector"]


def __getattr__(name: str) -> Any:
    """Import the connector when it is first asked for."""
    if name == "BlendConnector":
        from blend.connector.vllm.connector import BlendConnector

        return BlendConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
