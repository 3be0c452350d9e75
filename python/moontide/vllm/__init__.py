"""vLLM keeps its KV cache in the store: connector ``MoontideConnector``, module path ``moontide.vllm``.

``docs/vllm.md`` has the whole configuration. vLLM is imported only when the connector is asked for.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MoontideConnector"]


def __getattr__(name: str) -> Any:
    if name == "MoontideConnector":
        from .connector import MoontideConnector

        return MoontideConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
