"""A mixture of experts without any transport, in numpy: what a step must come to, bit by bit.

Numbers are float32 here. What crosses between ranks is rounded as a channel's ``send`` and ``back`` say: experts' results
once, the sum of those that a token has on one rank once, the sum over ranks once. Sums are made in float32, in the order
of a token's experts and then in the order of ranks.

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

#: Numbers that share a scale in float8.
FP8_BLOCK = 128
_FP8_MAX = np.float32(448)

#: What a channel's ``send`` and ``back`` may be; the latter not float8.
Dtype: TypeAlias = Literal["float32", "float16", "bfloat16", "float8", "float8_e4m3fn"]
#: Arrays, of whose types numpy's own annotations lose sight at the first operator.
Array: TypeAlias = Any


def to_rows(numbers: Array, dtype: Dtype) -> Array:
    """Numbers as rows of a channel: rounded to the nearest, ties to even. bfloat16 is uint16, float8 is bytes."""
    numbers = np.ascontiguousarray(numbers, np.float32)
    if dtype == "bfloat16":
        bits = numbers.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
        # A NaN stays one, also if its upper half alone would be an infinity.
        return np.where(np.isnan(numbers), bits >> 16 | 0x40, rounded).astype(np.uint16)
    if dtype.startswith("float8"):
        return to_fp8(numbers)
    return numbers.astype(dtype)


def to_numbers(rows: Array, dtype: Dtype, *, hidden: int) -> Array:
    """Rows of a channel as numbers."""
    if dtype == "bfloat16":
        return (np.asarray(rows).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype.startswith("float8"):
        return from_fp8(rows, hidden=hidden)
    return np.asarray(rows).astype(np.float32)


def to_fp8(numbers: Array) -> Array:
    """Numbers as rows of float8: the codes of all (E4M3), zeros up to a multiple of four, then a float32 for each 128 of
    them, by which they are multiplied."""
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
    """The numbers that rows of float8 mean."""
    rows = np.asarray(rows).view(np.uint8)
    scales = np.ascontiguousarray(rows[..., -(-hidden // 4) * 4 :]).view("<f4")
    return _E4M3[rows[..., :hidden]] * np.repeat(scales, FP8_BLOCK, axis=-1)[..., :hidden]


def _meanings() -> Array:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa / 512, np.exp2(exponent - 7.0) * (1 + mantissa / 8))
    magnitude[(exponent == 15) & (mantissa == 7)] = np.nan
    return np.where(codes >= 128, -magnitude, magnitude).astype(np.float32)


#: What each of the 256 codes means.
_E4M3 = _meanings()


def _to_e4m3(numbers: Array) -> Array:
    magnitude = np.abs(numbers)
    bits = magnitude.view(np.uint32).astype(np.int64)
    # An f32 with the same fields has its exponent biased by 127, ours by 7; below 2**-6 the steps are 2**-9.
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
    send: Dtype = "bfloat16",
    back: Dtype = "bfloat16",
    ranks: Iterable[int] | None = None,
) -> Array:
    """The results of one rank's tokens: rows of ``back``, from rows of ``send``, as ``moe_forward`` gives them.

    ``expert(e, numbers)`` is what expert e of all makes of numbers ``[rows, hidden]``. Only the experts of ``ranks`` take part;
    all do unless some are named.
    """
    experts, weights = np.asarray(experts), np.asarray(weights, np.float32)
    numbers = to_numbers(tokens, send, hidden=hidden)
    made = np.zeros((*experts.shape, hidden), np.float32)
    for number in np.unique(experts[experts >= 0]).tolist():
        where = np.nonzero(experts == number)
        rounded = to_rows(expert(number, numbers[where[0]]), back)
        made[where] = to_numbers(rounded, back, hidden=hidden)
    owners = np.where(experts >= 0, experts // experts_per_rank, -1)
    there = range(int(owners.max(initial=-1)) + 1) if ranks is None else sorted(ranks)
    sums: Array = np.zeros((len(experts), hidden), np.float32)
    for rank in there:
        of_rank = np.zeros_like(sums)
        for k in range(experts.shape[1]):
            here = owners[:, k] == rank
            of_rank[here] += weights[here, k, None] * made[here, k]
        sums += to_numbers(to_rows(of_rank, back), back, hidden=hidden)
    return to_rows(sums, back)


def grouped(
    tokens: Sequence[Array], experts: Sequence[Array], *, rank: int, experts_per_rank: int, tokens_max: int
) -> tuple[list[Array], list[list[int]]]:
    """What a rank receives of all ranks' tokens: for each of its experts the rows, and the slots that they are of, which are
    ``source * tokens_max + token``. Rows are in the order of slots."""
    rows: list[Array] = []
    slots: list[list[int]] = []
    for number in range(rank * experts_per_rank, (rank + 1) * experts_per_rank):
        of_number = [np.nonzero(np.asarray(of) == number)[0].tolist() for of in experts]
        found = [(source, token) for source, of in enumerate(of_number) for token in of]
        slots.append([source * tokens_max + token for source, token in found])
        rows.append([tokens[source][token] for source, token in found])
    return rows, slots
