"""Connector of the scheduler: decides which blocks are loaded, which are saved, and which must not be reused yet.

It never blocks and never calls the store: lookups run in the background, and everything else is bookkeeping.

Invariants:
 - A block is not returned to the engine while a save may still read it. Either it is copied in the step of its save
   (``staged``), or a finished request keeps its blocks until all its saves end, and workers finish the saves of a
   preempted request before its blocks are overwritten.
 - A block is saved only if it was computed from blocks whose load is known to have succeeded on all ranks. Rank 1 does
   not know that rank 0 failed to load a block, and would save wrong bytes under a valid key.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from vllm.distributed.kv_events import MEDIUM_STORAGE, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from moontide.kv import Lookups, RemovalTracker, keys_of

from .messages import Handshake, Load, Report, Save, Step
from .settings import Settings, namespace
from .stats import DeltaCounter, MoontideStats, of_lookups

LOG = logging.getLogger("moontide.vllm")


@dataclass
class _Tracked:
    """A request that has blocks."""

    request: Any
    #: Number of leading blocks that are saved or need not be saved.
    saved: int = 0
    #: Number of saves that some rank has not finished.
    pending_saves: int = 0
    #: Whether the request waits for an asynchronous load.
    loading: bool = False
    #: Whether a load failed; the request does not load again.
    load_failed: bool = False


@dataclass
class _Pending:
    """A save that some rank has not finished."""

    request: str
    ranks: int = 0
    missing: set[int] = field(default_factory=set)
    #: Events to publish after the save: one per block, with its hash.
    events: list[tuple[KVCacheEvent, bytes]] = field(default_factory=list)


class SchedulerConnector:
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

        self._connection = settings.connection()
        self._connection.connect_in_background()
        self._lookups = Lookups(self._connection, timeout=settings.lookup_timeout_ms / 1000)
        #: Tracks removals of announced blocks; None if events are off.
        self._removals = RemovalTracker(self._connection, self._keys_of_block) if self._with_events else None
        self._delta = DeltaCounter()
        #: Parts of a block on all ranks. Empty: nothing is loaded or saved.
        self._parts: list[str] = []
        self._staged = False
        #: Returns the blocks of a request; set by the engine.
        self.block_ids: Callable[[str], tuple[list[int], ...]] | None = None

        self._tracked: dict[str, _Tracked] = {}
        #: First block of the last lookup result, by request.
        self._offered: dict[str, int] = {}
        self._loads: list[Load] = []
        self._late: list[Save] = []
        self._ended: list[str] = []
        self._pending: dict[int, _Pending] = {}
        self._events: list[KVCacheEvent] = []
        #: Hashes of the saved blocks in `_events`.
        self._announced: list[bytes] = []
        self._step = 0
        self._saves = 0
        #: Last step with layerwise loads that some rank has not reported; 0 if there is none.
        self._unconfirmed_step = 0

    # ------------------------------------------------------------------------------------------------------------ start

    def register_workers(self, workers: Iterable[Handshake]) -> None:
        """Registers the workers and their parts, after all caches are registered."""
        workers = list(workers)
        reason = next((worker.unsupported for worker in workers if worker.unsupported), "")
        if reason:
            LOG.warning("connector disabled, no blocks are loaded or saved: %s", reason)
            return
        if len(workers) != self._world:
            LOG.warning(
                "connector disabled, no blocks are loaded or saved: %d of %d workers sent a handshake",
                len(workers),
                self._world,
            )
            return
        self._parts = [part for worker in workers for part in worker.parts]
        self._staged = all(worker.staged for worker in workers)
        LOG.info("key prefix %s, parts %s", self._prefix, ", ".join(self._parts))

    # ------------------------------------------------------------------------------------------------------------ loads

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Returns how many tokens beyond the computed ones can be loaded, None if it is not known yet; and whether the
        load is asynchronous."""
        if not self._parts or not self._may_load or request.skip_reading_prefix_cache:
            return 0, False
        name = request.request_id
        tracked = self._tracked.get(name)
        if tracked is not None and tracked.load_failed:
            return 0, False
        hashes = request.block_hashes
        first = computed // self._block_size
        # At least one token must be computed, to produce the next token.
        last = min((request.num_tokens - 1) // self._block_size, len(hashes))
        prefix, parts = self._prefix, self._parts
        found = self._lookups.ask(name, last - first, lambda: keys_of(prefix, hashes[first:last], parts))
        if not found:
            return found, False
        self._offered[name] = first
        return found * self._block_size, not self._in_batch

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Called when a request got its blocks. ``external`` is the number of tokens to load."""
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
        span = slice(first, first + count)
        self._loads.append(Load(name, request.block_hashes[span], [ids[group][span] for group in self._groups]))
        tracked.loading = not self._in_batch

    # ------------------------------------------------------------------------------------------------------------ steps

    def step(self, output: Any) -> Step:
        """Returns the work of the workers in this step."""
        self._step += 1
        step = Step(self._step, self._prefix, loads=self._loads, preempted=sorted(output.preempted_req_ids or ()))
        self._loads = []
        if step.loads and self._in_batch:
            self._unconfirmed_step = self._step
        for new in output.scheduled_new_reqs:
            self._begin(new.req_id, new.num_computed_tokens)
            self._save_full(step, new.req_id, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id])
        cached = output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                self._begin(name, computed)
            else:
                self._truncate(name, computed)
            self._save_full(step, name, computed + output.num_scheduled_tokens[name])
        if not self._unconfirmed_step:
            step.late, self._late = self._late, []
            step.ended, self._ended = self._ended, []
        return step

    def _begin(self, name: str, computed: int) -> None:
        """Starts a request. Its computed blocks were saved when they were computed."""
        tracked = self._tracked.get(name)
        if tracked is not None:
            tracked.saved = computed // self._block_size
            tracked.loading = False

    def _truncate(self, name: str, computed: int) -> None:
        """Adjusts a request after a failed layerwise load, which reduces the number of computed tokens."""
        tracked = self._tracked.get(name)
        if tracked is not None and tracked.load_failed:
            tracked.saved = min(tracked.saved, computed // self._block_size)

    def _save_full(self, step: Step, name: str, computed: int) -> None:
        """Saves the blocks that are full after ``computed`` tokens. Does nothing while a layerwise load is unconfirmed;
        the blocks are then saved in a later step."""
        tracked = self._tracked.get(name)
        if tracked is None or self._unconfirmed_step or not self._may_save or not self._parts:
            return
        full = self._full(tracked.request, computed)
        if full > tracked.saved and self.block_ids is not None:
            step.saves.append(self._save(tracked, full, self.block_ids(name)))

    def _full(self, request: Any, computed: int) -> int:
        """Returns the number of full blocks. Blocks with unknown or speculative tokens have no hash and do not
        count."""
        if not self._settings.save_decode:
            computed = min(computed, request.num_prompt_tokens)
        return min(computed // self._block_size, len(request.block_hashes))

    def _save(self, tracked: _Tracked, full: int, ids: tuple[list[int], ...]) -> Save:
        span = slice(tracked.saved, full)
        request = tracked.request
        self._saves += 1
        save = Save(
            self._saves,
            request.request_id,
            request.block_hashes[span],
            [ids[group][span] for group in self._groups],
        )
        events = self._describe(request, tracked.saved, full) if self._with_events else []
        self._pending[save.number] = _Pending(request.request_id, events=events)
        tracked.pending_saves += 1
        tracked.saved = full
        return save

    def finished(self, request: Any, ids: tuple[list[int], ...]) -> bool:
        """Called when a request ends. Returns True if its blocks must be kept until workers report the end of its
        saves."""
        name = request.request_id
        self._lookups.forget(name)
        self._offered.pop(name, None)
        tracked = self._tracked.pop(name, None)
        # A pending load keeps the blocks itself, and the request has no blocks to save.
        if tracked is None or tracked.loading:
            return False
        if self._may_save and self._parts and not tracked.load_failed:
            # The last token was not computed, although vLLM may already count it.
            full = self._full(request, min(request.num_computed_tokens, request.num_tokens - 1))
            full = min(full, *(len(ids[group]) for group in self._groups))
            if full > tracked.saved:
                self._late.append(self._save(tracked, full, ids))
                self._ended.append(name)
                return True
        if tracked.pending_saves and not self._staged:
            self._ended.append(name)
            return True
        return False

    # ---------------------------------------------------------------------------------------------------------- reports

    def on_worker_report(self, report: Report | None, received: Iterable[str]) -> None:
        """Processes the aggregated report of all ranks for a step."""
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
        for number, (complete, failed) in report.steps.items():
            if number == self._unconfirmed_step and complete + failed >= self._world:
                self._unconfirmed_step = 0
        for number, (ranks, missing) in report.saved.items():
            pending = self._pending.get(number)
            if pending is None:
                continue
            pending.ranks += ranks
            pending.missing |= missing
            if pending.ranks >= self._world:
                self._finish_save(number, pending)

    def _finish_save(self, number: int, pending: _Pending) -> None:
        del self._pending[number]
        tracked = self._tracked.get(pending.request)
        if tracked is not None:
            tracked.pending_saves -= 1
        saved = [event for at, event in enumerate(pending.events) if at not in pending.missing]
        self._events += [event for event, _ in saved]
        self._announced += [block for _, block in saved]

    # ----------------------------------------------------------------------------------------------------------- events

    def _describe(self, request: Any, first: int, last: int) -> list[tuple[KVCacheEvent, bytes]]:
        """Returns the events that announce blocks to routers after their save, with the hash of each block."""
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
        """Returns the events since the last call. Removals concern blocks that were announced before, and come
        first."""
        events, self._events = self._events, []
        if self._removals is None:
            return events
        removed = self._removals.take_removed()
        announced, self._announced = self._announced, []
        self._removals.add(announced)
        if removed:
            hashes = [maybe_convert_block_hash(cast(Any, block)) for block in removed]
            events.insert(0, BlockRemoved(block_hashes=hashes, medium=MEDIUM_STORAGE))
        return events

    def stats(self) -> MoontideStats | None:
        return self._delta.since(of_lookups(self._lookups.counts))

    def reset(self) -> None:
        """Drops cached lookup results. Removes nothing from the store, which other engines use."""
        self._lookups.forget_all()
        if self._with_events:
            self._events.append(AllBlocksCleared())

    def close(self) -> None:
        self._lookups.close()
        if self._removals is not None:
            self._removals.close()
        self._connection.close()
