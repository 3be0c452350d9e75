"""Host memory on the way between an engine's memory and the store, where the store cannot reach the former.

Also used where blocks must be free again at once: once copied, they are.

On a CPU a copy is over when the call returns. On a GPU, copies out are ordered by the stream that computes, so that
later writes to the same blocks come after them; copies in have a stream of their own, which waits for what was
computing when the load was begun. The GPU's side was never run by our tests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from moontide.kv import Pages, Run
from moontide.kv.pages import block_axis


@dataclass
class Stage:
    """Room for some blocks of some layers, and which they are."""

    #: The engine's memory: ``[blocks, bytes]`` for each run of a block.
    views: Sequence[torch.Tensor]
    blocks: torch.Tensor
    #: Ours: ``[len(blocks), bytes]`` for each of them.
    host: list[torch.Tensor]

    @property
    def pages(self) -> Pages:
        """Ours, as numbered from 0 on."""
        runs = [Run(room.data_ptr(), room.shape[1], room.shape[1]) for room in self.host]
        return Pages(runs, len(self.blocks))


class Stager:
    """Copies, and counts how much memory saves hold."""

    def __init__(self, device: torch.device, limit: int) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        if not self._on_gpu and device.type != "cpu":
            raise ValueError(f"memory of {device.type} cannot be copied yet")
        self._left = limit
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]

    def take(self, size: int) -> bool:
        """Whether so many bytes may be held, until they are given back."""
        with self._lock:
            if size > self._left:
                return False
            self._left -= size
            return True

    def give_back(self, size: int) -> None:
        with self._lock:
            self._left += size

    def room(self, views: Sequence[torch.Tensor], blocks: Sequence[int]) -> Stage:
        # Pinned memory comes from a cache of torch's own, so that taking it anew costs little.
        host = [torch.empty((len(blocks), view.shape[1]), dtype=torch.uint8, pin_memory=self._on_gpu) for view in views]
        return Stage(views, torch.tensor(blocks, dtype=torch.long), host)

    def gather(self, stages: Iterable[Stage]) -> Any:
        """Begins to copy out of the engine's memory; what to wait for before it is read."""
        for stage in stages:
            blocks = stage.blocks.to(self._device, non_blocking=True)
            for view, room in zip(stage.views, stage.host, strict=True):
                if self._on_gpu:
                    room.copy_(view.index_select(0, blocks), non_blocking=True)
                else:
                    torch.index_select(view, 0, blocks, out=room)
        return self.mark()

    def mark(self) -> Any:
        """Everything that computes now."""
        if not self._on_gpu:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        if mark is not None:
            mark.synchronize()

    def scatter(self, stages: Iterable[Stage], after: Any) -> None:
        """Copies into the engine's memory, after what computed at the mark; over when it returns."""
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            if self._stream is not None:
                self._stream.wait_event(after)
            for stage in stages:
                blocks = stage.blocks.to(self._device, non_blocking=True)
                for view, room in zip(stage.views, stage.host, strict=True):
                    view.index_copy_(0, blocks, room.to(self._device, non_blocking=True))
        if self._stream is not None:
            self._stream.synchronize()


def views_of(tensors: Iterable[torch.Tensor], blocks: int) -> list[torch.Tensor]:
    """The runs of `Pages.of_tensors`, as bytes that torch can copy: the same objects with and without staging."""
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
