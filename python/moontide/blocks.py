"""Paged KV cache of an inference engine: blocks of tokens in this process, sequences that share blocks, and methods
that save blocks to a store and restore them.

``BlockCache`` is the cache, ``SequenceView`` reads a sequence, ``SequenceWriter`` writes it, and ``Rows`` exports the
memory of both to numpy and torch without a copy. Engines in other processes find blocks that were spilled to a store,
also engines that use ``moontide.kv``. (``moontide.kv.StoreBlockCache`` is for engines that have their own cache.)

>>> import moontide.blocks
>>> cache = moontide.blocks.BlockCache(layers=2, kv_heads=4, dim=64, blocks=128)
>>> seq, cached_tokens = cache.allocate([11, 12, 13])
>>> cache.append(seq, 14)
>>> cache.tokens(seq), cache.computed_tokens(seq)
([11, 12, 13, 14], 0)
"""

from __future__ import annotations

from collections.abc import Mapping

from moontide._native import BlockCache, PinnedBlocks, Rows, SequenceView, SequenceWriter, SuspendedSequence
from moontide.errors import OutOfBlocks, UnknownSequence
from moontide.kv.naming import Namespace

__all__ = [
    "BlockCache",
    "OutOfBlocks",
    "PinnedBlocks",
    "Rows",
    "SequenceView",
    "SequenceWriter",
    "SuspendedSequence",
    "UnknownSequence",
    "namespace_of",
]


def namespace_of(
    cache: BlockCache, model: str, *, revision: str = "", ranks: str = "1", extra: Mapping[str, str] | None = None
) -> Namespace:
    """Returns the namespace for the blocks of a cache. Only caches of the same shape and type share it.

    >>> from moontide.blocks import BlockCache, namespace_of
    >>> cache = BlockCache(layers=2, kv_heads=4, dim=64, blocks=128)
    >>> namespace_of(cache, "org/model").layout
    '2 layers, 4 heads of 64, 16 tokens, Bf16, TokenMajor'
    """
    return Namespace(
        model,
        revision=revision,
        dtype=cache.dtype,
        block_size=cache.block_tokens,
        layout=cache.layout,
        ranks=ranks,
        more=dict(extra or {}),
    )
