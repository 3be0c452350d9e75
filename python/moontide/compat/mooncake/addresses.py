"""The calls by address, which are those that engines use.

Each is a look at the addresses and one call of the store below, which moves the bytes with Python's lock released. Only
what goes wrong takes longer: there the good part of a batch is done, and the rest gets a number.
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

_KEY_BYTES_MAX = 4096
# How the store below says that an object is shorter than the memory it was to fill: out of bounds.
NOT_FILLED = -306


def is_key(key: str | bytes) -> bool:
    """Whether an object can have this key."""
    return 0 < len(key.encode() if isinstance(key, str) else key) <= _KEY_BYTES_MAX


def filtered(good: list[bool], several: Sequence[Any]) -> list[Any]:
    """Those that are good."""
    return [one for one, fine in zip(several, good, strict=True) if fine]


def only(
    good: list[bool], call: Callable[..., list[int]], *lists: Sequence[Any], bad: int = BAD_ARGUMENT, **named: Any
) -> list[int]:
    """Calls with those that are good; `bad` for the others."""
    rest = iter(call(*(filtered(good, several) for several in lists), **named) if any(good) else ())
    return [next(rest) if fine else bad for fine in good]


def read_number(key: str, number: int) -> int:
    """The number for a read that failed: nothing is stored under a key that cannot be."""
    return NOT_FOUND if number == -2 and not is_key(key) else READ.get(number, INTERNAL)


class Addresses:
    """The part of the store that is told where bytes are by their addresses."""

    _store: Store | None
    _buffers: Buffers
    _get: Callable[..., list[int]]
    _put: Callable[..., list[int]]

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Bytes read, or a negative number."""
        low, high = self._buffers.widest
        if (buffer_ptr < low or buffer_ptr + size > high) and not self._buffers.admits(buffer_ptr, size):
            return BAD_ARGUMENT
        try:
            length = self._get((key,), (buffer_ptr,), (size,))[0]
        except Exception as error:
            return self._look_failed(key, error)
        return length if length >= 0 else read_number(key, length)

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """For each key, bytes read or a negative number."""
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
        """The same, each object into several places. They must be filled: a shorter object is a failure."""
        call = self.batch_get_into_multi_buffers
        good = self._look_at_parts(keys, all_buffer_ptrs, all_sizes)
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
        """0, or a negative number. What is there stays; an object without bytes is not stored."""
        return self._put_one(key, buffer_ptr, size, config, False)

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """The same, in place of what is there."""
        return self._put_one(key, buffer_ptr, size, config, True)

    def _put_one(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None, overwrite: bool) -> int:
        low, high = self._buffers.widest
        if (buffer_ptr < low or buffer_ptr + size > high) and not self._buffers.admits(buffer_ptr, size):
            return BAD_ARGUMENT
        if not size:
            return 0 if self._store is not None else BAD_ARGUMENT
        try:
            how = None if config is None and not overwrite else options(config, 1, overwrite)
            code = self._put((key,), (buffer_ptr,), (size,), how)[0]
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
        """For each key, 0 or a negative number."""
        return self._put_many(keys, buffer_ptrs, sizes, config, False)

    def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """The same, in place of what is there."""
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
            how = options(config, count, overwrite)
        except ValueError as error:
            return [code_of(error)] * count
        return self._put_with(keys, buffer_ptrs, sizes, how)

    def _put_with(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], how: PutOptions | None
    ) -> list[int]:
        if not self._admits(buffer_ptrs, sizes) or 0 in sizes:
            admits = self._buffers.admits
            good = [bool(size) and admits(ptr, size) for ptr, size in zip(buffer_ptrs, sizes, strict=True)]
            return only(good, self._put_with, keys, buffer_ptrs, sizes, how=how)
        try:
            codes = self._put(keys, buffer_ptrs, sizes, how)
        except Exception as error:
            call = self._put_with
            return self._batch_failed(error, call, BAD_ARGUMENT, WRITE, keys, buffer_ptrs, sizes, how=how)
        return codes if not any(codes) else [WRITE.get(code, INTERNAL) if code else 0 for code in codes]

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """The same, each object from several places."""
        try:
            how = options(config, len(keys))
        except ValueError as error:
            return [code_of(error)] * len(keys)
        return self._put_parts_with(keys, all_buffer_ptrs, all_sizes, how)

    def _put_parts_with(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        how: PutOptions | None,
    ) -> list[int]:
        call = self._put_parts_with
        good = self._look_at_parts(keys, all_buffer_ptrs, all_sizes)
        if good is None and not all(map(any, all_sizes)):
            good = list(map(any, all_sizes))
        if good is not None:
            return only(good, call, keys, all_buffer_ptrs, all_sizes, how=how)
        try:
            codes = self._put(keys, all_buffer_ptrs, all_sizes, how)
        except Exception as error:
            return self._batch_failed(error, call, BAD_ARGUMENT, WRITE, keys, all_buffer_ptrs, all_sizes, how=how)
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
        """An object of two parts, the metadata first."""
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
        """Ranges of objects, by buffer and key: bytes read or a negative number for each range."""
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
            return [self._look_failed(key, error)] * len(sizes)
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

    def _look_at_parts(
        self, keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]], all_sizes: Sequence[Sequence[int]]
    ) -> list[bool] | None:
        """None if all is well; otherwise which objects are good."""
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

    def _look_failed(self, key: str, error: Exception) -> int:
        """A number for a failed read of one key: nothing is stored under a key that cannot be."""
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
        """Numbers for a batch that failed as a whole: if because of some keys, the others are tried without them."""
        good = list(map(is_key, keys)) if isinstance(error, Error) else []
        if good and not all(good):
            return only(good, call, keys, *lists, bad=bad_key, **named)
        return [code_of(error, codes)] * len(keys)
