"""The package ``mooncake``, implemented by Moontide; see ``moontide.compat.mooncake``."""

from .store import MooncakeDistributedStore, ReplicateConfig

__all__ = ["MooncakeDistributedStore", "ReplicateConfig"]
