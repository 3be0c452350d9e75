"""Connector of a worker: transfers blocks between the engine's memory and the store.

A block is one object per `LayerSlice`: all layers of a group, unless `layers_per_object` is set. Transfers run in the
background. Failed loads are reported, and the engine computes the blocks. Failed saves are dropped.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, RSWASpec, UniformTypeKVCacheSpecs

from moontide.kv import Batch, BlockPages, Transfers, keys_of
from moontide.kv import Load as Loading
from moontide.kv.pages import memory_order

from .messages import NULL_BLOCK, Handshake, Load, Report, Save, Step
from .settings import Settings
from .staging import StagedBlocks, StagingPool, views_of
from .stats import DeltaCounter, MoontideStats, of_transfers

LOG = logging.getLogger("moontide.vllm")


@dataclass
class LayerSlice:
    """Layers whose bytes form one object."""

    part: str
    #: Index of their group in the lists of blocks of a message.
    group: int
    layers: list[str]
    pages: BlockPages
    #: Byte views of the layers for staging; empty without staging.
    views: list[torch.Tensor] = field(default_factory=list)


class _Objects:
    """Objects of the blocks of a message, slice by slice. Null blocks have no object."""

    def __init__(self, prefix: str, message: Load | Save, slices: Sequence[LayerSlice]) -> None:
        self._prefix = prefix
        self._hashes = message.hashes
        #: Number of requested slices, including those without blocks.
        self.slice_count = len(slices)
        all_blocks = [
            [(at, block) for at, block in enumerate(message.blocks[one.group]) if block != NULL_BLOCK] for one in slices
        ]
        self.slices = [one for one, blocks in zip(slices, all_blocks, strict=True) if blocks]
        #: For each slice with blocks: index in the message, and block number.
        self._blocks = [blocks for blocks in all_blocks if blocks]
        #: Index of each object's block in the message.
        self.positions = [at for blocks in self._blocks for at, _ in blocks]

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def blocks(self) -> list[list[int]]:
        return [[block for _, block in blocks] for blocks in self._blocks]

    @property
    def bytes(self) -> int:
        return sum(one.pages.block_bytes * len(blocks) for one, blocks in zip(self.slices, self._blocks, strict=True))

    def in_place(self) -> Batch:
        return self._batch([one.pages for one in self.slices], self.blocks)

    def staged(self, stages: Sequence[StagedBlocks]) -> Batch:
        return self._batch([stage.pages for stage in stages], [range(len(stage.blocks)) for stage in stages])

    def _batch(self, pages: Sequence[BlockPages], blocks: Sequence[Sequence[int]]) -> Batch:
        keys: list[str] = []
        addresses: list[list[int]] = []
        sizes: list[list[int]] = []
        for one, indexed, memory, own in zip(self.slices, self._blocks, pages, blocks, strict=True):
            keys += keys_of(self._prefix, (self._hashes[at] for at, _ in indexed), [one.part])
            addresses += memory.addresses(own)
            sizes += memory.sizes(len(own))
        return Batch(keys, addresses, sizes)


@dataclass
class _Saving:
    """A save with pending objects."""

    number: int
    #: Number of slices that are not finished.
    left: int
    missing: set[int] = field(default_factory=set)


class WorkerConnector:
    def __init__(self, settings: Settings, vllm_config: Any, kv_cache_config: Any, rank: str) -> None:
        self._settings = settings
        self._config = kv_cache_config
        self._rank = rank
        self._unsupported = unsupported_reason(vllm_config, kv_cache_config)
        self._one_group = len(kv_cache_config.kv_cache_groups) == 1
        self._layerwise = settings.load == "layerwise" and self._one_group
        if settings.load == "layerwise" and not self._one_group:
            LOG.warning('load="layerwise" needs one group of layers, but this model has several; using "async"')
        self._slices: list[LayerSlice] = []
        self._by_layer: dict[str, LayerSlice] = {}
        self._staging: StagingPool | None = None
        self._connection = settings.connection()
        self._connection.connect_in_background()
        self._transfers = Transfers(
            self._connection,
            settings.options(),
            save_threads=settings.save_threads,
            load_threads=settings.load_threads,
        )
        self._delta = DeltaCounter()
        self._lock = threading.Lock()
        self._report = Report()
        #: Asynchronous loads by request.
        self._loading: dict[str, Load] = {}
        #: Layerwise loads of this step, by part.
        self._layer_loads: dict[str, list[tuple[Load, _Objects, Loading]]] = {}
        self._load_failed = False
        self._bad_blocks: set[int] = set()
        #: Unfinished saves, by number.
        self._savings: dict[int, _Saving] = {}
        #: Parts whose saves were started in this step.
        self._started_parts: set[str] = set()
        self._ended: set[str] = set()
        # Programs that use vLLM as a library often exit without a shutdown; pending saves should still finish.
        atexit.register(self.close)

    # ------------------------------------------------------------------------------------------------------------ start

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """Registers the engine's caches."""
        if self._unsupported:
            return
        try:
            self._slices = self._make_slices(caches)
        except ValueError as error:
            self._unsupported = f"cache layout is not supported: {error}"
            return
        for one in self._slices:
            for layer in one.layers:
                self._by_layer[layer] = one
        device = next(iter(caches.values())).device
        if self._wants_staging(device):
            try:
                self._staging = StagingPool(device, self._settings.staging_mib << 20)
            except ValueError as error:
                self._unsupported = str(error)
                return
            for one in self._slices:
                one.views = views_of((caches[layer] for layer in one.layers), self._config.num_blocks)

    def _wants_staging(self, device: torch.device) -> bool:
        # Blocks that a sliding window has left are reused while the request runs, without waiting for their saves.
        keeps = all(keeps_blocks(group.kv_cache_spec) for group in self._config.kv_cache_groups)
        return device.type != "cpu" or not keeps or self._settings.staging == "true"

    def _make_slices(self, caches: dict[str, torch.Tensor]) -> list[LayerSlice]:
        blocks, slices = self._config.num_blocks, []
        for at, group in enumerate(self._config.prefix_cacheable_groups):
            names = [name for name in group.layer_names if name in caches]
            each = self._settings.layers_per_object or (1 if self._layerwise else len(names))
            for start in range(0, len(names), each):
                layers = names[start : start + each]
                tensors = [caches[name] for name in layers]
                part = self._rank
                part += "" if self._one_group else f".g{at}"
                part += "" if each >= len(names) else f".l{start}-{start + len(layers) - 1}"
                part += f".{shape_digest(tensors, blocks)}"
                slices.append(LayerSlice(part, at, layers, BlockPages.of_tensors(tensors, blocks)))
        if not slices:
            raise ValueError("no layer has blocks")
        return slices

    def handshake(self) -> Handshake:
        return Handshake([one.part for one in self._slices], self._staging is not None, self._unsupported)

    # ------------------------------------------------------------------------------------------------------------ loads

    def start(self, step: Step) -> None:
        """Starts the loads of a step."""
        if self._layerwise:
            self._start_layers(step)
        else:
            for load in step.loads:
                self._loading[load.request] = load
                self._begin_load(step.prefix, load, self._slices)
        for save in step.late:
            self._save(step.prefix, save, self._slices)
        self._ended.update(step.ended)

    def _start_layers(self, step: Step) -> None:
        self._layer_loads = {}
        self._load_failed = False
        # Layer by layer, not request by request: the first layer of all requests is needed first.
        for one in self._slices:
            for load in step.loads:
                started = (load, *self._begin_load(step.prefix, load, [one]))
                self._layer_loads.setdefault(one.part, []).append(started)

    def _begin_load(self, prefix: str, load: Load, slices: Sequence[LayerSlice]) -> tuple[_Objects, Loading]:
        objects = _Objects(prefix, load, slices)
        if self._staging is None:
            return objects, self._transfers.load(load.request, len(objects), objects.in_place)
        staging, stages = self._staging, list[StagedBlocks]()
        after = staging.mark()

        def batch() -> Batch:
            stages.extend(map(staging.allocate, (one.views for one in objects.slices), objects.blocks))
            return objects.staged(stages)

        return objects, self._transfers.load(load.request, len(objects), batch, lambda: staging.scatter(stages, after))

    def wait_layer(self, layer: str) -> None:
        """Waits until the blocks of a layer are loaded or have failed."""
        one = self._by_layer.get(layer)
        if one is None:
            return
        for load, objects, loading in self._layer_loads.pop(one.part, ()):
            failed = self._wait(loading, load.request)
            if failed:
                self._load_failed = True
                positions = {objects.positions[index] for index in failed}
                self._bad_blocks.update(load.blocks[one.group][at] for at in positions)
                with self._lock:
                    self._report.failed.add(load.request)

    def _wait(self, loading: Loading, name: str) -> list[int]:
        """Waits for the end of a load without a timeout, because the load writes to blocks that the engine uses
        afterwards. The timeout of the store bounds it."""
        while (failed := loading.wait(self._settings.transfer_timeout_s + 1)) is None:
            LOG.warning("load of %s exceeds transfer_timeout_s", name)
        return failed

    # ------------------------------------------------------------------------------------------------------------ saves

    def save_layer(self, step: Step, layer: str) -> None:
        """Called when a layer is computed. Saves the object if the layer is its last one."""
        one = self._by_layer.get(layer)
        if self._layerwise and one is not None and layer == one.layers[-1]:
            self._save_slice(step, one)

    def save(self, step: Step) -> None:
        """Called when all layers are computed."""
        if not self._layerwise:
            for save in step.saves:
                self._save(step.prefix, save, self._slices)
            return
        # Slices that the forward pass did not reach.
        for one in self._slices:
            self.wait_layer(one.layers[0])
            self._save_slice(step, one)
        self._started_parts.clear()
        if step.loads:
            with self._lock:
                self._report.steps[step.number] = (0, 1) if self._load_failed else (1, 0)

    def _save_slice(self, step: Step, one: LayerSlice) -> None:
        if one.part not in self._started_parts:
            self._started_parts.add(one.part)
            for save in step.saves:
                self._save(step.prefix, save, [one])

    def _save(self, prefix: str, save: Save, slices: Sequence[LayerSlice]) -> None:
        """Starts a save of some slices. Other calls save the other slices of the same save."""
        objects = _Objects(prefix, save, slices)
        with self._lock:
            saving = self._savings.setdefault(save.number, _Saving(save.number, len(self._slices)))

        def on_done(failed: Sequence[int]) -> None:
            self._saved(saving, objects, failed)

        if self._staging is None:
            started = self._transfers.save(save.request, len(objects), objects.in_place, on_done=on_done)
        else:
            started = self._save_copies(self._staging, save.request, objects, on_done)
        if not started:
            on_done(range(len(objects)))

    def _save_copies(
        self, staging: StagingPool, name: str, objects: _Objects, on_done: Callable[[Sequence[int]], None]
    ) -> bool:
        size = objects.bytes
        if not self._connection.available or not staging.reserve(size):
            self._transfers.counts.save_failures += len(objects)
            return False
        stages = list(map(staging.allocate, (one.views for one in objects.slices), objects.blocks))
        copied = staging.gather(stages)

        def batch() -> Batch:
            staging.wait(copied)
            return objects.staged(stages)

        def on_saved(failed: Sequence[int]) -> None:
            stages.clear()
            staging.release(size)
            on_done(failed)

        started = self._transfers.save(name, len(objects), batch, on_done=on_saved)
        if not started:
            staging.release(size)
        return started

    def _saved(self, saving: _Saving, objects: _Objects, failed: Sequence[int]) -> None:
        with self._lock:
            saving.missing.update(objects.positions[index] for index in failed)
            saving.left -= objects.slice_count
            if saving.left == 0:
                del self._savings[saving.number]
                self._report.saved[saving.number] = (1, saving.missing)

    def preempt(self, step: Step) -> None:
        """Waits for the saves of preempted requests: their blocks may be overwritten afterwards."""
        if self._staging is not None or not step.preempted:
            return
        while not self._transfers.wait_saved(step.preempted, self._settings.transfer_timeout_s + 1):
            LOG.warning("saves of preempted requests exceed transfer_timeout_s")

    # ---------------------------------------------------------------------------------------------------------- results

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Returns the requests whose saves ended, those whose loads ended, and those whose loads failed."""
        received, failed_requests = set[str](), set[str]()
        for name, failed in self._transfers.take_loaded():
            load = self._loading.pop(name, None)
            if load is None:  # a layerwise load
                continue
            received.add(name)
            if failed:
                self._record_failure(load, failed, failed_requests)
        sent = {name for name in self._ended if not self._transfers.is_saving(name)}
        self._ended -= sent
        return sent, received, failed_requests

    def _record_failure(self, load: Load, failed: Sequence[int], failed_requests: set[str]) -> None:
        with self._lock:
            self._report.failed.add(load.request)
        if not self._one_group:
            # A block number is ambiguous without its group, which vLLM's interface does not take.
            failed_requests.add(load.request)
            return
        positions = _Objects("", load, self._slices).positions
        self._bad_blocks.update(load.blocks[0][positions[index]] for index in failed)

    def bad_blocks(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def report(self) -> Report | None:
        with self._lock:
            report, self._report = self._report, Report()
        return report or None

    def stats(self) -> MoontideStats | None:
        return self._delta.since(of_transfers(self._transfers.counts))

    def close(self) -> None:
        """Finishes the pending transfers and closes the connection. Further calls do nothing."""
        atexit.unregister(self.close)
        self._transfers.close()
        self._connection.close()


def unsupported_reason(vllm_config: Any, kv_cache_config: Any) -> str:
    """Returns the reason why a configuration is not supported, or ""."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "contexts split between ranks (DCP, PCP) are not supported"
    groups = kv_cache_config.kv_cache_groups
    if any(isinstance(spec, MambaSpec) for group in groups for spec in _specs(group.kv_cache_spec)):
        return "layers with a state instead of blocks (Mamba) are not supported"
    if len(kv_cache_config.prefix_cacheable_group_ids) != len(groups) or not groups:
        return "groups of layers whose blocks have no hash are not supported"
    sizes = {group.kv_cache_spec.block_size for group in groups}
    if sizes != {vllm_config.cache_config.block_size}:
        return f"groups of layers with blocks of different sizes ({sorted(sizes)}) are not supported"
    if kv_cache_config.hash_block_size not in (None, vllm_config.cache_config.block_size):
        return "hashes of less than a block (prefix_match_unit) are not supported"
    return ""


def keeps_blocks(spec: Any) -> bool:
    """Whether a running request keeps all its blocks."""
    return all(isinstance(one, FullAttentionSpec) and not isinstance(one, RSWASpec) for one in _specs(spec))


def _specs(spec: Any) -> Iterable[Any]:
    return spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)


def shape_digest(tensors: Sequence[torch.Tensor], blocks: int) -> str:
    """Returns a digest of the memory layout of a block. Ranks with another layout must not share blocks."""
    layout = "; ".join(f"{tensor.dtype} {memory_order(tensor, blocks)}" for tensor in tensors)
    return hashlib.sha256(layout.encode()).hexdigest()[:8]
