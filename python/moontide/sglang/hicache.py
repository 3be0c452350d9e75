"""``MoontideHiCache``: saves SGLang's pages in the store.

SGLang calls from up to three threads at once: one for lookups, one for loads, one for saves. All calls here are
therefore blocking calls (see `moontide.kv.calls`). While the store is unavailable, no page exists, none is loaded and
none is saved, and the engine computes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (  # type: ignore[import-untyped]
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from moontide.kv import Batch
from moontide.kv.calls import Calls, CallStats, Settings

from .pools import Pool

LOG = logging.getLogger("moontide.sglang")

#: Keys of the extra config that belong to SGLang.
_OF_SGLANG = frozenset(
    (
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "tp_lcm_size",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
    )
)
#: Maximum number of samples per metric.
_SAMPLES_MAX = 1024


class MoontideHiCache(HiCacheStorage):  # type: ignore[misc]
    """HiCache storage backend. Each page is an object; engines with the same model and settings share pages."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        self._config = storage_config
        extra = storage_config.extra_config or {}
        #: Whether SGLang passes the locations of pages, instead of copies.
        self._in_place = bool(extra.get("interface_v1", False))
        self._settings = Settings.of({name: value for name, value in extra.items() if name not in _OF_SGLANG})
        self._calls = Calls(self._settings)
        self._pools: dict[str, Pool] = {}
        self._flat: Pool | None = None
        self._samples: dict[str, list[float]] = {}

    # ------------------------------------------------------------------------------------------------------------ pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Registers the pool of keys and values."""
        super().register_mem_pool_host(mem_pool_host)
        # The pool of a hybrid model may own slots without bytes; the bytes are then in the other pools.
        if getattr(mem_pool_host, "kv_buffer", None) is not None:
            self._pools[PoolName.KV] = self._pool(mem_pool_host, PoolName.KV, flat=False)
            self._flat = self._pool(mem_pool_host, PoolName.KV, flat=True)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Registers another pool: of states, windows or draft models."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV:
            self._pools[host_pool_name] = self._pool(host_pool, host_pool_name, flat=False)

    @property
    def _anchor(self) -> Pool | None:
        """Pool of keys and values, in the form that SGLang passes."""
        return self._pools.get(PoolName.KV) if self._in_place else self._flat

    def _pool(self, host: Any, name: str, flat: bool) -> Pool:
        return Pool(host, name, self._config, self._settings, flat)

    # ------------------------------------------------------------------------------------------- pages by location (v1)

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Returns the number of stored pages, from the first one up to the first gap."""
        pool = self._anchor
        return 0 if pool is None else _leading(pool.whole(self._calls.exists(pool.keys(keys))))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Loads pages to their locations. The memory of pages that were not loaded is undefined."""
        pool = self._pools.get(PoolName.KV)
        if pool is None:
            return [True] * len(keys)
        return pool.whole(self._load(len(keys) * pool.split, lambda: pool.batch(keys, host_indices)))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Saves pages. Does not write existing pages again."""
        pool = self._pools.get(PoolName.KV)
        if pool is None:
            return [True] * len(keys)
        return pool.whole(self._save(len(keys) * pool.split, lambda: pool.batch(keys, host_indices)))

    # ------------------------------------------------------------------------------------------- several pools (v2)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Returns how many pages can be restored together with their pages in the other pools, and the possible
        lengths."""
        anchor = self._anchor
        transfers = [one for one in pool_transfers or [] if one.hit_policy != PoolHitPolicy.BLOCK_GROUPS]
        pools = [pool for pool in (anchor, *map(self._pool_of, transfers)) if pool is not None]
        # One lookup for all pools.
        of_each = [pool.keys(keys) for pool in pools]
        exists = iter(self._calls.exists([key for own in of_each for key in own]))
        pages = [pool.whole([next(exists) for _ in own]) for pool, own in zip(pools, of_each, strict=True)]
        found = len(keys) if anchor is None else _leading(pages.pop(0))
        hits = {PoolName.KV: found} if found else {}
        possible = set(range(1, found + 1))
        for transfer, of_pool in zip(transfers, pages, strict=True):
            lengths = _restorable(transfer, of_pool, found)
            if lengths:
                hits[transfer.name] = max(lengths)
            possible &= lengths
        return PoolTransferResult(max(possible, default=0), hits, sorted(possible))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Loads pages of several pools."""
        return self._move_v2(transfers, self._load)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Saves pages of several pools."""
        return self._move_v2(transfers, self._save)

    def _move_v2(
        self, transfers: list[PoolTransfer], move: Callable[[int, Callable[[], Batch]], list[bool]]
    ) -> dict[str, list[bool]]:
        moved: dict[str, list[bool]] = {}
        for transfer in transfers:
            pool, keys, indices = self._pool_of(transfer), transfer.keys or [], transfer.host_indices

            def make_batch(pool: Pool = pool, keys: list[str] = keys, indices: Any = indices) -> Batch:
                return pool.batch(keys, indices)

            moved[transfer.name] = pool.whole(move(len(keys) * pool.split, make_batch)) if keys else []
        return moved

    def _pool_of(self, transfer: PoolTransfer) -> Pool:
        try:
            return self._pools[transfer.name]
        except KeyError:
            raise ValueError(f"pool {transfer.name} is not registered") from None

    # ------------------------------------------------------------------------------------------ pages as tensors (flat)

    def exists(self, key: str) -> bool:
        """Whether a page exists, in the configured form."""
        return self.batch_exists([key]) == 1

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Loads a page, into the given tensor or a new one."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Sequence[torch.Tensor] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Loads pages; None for each page that was not loaded."""
        pool = self._flat
        if pool is None:
            return [None] * len(keys)
        targets = target_locations
        if targets is None:
            targets = [pool.host.get_dummy_flat_data_page() for _ in keys]
        loaded = self._load(len(keys), lambda: _of_tensors(pool.keys(keys), targets))
        return [target if done else None for target, done in zip(targets, loaded, strict=True)]

    def set(
        self, key: str, value: torch.Tensor | None = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Saves a page."""
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Saves pages. Returns whether all are stored now."""
        pool = self._flat
        if pool is None or values is None:
            return False
        # The tensors must live until the save has read their memory.
        tensors = [value.detach().to("cpu").contiguous() for value in values]
        return all(self._save(len(keys), lambda: _of_tensors(pool.keys(keys), tensors)))

    # ------------------------------------------------------------------------------------------------------------ other

    def clear(self) -> bool:
        """Removes all pages of engines with this model and these settings. Other pages are not removed."""
        pools = [*self._pools.values(), *([self._flat] if self._flat is not None else [])]
        return all(self._calls.remove_all(prefix) for prefix in {pool.prefix for pool in pools})

    def get_stats(self) -> Any:
        """Returns pages and GB/s of each batch since the last call, for SGLang's metrics."""
        if not self._config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics  # type: ignore[import-untyped]

        samples, self._samples = self._samples, {}
        return StorageMetrics(**samples)

    def close(self) -> None:
        """Closes the connections."""
        LOG.info("%s", self._calls.counts)
        self._calls.close()

    @property
    def counts(self) -> CallStats:
        """Counters of objects: pages, or parts of pages if a page has several objects."""
        return self._calls.counts

    # -------------------------------------------------------------------------------------------------------- transfers

    def _load(self, objects: int, make_batch: Callable[[], Batch]) -> list[bool]:
        return self._measured("prefetch", self._calls.load, objects, make_batch)

    def _save(self, objects: int, make_batch: Callable[[], Batch]) -> list[bool]:
        return self._measured("backup", self._calls.save, objects, make_batch)

    def _measured(
        self,
        way: str,
        move: Callable[[int, Callable[[], Batch]], list[bool]],
        objects: int,
        make_batch: Callable[[], Batch],
    ) -> list[bool]:
        if not self._config.enable_storage_metrics:
            return move(objects, make_batch)
        sizes: list[int] = []

        def measured_batch() -> Batch:
            batch = make_batch()
            sizes.append(batch.bytes)
            return batch

        began = time.monotonic()
        moved = move(objects, measured_batch)
        took = time.monotonic() - began
        if sizes and any(moved) and took > 0:
            self._sample(f"{way}_pgs", sum(moved))
            self._sample(f"{way}_bandwidth", sizes[0] * sum(moved) / objects / took / (1 << 30))
        return moved

    def _sample(self, name: str, value: float) -> None:
        # Bounded, in case SGLang does not collect them.
        samples = self._samples.setdefault(name, [])
        if len(samples) < _SAMPLES_MAX:
            samples.append(value)


def _of_tensors(keys: list[str], tensors: Sequence[torch.Tensor]) -> Batch:
    if not all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in tensors):
        raise ValueError("pages must be contiguous tensors in host memory")
    return Batch(keys, [[one.data_ptr()] for one in tensors], [[one.nbytes] for one in tensors])


def _leading(exists: Sequence[bool]) -> int:
    return next((at for at, one in enumerate(exists) if not one), len(exists))


def _restorable(transfer: PoolTransfer, exists: Sequence[bool], found: int) -> set[int]:
    """Returns the prefix lengths, up to ``found`` pages, for which this pool has all required pages."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, min(_leading(exists), found) + 1))
    # Required are the pages of the window, or the one page of the state, at the end of the prefix.
    window = max(1, len(transfer.keys or ()))
    return {end for end in range(1, found + 1) if all(exists[max(0, end - window) : end])}
