"""The name under which programs look for Mooncake's store, answered by Moontide; see ``moontide.compat.mooncake``."""

from .store import MooncakeDistributedStore, ReplicateConfig

__all__ = ["MooncakeDistributedStore", "ReplicateConfig"]
