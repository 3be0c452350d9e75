"""Metrics of the connector, in the form in which vLLM logs and exports them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

#: Counters and their descriptions.
COUNTERS = {
    "loads": "Transfers from the store.",
    "loaded_blocks": "Objects loaded from the store.",
    "loaded_bytes": "Bytes loaded from the store.",
    "load_failures": "Objects that were found but could not be loaded; vLLM computed them.",
    "load_seconds": "Seconds spent in transfers from the store, sum of all threads.",
    "saves": "Transfers to the store.",
    "saved_blocks": "Objects saved, including objects that were already stored.",
    "saved_bytes": "Bytes saved, including objects that were already stored.",
    "save_failures": "Objects that were not saved.",
    "save_seconds": "Seconds spent in transfers to the store, sum of all threads.",
    "lookups": "Prefix lookups.",
    "lookups_timed_out": "Lookups that timed out, or that were skipped because the store was unavailable.",
    "lookup_blocks": "Blocks looked up.",
    "lookup_hit_blocks": "Blocks found by lookups.",
    "lookup_seconds": "Seconds spent in lookups.",
}


@dataclass
class MoontideStats(KVConnectorStats):
    """Increments of the counters since the last report."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> MoontideStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        found = {name: round(value, 6) for name, value in self.data.items() if value}
        for way, verb in (("load", "loaded"), ("save", "saved")):
            seconds, moved = self.data.get(f"{way}_seconds", 0), self.data.get(f"{verb}_bytes", 0)
            if seconds and moved:
                found[f"{way}_MB_per_s"] = round(moved / seconds / 1e6, 1)
        return found

    def is_empty(self) -> bool:
        return not any(self.data.values())


class DeltaCounter:
    """Converts counters to increments since the last call."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def since(self, now: dict[str, float]) -> MoontideStats | None:
        """Returns the increments, or None if no counter changed."""
        grown = {name: value - self._before.get(name, 0) for name, value in now.items()}
        self._before = now
        stats = MoontideStats({name: value for name, value in grown.items() if value})
        return None if stats.is_empty() else stats


def of_transfers(counts: Any) -> dict[str, float]:
    return asdict(counts)


def of_lookups(counts: Any) -> dict[str, float]:
    return {
        "lookups": counts.lookups,
        "lookups_timed_out": counts.timed_out,
        "lookup_blocks": counts.blocks,
        "lookup_hit_blocks": counts.hit_blocks,
        "lookup_seconds": counts.seconds,
    }


class MoontideMetrics(KVConnectorPromMetrics):
    """Prometheus counters such as ``vllm:moontide_loaded_bytes_total`` on vLLM's ``/metrics``."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, Any] = {
            name: self._counter_cls(name=f"vllm:moontide_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._counters and value > 0:
                self._counters[name].labels(*labels).inc(value)
