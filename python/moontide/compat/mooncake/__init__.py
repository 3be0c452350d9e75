"""Implementation of ``mooncake.store`` on Moontide.

The distribution ``moontide-mooncake-compat`` installs it under the name ``mooncake``. It can also be imported from
here:

>>> from moontide.compat.mooncake import MooncakeDistributedStore, ReplicateConfig

``docs/mooncake.md`` describes the differences to Mooncake. In reading order: ``codes`` (error numbers), ``config``
(options of objects), ``buffers`` (memory that may be used by its address), ``replicas`` (locations of an object),
``setup`` (connection to the cluster), ``addresses``, ``tensors`` and ``store`` (the calls), ``commands`` (the programs
``mooncake_master`` and ``mooncake_client``).
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
