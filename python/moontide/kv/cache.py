"""``StoreBlockCache``: saves and loads blocks by hash, without copies, for custom inference engines."""

from __future__ import annotations

from collections.abc import Sequence

from moontide._native import PutOptions
from moontide.errors import BatchError, Error, InvalidArgument
from moontide.store import Store

from .naming import Namespace
from .pages import BlockPages


class StoreBlockCache:
    """The blocks of a model in the store.

    >>> import numpy
    >>> from moontide.kv import BlockPages, LayerRun, Namespace, StoreBlockCache, block_hashes
    >>> memory = numpy.arange(8 * 1024, dtype="uint8").reshape(8, 1024)  # eight blocks of one layer
    >>> pages = BlockPages([LayerRun(memory.ctypes.data, 1024, 1024)], blocks=8)
    >>> cache = StoreBlockCache(store, Namespace("tiny", dtype="uint8", block_size=16))
    >>> hashes = block_hashes(range(48), 16)
    >>> cache.save(hashes, pages, [0, 1, 2])
    3
    >>> cache.match(block_hashes(range(64), 16))  # the fourth block was never saved
    3
    >>> cache.load(hashes, pages, [5, 6, 7])
    3
    >>> bool((memory[5:8] == memory[0:3]).all())
    True
    """

    def __init__(
        self, store: Store, namespace: Namespace, part: str = "0", options: PutOptions | None = None
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._part = part
        self._options = options

    def match(self, hashes: Sequence[bytes], parts: Sequence[str] | None = None) -> int:
        """Returns the number of stored blocks, from the first one up to the first gap. With ``parts``, a block counts
        only if all of these parts are stored. A block whose master does not respond is a gap; if it is the first one,
        the call fails."""
        parts = [self._part] if parts is None else parts
        try:
            exists: list[object] = list(self._store.batch_exists(self._namespace.keys(hashes, parts)))
        except BatchError as error:
            exists = error.outcomes
        stored = next((at for at, found in enumerate(exists) if found is not True), len(exists)) // len(parts)
        first = next((found for found in exists[: len(parts)] if found is not True), None)
        if isinstance(first, Error):
            raise first
        return stored

    def save(self, hashes: Sequence[bytes], pages: BlockPages, blocks: Sequence[int]) -> int:
        """Saves blocks. Returns how many of them are stored now. Does not write existing objects again."""
        codes = self._store._put_addresses(*self._batch(hashes, pages, blocks), self._options)
        return sum(code >= 0 for code in codes)

    def load(self, hashes: Sequence[bytes], pages: BlockPages, blocks: Sequence[int]) -> int:
        """Loads blocks. Returns how many were loaded, from the first one up to the first gap. The memory of the other
        blocks is undefined."""
        codes = self._store._get_addresses(*self._batch(hashes, pages, blocks), exact=True)
        return next((at for at, code in enumerate(codes) if code < 0), len(codes))

    def _batch(
        self, hashes: Sequence[bytes], pages: BlockPages, blocks: Sequence[int]
    ) -> tuple[list[str], list[list[int]], list[list[int]]]:
        if len(hashes) != len(blocks):
            raise InvalidArgument(f"{len(hashes)} hashes and {len(blocks)} blocks: pass one hash for each block")
        keys = self._namespace.keys(hashes, [self._part])
        return keys, pages.addresses(blocks), pages.sizes(len(keys))
