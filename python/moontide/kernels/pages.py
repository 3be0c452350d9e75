"""Copies a page: in 16-byte vectors if source and target are aligned, otherwise in bytes; the tail is masked."""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from ._jit import jit
from .digest import LENGTH_INDEX, mix

_LENGTH_INDEX = tl.constexpr(LENGTH_INDEX)


@jit
def copy_page(
    source: tl.tensor,
    target: tl.tensor,
    length: tl.tensor,
    first_index: tl.tensor,
    WIDE: tl.constexpr,
    DIGEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Copies ``length`` bytes between two addresses, ``BLOCK`` elements at a time. Returns the page's digest, or 0.

    ``WIDE``: both addresses are multiples of 16. ``first_index``: index of the page's first word in the payload.
    """
    length = length.to(tl.int64)
    digest = tl.full([1], 0, tl.uint64)
    if DIGEST:
        digest += mix(length, first_index.to(tl.uint64) + _LENGTH_INDEX)
    if WIDE:
        # An even number, in a form that the compiler recognizes: with a mask that could end within a pair of words, it
        # would split the vectors into single words.
        words = length // 16 * 2
        from_words = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
        to_words = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
        for at in range(0, words, BLOCK):
            index = at + tl.arange(0, BLOCK).to(tl.int64)
            in_range = index < words
            value = tl.load(from_words + index, mask=in_range, other=0)
            tl.store(to_words + index, value, mask=in_range)
            if DIGEST:
                digest += tl.sum(tl.where(in_range, mix(value, first_index + index), 0), axis=0)
        digest += copy_bytes(source, target, words * 8, length, first_index, DIGEST, 16)
    else:
        for at in range(0, length, BLOCK):
            digest += copy_bytes(source, target, at, length, first_index, DIGEST, BLOCK)
    return tl.sum(digest, axis=0)


@jit
def copy_bytes(
    source: tl.tensor,
    target: tl.tensor,
    at: tl.tensor,
    length: tl.tensor,
    first_index: tl.tensor,
    DIGEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Copies up to ``BLOCK`` bytes of a page, from its byte ``at`` on, one by one. ``at`` is a multiple of 8."""
    offset = at + tl.arange(0, BLOCK).to(tl.int64)
    in_range = offset < length
    value = tl.load(source.to(tl.pointer_type(tl.uint8)) + offset, mask=in_range, other=0)
    tl.store(target.to(tl.pointer_type(tl.uint8)) + offset, value, mask=in_range)
    digest = tl.full([1], 0, tl.uint64)
    if DIGEST:
        # Words from bytes; bytes behind the end are zeros, which pad the last word.
        shifted = value.to(tl.uint64) << ((offset % 8) * 8).to(tl.uint64)
        words = tl.sum(tl.reshape(shifted, [BLOCK // 8, 8]), axis=1)
        index = at // 8 + tl.arange(0, BLOCK // 8).to(tl.int64)
        digest += tl.sum(tl.where(index * 8 < length, mix(words, first_index + index), 0), axis=0)
    return digest
