"""L2 plugin for LMCache, of type "native_plugin". ``docs/lmcache.md`` describes the configuration."""

from .l2 import MoontideL2

__all__ = ["MoontideL2"]
