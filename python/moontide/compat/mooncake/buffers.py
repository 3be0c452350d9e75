"""Memory that calls may use by its address: registered ranges, and mapped memory of this process.

Moontide needs no registration, because the calling thread copies the bytes. The ranges are checked so that a wrong
address is rejected instead of crashing the process.
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
    """Returns the address of new memory. Raises RuntimeError if there is none, as Mooncake does."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) if size > 0 else _FAILED
    if address is None or address == _FAILED:
        raise RuntimeError(f"cannot map {size} bytes of memory")
    return address


def unmap_memory(address: int, size: int) -> None:
    """Unmaps memory of `map_memory`."""
    _LIBC.munmap(address, size)


def empty_memory(address: int, size: int) -> None:
    """Frees the pages of memory of `map_memory`, but keeps the addresses mapped."""
    _LIBC.madvise(address, size, mmap.MADV_DONTNEED)


@cache
def _probe() -> int:
    """Returns a file to which single bytes are written, to test whether they can be read."""
    return os.memfd_create("moontide-probe", os.MFD_CLOEXEC)


def is_mapped(address: int, size: int) -> bool:
    """Whether a range is mapped and readable in this process.

    Asks the kernel with msync: MS_ASYNC writes nothing, but fails for a range with holes. Address ranges of GPU memory
    are mapped but not readable, so the first and the last byte are read too.
    """
    if not _PAGE <= address < address + size < _ADDRESS_MAX:
        return False
    start = address - address % _PAGE
    if _LIBC.msync(start, address + size - start, _MS_ASYNC) != 0:
        return False
    return all(_LIBC.pwrite(_probe(), byte, 1, 0) == 1 for byte in (address, address + size - 1))


class Buffers:
    """Registered ranges, sorted and without overlap.

    The lists that readers use are replaced as a whole and never modified, so readers need no lock. With a pool, only
    registered ranges and the pool are admitted; without one, all mapped memory. A range that starts in a registered
    range and exceeds its end is always rejected.

    Attributes:
        widest: Start and end of the widest range. A call whose addresses are inside it needs no further check.
    """

    def __init__(self, pool: tuple[int, int] | None = None) -> None:
        self.widest = (0, 0)
        self._pool = pool
        # Starts, and ends shifted by one: `ends[n]` is the end of the range that contains an address with n starts at
        # or below it.
        self._sorted: tuple[list[int], list[int]] = ([], [0])
        self._lock = threading.Lock()

    def register(self, address: int, size: int) -> int:
        """Returns 0, or an error if the range is not mapped or overlaps a registered one."""
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
        """Returns 0, or `unknown` if no registered range starts there."""
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
        """Whether calls may use a range."""
        if address < 0 or size < 0:
            raise TypeError("addresses and sizes must not be negative")
        starts, ends = self._sorted
        end = address + size
        at = bisect_right(starts, address)
        if size == 0 or end <= ends[at]:
            return True
        if address < ends[at]:
            # The range exceeds the end of a registered one: valid only if adjacent registered ranges cover the rest.
            while at < len(starts) and starts[at] == ends[at] and end > ends[at]:
                at += 1
            return end <= ends[at]
        if self._pool is not None:
            return self._pool[0] <= address and end <= self._pool[1]
        return is_mapped(address, size)

    def admits_all(self, addresses: Sequence[int], sizes: Sequence[int]) -> bool:
        """As `admits`, for several ranges. Registered ranges are checked without a Python loop."""
        starts, ends = self._sorted
        bounds = map(ends.__getitem__, map(bisect_right, repeat(starts), addresses))
        if all(map(le, map(add, addresses, sizes), bounds)) and min(sizes) >= 0:
            return True
        return all(map(self.admits, addresses, sizes))


class Pool:
    """Memory for `alloc_from_mem_pool`, a bump allocator. Allocations are freed only by `close`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = map_memory(size) if size else 0
        self._used = 0
        self._lock = threading.Lock()

    def alloc(self, size: int) -> int:
        """Returns the address of page-aligned memory, or 0."""
        pages = -(-size // _PAGE) * _PAGE
        with self._lock:
            if size <= 0 or self._used + pages > self.size:
                return 0
            address = self.address + self._used
            self._used += pages
        return address

    def close(self) -> None:
        """Frees the memory. The addresses stay mapped: a call of another thread may use them."""
        if self.address:
            empty_memory(self.address, self.size)
        self.address = self.size = self._used = 0


class MooncakeHostMemAllocator:
    """Allocator of host memory for the engine's tensors."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    def alloc(self, size: int) -> int:
        """Returns the address of new memory. Raises RuntimeError if there is none."""
        address = map_memory(size)
        self._sizes[address] = size
        return address

    def free(self, address: int) -> int:
        """Returns 0, or -1 if the address was not allocated here."""
        size = self._sizes.pop(address, 0)
        if not size:
            return -1
        unmap_memory(address, size)
        return 0
