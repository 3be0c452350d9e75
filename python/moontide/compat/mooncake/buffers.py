"""Which memory may be used by its address: what was registered, and what this process has mapped.

Nothing has to be registered for us, because the calling thread moves the bytes. The ranges are kept so that an address
which a program has got wrong is refused and does not end the process.
"""

import ctypes
import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import repeat
from operator import add, le

from .codes import BAD_ARGUMENT

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.pwrite.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long)
_LIBC.pwrite.restype = ctypes.c_ssize_t
_MS_ASYNC = 1
_PAGE = mmap.PAGESIZE
_ADDRESS_MAX = 1 << 63
_FAILED = ctypes.c_void_p(-1).value


def map_memory(size: int) -> int:
    """The address of fresh memory. Raises RuntimeError if there is none, as Mooncake does."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) if size > 0 else _FAILED
    if address is None or address == _FAILED:
        raise RuntimeError(f"{size} bytes of memory could not be mapped")
    return address


def unmap_memory(address: int, size: int) -> None:
    """Gives back what `map_memory` gave."""
    _LIBC.munmap(address, size)


def empty_memory(address: int, size: int) -> None:
    """Gives back the pages of what `map_memory` gave, but not the addresses."""
    _LIBC.madvise(address, size, mmap.MADV_DONTNEED)


@cache
def _probe() -> int:
    """A file into which single bytes are written, to learn whether they can be read."""
    return os.memfd_create("moontide-probe", os.MFD_CLOEXEC)


def is_mapped(address: int, size: int) -> bool:
    """Whether this process has memory there that it can read.

    Asks the kernel: it has nothing to write back for MS_ASYNC, but refuses a range with holes. Addresses of a GPU's
    memory are kept free of anything else by ranges that nobody can read, so the first and the last byte are tried.
    """
    if not _PAGE <= address < address + size < _ADDRESS_MAX:
        return False
    start = address - address % _PAGE
    if _LIBC.msync(start, address + size - start, _MS_ASYNC) != 0:
        return False
    return all(_LIBC.pwrite(_probe(), byte, 1, 0) == 1 for byte in (address, address + size - 1))


class Buffers:
    """Registered ranges, sorted; they do not overlap.

    What readers look at is replaced as a whole and never changed, so that they need no lock. With a pool, only what is
    registered or lies in the pool is admitted; without one, whatever is mapped. What begins in a range and is longer is
    refused in any case.

    Attributes:
        widest: Start and end of the widest range. A call whose addresses lie in it needs no look at the others.
    """

    def __init__(self, pool: tuple[int, int] | None = None) -> None:
        self.widest = (0, 0)
        self._pool = pool
        # Starts, and for each number of starts that are not above an address, the end of the range that may hold it.
        self._sorted: tuple[list[int], list[int]] = ([], [0])
        self._lock = threading.Lock()

    def register(self, address: int, size: int) -> int:
        """0, or a refusal: no memory, or some that is registered."""
        if not is_mapped(address, size):
            return BAD_ARGUMENT
        with self._lock:
            starts, ends = self._sorted
            at = bisect_right(starts, address)
            if ends[at] > address or (at < len(starts) and starts[at] < address + size):
                return BAD_ARGUMENT
            self._replace([*starts[:at], address, *starts[at:]], [*ends[: at + 1], address + size, *ends[at + 1 :]])
        return 0

    def unregister(self, address: int, unknown: int) -> int:
        """0, or `unknown` if nothing was registered that begins there."""
        with self._lock:
            starts, ends = self._sorted
            at = bisect_right(starts, address)
            if at == 0 or starts[at - 1] != address:
                return unknown
            self._replace([*starts[: at - 1], *starts[at:]], [*ends[:at], *ends[at + 1 :]])
        return 0

    def _replace(self, starts: list[int], ends: list[int]) -> None:
        ranges = zip(starts, ends[1:], strict=True)
        self.widest = max(ranges, key=lambda one: one[1] - one[0], default=(0, 0))
        self._sorted = (starts, ends)

    def admits(self, address: int, size: int) -> bool:
        """Whether bytes may be moved there."""
        if address < 0 or size < 0:
            raise TypeError("addresses and sizes are not negative")
        starts, ends = self._sorted
        end = address + size
        at = bisect_right(starts, address)
        if size == 0 or end <= ends[at]:
            return True
        if address < ends[at]:
            # It runs over the end of what was registered, which only the next range can make good.
            while at < len(starts) and starts[at] == ends[at] and end > ends[at]:
                at += 1
            return end <= ends[at]
        if self._pool is not None:
            return self._pool[0] <= address and end <= self._pool[1]
        return is_mapped(address, size)

    def admits_all(self, addresses: Sequence[int], sizes: Sequence[int]) -> bool:
        """The same for several. Those that are registered cost no step of Python each."""
        starts, ends = self._sorted
        bounds = map(ends.__getitem__, map(bisect_right, repeat(starts), addresses))
        if all(map(le, map(add, addresses, sizes), bounds)) and min(sizes) >= 0:
            return True
        return all(map(self.admits, addresses, sizes))


class Pool:
    """Memory that `alloc_from_mem_pool` hands out, piece after piece. Nothing is given back before the end."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = map_memory(size) if size else 0
        self._used = 0
        self._lock = threading.Lock()

    def alloc(self, size: int) -> int:
        """An address on a page of its own, or 0."""
        pages = -(-size // _PAGE) * _PAGE
        with self._lock:
            if size <= 0 or self._used + pages > self.size:
                return 0
            address = self.address + self._used
            self._used += pages
        return address

    def close(self) -> None:
        """Gives the memory back. The addresses stay: a call of another thread may be using them."""
        if self.address:
            empty_memory(self.address, self.size)
        self.address = self.size = self._used = 0


class MooncakeHostMemAllocator:
    """Memory for an engine's own tensors, by address."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    def alloc(self, size: int) -> int:
        """The address of fresh memory; RuntimeError if there is none."""
        address = map_memory(size)
        self._sizes[address] = size
        return address

    def free(self, address: int) -> int:
        """0, or -1 for what was not allocated here."""
        size = self._sizes.pop(address, 0)
        if not size:
            return -1
        unmap_memory(address, size)
        return 0
