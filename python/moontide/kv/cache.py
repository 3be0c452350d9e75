"""``BlockCache``: for engines of one's own. Blocks by hash, saved and loaded where they are."""

from __future__ import annotations

from collections.abc import Sequence

from moontide._native import PutOptions
from moontide.errors import InvalidArgument
from moontide.store import Store

from .naming import Namespace
from .pages import Pages


class BlockCache:
    """The blocks of a model that the cluster has.

    >>> import numpy
    >>> from moontide.kv import BlockCache, Namespace, Pages, Run, block_hashes
    >>> memory = numpy.arange(8 * 1024, dtype="uint8").reshape(8, 1024)  # eight blocks of one layer
    >>> pages = Pages([Run(memory.ctypes.data, 1024, 1024)], blocks=8)
    >>> cache = BlockCache(store, Namespace("tiny", dtype="uint8", block_size=16))
    >>> hashes = block_hashes(range(48), 16)
    >>> cache.save(hashes, pages, [0, 1, 2])
    3
    >>> cache.match(block_hashes(range(64), 16))  # the fourth block was never computed
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
        """How many blocks there are, from the first on without a gap. With ``parts``, all of these must be there."""
        parts = [self._part] if parts is None else parts
        there = self._store.batch_exists(self._namespace.keys(hashes, parts))
        return next((at for at, is_there in enumerate(there) if not is_there), len(there)) // len(parts)

    def save(self, hashes: Sequence[bytes], pages: Pages, blocks: Sequence[int]) -> int:
        """Saves blocks; how many are there now. What is there already is not written again."""
        codes = self._store._put_addresses(*self._batch(hashes, pages, blocks), self._options)
        return sum(code >= 0 for code in codes)

    def load(self, hashes: Sequence[bytes], pages: Pages, blocks: Sequence[int]) -> int:
        """Loads blocks; how many came, from the first on without a gap. The memory of the others may hold anything."""
        codes = self._store._get_addresses(*self._batch(hashes, pages, blocks), exact=True)
        return next((at for at, code in enumerate(codes) if code < 0), len(codes))

    def _batch(
        self, hashes: Sequence[bytes], pages: Pages, blocks: Sequence[int]
    ) -> tuple[list[str], list[list[int]], list[list[int]]]:
        if len(hashes) != len(blocks):
            raise InvalidArgument(f"{len(hashes)} hashes and {len(blocks)} blocks: say one hash for each block")
        keys = self._namespace.keys(hashes, [self._part])
        return keys, pages.addresses(blocks), pages.sizes(len(keys))
