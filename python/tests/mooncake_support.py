"""What the tests of ``moontide.compat.mooncake`` share: stores that are set up, and memory by its address."""

import ctypes
import mmap
import socket

from moontide.compat.mooncake import MooncakeDistributedStore

MIB = 1 << 20


def set_up(master: str, segment_bytes: int = 0, **named) -> MooncakeDistributedStore:
    """A store of the cluster."""
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, MIB, "tcp", "", master, **named)
    assert code == 0, code
    return store


def unused_port() -> int:
    """A port of this host at which nobody listens."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


class Block:
    """Memory by its address."""

    def __init__(self, size: int = MIB) -> None:
        self.size = size
        self._map = mmap.mmap(-1, size)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def fill(self, start: int, content: bytes) -> int:
        """Writes bytes, and gives their address."""
        self.view[start : start + len(content)] = content
        return self.address + start

    def read(self, start: int, size: int) -> bytes:
        """The bytes there."""
        return bytes(self.view[start : start + size])
