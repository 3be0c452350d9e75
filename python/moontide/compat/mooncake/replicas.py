"""Where an object is, as ``batch_get_replica_desc`` tells it."""

import enum
from dataclasses import dataclass
from typing import TypeVar

Kind = TypeVar("Kind")


class ReplicaStatus(enum.IntEnum):
    """How far a replica is."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


@dataclass(frozen=True)
class Descriptor:
    """A range in a node's memory. No address of a node is known to others, so it is 0."""

    size: int
    transport_endpoint: str
    buffer_address: int = 0


@dataclass(frozen=True)
class MemoryDescriptor:
    """A replica in memory."""

    buffer_descriptor: Descriptor


@dataclass(frozen=True)
class DiskDescriptor:
    """A replica in a file system that all share. We have none."""

    file_path: str
    object_size: int


@dataclass(frozen=True)
class LocalDiskDescriptor:
    """A replica on a node's own disk."""

    object_size: int
    transport_endpoint: str


class ReplicaDescriptor:
    """One replica of an object."""

    __slots__ = ("_what", "status")

    def __init__(self, what: MemoryDescriptor | LocalDiskDescriptor, status: ReplicaStatus) -> None:
        self._what, self.status = what, status

    def is_memory_replica(self) -> bool:
        return isinstance(self._what, MemoryDescriptor)

    def is_local_disk_replica(self) -> bool:
        return isinstance(self._what, LocalDiskDescriptor)

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
        if not isinstance(self._what, kind):
            raise RuntimeError(f"this replica has no {kind.__name__}, but a {type(self._what).__name__}")
        return self._what

    def __repr__(self) -> str:
        return f"ReplicaDescriptor({self._what!r}, {self.status.name})"
