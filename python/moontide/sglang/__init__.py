"""HiCache storage backend for SGLang, of type "dynamic". ``docs/sglang.md`` describes the configuration."""

from .hicache import MoontideHiCache

__all__ = ["MoontideHiCache"]
