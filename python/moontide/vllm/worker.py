"""A worker's half of the connector: moves blocks between the engine's memory and the store.

A block is one object for each `Slice` of layers: all layers of a group unless told otherwise. Transfers run in the
background. What fails to load is reported and computed by the engine; what fails to be saved is forgotten.
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

from moontide.kv import Batch, Pages, Transfers, keys_of
from moontide.kv import Load as Loading
from moontide.kv.pages import order

from .messages import NULL_BLOCK, Handshake, Load, Report, Save, Step
from .settings import Settings
from .staging import Stage, Stager, views_of
from .stats import Meter, MoontideStats, of_transfers

LOG = logging.getLogger("moontide.vllm")


@dataclass
class Slice:
    """Layers whose bytes are one object."""

    part: str
    #: Which of a message's lists of blocks is theirs.
    group: int
    layers: list[str]
    pages: Pages
    #: The same for copies; only if they are made.
    views: list[torch.Tensor] = field(default_factory=list)


class _Objects:
    """The objects of some blocks, slice by slice. Where a group has no block any more there is no object."""

    def __init__(self, prefix: str, message: Load | Save, slices: Sequence[Slice]) -> None:
        self._prefix = prefix
        self._hashes = message.hashes
        #: How many slices were asked for; those without any block are left out below.
        self.asked = len(slices)
        there = [
            [(at, block) for at, block in enumerate(message.blocks[one.group]) if block != NULL_BLOCK] for one in slices
        ]
        self.slices = [one for one, some in zip(slices, there, strict=True) if some]
        #: For each slice: which of the message's blocks, and where.
        self._there = [some for some in there if some]
        #: Of each object, to which of the message's blocks it belongs.
        self.positions = [at for there in self._there for at, _ in there]

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def blocks(self) -> list[list[int]]:
        return [[block for _, block in there] for there in self._there]

    @property
    def bytes(self) -> int:
        return sum(one.pages.block_bytes * len(there) for one, there in zip(self.slices, self._there, strict=True))

    def in_place(self) -> Batch:
        return self._batch([one.pages for one in self.slices], self.blocks)

    def staged(self, stages: Sequence[Stage]) -> Batch:
        return self._batch([stage.pages for stage in stages], [range(len(stage.blocks)) for stage in stages])

    def _batch(self, pages: Sequence[Pages], blocks: Sequence[Sequence[int]]) -> Batch:
        keys: list[str] = []
        addresses: list[list[int]] = []
        sizes: list[list[int]] = []
        for one, there, memory, own in zip(self.slices, self._there, pages, blocks, strict=True):
            keys += keys_of(self._prefix, (self._hashes[at] for at, _ in there), [one.part])
            addresses += memory.addresses(own)
            sizes += memory.sizes(len(own))
        return Batch(keys, addresses, sizes)


@dataclass
class _Saving:
    """A save of which some objects are on their way."""

    number: int
    left: int
    missing: set[int] = field(default_factory=set)


class WorkerSide:
    def __init__(self, settings: Settings, vllm_config: Any, kv_cache_config: Any, rank: str) -> None:
        self._settings = settings
        self._config = kv_cache_config
        self._rank = rank
        self._refuses = refusal(vllm_config, kv_cache_config)
        self._one_group = len(kv_cache_config.kv_cache_groups) == 1
        self._layerwise = settings.load == "layerwise" and self._one_group
        if settings.load == "layerwise" and not self._one_group:
            LOG.warning('load="layerwise" needs one group of layers, and this model has several: "async" is used')
        self._slices: list[Slice] = []
        self._by_layer: dict[str, Slice] = {}
        self._stager: Stager | None = None
        self._door = settings.door()
        self._door.connect_early()
        self._transfers = Transfers(self._door, settings.options(), savers=settings.savers, loaders=settings.loaders)
        self._meter = Meter()
        self._lock = threading.Lock()
        self._report = Report()
        #: Async loads by request.
        self._loading: dict[str, Load] = {}
        #: Loads of this step that layers wait for, by part.
        self._waited: dict[str, list[tuple[Load, _Objects, Loading]]] = {}
        self._broken = False
        self._bad_blocks: set[int] = set()
        #: Saves of which not all objects are over, by number.
        self._savings: dict[int, _Saving] = {}
        #: Parts that are on their way in this step.
        self._gone: set[str] = set()
        self._ended: set[str] = set()
        # Programs that use vLLM as a library often end without a word; what waits to be saved should not end with them.
        atexit.register(self.close)

    # ------------------------------------------------------------------------------------------------------------ start

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """The engine's memory is there."""
        if self._refuses:
            return
        try:
            self._slices = self._cut(caches)
        except ValueError as error:
            self._refuses = f"this layout of the cache is not supported: {error}"
            return
        for one in self._slices:
            for layer in one.layers:
                self._by_layer[layer] = one
        device = next(iter(caches.values())).device
        if self._wants_staging(device):
            try:
                self._stager = Stager(device, self._settings.staging_mib << 20)
            except ValueError as error:
                self._refuses = str(error)
                return
            for one in self._slices:
                one.views = views_of((caches[layer] for layer in one.layers), self._config.num_blocks)

    def _wants_staging(self, device: torch.device) -> bool:
        # Blocks that a window has left are used again while the request runs: nobody would wait for their saves.
        keeps = all(keeps_blocks(group.kv_cache_spec) for group in self._config.kv_cache_groups)
        return device.type != "cpu" or not keeps or self._settings.staging == "true"

    def _cut(self, caches: dict[str, torch.Tensor]) -> list[Slice]:
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
                slices.append(Slice(part, at, layers, Pages.of_tensors(tensors, blocks)))
        if not slices:
            raise ValueError("there are no layers with blocks")
        return slices

    def handshake(self) -> Handshake:
        return Handshake([one.part for one in self._slices], self._stager is not None, self._refuses)

    # ------------------------------------------------------------------------------------------------------------ loads

    def start(self, step: Step) -> None:
        """Begins the loads of a step."""
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
        self._waited = {}
        self._broken = False
        # Layer after layer, and not request after request: the first layer of all requests is needed first.
        for one in self._slices:
            for load in step.loads:
                begun = (load, *self._begin_load(step.prefix, load, [one]))
                self._waited.setdefault(one.part, []).append(begun)

    def _begin_load(self, prefix: str, load: Load, slices: Sequence[Slice]) -> tuple[_Objects, Loading]:
        objects = _Objects(prefix, load, slices)
        if self._stager is None:
            return objects, self._transfers.load(load.request, len(objects), objects.in_place)
        stager, stages = self._stager, list[Stage]()
        after = stager.mark()

        def batch() -> Batch:
            stages.extend(map(stager.room, (one.views for one in objects.slices), objects.blocks))
            return objects.staged(stages)

        return objects, self._transfers.load(load.request, len(objects), batch, lambda: stager.scatter(stages, after))

    def wait_layer(self, layer: str) -> None:
        """Waits until the layer's blocks are there, or have failed."""
        one = self._by_layer.get(layer)
        if one is None:
            return
        for load, objects, loading in self._waited.pop(one.part, ()):
            failed = self._wait(loading, load.request)
            if failed:
                self._broken = True
                positions = {objects.positions[index] for index in failed}
                self._bad_blocks.update(load.blocks[one.group][at] for at in positions)
                with self._lock:
                    self._report.failed.add(load.request)

    def _wait(self, loading: Loading, name: str) -> list[int]:
        """Until it is over, whatever it takes: it writes into blocks that would otherwise be used. The store's own
        deadline bounds it."""
        while (failed := loading.wait(self._settings.deadline_s + 1)) is None:
            LOG.warning("a load of %s takes longer than its deadline", name)
        return failed

    # ------------------------------------------------------------------------------------------------------------ saves

    def save_layer(self, step: Step, layer: str) -> None:
        """A layer is computed. If it is the last of an object, that object can go."""
        one = self._by_layer.get(layer)
        if self._layerwise and one is not None and layer == one.layers[-1]:
            self._save_slice(step, one)

    def save(self, step: Step) -> None:
        """All layers are computed."""
        if not self._layerwise:
            for save in step.saves:
                self._save(step.prefix, save, self._slices)
            return
        # Those to which the forward did not come, if there was one.
        for one in self._slices:
            self.wait_layer(one.layers[0])
            self._save_slice(step, one)
        self._gone.clear()
        if step.loads:
            with self._lock:
                self._report.steps[step.number] = (0, 1) if self._broken else (1, 0)

    def _save_slice(self, step: Step, one: Slice) -> None:
        if one.part not in self._gone:
            self._gone.add(one.part)
            for save in step.saves:
                self._save(step.prefix, save, [one])

    def _save(self, prefix: str, save: Save, slices: Sequence[Slice]) -> None:
        """Begins a save of all slices; or of some, the others of the same save before or after."""
        objects = _Objects(prefix, save, slices)
        with self._lock:
            saving = self._savings.setdefault(save.number, _Saving(save.number, len(self._slices)))

        def told(failed: Sequence[int]) -> None:
            self._saved(saving, objects, failed)

        if self._stager is None:
            began = self._transfers.save(save.request, len(objects), objects.in_place, told=told)
        else:
            began = self._save_copies(self._stager, save.request, objects, told)
        if not began:
            told(range(len(objects)))

    def _save_copies(self, stager: Stager, name: str, objects: _Objects, told: Callable[[Sequence[int]], None]) -> bool:
        size = objects.bytes
        if not self._door.is_open or not stager.take(size):
            self._transfers.counts.failed_saves += len(objects)
            return False
        stages = list(map(stager.room, (one.views for one in objects.slices), objects.blocks))
        copied = stager.gather(stages)

        def batch() -> Batch:
            stager.wait(copied)
            return objects.staged(stages)

        def over(failed: Sequence[int]) -> None:
            stages.clear()
            stager.give_back(size)
            told(failed)

        began = self._transfers.save(name, len(objects), batch, told=over)
        if not began:
            stager.give_back(size)
        return began

    def _saved(self, saving: _Saving, objects: _Objects, failed: Sequence[int]) -> None:
        with self._lock:
            saving.missing.update(objects.positions[index] for index in failed)
            saving.left -= objects.asked
            if saving.left == 0:
                del self._savings[saving.number]
                self._report.saved[saving.number] = (1, saving.missing)

    def preempt(self, step: Step) -> None:
        """Blocks of these requests may be written from now on: their saves must be over."""
        if self._stager is not None or not step.preempted:
            return
        while not self._transfers.wait_saved(step.preempted, self._settings.deadline_s + 1):
            LOG.warning("saves of preempted requests take longer than their deadline")

    # ------------------------------------------------------------------------------------------------------------- ends

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose saves are over, whose loads are over, and those of the latter that have failed."""
        received, failed_requests = set[str](), set[str]()
        for name, failed in self._transfers.loaded():
            load = self._loading.pop(name, None)
            if load is None:  # one that layers have waited for
                continue
            received.add(name)
            if failed:
                self._lost(load, failed, failed_requests)
        sent = {name for name in self._ended if not self._transfers.saving(name)}
        self._ended -= sent
        return sent, received, failed_requests

    def _lost(self, load: Load, failed: Sequence[int], failed_requests: set[str]) -> None:
        with self._lock:
            self._report.failed.add(load.request)
        if not self._one_group:
            # Block numbers mean nothing without their group, and the engine does not ask for it.
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
        return self._meter.since(of_transfers(self._transfers.counts))

    def close(self) -> None:
        """Finishes what is under way. A second time it does nothing."""
        atexit.unregister(self.close)
        self._transfers.close()
        self._door.close()


def refusal(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why nothing can be kept of such a cache, or nothing."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "contexts that are split between ranks (DCP, PCP) are not supported"
    groups = kv_cache_config.kv_cache_groups
    if any(isinstance(spec, MambaSpec) for group in groups for spec in _specs(group.kv_cache_spec)):
        return "layers with a state instead of blocks (Mamba) are not supported"
    if len(kv_cache_config.prefix_cacheable_group_ids) != len(groups) or not groups:
        return "a group of layers has blocks that no hash stands for"
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
    """Of how the numbers of a block lie. Ranks whose bytes lie otherwise must not read them."""
    said = "; ".join(f"{tensor.dtype} {order(tensor, blocks)}" for tensor in tensors)
    return hashlib.sha256(said.encode()).hexdigest()[:8]
