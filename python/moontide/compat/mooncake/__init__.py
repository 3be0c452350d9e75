"""What programs import from ``mooncake.store``, answered by Moontide.

The distribution ``moontide-mooncake-compat`` puts this behind the name ``mooncake``; it can also be imported from here:

>>> from moontide.compat.mooncake import MooncakeDistributedStore, ReplicateConfig

``docs/mooncake.md`` says what is the same and what is not. In reading order: ``codes`` (how failures are numbered),
``config`` (how objects are to be stored), ``buffers`` (which memory may be used by its address), ``replicas`` (where an
object is), ``setup`` (how a store comes to its cluster), ``addresses``, ``tensors`` and ``store`` (the calls),
``commands`` (the programs ``mooncake_master`` and ``mooncake_client``).
"""

from moontide._native import View as BufferHandle

from .buffers import MooncakeHostMemAllocator
from .config import ObjectDataType, ReplicateConfig, SoftPinAction
from .replicas import (
    Descriptor,
    DiskDescriptor,
    LocalDiskDescriptor,
    MemoryDescriptor,
    ReplicaDescriptor,
    ReplicaStatus,
)
from .store import MooncakeDistributedStore

__all__ = [
    "BufferHandle",
    "Descriptor",
    "DiskDescriptor",
    "LocalDiskDescriptor",
    "MemoryDescriptor",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
]
