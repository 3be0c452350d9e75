"""Reference implementation of a mixture of experts in numpy, without transport. Its results equal those of a step, bit
by bit.

It computes in float32. Values that pass between ranks are rounded to the ``dispatch_dtype`` and ``combine_dtype`` of a
channel: the results of experts once, the sum of a token's results on one rank once, the sum over ranks once. Sums are
computed in float32, in the order of a token's experts and then in rank order.

>>> import numpy
>>> from moontide.ep import reference
>>> rows = reference.to_rows(numpy.array([[1.0, 2.5, 448.0]]), "float8")
>>> rows.dtype, reference.to_numbers(rows, "float8", hidden=3).tolist()
(dtype('uint8'), [[1.0, 2.5, 448.0]])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

__all__ = ["FP8_BLOCK", "from_fp8", "grouped", "layer", "to_fp8", "to_numbers", "to_rows"]

#: Number of elements that share a scale in float8.
FP8_BLOCK = 128
_FP8_MAX = np.float32(448)

#: Values of ``dispatch_dtype`` and ``combine_dtype``; the latter cannot be float8.
Dtype: TypeAlias = Literal["float32", "float16", "bfloat16", "float8", "float8_e4m3fn"]
#: A numpy array. numpy's annotations lose the element type at the first operator.
Array: TypeAlias = Any


def to_rows(numbers: Array, dtype: Dtype) -> Array:
    """Converts numbers to rows of a channel, rounded to nearest, ties to even. bfloat16 is uint16, float8 is bytes."""
    numbers = np.ascontiguousarray(numbers, np.float32)
    if dtype == "bfloat16":
        bits = numbers.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
        # A NaN remains a NaN, even if its upper half alone would be an infinity.
        return np.where(np.isnan(numbers), bits >> 16 | 0x40, rounded).astype(np.uint16)
    if dtype.startswith("float8"):
        return to_fp8(numbers)
    return numbers.astype(dtype)


def to_numbers(rows: Array, dtype: Dtype, *, hidden: int) -> Array:
    """Converts rows of a channel to numbers."""
    if dtype == "bfloat16":
        return (np.asarray(rows).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype.startswith("float8"):
        return from_fp8(rows, hidden=hidden)
    return np.asarray(rows).astype(np.float32)


def to_fp8(numbers: Array) -> Array:
    """Converts numbers to rows of float8: the E4M3 codes, zeros up to a multiple of four, then one float32 scale for
    each 128 codes."""
    numbers = np.asarray(numbers, np.float32)
    *outer, hidden = numbers.shape
    blocks = -(-hidden // FP8_BLOCK)
    padded = np.zeros((*outer, blocks * FP8_BLOCK), np.float32)
    padded[..., :hidden] = numbers
    padded = padded.reshape(*outer, blocks, FP8_BLOCK)
    largest = np.abs(padded).max(axis=-1, initial=0)
    scales = np.where(largest > 0, largest / _FP8_MAX, np.float32(1)).astype(np.float32)
    codes = _to_e4m3(padded / scales[..., None]).reshape(*outer, blocks * FP8_BLOCK)[..., : -(-hidden // 4) * 4]
    codes[..., hidden:] = 0
    return np.concatenate([codes, np.ascontiguousarray(scales).view(np.uint8)], axis=-1)


def from_fp8(rows: Array, *, hidden: int) -> Array:
    """Converts rows of float8 to numbers."""
    rows = np.asarray(rows).view(np.uint8)
    scales = np.ascontiguousarray(rows[..., -(-hidden // 4) * 4 :]).view("<f4")
    return _E4M3[rows[..., :hidden]] * np.repeat(scales, FP8_BLOCK, axis=-1)[..., :hidden]


def _decoded_codes() -> Array:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa / 512, np.exp2(exponent - 7.0) * (1 + mantissa / 8))
    magnitude[(exponent == 15) & (mantissa == 7)] = np.nan
    return np.where(codes >= 128, -magnitude, magnitude).astype(np.float32)


#: Value of each of the 256 codes.
_E4M3 = _decoded_codes()


def _to_e4m3(numbers: Array) -> Array:
    magnitude = np.abs(numbers)
    bits = magnitude.view(np.uint32).astype(np.int64)
    # The exponent bias is 127 in f32 and 7 in E4M3; below 2**-6 the step is 2**-9.
    normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3)
    with np.errstate(invalid="ignore"):
        small = np.rint(magnitude * np.float32(512)).astype(np.int64)
    codes = np.minimum(np.where(magnitude < 1 / 64, small, normal), 0x7E)
    codes = np.where(np.isnan(numbers), 0x7F, codes)
    return np.where(np.signbit(numbers), codes | 0x80, codes).astype(np.uint8)


def layer(
    tokens: Array,
    experts: Array,
    weights: Array,
    expert: Callable[[int, Array], Array],
    *,
    experts_per_rank: int,
    hidden: int,
    dispatch_dtype: Dtype = "bfloat16",
    combine_dtype: Dtype = "bfloat16",
    ranks: Iterable[int] | None = None,
) -> Array:
    """Returns the results of one rank's tokens as ``moe_forward`` does: rows of ``combine_dtype`` from rows of
    ``dispatch_dtype``.

    ``expert(e, numbers)`` returns the result of expert e (global number) for numbers ``[rows, hidden]``. Only experts
    of ``ranks`` take part [default: all].
    """
    experts, weights = np.asarray(experts), np.asarray(weights, np.float32)
    numbers = to_numbers(tokens, dispatch_dtype, hidden=hidden)
    results = np.zeros((*experts.shape, hidden), np.float32)
    for number in np.unique(experts[experts >= 0]).tolist():
        where = np.nonzero(experts == number)
        rounded = to_rows(expert(number, numbers[where[0]]), combine_dtype)
        results[where] = to_numbers(rounded, combine_dtype, hidden=hidden)
    owners = np.where(experts >= 0, experts // experts_per_rank, -1)
    members = range(int(owners.max(initial=-1)) + 1) if ranks is None else sorted(ranks)
    sums: Array = np.zeros((len(experts), hidden), np.float32)
    for rank in members:
        of_rank = np.zeros_like(sums)
        for k in range(experts.shape[1]):
            own = owners[:, k] == rank
            of_rank[own] += weights[own, k, None] * results[own, k]
        sums += to_numbers(to_rows(of_rank, combine_dtype), combine_dtype, hidden=hidden)
    return to_rows(sums, combine_dtype)


def grouped(
    tokens: Sequence[Array], experts: Sequence[Array], *, rank: int, experts_per_rank: int, tokens_max: int
) -> tuple[list[Array], list[list[int]]]:
    """Returns the rows that a rank receives from all ranks: for each of its experts the rows and their slots. A slot is
    ``source * tokens_max + token``. Rows are in the order of slots."""
    rows: list[Array] = []
    slots: list[list[int]] = []
    for number in range(rank * experts_per_rank, (rank + 1) * experts_per_rank):
        of_number = [np.nonzero(np.asarray(of) == number)[0].tolist() for of in experts]
        found = [(source, token) for source, of in enumerate(of_number) for token in of]
        slots.append([source * tokens_max + token for source, token in found])
        rows.append([tokens[source][token] for source, token in found])
    return rows, slots
