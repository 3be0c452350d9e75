"""Locations of an object, as ``batch_get_replica_desc`` returns them."""

import enum
from dataclasses import dataclass
from typing import TypeVar

Kind = TypeVar("Kind")


class ReplicaStatus(enum.IntEnum):
    """State of a replica."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


@dataclass(frozen=True)
class Descriptor:
    """A range of a node's memory. Addresses of a node are not known to clients, so ``buffer_address`` is 0."""

    size: int
    transport_endpoint: str
    buffer_address: int = 0


@dataclass(frozen=True)
class MemoryDescriptor:
    """A replica in memory."""

    buffer_descriptor: Descriptor


@dataclass(frozen=True)
class DiskDescriptor:
    """A replica in a shared file system. Moontide has none."""

    file_path: str
    object_size: int


@dataclass(frozen=True)
class LocalDiskDescriptor:
    """A replica on the disk of a node."""

    object_size: int
    transport_endpoint: str


class ReplicaDescriptor:
    """One replica of an object."""

    __slots__ = ("_descriptor", "status")

    def __init__(self, descriptor: MemoryDescriptor | LocalDiskDescriptor, status: ReplicaStatus) -> None:
        self._descriptor, self.status = descriptor, status

    def is_memory_replica(self) -> bool:
        return isinstance(self._descriptor, MemoryDescriptor)

    def is_local_disk_replica(self) -> bool:
        return isinstance(self._descriptor, LocalDiskDescriptor)

    def is_disk_replica(self) -> bool:
        return False

    def is_nof_replica(self) -> bool:
        return False

    def get_memory_descriptor(self) -> MemoryDescriptor:
        return self._as(MemoryDescriptor)

    def get_local_disk_descriptor(self) -> LocalDiskDescriptor:
        return self._as(LocalDiskDescriptor)

    def get_disk_descriptor(self) -> DiskDescriptor:
        return self._as(DiskDescriptor)

    def _as(self, kind: type[Kind]) -> Kind:
        if not isinstance(self._descriptor, kind):
            raise RuntimeError(f"the replica has a {type(self._descriptor).__name__}, not a {kind.__name__}")
        return self._descriptor

    def __repr__(self) -> str:
        return f"ReplicaDescriptor({self._descriptor!r}, {self.status.name})"
