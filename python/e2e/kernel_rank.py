"""One rank of a world whose kernels run in Triton's interpreter: a process that executes commands, line by line.

    TRITON_INTERPRET=1 python kernel_rank.py RANK FOLDER        # started by kernel_world.py

It maps the regions of all ranks, the headers (read-only, as in the store) and the ledger. Every line of its input is a
call, ``{"do": name, …}``; every line of its output is a result.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton.language as tl  # type: ignore[import-untyped]
from moontide import kernels
from moontide.kernels._jit import jit
from moontide.kernels.memory_order import pointer
from moontide.kernels.pages import copy_page
from moontide.kernels.read import clear_cell


def bytes_of(seed: int, length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns the content of a test record."""
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


@jit
def read_unchecked(
    source: tl.int64, length: tl.int64, cell: tl.int64, name: tl.int64, target: tl.int64, status: tl.tensor
) -> None:
    """Mutation: pins the slot, but does not check its header word."""
    tl.atomic_xchg(pointer(cell), name.to(tl.int64), sem="acq_rel", scope="sys")
    copy_page(source, target, length, length, True, False, 32_768)
    clear_cell(cell, "interpreter")
    tl.store(status, 1)


@jit
def add_by_cas(word: tl.int64, times: tl.int64) -> None:
    """Adds 1 by a CAS loop, as ``push`` counts pages."""
    for _ in range(0, times):
        expected = tl.full([], 0, tl.int64)
        found = tl.atomic_cas(pointer(word), expected, expected + 1, sem="acq_rel", scope="sys")
        while found != expected:
            expected = found
            found = tl.atomic_cas(pointer(word), expected, expected + 1, sem="acq_rel", scope="sys")


class Rank:
    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        ranks = len(list(folder.glob("region-*")))
        # Each process maps the regions in another order and behind another hole, so that no region has the same address
        # in two processes.
        self.hole = mmap.mmap(-1, (rank + 1) * 12_345 * 4096)
        order = [(rank + nth) % ranks for nth in range(ranks)]
        self.regions = {at: self.map(folder / f"region-{at}") for at in order}
        self.headers = self.map(folder / "headers", mmap.PROT_READ)
        self.cells = self.map(folder / "ledger")
        self.bases = torch.tensor([self.regions[at].ctypes.data for at in range(ranks)], dtype=torch.int64)
        self.status = torch.zeros(1, dtype=torch.int32)
        self.digest = torch.zeros(1, dtype=torch.int64)

    @staticmethod
    def map(path: Path, protection: int = mmap.PROT_READ | mmap.PROT_WRITE) -> np.ndarray[Any, np.dtype[np.uint8]]:
        with path.open("rb" if protection == mmap.PROT_READ else "r+b") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, prot=protection), dtype=np.uint8)

    def pin(self, slot: int) -> kernels.Pin:
        cell = self.cells.ctypes.data + 8 * self.rank
        return kernels.Pin(cell=cell, name=slot + 1, header_word=self.headers.ctypes.data + 8 * slot)

    def aligned(self, length: int, misalignment: int = 0) -> torch.Tensor:
        """Returns a buffer at a multiple of 16, plus the misalignment."""
        buffer = torch.zeros(length + 32, dtype=torch.uint8)
        begin = -buffer.data_ptr() % 16 + misalignment
        return buffer[begin : begin + length]

    # Commands.

    def base_addresses(self) -> list[int]:
        return [int(base) for base in self.bases]

    def add(self, times: int) -> None:
        add_by_cas[(1,)](self.cells.ctypes.data + 8 * 100, times)

    def push(
        self,
        record: dict[str, int],
        seed: int,
        first_page: int = 0,
        pages: int | None = None,
        digest: bool = False,
        misalignment: int = 0,
        programs: int | None = None,
    ) -> str:
        version = kernels.Record(**record)
        count = version.pages - first_page if pages is None else pages
        begin = first_page * version.page_bytes
        length = version.bytes_of(first_page, count)
        source = self.aligned(length, misalignment)
        source.numpy()[:] = bytes_of(seed, version.bytes_total)[begin : begin + length]
        kernels.push(
            self.bases,
            version,
            source,
            self.status,
            first_page=first_page,
            pages=count,
            digest=digest,
            programs=programs,
        )
        return kernels.Push(int(self.status)).name

    def wait(self, record: dict[str, int], slot: int, polls_max: int) -> str:
        word = self.pin(slot).header_word
        kernels.wait_ready(self.bases, kernels.Record(**record), word, self.status, polls_max=polls_max)
        return kernels.Wait(int(self.status)).name

    def acquire(self, slot: int, epoch: int) -> str:
        kernels.acquire(self.pin(slot), epoch, self.status)
        return kernels.Read(int(self.status)).name

    def copy(self, record: dict[str, int], programs: int | None = None, misalignment: int = 0) -> dict[str, Any]:
        version = kernels.Record(**record)
        target = self.aligned(version.bytes_total, misalignment)
        self.digest.zero_()
        kernels.copy(self.bases, version, target, self.status, digest=self.digest, programs=programs)
        return self.seen(target)

    def release(self, slot: int) -> None:
        kernels.release(self.pin(slot), self.status)

    def read(self, record: dict[str, int], slot: int, polls_max: int = 1, misalignment: int = 0) -> dict[str, Any]:
        version = kernels.Record(**record)
        target = self.aligned(version.bytes_total, misalignment)
        self.digest.zero_()
        began = time.monotonic()
        kernels.read(self.bases, version, self.pin(slot), target, self.status, polls_max=polls_max, digest=self.digest)
        return self.seen(target) | {"seconds": time.monotonic() - began}

    def seen(self, target: torch.Tensor) -> dict[str, Any]:
        return {
            "status": kernels.Read(int(self.status)).name,
            "sha": hashlib.sha256(target.numpy().tobytes()).hexdigest(),
            "digest": int(self.digest) % (1 << 64),
        }

    def read_many(self, record: dict[str, int], slot: int, seconds: float, checked: bool) -> dict[str, int]:
        """Reads the current version repeatedly. All bytes of a version have the same value, derived from its epoch."""
        pin, word = self.pin(slot), self.headers[8 * slot : 8 * slot + 8].view(np.uint64)
        target = self.aligned(record["bytes_total"])
        found = {"ok": 0, "miss": 0, "torn": 0}
        rng = random.Random(self.rank)
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            epoch = int(word[0]) >> 2
            version = kernels.Record(**(record | {"epoch": max(epoch, 1)}))
            # Gives the owner time to kill and free the version.
            time.sleep(rng.choice([0, 0, 0.002, 0.004]))
            if checked:
                kernels.read(self.bases, version, pin, target, self.status)
            else:
                begin = int(self.bases[version.owner]) + version.payload_offset
                read_unchecked[(1,)](begin, version.bytes_total, pin.cell, pin.name, target.data_ptr(), self.status)
            if int(self.status) == kernels.Read.OK:
                found["ok"] += 1
                found["torn"] += bool((target.numpy() != epoch % 251 + 1).any())
            else:
                found["miss"] += 1
        return found


def main() -> None:
    rank = Rank(int(sys.argv[1]), Path(sys.argv[2]))
    for line in sys.stdin:
        call = json.loads(line)
        result = getattr(rank, call.pop("do"))(**call)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
