"""Host side of a world of kernels, in numpy: regions, headers, ledger, flags."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
from moontide.kernels import layout

REGION_BYTES = 12 << 20
SLOTS = 64
FLAGS_AT, PAYLOAD_AT = 0, 4096
REPLY_TIMEOUT_S = 120.0


class Process:
    """A program of this folder that executes commands, one line of JSON each."""

    def __init__(self, program: str, *arguments: str, **variables: str) -> None:
        words = [sys.executable, str(Path(__file__).with_name(program)), *arguments]
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | variables
        self.process = subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def send(self, do: str, **call: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do} | call) + "\n")

    def receive(self) -> Any:
        assert self.process.stdout is not None
        timer = threading.Timer(REPLY_TIMEOUT_S, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        assert line, "the rank has ended; see its output above"
        return json.loads(line)

    def ask(self, do: str, **call: Any) -> Any:
        self.send(do, **call)
        return self.receive()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Rank(Process):
    """Process of one rank."""

    def __init__(self, rank: int, folder: Path) -> None:
        super().__init__("kernel_rank.py", str(rank), str(folder))


class World:
    """Four ranks over files in shared memory, and the work of a node for them."""

    def __init__(self, folder: Path, ranks: int = 4) -> None:
        sizes = {f"region-{rank}": REGION_BYTES for rank in range(ranks)} | {"headers": 4096, "ledger": 4096}
        maps = {}
        for name, size in sizes.items():
            with (folder / name).open("w+b") as file:
                file.truncate(size)
                maps[name] = np.frombuffer(mmap.mmap(file.fileno(), size), dtype=np.uint8)
        self.regions = [maps[f"region-{rank}"] for rank in range(ranks)]
        self.headers = maps["headers"].view(np.uint64)
        self.cells = maps["ledger"].view(np.uint64)
        self.ranks = [Rank(rank, folder) for rank in range(ranks)]
        # Waits for all ranks: a start takes seconds, and tests with a time limit would end before their readers start.
        for rank in self.ranks:
            rank.send("base_addresses")
        self.bases = [rank.receive() for rank in self.ranks]
        self.epoch = 0

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()

    def record(
        self, owner: int, bytes_total: int, slot: int = 0, page_bytes: int = layout.PAGE_BYTES
    ) -> dict[str, int]:
        """Returns a new version in a slot. All versions have the same offset, because tests run one at a time."""
        # A large step, so that the upper bits of epochs change too.
        self.epoch += (1 << 40) + 1
        return {
            "owner": owner,
            "payload_offset": PAYLOAD_AT,
            "flag_offset": FLAGS_AT + layout.FLAG_BYTES * slot,
            "bytes_total": bytes_total,
            "epoch": self.epoch,
            "page_bytes": page_bytes,
        }

    def flag(self, record: dict[str, int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        at = record["flag_offset"]
        return self.regions[record["owner"]][at : at + layout.FLAG_BYTES].view(np.uint64)

    def payload(self, record: dict[str, int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        at = record["payload_offset"]
        return self.regions[record["owner"]][at : at + record["bytes_total"]]

    def set_header(self, slot: int, epoch: int, state: int) -> None:
        self.headers[slot] = layout.word(epoch, state)

    def begin(self, record: dict[str, int], slot: int = 0) -> None:
        """Initializes header and flag, as the producer's host does before it starts kernels."""
        flag = self.flag(record)
        flag[:] = 0
        flag[1] = layout.pages_left(record["epoch"], layout.Record(**record).pages)
        flag[0] = layout.word(record["epoch"], layout.WRITING)
        self.set_header(slot, record["epoch"], layout.WRITING)

    def is_published(self, record: dict[str, int]) -> bool:
        word, missing = (int(bits) for bits in self.flag(record)[:2])
        return word == layout.word(record["epoch"], layout.READY) and missing == layout.pages_left(record["epoch"], 0)


def full_fence() -> None:
    """Executes a full fence. Python has none; taking a lock is a locked instruction on x86, which is a full fence."""
    with threading.Lock():
        pass
