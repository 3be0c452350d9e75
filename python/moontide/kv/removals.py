"""Tracks which announced blocks were removed from the store, for engines that announce saved blocks to routers."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from moontide._native import Invalidations
from moontide.errors import BatchError, Error
from moontide.store import Store

from .connection import LOG, StoreConnection

#: Number of blocks that are processed before the thread sleeps for `_PAUSE_S`, to release the GIL for the engine.
_BATCH_BLOCKS = 512
_PAUSE_S = 0.002
#: Length of one wait for the feed; added blocks are registered after at most this time.
_FEED_WAIT_S = 0.25


@dataclass
class TrackerStats:
    """Counters of blocks."""

    added: int = 0
    #: Blocks that lost an object.
    removed: int = 0
    #: Blocks that were dropped because `blocks_max` was exceeded.
    dropped: int = 0
    #: Number of checks of all blocks, after a gap of the feed or after `check_interval`.
    full_checks: int = 0


class RemovalTracker:
    """Tracks announced blocks, and reports which of them can no longer be loaded.

    ``add`` and ``take_removed`` never block and never fail; a background thread follows the store. A block is removed
    when the first of its objects is removed. It is reported once, and can be added again. An invalidation only makes a
    block suspect: the thread checks the keys with the store before it reports the block. A block that was saved again
    meanwhile is therefore not reported. While the store is unavailable nothing is reported; the check follows later.

    ``keys`` returns the keys of a block; the thread calls it. At most ``blocks_max`` blocks are tracked. Beyond that,
    the oldest ones are dropped and reported as removed: a router that does not know of a block does less harm than a
    router with a stale entry. Every ``check_interval`` seconds all blocks are checked, in case an invalidation was
    missed.
    """

    def __init__(
        self,
        connection: StoreConnection,
        keys: Callable[[Hashable], Sequence[str]],
        blocks_max: int = 1 << 18,
        check_interval: float = 600.0,
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._blocks_max = blocks_max
        self._check_interval = check_interval
        #: Blocks with the ids of their objects, in the order in which they were added.
        self._blocks: dict[Hashable, tuple[bytes, ...]] = {}
        self._of_object: dict[bytes, Hashable] = {}
        #: Blocks to check, in this order.
        self._suspects: dict[Hashable, None] = {}
        self._feed: Invalidations | None = None
        self._store: Store | None = None
        self._last_check = time.monotonic()
        #: Protects `_added` and `_removed`, which both threads use.
        self._lock = threading.Lock()
        self._added: dict[Hashable, None] = {}
        self._removed: dict[Hashable, None] = {}
        self._stop = threading.Event()
        self.counts = TrackerStats()
        self._thread = threading.Thread(target=self._work, name="moontide-removals", daemon=True)
        self._thread.start()

    def add(self, blocks: Iterable[Hashable]) -> None:
        """Adds announced blocks."""
        with self._lock:
            for block in blocks:
                self._added[block] = None
                # A pending removal belongs to the previous announcement.
                self._removed.pop(block, None)

    def take_removed(self) -> list[Hashable]:
        """Returns the blocks that were removed since the last call. Announce their removal before calling ``add`` for
        newer blocks."""
        with self._lock:
            removed, self._removed = self._removed, {}
        return list(removed)

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join(10)

    # ------------------------------------------------------------------------------------------------ background thread

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                self._poll()
            except Error as error:
                self._connection.mark_failed(str(error))
            except Exception as error:  # the thread must continue
                LOG.exception("following invalidations failed")
                self._connection.mark_failed(str(error))
        self._close_feed()

    def _poll(self) -> None:
        store = self._connection.store()
        if store is None:
            # Without a store there are no object ids; added blocks wait.
            self._drop_excess()
            self._stop.wait(_FEED_WAIT_S)
            return
        if store is not self._store:
            self._close_feed()
            self._store, self._feed = store, store.invalidations()
        assert self._feed is not None
        received = self._feed.next(_FEED_WAIT_S)
        # Blocks added before these invalidations must be registered before the invalidations are processed.
        self._register_added(store)
        ids, gap = received or ([], False)
        self._suspects.update(dict.fromkeys(self._of_object[id] for id in ids if id in self._of_object))
        if gap or time.monotonic() - self._last_check > self._check_interval:
            self._suspect_all(store)
        if self._suspects:
            self._check(store)

    def _close_feed(self) -> None:
        feed, self._feed, self._store = self._feed, None, None
        if feed is not None:
            feed.close()

    def _drop_excess(self) -> None:
        """Applies `blocks_max` to the added blocks while the store is unavailable."""
        with self._lock:
            excess = _first(self._added, len(self._added) - self._blocks_max)
            for block in excess:
                del self._added[block]
                self._removed[block] = None
        self.counts.dropped += len(excess)

    def _register_added(self, store: Store) -> None:
        """Registers added blocks for the feed. Their objects may have been removed before, so each block is checked
        once."""
        with self._lock:
            added, self._added = self._added, {}
        for block in added:
            self._forget(block)
            self._register(store, block)
            self._suspects[block] = None
        self.counts.added += len(added)
        excess = _first(self._blocks, len(self._blocks) - self._blocks_max)
        for block in excess:
            self._forget(block)
        self.counts.dropped += len(excess)
        self._report(excess)

    def _register(self, store: Store, block: Hashable) -> None:
        ids = tuple(store.object_id(key) for key in self._keys(block))
        self._blocks[block] = ids
        for id in ids:
            self._of_object[id] = block

    def _forget(self, block: Hashable) -> None:
        self._suspects.pop(block, None)
        for id in self._blocks.pop(block, ()):
            self._of_object.pop(id, None)

    def _suspect_all(self, store: Store) -> None:
        self._last_check = time.monotonic()
        self.counts.full_checks += 1
        # The ids change after a removal of all objects of the tenant.
        self._of_object.clear()
        for at, block in enumerate(list(self._blocks)):
            self._register(store, block)
            if at % _BATCH_BLOCKS == _BATCH_BLOCKS - 1:
                self._stop.wait(_PAUSE_S)
        self._suspects.update(dict.fromkeys(self._blocks))

    def _check(self, store: Store) -> None:
        """Checks the keys of all suspects. Blocks with a key of which nothing is known remain suspects; the others are
        checked before them."""
        while self._suspects and not self._stop.is_set():
            batch = [(block, list(self._keys(block))) for block in _first(self._suspects, _BATCH_BLOCKS)]
            failure: Error | None = None
            try:
                outcomes: list[object] = list(store.batch_exists([key for _, keys in batch for key in keys]))
            except BatchError as error:
                outcomes, failure = error.outcomes, error
            exists = iter(outcomes)
            removed = []
            for block, keys in batch:
                found = [next(exists) for _ in keys]
                del self._suspects[block]
                if False in found:
                    removed.append(block)
                elif found.count(True) < len(found):
                    self._suspects[block] = None
            for block in removed:
                self._forget(block)
            self.counts.removed += len(removed)
            self._report(removed)
            if failure is not None:
                raise failure
            self._connection.mark_ok()
            if self._suspects:
                self._stop.wait(_PAUSE_S)

    def _report(self, removed: list[Hashable]) -> None:
        with self._lock:
            # A block that was added again meanwhile is checked again.
            self._removed.update(dict.fromkeys(block for block in removed if block not in self._added))


def _first(blocks: Iterable[Hashable], count: int) -> list[Hashable]:
    return list(itertools.islice(blocks, max(0, count)))
