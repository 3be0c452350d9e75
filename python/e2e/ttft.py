"""Time to the first token of a prompt of 1,500 tokens: computed, and loaded from where a block may be.

    target/engines/venv/bin/python python/e2e/ttft.py [--count N]

Prints a table in Markdown. The model is tiny, so computing is cheap: what loading saves with a real model is more, and
the seconds of loading are what they are per byte. "Over TCP" is through the loopback of this host, and not a network.
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
#: What is put into the store to drive everything else out of a node's memory.
FILLER_BYTES = 1 << 20


def push_out(cluster: Cluster) -> int:
    """Fills a node's memory with other things until all blocks are on its disk; how many are not in memory."""
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
    return found is not None and any(place["medium"] == "memory" for place in found["places"])


def measure(
    folder: Path, model: Path, title: str, count: int, store: dict[str, Any] | None, cluster: Cluster | None, disk: bool
) -> dict[str, list[float]]:
    """Each prompt twice; the engine's own cache is emptied between."""
    prompts = [[{"tokens": [[2000 + at, TOKENS]], "max_tokens": 1}] for at in range(count)]
    # The first requests of an engine are slow whatever they are.
    warm_up = [[{"tokens": [[1 + at, TOKENS]], "max_tokens": 1}] for at in range(2)]
    job = {"model": str(model), "rounds": [*warm_up, *prompts, *prompts], "wait": True, "reset_local": True}
    if store is not None:
        job["store"] = store
    engine = Engine(folder, job)
    try:
        engine.until(lambda line: "ready" in line)
        for number in range(2 + 2 * count):
            if disk and cluster is not None and number >= 2 + count:
                left = push_out(cluster)
                print(f"{title}: {left} blocks are on disk and not in memory", file=sys.stderr)
            engine.go()
            engine.until(lambda line, number=number: "counters" in line and line["round"] == number)  # type: ignore[misc]
            time.sleep(0.2)  # for saves to be over
        run = engine.finish()
    finally:
        if engine.process.poll() is None:
            engine.kill()
    firsts = [answers[0]["ttft"] for answers in run.answers]
    loaded = run.counters[-1].get("loaded_blocks", 0) - run.counters[1 + count].get("loaded_blocks", 0)
    if store is not None:
        assert loaded == count * (TOKENS // 32), f"{loaded} blocks were loaded, of {count * (TOKENS // 32)}"
        assert all(run.answers[number][0]["cached"] == 0 for number in range(2 + count))
    return {"first": firsts[2 : 2 + count], "again": firsts[2 + count :]}


def row(title: str, seconds: list[float]) -> str:
    low, high = min(seconds) * 1000, max(seconds) * 1000
    return f"| {title} | {statistics.median(seconds) * 1000:.0f} ms | {low:.0f} … {high:.0f} ms |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=7, help="prompts of each kind; %(default)s unless told")
    count = parser.parse_args().count
    with tempfile.TemporaryDirectory(prefix="moontide-ttft-") as temporary:
        folder = Path(temporary)
        write(folder / "tiny")
        rows = []
        found = measure(folder, folder / "tiny", "alone", count, None, None, False)
        rows.append(row("computed, vLLM without a connector", found["first"] + found["again"]))
        for title, memory, node, store, disk in (
            ("loaded from memory of this host", "256MiB", [], {}, False),
            ("loaded over TCP (loopback)", "256MiB", [], {"local": False}, False),
            ("loaded from the SSD of a node on this host", "64MiB", ["--disk-dir", str(folder / "disk")], {}, True),
        ):
            place = folder / title.replace(" ", "-")
            place.mkdir()
            cluster = Cluster(place, memory=memory, node=node)
            try:
                found = measure(place, folder / "tiny", title, count, cluster.settings | store, cluster, disk)
            finally:
                cluster.end()
            if not store and not disk:
                rows.append(row("computed, not in the store, and saved", found["first"]))
            rows.append(row(title, found["again"]))
    print(f"| {TOKENS:,} tokens | median of {count} | from … to |\n|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
