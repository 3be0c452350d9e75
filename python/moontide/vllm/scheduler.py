"""The scheduler's half of the connector: which blocks are loaded, which are saved, which must not be used again yet.

It never waits and never calls the store: lookups are answered in the background, and everything else is bookkeeping.

Invariants:
 - No block is given back to the engine while a save may still read it. Either it is copied in the step in which it is
   saved (``staged``), or a request that ends keeps its blocks until all its saves are over, and workers finish those
   of a preempted request before its blocks are written again.
 - Nothing is saved that was computed from blocks whose load is not known to have succeeded on all ranks. Rank 1 cannot
   tell that rank 0 read garbage, and would store its consequences under a right name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from vllm.distributed.kv_events import MEDIUM_STORAGE, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from moontide.kv import Departures, Lookups, keys_of

from .messages import Handshake, Load, Report, Save, Step
from .settings import Settings, namespace
from .stats import Meter, MoontideStats, of_lookups

LOG = logging.getLogger("moontide.vllm")


@dataclass
class _Tracked:
    """A request since it first got blocks."""

    request: Any
    #: How many of its first blocks are saved, or need not be.
    saved: int = 0
    #: Saves that are not over on all ranks.
    under_way: int = 0
    #: Whether blocks are being loaded while it waits.
    loading: bool = False
    #: Whether a load failed: what the lookup says is not to be trusted any more.
    load_failed: bool = False


@dataclass
class _Pending:
    """A save that is not over on all ranks."""

    request: str
    ranks: int = 0
    missing: set[int] = field(default_factory=set)
    #: What others are told when it is over: one event for each block, and its hash.
    events: list[tuple[KVCacheEvent, bytes]] = field(default_factory=list)


class SchedulerSide:
    def __init__(self, settings: Settings, vllm_config: Any, kv_cache_config: Any) -> None:
        self._settings = settings
        self._block_size = int(vllm_config.cache_config.block_size)
        self._world = int(vllm_config.parallel_config.world_size)
        transfer = vllm_config.kv_transfer_config
        self._may_load = transfer.kv_role != "kv_producer"
        self._may_save = transfer.kv_role != "kv_consumer"
        self._groups: Sequence[int] = kv_cache_config.prefix_cacheable_group_ids
        self._in_batch = settings.load == "layerwise" and len(kv_cache_config.kv_cache_groups) == 1
        self._prefix = namespace(vllm_config, settings, self._block_size).prefix
        events = vllm_config.kv_events_config
        self._with_events = bool(events is not None and events.enable_kv_cache_events)

        self._door = settings.door()
        self._door.connect_early()
        self._lookups = Lookups(self._door, patience=settings.patience_ms / 1000)
        #: Who hears which of the blocks that routers were told of have left the store.
        self._departures = Departures(self._door, self._keys_of_block) if self._with_events else None
        self._meter = Meter()
        #: What all ranks together have of a block. Empty: nothing is loaded or saved.
        self._parts: list[str] = []
        self._staged = False
        #: Where the engine keeps which request has which blocks.
        self.block_ids: Callable[[str], tuple[list[int], ...]] | None = None

        self._tracked: dict[str, _Tracked] = {}
        #: From which block on the last answer counts.
        self._offered: dict[str, int] = {}
        self._loads: list[Load] = []
        self._late: list[Save] = []
        self._ended: list[str] = []
        self._pending: dict[int, _Pending] = {}
        self._events: list[KVCacheEvent] = []
        #: Hashes of the blocks in them that were saved.
        self._told: list[bytes] = []
        self._step = 0
        self._saves = 0
        #: The last step in which layers waited for loads and of which not all ranks have told; 0 if there is none.
        self._unsure = 0

    # ------------------------------------------------------------------------------------------------------------ start

    def greet(self, workers: Iterable[Handshake]) -> None:
        """All workers have their caches, and say what they have of a block."""
        workers = list(workers)
        refusal = next((worker.refuses for worker in workers if worker.refuses), "")
        if refusal:
            LOG.warning("nothing is loaded or saved: %s", refusal)
            return
        if len(workers) != self._world:
            LOG.warning("nothing is loaded or saved: %d of %d workers have said hello", len(workers), self._world)
            return
        self._parts = [part for worker in workers for part in worker.parts]
        self._staged = all(worker.staged for worker in workers)
        LOG.info("blocks are %s… with parts %s", self._prefix, ", ".join(self._parts))

    # ------------------------------------------------------------------------------------------------------------ loads

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond those that the engine has can be loaded; nothing if that is not known yet."""
        if not self._parts or not self._may_load or request.skip_reading_prefix_cache:
            return 0, False
        name = request.request_id
        known = self._tracked.get(name)
        if known is not None and known.load_failed:
            return 0, False
        hashes = request.block_hashes
        first = computed // self._block_size
        # At least one token must be computed: nothing else gives the next one.
        last = min((request.num_tokens - 1) // self._block_size, len(hashes))
        prefix, parts = self._prefix, self._parts
        found = self._lookups.ask(name, last - first, lambda: keys_of(prefix, hashes[first:last], parts))
        if not found:
            return found, False
        self._offered[name] = first
        return found * self._block_size, not self._in_batch

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """The request got its blocks; so many of its tokens are to be loaded."""
        name = request.request_id
        self._lookups.forget(name)
        first = self._offered.pop(name, 0)
        tracked = self._tracked.get(name)
        if tracked is None:
            tracked = self._tracked[name] = _Tracked(request)
        count = external // self._block_size
        if count < 1:
            return
        ids = blocks.get_block_ids()
        wanted = slice(first, first + count)
        self._loads.append(Load(name, request.block_hashes[wanted], [ids[group][wanted] for group in self._groups]))
        tracked.loading = not self._in_batch

    # ------------------------------------------------------------------------------------------------------------ steps

    def step(self, output: Any) -> Step:
        """What workers do in this step. Everything that was to be told is told."""
        self._step += 1
        step = Step(self._step, self._prefix, loads=self._loads, preempted=sorted(output.preempted_req_ids or ()))
        self._loads = []
        if step.loads and self._in_batch:
            self._unsure = self._step
        for new in output.scheduled_new_reqs:
            self._begin(new.req_id, new.num_computed_tokens)
            self._save_full(step, new.req_id, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id])
        cached = output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                self._begin(name, computed)
            else:
                self._cut(name, computed)
            self._save_full(step, name, computed + output.num_scheduled_tokens[name])
        if not self._unsure:
            step.late, self._late = self._late, []
            step.ended, self._ended = self._ended, []
        return step

    def _begin(self, name: str, computed: int) -> None:
        """What it begins with was saved by whoever computed it."""
        tracked = self._tracked.get(name)
        if tracked is not None:
            tracked.saved = computed // self._block_size
            tracked.loading = False

    def _cut(self, name: str, computed: int) -> None:
        """After a load that failed in the batch, fewer tokens are computed than before."""
        tracked = self._tracked.get(name)
        if tracked is not None and tracked.load_failed:
            tracked.saved = min(tracked.saved, computed // self._block_size)

    def _save_full(self, step: Step, name: str, computed: int) -> None:
        """Saves the blocks that are full after so many tokens, unless somebody has to be heard first: then later."""
        tracked = self._tracked.get(name)
        if tracked is None or self._unsure or not self._may_save or not self._parts:
            return
        full = self._full(tracked.request, computed)
        if full > tracked.saved and self.block_ids is not None:
            step.saves.append(self._save(tracked, full, self.block_ids(name)))

    def _full(self, request: Any, computed: int) -> int:
        """How many blocks are full. One whose tokens are not all known has no hash yet; guesses have none either."""
        if not self._settings.save_decode:
            computed = min(computed, request.num_prompt_tokens)
        return min(computed // self._block_size, len(request.block_hashes))

    def _save(self, tracked: _Tracked, full: int, ids: tuple[list[int], ...]) -> Save:
        wanted = slice(tracked.saved, full)
        request = tracked.request
        self._saves += 1
        save = Save(
            self._saves,
            request.request_id,
            request.block_hashes[wanted],
            [ids[group][wanted] for group in self._groups],
        )
        events = self._describe(request, tracked.saved, full) if self._with_events else []
        self._pending[save.number] = _Pending(request.request_id, events=events)
        tracked.under_way += 1
        tracked.saved = full
        return save

    def finished(self, request: Any, ids: tuple[list[int], ...]) -> bool:
        """The request has ended. True: its blocks are kept until workers say that its saves are over."""
        name = request.request_id
        self._lookups.forget(name)
        self._offered.pop(name, None)
        tracked = self._tracked.pop(name, None)
        # A load that is under way keeps the blocks by itself, and there is nothing of this request to save.
        if tracked is None or tracked.loading:
            return False
        if self._may_save and self._parts and not tracked.load_failed:
            # The last token was never computed; what was counted in advance for it does not count.
            full = self._full(request, min(request.num_computed_tokens, request.num_tokens - 1))
            full = min(full, *(len(ids[group]) for group in self._groups))
            if full > tracked.saved:
                self._late.append(self._save(tracked, full, ids))
                self._ended.append(name)
                return True
        if tracked.under_way and not self._staged:
            self._ended.append(name)
            return True
        return False

    # ---------------------------------------------------------------------------------------------------------- reports

    def heard(self, report: Report | None, received: Iterable[str]) -> None:
        """What ranks told in a step."""
        for name in received:
            tracked = self._tracked.get(name)
            if tracked is not None:
                tracked.loading = False
        if report is None:
            return
        for name in report.failed:
            tracked = self._tracked.get(name)
            if tracked is not None:
                tracked.load_failed = True
        for number, (whole, broken) in report.steps.items():
            if number == self._unsure and whole + broken >= self._world:
                self._unsure = 0
        for number, (ranks, missing) in report.saved.items():
            pending = self._pending.get(number)
            if pending is None:
                continue
            pending.ranks += ranks
            pending.missing |= missing
            if pending.ranks >= self._world:
                self._over(number, pending)

    def _over(self, number: int, pending: _Pending) -> None:
        del self._pending[number]
        tracked = self._tracked.get(pending.request)
        if tracked is not None:
            tracked.under_way -= 1
        saved = [told for at, told in enumerate(pending.events) if at not in pending.missing]
        self._events += [event for event, _ in saved]
        self._told += [block for _, block in saved]

    # ----------------------------------------------------------------------------------------------------------- events

    def _describe(self, request: Any, first: int, last: int) -> list[tuple[KVCacheEvent, bytes]]:
        """What routers are told about blocks once they are in the store, and the hash of each."""
        size, hashes, lora = self._block_size, request.block_hashes, request.lora_request
        events = [
            BlockStored(
                block_hashes=[maybe_convert_block_hash(hashes[at])],
                parent_block_hash=maybe_convert_block_hash(hashes[at - 1]) if at else None,
                token_ids=list(request.all_token_ids[at * size : (at + 1) * size]),
                block_size=size,
                lora_id=lora.lora_int_id if lora else None,
                medium=MEDIUM_STORAGE,
                lora_name=lora.lora_name if lora else None,
            )
            for at in range(first, last)
        ]
        return list(zip(events, hashes[first:last], strict=True))

    def _keys_of_block(self, block: Any) -> list[str]:
        return keys_of(self._prefix, [block], self._parts)

    def take_events(self) -> list[KVCacheEvent]:
        """Since the last time. What has left the store is of blocks that were told of before, and comes first."""
        events, self._events = self._events, []
        if self._departures is None:
            return events
        gone = self._departures.take()
        told, self._told = self._told, []
        self._departures.announced(told)
        if gone:
            hashes = [maybe_convert_block_hash(cast(Any, block)) for block in gone]
            events.insert(0, BlockRemoved(block_hashes=hashes, medium=MEDIUM_STORAGE))
        return events

    def stats(self) -> MoontideStats | None:
        return self._meter.since(of_lookups(self._lookups.counts))

    def reset(self) -> None:
        """Forgets answers. What is in the store stays: others use it."""
        self._lookups.forget_all()
        if self._with_events:
            self._events.append(AllBlocksCleared())

    def close(self) -> None:
        self._lookups.close()
        if self._departures is not None:
            self._departures.close()
        self._door.close()
