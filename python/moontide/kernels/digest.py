"""Digest of pages that a kernel computes during a copy.

It detects accidental errors: a missing page, bytes that were written twice or at the wrong offset, a flipped bit. It is
not collision resistant. It is **not** the store's digest, which is XXH3 with a seed for each page; a record that a
kernel pushed has no such digests until a CPU computes them.

    digest of a record = Σ over its words mix(word, index) + Σ over its pages mix(length, index of its first word + 2⁶²)

modulo 2⁶⁴. ``index`` counts the words of 8 bytes from the start of the payload, so swapped pages are detected. The last
word is padded with zeros. For a given index ``mix`` is a bijection: an error within one word is always detected.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import triton.language as tl  # type: ignore[import-untyped]

from ._jit import jit

# Constants of splitmix64; `mix` is its finalizer.
GOLDEN = 0x9E37_79B9_7F4A_7C15
FIRST = 0xBF58_476D_1CE4_E5B9
SECOND = 0x94D0_49BB_1331_11EB
LENGTH_INDEX = 1 << 62

_GOLDEN = tl.constexpr(GOLDEN)
_FIRST = tl.constexpr(FIRST)
_SECOND = tl.constexpr(SECOND)


@jit
def mix(word: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Mixes a word with its index; as ``mix_on_cpu``."""
    bits = word.to(tl.uint64) ^ ((index.to(tl.uint64) + 1) * _GOLDEN)
    bits = (bits ^ (bits >> 30)) * _FIRST
    bits = (bits ^ (bits >> 27)) * _SECOND
    return bits ^ (bits >> 31)


def mix_on_cpu(words: npt.NDArray[np.uint64], indices: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """As ``mix``, with numpy, for many words."""
    bits: npt.NDArray[np.uint64] = words ^ ((indices + np.uint64(1)) * np.uint64(GOLDEN))
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(FIRST)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(SECOND)
    bits ^= bits >> np.uint64(31)
    return bits


def digest_on_cpu(payload: npt.NDArray[np.uint8], page_bytes: int) -> int:
    """Returns the digest of a whole record: the value in its flag after all pages were pushed with digests."""
    words = np.zeros(-(-payload.size // 8), np.uint64)
    words.view(np.uint8)[: payload.size] = payload
    begins = np.arange(0, payload.size, page_bytes, dtype=np.uint64)
    lengths = np.minimum(np.uint64(page_bytes), np.uint64(payload.size) - begins)
    indices = np.arange(words.size, dtype=np.uint64)
    of_words = mix_on_cpu(words, indices).sum(dtype=np.uint64)
    of_lengths = mix_on_cpu(lengths, begins // np.uint64(8) + np.uint64(LENGTH_INDEX)).sum(dtype=np.uint64)
    return (int(of_words) + int(of_lengths)) % (1 << 64)
