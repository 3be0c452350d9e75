"""Host memory between the engine's memory and the store, for engine memory that the store cannot access.

Also used for blocks that must be reusable at once: they are, as soon as they are copied.

On a CPU a copy ends when the call returns. On a GPU, copies out run in the compute stream, so that later writes to the
same blocks follow them. Copies in run in a separate stream, which waits for the work that was queued when the load
started. Our tests never ran the GPU path.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from moontide.kv import BlockPages, LayerRun
from moontide.kv.pages import block_axis


@dataclass
class StagedBlocks:
    """Host buffers for some blocks of some layers."""

    #: Engine memory: ``[blocks, bytes]`` for each run of a block.
    views: Sequence[torch.Tensor]
    blocks: torch.Tensor
    #: Host memory: ``[len(blocks), bytes]`` for each run.
    host: list[torch.Tensor]

    @property
    def pages(self) -> BlockPages:
        """Pages of the host memory; blocks are numbered from 0."""
        runs = [LayerRun(buffer.data_ptr(), buffer.shape[1], buffer.shape[1]) for buffer in self.host]
        return BlockPages(runs, len(self.blocks))


class StagingPool:
    """Copies blocks to and from host memory, and limits the memory of saves."""

    def __init__(self, device: torch.device, limit: int) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        if not self._on_gpu and device.type != "cpu":
            raise ValueError(f"device type {device.type} is not supported")
        self._left = limit
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]

    def reserve(self, size: int) -> bool:
        """Reserves ``size`` bytes until `release`. Returns False if the limit is reached."""
        with self._lock:
            if size > self._left:
                return False
            self._left -= size
            return True

    def release(self, size: int) -> None:
        with self._lock:
            self._left += size

    def allocate(self, views: Sequence[torch.Tensor], blocks: Sequence[int]) -> StagedBlocks:
        # torch caches pinned memory, so a new allocation is cheap.
        host = [torch.empty((len(blocks), view.shape[1]), dtype=torch.uint8, pin_memory=self._on_gpu) for view in views]
        return StagedBlocks(views, torch.tensor(blocks, dtype=torch.long), host)

    def gather(self, stages: Iterable[StagedBlocks]) -> Any:
        """Starts to copy blocks out of the engine's memory. Returns a mark to `wait` for before they are read."""
        for stage in stages:
            blocks = stage.blocks.to(self._device, non_blocking=True)
            for view, buffer in zip(stage.views, stage.host, strict=True):
                if self._on_gpu:
                    buffer.copy_(view.index_select(0, blocks), non_blocking=True)
                else:
                    torch.index_select(view, 0, blocks, out=buffer)
        return self.mark()

    def mark(self) -> Any:
        """Returns a mark of the work that is queued now."""
        if not self._on_gpu:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        if mark is not None:
            mark.synchronize()

    def scatter(self, stages: Iterable[StagedBlocks], after: Any) -> None:
        """Copies blocks into the engine's memory, after the work before the mark. Returns when the copy is complete."""
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            if self._stream is not None:
                self._stream.wait_event(after)
            for stage in stages:
                blocks = stage.blocks.to(self._device, non_blocking=True)
                for view, buffer in zip(stage.views, stage.host, strict=True):
                    view.index_copy_(0, blocks, buffer.to(self._device, non_blocking=True))
        if self._stream is not None:
            self._stream.synchronize()


def views_of(tensors: Iterable[torch.Tensor], blocks: int) -> list[torch.Tensor]:
    """Returns the runs of `BlockPages.of_tensors` as byte tensors that torch can copy. Objects are the same with and
    without staging."""
    views = []
    for tensor in tensors:
        axis = block_axis(tensor.shape, blocks)
        count = 1
        for at in range(axis + 1, tensor.dim()):
            count *= tensor.shape[at]
        for half in range(tensor.shape[0] if axis else 1):
            offset = tensor.storage_offset() + (half * tensor.stride(0) if axis else 0)
            flat = torch.as_strided(tensor, (blocks, count), (tensor.stride(axis), 1), offset)
            views.append(flat.view(torch.uint8))
    return views
