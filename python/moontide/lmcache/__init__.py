"""LMCache on Moontide: an L2 of the kind "native_plugin". ``docs/lmcache.md`` says how to configure it."""

from .l2 import MoontideL2

__all__ = ["MoontideL2"]
