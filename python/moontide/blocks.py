"""The KV cache of an engine itself: blocks of tokens in this process, sequences that share them, and a way to a store.

``BlockCache`` is what an engine holds; ``SequenceView`` is what it reads, ``Fill`` what it writes, ``Rows`` what both
lend to numpy and torch without a copy. Blocks that were spilled to a store are found by engines of other processes,
also by those that use ``moontide.kv``. (The ``BlockCache`` there is another: for engines that have a cache already.)

>>> import moontide.blocks
>>> cache = moontide.blocks.BlockCache(layers=2, kv_heads=4, dim=64, blocks=128)
>>> seq, shared_tokens = cache.allocate([11, 12, 13])
>>> cache.append(seq, 14)
>>> cache.tokens(seq), cache.filled(seq)
([11, 12, 13, 14], 0)
"""

from __future__ import annotations

from collections.abc import Mapping

from moontide._native import BlockCache, Fill, Held, Parked, Rows, SequenceView
from moontide.errors import NoBlocks, UnknownSequence
from moontide.kv.naming import Namespace

__all__ = [
    "BlockCache",
    "Fill",
    "Held",
    "NoBlocks",
    "Parked",
    "Rows",
    "SequenceView",
    "UnknownSequence",
    "namespace_of",
]


def namespace_of(
    cache: BlockCache, model: str, *, revision: str = "", ranks: str = "1", more: Mapping[str, str] | None = None
) -> Namespace:
    """Under which name the blocks of a cache are stored: only caches of the same shape and type find them.

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
        more=dict(more or {}),
    )
