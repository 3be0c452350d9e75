"""Calls by address, which inference engines use.

Each call checks the addresses and makes one call of the store, which copies the bytes with the GIL released. Only
failures take longer: the valid part of a batch is processed, and the rest gets an error number.
"""

import ctypes
from collections.abc import Callable, Sequence
from itertools import chain
from operator import add
from typing import Any

from moontide._native import PutOptions
from moontide.errors import Error
from moontide.store import Store

from .buffers import Buffers
from .codes import BAD_ARGUMENT, CORRUPT, INTERNAL, NOT_FOUND, READ, TRANSFER_FAILED, WRITE, code_of
from .config import ReplicateConfig, options
from .places import Places

_KEY_BYTES_MAX = 4096
# Error of the store for an object that is shorter than its memory: OutOfBounds.
NOT_FILLED = -306


def is_key(key: str | bytes) -> bool:
    """Whether a key is valid."""
    return 0 < len(key.encode() if isinstance(key, str) else key) <= _KEY_BYTES_MAX


def filtered(good: list[bool], several: Sequence[Any]) -> list[Any]:
    """Returns the items whose flag in ``good`` is true."""
    return [one for one, fine in zip(several, good, strict=True) if fine]


def only(
    good: list[bool], call: Callable[..., list[int]], *lists: Sequence[Any], bad: int = BAD_ARGUMENT, **named: Any
) -> list[int]:
    """Calls ``call`` with the good items. The result has ``bad`` for the others."""
    rest = iter(call(*(filtered(good, several) for several in lists), **named) if any(good) else ())
    return [next(rest) if fine else bad for fine in good]


def read_number(key: str, number: int) -> int:
    """Returns the number for a failed read. An invalid key counts as not found."""
    return NOT_FOUND if number == -2 and not is_key(key) else READ.get(number, INTERNAL)


class Addresses:
    """Calls of the store that take addresses."""

    _store: Store | None
    _buffers: Buffers
    _places: Places
    _get: Callable[..., list[int]]
    _put: Callable[..., list[int]]

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Returns the number of bytes read, or a negative number."""
        low, high = self._buffers.widest
        if (buffer_ptr < low or buffer_ptr + size > high) and not self._buffers.admits(buffer_ptr, size):
            return BAD_ARGUMENT
        try:
            length = self._get((key,), (buffer_ptr,), (size,))[0]
        except Exception as error:
            return self._lookup_failed(key, error)
        return length if length >= 0 else read_number(key, length)

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Returns for each key the number of bytes read, or a negative number."""
        count = len(keys)
        if not count or count != len(buffer_ptrs) or count != len(sizes):
            return [BAD_ARGUMENT] * count
        if not self._admits(buffer_ptrs, sizes):
            good = list(map(self._buffers.admits, buffer_ptrs, sizes))
            return only(good, self.batch_get_into, keys, buffer_ptrs, sizes)
        try:
            lengths = self._get(keys, buffer_ptrs, sizes)
        except Exception as error:
            return self._batch_failed(error, self.batch_get_into, NOT_FOUND, READ, keys, buffer_ptrs, sizes)
        if min(lengths) >= 0:
            return lengths
        return [n if n >= 0 else read_number(key, n) for key, n in zip(keys, lengths, strict=True)]

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """As `batch_get_into`, each object into several buffers. An object that does not fill them is a failure."""
        call = self.batch_get_into_multi_buffers
        good = self._check_parts(keys, all_buffer_ptrs, all_sizes)
        if good is not None:
            return only(good, call, keys, all_buffer_ptrs, all_sizes)
        try:
            lengths = self._get(keys, all_buffer_ptrs, all_sizes, True)
        except Exception as error:
            return self._batch_failed(error, call, NOT_FOUND, READ, keys, all_buffer_ptrs, all_sizes)
        if min(lengths) >= 0:
            return lengths
        return [
            n if n >= 0 else TRANSFER_FAILED if n == NOT_FILLED else read_number(key, n)
            for key, n in zip(keys, lengths, strict=True)
        ]

    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """Returns 0, or a negative number. Does not replace an existing object. Does not store an empty object."""
        return self._put_one(key, buffer_ptr, size, config, False)

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """As `put_from`, but replaces an existing object."""
        return self._put_one(key, buffer_ptr, size, config, True)

    def _put_one(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None, overwrite: bool) -> int:
        low, high = self._buffers.widest
        if (buffer_ptr < low or buffer_ptr + size > high) and not self._buffers.admits(buffer_ptr, size):
            return BAD_ARGUMENT
        if not size:
            return 0 if self._store is not None else BAD_ARGUMENT
        try:
            opts = None if config is None and not overwrite else options(config, 1, self._places, overwrite)
            code = self._put((key,), (buffer_ptr,), (size,), opts)[0]
        except Exception as error:
            return code_of(error, WRITE)
        return code if code == 0 else WRITE.get(code, INTERNAL)

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Returns for each key 0, or a negative number."""
        return self._put_many(keys, buffer_ptrs, sizes, config, False)

    def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """As `batch_put_from`, but replaces existing objects."""
        return self._put_many(keys, buffer_ptrs, sizes, config, True)

    def _put_many(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None,
        overwrite: bool,
    ) -> list[int]:
        count = len(keys)
        if not count or count != len(buffer_ptrs) or count != len(sizes):
            return [BAD_ARGUMENT] * count
        try:
            opts = options(config, count, self._places, overwrite)
        except ValueError as error:
            return [code_of(error)] * count
        return self._put_with(keys, buffer_ptrs, sizes, opts)

    def _put_with(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], opts: PutOptions | None
    ) -> list[int]:
        if not self._admits(buffer_ptrs, sizes) or 0 in sizes:
            admits = self._buffers.admits
            good = [bool(size) and admits(ptr, size) for ptr, size in zip(buffer_ptrs, sizes, strict=True)]
            return only(good, self._put_with, keys, buffer_ptrs, sizes, opts=opts)
        try:
            codes = self._put(keys, buffer_ptrs, sizes, opts)
        except Exception as error:
            call = self._put_with
            return self._batch_failed(error, call, BAD_ARGUMENT, WRITE, keys, buffer_ptrs, sizes, opts=opts)
        return codes if not any(codes) else [WRITE.get(code, INTERNAL) if code else 0 for code in codes]

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """As `batch_put_from`, each object from several buffers."""
        try:
            opts = options(config, len(keys), self._places)
        except ValueError as error:
            return [code_of(error)] * len(keys)
        return self._put_parts_with(keys, all_buffer_ptrs, all_sizes, opts)

    def _put_parts_with(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        opts: PutOptions | None,
    ) -> list[int]:
        call = self._put_parts_with
        good = self._check_parts(keys, all_buffer_ptrs, all_sizes)
        if good is None and not all(map(any, all_sizes)):
            good = list(map(any, all_sizes))
        if good is not None:
            return only(good, call, keys, all_buffer_ptrs, all_sizes, opts=opts)
        try:
            codes = self._put(keys, all_buffer_ptrs, all_sizes, opts)
        except Exception as error:
            return self._batch_failed(error, call, BAD_ARGUMENT, WRITE, keys, all_buffer_ptrs, all_sizes, opts=opts)
        return codes if not any(codes) else [WRITE.get(code, INTERNAL) if code else 0 for code in codes]

    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: ReplicateConfig | None = None,
    ) -> int:
        """Stores an object of two parts, the metadata first."""
        parts, sizes = [metadata_buffer_ptr, buffer_ptr], [metadata_size, size]
        return self.batch_put_from_multi_buffers([key], [parts], [sizes], config)[0]

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[list[int]]]:
        """Reads ranges of objects, by buffer and key. Returns for each range the number of bytes read, or a negative
        number."""
        if not len(buffer_ptrs) == len(all_keys) == len(all_dst_offsets) == len(all_src_offsets) == len(all_sizes):
            return [[] for _ in buffer_ptrs]
        each = zip(buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes, strict=True)
        return [
            [self._get_ranges(key, at, *ranges) for key, *ranges in zip(keys, *of_buffer, strict=True)]
            if all(len(ranges) == len(keys) for ranges in of_buffer)
            else [[BAD_ARGUMENT] for _ in keys]
            for at, keys, *of_buffer in each
        ]

    def _get_ranges(
        self, key: str, at: int, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        if not len(targets) == len(sources) == len(sizes):
            return [BAD_ARGUMENT] * max(len(targets), len(sources), len(sizes))
        try:
            if self._store is None:
                return [BAD_ARGUMENT] * len(sizes)
            view = self._store.get_view(key)
        except Exception as error:
            return [self._lookup_failed(key, error)] * len(sizes)
        if view is None:
            return [NOT_FOUND] * len(sizes)
        if not view.verify():
            return [CORRUPT] * len(sizes)
        numbers = []
        for target, source, size in zip(targets, sources, sizes, strict=True):
            good = source >= 0 and source + size <= len(view) and self._buffers.admits(at + target, size)
            if good:
                ctypes.memmove(at + target, view.ptr() + source, size)
            numbers.append(size if good else BAD_ARGUMENT)
        return numbers

    def _admits(self, buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> bool:
        low, high = self._buffers.widest
        if min(buffer_ptrs) >= low and max(map(add, buffer_ptrs, sizes)) <= high:
            return True
        return self._buffers.admits_all(buffer_ptrs, sizes)

    def _check_parts(
        self, keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]], all_sizes: Sequence[Sequence[int]]
    ) -> list[bool] | None:
        """Returns None if all objects are valid, otherwise which of them are."""
        count = len(keys)
        if not count or count != len(all_buffer_ptrs) or count != len(all_sizes):
            return [False] * count
        if list(map(len, all_buffer_ptrs)) == list(map(len, all_sizes)) and min(map(len, all_sizes)) > 0:
            addresses, sizes = list(chain.from_iterable(all_buffer_ptrs)), list(chain.from_iterable(all_sizes))
            if self._admits(addresses, sizes):
                return None
        good = [
            len(ptrs) == len(sizes) > 0 and self._buffers.admits_all(ptrs, sizes)
            for ptrs, sizes in zip(all_buffer_ptrs, all_sizes, strict=True)
        ]
        return None if all(good) else good

    def _lookup_failed(self, key: str, error: Exception) -> int:
        """Returns the number for a failed read of one key. An invalid key counts as not found."""
        code = code_of(error)
        return NOT_FOUND if code == BAD_ARGUMENT and self._store is not None and not is_key(key) else code

    def _batch_failed(
        self,
        error: Exception,
        call: Callable[..., list[int]],
        bad_key: int,
        codes: dict[int, int],
        keys: Sequence[str],
        *lists: Sequence[Any],
        **named: Any,
    ) -> list[int]:
        """Returns the numbers for a batch that failed as a whole. If some keys are invalid, retries without them."""
        good = list(map(is_key, keys)) if isinstance(error, Error) else []
        if good and not all(good):
            return only(good, call, keys, *lists, bad=bad_key, **named)
        return [code_of(error, codes)] * len(keys)
