"""Memory addresses of the blocks of an engine's cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerRun:
    """Bytes that every block has at a constant stride: those of one layer, or of its keys, or of its values."""

    #: Address of the bytes of block 0.
    address: int
    #: Distance in bytes to the next block.
    stride: int
    #: Bytes per block.
    size: int


class BlockPages:
    """All runs of the blocks of a cache, in the order in which the bytes of a block are stored."""

    def __init__(self, runs: Sequence[LayerRun], blocks: int) -> None:
        if not runs or blocks < 1:
            raise ValueError(f"at least one run and one block are needed, not {len(runs)} and {blocks}")
        self.runs = list(runs)
        self.blocks = blocks
        self._sizes = [run.size for run in self.runs]

    @property
    def block_bytes(self) -> int:
        """Bytes of the object of a block."""
        return sum(self._sizes)

    def addresses(self, blocks: Iterable[int]) -> list[list[int]]:
        """Returns the addresses of the runs of each block."""
        found = []
        for block in blocks:
            if not 0 <= block < self.blocks:
                raise IndexError(f"there is no block {block}; the cache has {self.blocks} blocks")
            found.append([run.address + block * run.stride for run in self.runs])
        return found

    def sizes(self, count: int) -> list[list[int]]:
        """Returns the sizes of the runs of ``count`` blocks."""
        return [self._sizes] * count

    @classmethod
    def of_tensors(cls, tensors: Iterable[Any], blocks: int) -> BlockPages:
        """Creates the pages of torch tensors, one or more per layer, each ``[blocks, …]`` or, with two halves,
        ``[2, blocks, …]``.

        The bytes of a block in a tensor must be contiguous, in any order of dimensions. Readers need the same order:
        include it in the ``layout`` of the namespace (see `memory_order`).
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
                runs.append(LayerRun(address, step[axis] * item, size))
        return cls(runs, blocks)


def block_axis(shape: Sequence[int], blocks: int) -> int:
    """Returns the dimension that counts the blocks."""
    if shape[0] == blocks:
        return 0
    if len(shape) > 1 and shape[0] == 2 and shape[1] == blocks:
        return 1
    raise ValueError(f"shape {list(shape)} is neither [blocks, …] nor [2, blocks, …] with {blocks} blocks")


def memory_order(tensor: Any, blocks: int) -> str:
    """Returns the order of the dimensions of a block in memory, outermost first. Two tensors with different orders must
    not share blocks."""
    axis = block_axis(tensor.shape, blocks)
    inner = [(tensor.stride(at), at - axis, tensor.shape[at]) for at in range(axis + 1, tensor.dim())]
    dims = " ".join(f"{at}:{count}" for _, at, count in sorted(inner, reverse=True))
    return f"{'halves ' if axis else ''}{dims}"


def _dense(inner: list[tuple[int, int]], tensor: Any) -> int:
    """Returns the number of elements of the inner dimensions. Raises ValueError if there are gaps between them."""
    expected = 1
    for count, step in sorted(inner, key=lambda pair: pair[1]):
        if count > 1 and step != expected:
            raise ValueError(f"blocks are not contiguous: shape {list(tensor.shape)}, strides {list(tensor.stride())}")
        expected *= count
    return expected
