"""Helpers of the tests of ``moontide.compat.mooncake``: stores after setup, and memory with an address."""

import ctypes
import mmap
import socket

from moontide.compat.mooncake import MooncakeDistributedStore

MIB = 1 << 20


def set_up(master: str, segment_bytes: int = 0, **named) -> MooncakeDistributedStore:
    """Returns a store of the cluster, after setup."""
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, MIB, "tcp", "", master, **named)
    assert code == 0, code
    return store


def unused_port() -> int:
    """Returns a free port of this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Block:
    """Memory with an address."""

    def __init__(self, size: int = MIB) -> None:
        self.size = size
        self._map = mmap.mmap(-1, size)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def fill(self, start: int, content: bytes) -> int:
        """Writes bytes and returns their address."""
        self.view[start : start + len(content)] = content
        return self.address + start

    def read(self, start: int, size: int) -> bytes:
        """Reads bytes."""
        return bytes(self.view[start : start + size])
