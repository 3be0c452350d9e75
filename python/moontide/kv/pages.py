"""Where the blocks of an engine's cache are in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Run:
    """Bytes that every block has at the same distance: those of one layer, or its keys, or its values."""

    #: Where those of block 0 begin.
    address: int
    #: How far those of the next block are.
    stride: int
    #: How many there are.
    size: int


class Pages:
    """All runs of a block, in the order in which its bytes are stored."""

    def __init__(self, runs: Sequence[Run], blocks: int) -> None:
        if not runs or blocks < 1:
            raise ValueError("a cache has blocks, and a block has bytes")
        self.runs = list(runs)
        self.blocks = blocks
        self._sizes = [run.size for run in self.runs]

    @property
    def block_bytes(self) -> int:
        """The length of a block's object."""
        return sum(self._sizes)

    def addresses(self, blocks: Iterable[int]) -> list[list[int]]:
        """Of each block, where its runs are."""
        found = []
        for block in blocks:
            if not 0 <= block < self.blocks:
                raise IndexError(f"there is no block {block}; there are {self.blocks}")
            found.append([run.address + block * run.stride for run in self.runs])
        return found

    def sizes(self, count: int) -> list[list[int]]:
        """The lengths of those runs, for so many blocks."""
        return [self._sizes] * count

    @classmethod
    def of_tensors(cls, tensors: Iterable[Any], blocks: int) -> Pages:
        """Of torch tensors, one or more for each layer, each ``[blocks, …]`` or, as two halves, ``[2, blocks, …]``.

        What a block has of a tensor must lie together; in which order of dimensions makes no difference here, but to
        whoever reads it: say it in the namespace's ``layout`` (see `order`).
        """
        runs = []
        for tensor in tensors:
            axis = block_axis(tensor.shape, blocks)
            step, item = tensor.stride(), tensor.element_size()
            inner = [(tensor.shape[at], step[at]) for at in range(axis + 1, tensor.dim())]
            size = _dense(inner, tensor) * item
            halves = tensor.shape[0] if axis else 1
            for half in range(halves):
                address = tensor.data_ptr() + (half * step[0] * item if axis else 0)
                runs.append(Run(address, step[axis] * item, size))
        return cls(runs, blocks)


def block_axis(shape: Sequence[int], blocks: int) -> int:
    """Which dimension counts the blocks."""
    if shape[0] == blocks:
        return 0
    if len(shape) > 1 and shape[0] == 2 and shape[1] == blocks:
        return 1
    raise ValueError(f"neither [blocks, …] nor [2, blocks, …] with {blocks} blocks: {list(shape)}")


def order(tensor: Any, blocks: int) -> str:
    """How the numbers of one block lie in memory, outermost first: part of what gives bytes a meaning."""
    axis = block_axis(tensor.shape, blocks)
    inner = [(tensor.stride(at), at - axis, tensor.shape[at]) for at in range(axis + 1, tensor.dim())]
    dims = " ".join(f"{at}:{count}" for _, at, count in sorted(inner, reverse=True))
    return f"{'halves ' if axis else ''}{dims}"


def _dense(inner: list[tuple[int, int]], tensor: Any) -> int:
    """How many numbers the inner dimensions have; they must leave no holes."""
    expected = 1
    for count, step in sorted(inner, key=lambda pair: pair[1]):
        if count > 1 and step != expected:
            raise ValueError(f"a block's bytes do not lie together: {list(tensor.shape)}, {list(tensor.stride())}")
        expected *= count
    return expected
