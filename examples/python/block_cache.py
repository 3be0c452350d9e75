"""A paged KV cache: two sequences share the blocks of a prefix, and a second cache restores them from the store.

    python block_cache.py           # needs the package `moontide` and numpy

``moontide.blocks`` is for inference engines without a cache of their own. decode.py beside this file is a whole engine.
Constant rows stand in for the keys and values that a model computes.
"""

import numpy as np

import moontide
from moontide.blocks import BlockCache, namespace_of

LAYERS, HEADS, DIM, BLOCK_TOKENS = 2, 2, 8, 4
PROMPT = list(range(10))


def new_cache() -> BlockCache:
    return BlockCache(layers=LAYERS, kv_heads=HEADS, dim=DIM, block_tokens=BLOCK_TOKENS, dtype="float32", blocks=64)


def compute(cache: BlockCache, sequence: int) -> int:
    """Writes the rows of all tokens that have none. Returns their number."""
    with cache.writer(sequence) as writer:
        rows = np.empty((len(writer.tokens), HEADS, DIM), "float32")
        rows[:] = np.array(writer.tokens)[:, None, None]  # each row has the position of its token
        for layer in range(LAYERS):
            writer.write("k", layer, rows)
            writer.write("v", layer, -rows)
        writer.mark_written(len(rows))
    # The end of the `with` block commits: readers see the rows, and other sequences share the full blocks.
    return len(rows)


def main() -> None:
    cache = new_cache()
    first, cached_tokens = cache.allocate(PROMPT)
    assert cached_tokens == 0
    assert compute(cache, first) == 10

    # The same prompt again: its two full blocks are shared. Only the tokens of the last one are computed.
    second, cached_tokens = cache.allocate(PROMPT)
    assert cached_tokens == 8
    assert compute(cache, second) == 2

    # A view is a snapshot without a copy, one array per block.
    with cache.view(second) as view:
        keys = np.concatenate([rows.numpy() for rows in view.rows("k", 0)])
    assert keys[:, 0, 0].tolist() == PROMPT

    with moontide.dev(64 << 20) as cluster, cluster.store() as store:
        # The namespace contains what the bytes depend on: model, revision, shape and type.
        namespace = namespace_of(cache, "org/model", revision="1")
        cache.spill(first, store, namespace)

        # Another engine, usually in another process, with an empty cache.
        other = new_cache()
        sequence, cached_tokens = other.allocate(PROMPT)
        assert cached_tokens == 0
        other.restore(sequence, store, namespace)
        assert other.computed_tokens(sequence) == 8
        assert compute(other, sequence) == 2
    print("8 of 10 tokens shared in one cache and restored in another: ok")


if __name__ == "__main__":
    main()
