"""Copies a page: 16-byte vectors where both sides are aligned, bytes where not, and the tail masked."""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from ._jit import jit
from .digest import LENGTH_PLACE, mix

_LENGTH_PLACE = tl.constexpr(LENGTH_PLACE)


@jit
def copy_page(
    source: tl.tensor,
    target: tl.tensor,
    length: tl.tensor,
    first_place: tl.tensor,
    WIDE: tl.constexpr,
    DIGEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Copies ``length`` bytes between two addresses, ``BLOCK`` elements at a time. Returns the page's digest, or 0.

    ``WIDE`` says that both addresses are multiples of 16. ``first_place`` counts words from the payload's beginning.
    """
    length = length.to(tl.int64)
    digest = tl.full([1], 0, tl.uint64)
    if DIGEST:
        digest += mix(length, first_place.to(tl.uint64) + _LENGTH_PLACE)
    if WIDE:
        # An even number, and written so that the compiler sees it: a mask that may end within a pair of words would
        # make single words of the vectors.
        words = length // 16 * 2
        from_words = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
        to_words = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
        for at in range(0, words, BLOCK):
            place = at + tl.arange(0, BLOCK).to(tl.int64)
            is_there = place < words
            value = tl.load(from_words + place, mask=is_there, other=0)
            tl.store(to_words + place, value, mask=is_there)
            if DIGEST:
                digest += tl.sum(tl.where(is_there, mix(value, first_place + place), 0), axis=0)
        digest += copy_bytes(source, target, words * 8, length, first_place, DIGEST, 16)
    else:
        for at in range(0, length, BLOCK):
            digest += copy_bytes(source, target, at, length, first_place, DIGEST, BLOCK)
    return tl.sum(digest, axis=0)


@jit
def copy_bytes(
    source: tl.tensor,
    target: tl.tensor,
    at: tl.tensor,
    length: tl.tensor,
    first_place: tl.tensor,
    DIGEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Copies up to ``BLOCK`` bytes of a page from its byte ``at`` on, one by one. ``at`` is a multiple of 8."""
    offset = at + tl.arange(0, BLOCK).to(tl.int64)
    is_there = offset < length
    value = tl.load(source.to(tl.pointer_type(tl.uint8)) + offset, mask=is_there, other=0)
    tl.store(target.to(tl.pointer_type(tl.uint8)) + offset, value, mask=is_there)
    digest = tl.full([1], 0, tl.uint64)
    if DIGEST:
        # Words out of bytes; those behind the end are the zeros that fill up the last word.
        shifted = value.to(tl.uint64) << ((offset % 8) * 8).to(tl.uint64)
        words = tl.sum(tl.reshape(shifted, [BLOCK // 8, 8]), axis=1)
        place = at // 8 + tl.arange(0, BLOCK // 8).to(tl.int64)
        digest += tl.sum(tl.where(place * 8 < length, mix(words, first_place + place), 0), axis=0)
    return digest
