"""Measures the time to first token of a prompt of 1,500 tokens: computed, and loaded from each kind of storage.

    target/engines/venv/bin/python python/e2e/ttft.py [--count N]

Prints a table in Markdown. The model is small, so computing is cheap: with a real model, loading saves more. The time
of loading depends on the number of bytes. "Over TCP" is the loopback of this host, not a network.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from model import write  # noqa: E402
from support import Cluster, Engine  # noqa: E402

TOKENS = 1500
#: Size of the objects that evict all others from a node's memory.
FILLER_BYTES = 1 << 20


def evict_to_disk(cluster: Cluster) -> int:
    """Fills a node's memory with other objects until all blocks are only on its disk. Returns the number of blocks that
    are not in memory."""
    with cluster.store() as store:
        keys = store.keys("kv1/")
        for number in range(192):
            store.put(f"filler/{number}", bytes([number]) * FILLER_BYTES)
            if number % 16 == 15 and not any(in_memory(store, key) for key in keys):
                break
            time.sleep(0.02)
        return sum(not in_memory(store, key) for key in keys)


def in_memory(store: Any, key: bytes) -> bool:
    found = store.stat(key)
    return found is not None and any(location["medium"] == "memory" for location in found["locations"])


def measure(
    folder: Path, model: Path, title: str, count: int, store: dict[str, Any] | None, cluster: Cluster | None, disk: bool
) -> dict[str, list[float]]:
    """Runs each prompt twice. The engine's own cache is cleared between the rounds."""
    prompts = [[{"tokens": [[2000 + at, TOKENS]], "max_tokens": 1}] for at in range(count)]
    # The first requests of an engine are always slow.
    warm_up = [[{"tokens": [[1 + at, TOKENS]], "max_tokens": 1}] for at in range(2)]
    job = {"model": str(model), "rounds": [*warm_up, *prompts, *prompts], "wait": True, "reset_local": True}
    if store is not None:
        job["store"] = store
    engine = Engine(folder, job)
    try:
        engine.until(lambda line: "ready" in line)
        for number in range(2 + 2 * count):
            if disk and cluster is not None and number >= 2 + count:
                left = evict_to_disk(cluster)
                print(f"{title}: {left} blocks are on disk and not in memory", file=sys.stderr)
            engine.go()
            engine.until(lambda line, number=number: "counters" in line and line["round"] == number)  # type: ignore[misc]
            time.sleep(0.2)  # for saves to finish
        run = engine.finish()
    finally:
        if engine.process.poll() is None:
            engine.kill()
    firsts = [outputs[0]["ttft"] for outputs in run.outputs]
    loaded = run.counters[-1].get("loaded_blocks", 0) - run.counters[1 + count].get("loaded_blocks", 0)
    if store is not None:
        assert loaded == count * (TOKENS // 32), f"{loaded} blocks were loaded, of {count * (TOKENS // 32)}"
        assert all(run.outputs[number][0]["cached"] == 0 for number in range(2 + count))
    return {"first": firsts[2 : 2 + count], "again": firsts[2 + count :]}


def row(title: str, seconds: list[float]) -> str:
    low, high = min(seconds) * 1000, max(seconds) * 1000
    return f"| {title} | {statistics.median(seconds) * 1000:.0f} ms | {low:.0f}–{high:.0f} ms |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=7, help="number of prompts of each kind [default: %(default)s]")
    count = parser.parse_args().count
    with tempfile.TemporaryDirectory(prefix="moontide-ttft-") as temporary:
        folder = Path(temporary)
        write(folder / "tiny")
        rows = []
        found = measure(folder, folder / "tiny", "alone", count, None, None, False)
        rows.append(row("computed, vLLM without a connector", found["first"] + found["again"]))
        for title, memory, node, store, disk in (
            ("loaded from memory of the same host", "256MiB", [], {}, False),
            ("loaded over TCP (loopback)", "256MiB", [], {"shm": False}, False),
            ("loaded from the SSD of a local node", "64MiB", ["--disk-dir", str(folder / "disk")], {}, True),
        ):
            own_folder = folder / title.replace(" ", "-")
            own_folder.mkdir()
            cluster = Cluster(own_folder, memory=memory, node=node)
            try:
                found = measure(own_folder, folder / "tiny", title, count, cluster.settings | store, cluster, disk)
            finally:
                cluster.end()
            if not store and not disk:
                rows.append(row("computed, miss in the store, saved", found["first"]))
            rows.append(row(title, found["again"]))
    print(f"| {TOKENS:,} tokens | median of {count} | range |\n|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
