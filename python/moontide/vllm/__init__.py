"""KV connector for vLLM: connector ``MoontideConnector``, module path ``moontide.vllm``.

``docs/vllm.md`` describes the configuration. vLLM is imported only when ``MoontideConnector`` is accessed.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MoontideConnector"]


def __getattr__(name: str) -> Any:
    if name == "MoontideConnector":
        from .connector import MoontideConnector

        return MoontideConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
