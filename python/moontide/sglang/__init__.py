"""SGLang's HiCache on Moontide: a storage backend of the kind "dynamic". How to configure it: ``docs/sglang.md``."""

from .hicache import MoontideHiCache

__all__ = ["MoontideHiCache"]
