"""A digest of pages that a kernel computes on the way.

It finds accidents: a page that did not arrive, bytes that came twice or at the wrong place, a flipped bit. It does not
withstand anyone who wants two records with one digest, and it is **not** the store's digest, which is XXH3 with a seed
for each page; a record that was pushed by a kernel has none of those until a CPU computes them.

    digest of a record = Σ over its words mix(word, place) + Σ over its pages mix(length, place of its first word + 2⁶²)

modulo 2⁶⁴. ``place`` counts the words of 8 bytes from the payload's beginning, so exchanged pages are noticed. The last
word is filled up with zeros. For a given place ``mix`` is a bijection: an error within one word is always found.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import triton.language as tl  # type: ignore[import-untyped]

from ._jit import jit

# The steps of splitmix64, whose finalizer this is.
GOLDEN = 0x9E37_79B9_7F4A_7C15
FIRST = 0xBF58_476D_1CE4_E5B9
SECOND = 0x94D0_49BB_1331_11EB
LENGTH_PLACE = 1 << 62

_GOLDEN = tl.constexpr(GOLDEN)
_FIRST = tl.constexpr(FIRST)
_SECOND = tl.constexpr(SECOND)


@jit
def mix(word: tl.tensor, place: tl.tensor) -> tl.tensor:
    """Of a word at a place; as ``mix_on_cpu``."""
    bits = word.to(tl.uint64) ^ ((place.to(tl.uint64) + 1) * _GOLDEN)
    bits = (bits ^ (bits >> 30)) * _FIRST
    bits = (bits ^ (bits >> 27)) * _SECOND
    return bits ^ (bits >> 31)


def mix_on_cpu(words: npt.NDArray[np.uint64], places: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The same with numpy, for many words."""
    bits: npt.NDArray[np.uint64] = words ^ ((places + np.uint64(1)) * np.uint64(GOLDEN))
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(FIRST)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(SECOND)
    bits ^= bits >> np.uint64(31)
    return bits


def digest_on_cpu(payload: npt.NDArray[np.uint8], page_bytes: int) -> int:
    """Of a whole record: what its flag holds after all pages were pushed with digests."""
    words = np.zeros(-(-payload.size // 8), np.uint64)
    words.view(np.uint8)[: payload.size] = payload
    begins = np.arange(0, payload.size, page_bytes, dtype=np.uint64)
    lengths = np.minimum(np.uint64(page_bytes), np.uint64(payload.size) - begins)
    places = np.arange(words.size, dtype=np.uint64)
    of_words = mix_on_cpu(words, places).sum(dtype=np.uint64)
    of_lengths = mix_on_cpu(lengths, begins // np.uint64(8) + np.uint64(LENGTH_PLACE)).sum(dtype=np.uint64)
    return (int(of_words) + int(of_lengths)) % (1 << 64)
