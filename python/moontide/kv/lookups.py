"""Background lookups of the length of stored prefixes, for schedulers that must not block."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moontide.errors import Error

from .connection import LOG, StoreConnection

#: Maximum number of keys in one call.
_BATCH_KEYS = 8192


@dataclass
class LookupStats:
    """Counters of lookups."""

    lookups: int = 0
    answered: int = 0
    #: Timed out, or skipped because the store is unavailable.
    timed_out: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    seconds: float = 0.0


@dataclass
class _PendingLookup:
    keys: Callable[[], Sequence[str]]
    blocks: int
    started: float = field(default_factory=time.monotonic)
    found: int | None = None
    answered: float = 0.0


class Lookups:
    """Prefix lookups by name. ``ask`` never blocks; it returns None until the result is known.

    One thread looks up all pending prefixes in one call. If the store is slow or unavailable, a request waits
    ``timeout`` seconds once, and does not wait while the store remains unavailable. Results are valid for ``ttl``
    seconds.
    """

    def __init__(
        self, connection: StoreConnection, timeout: float = 0.25, ttl: float = 2.0, prefetch: bool = True
    ) -> None:
        self._connection = connection
        self._timeout = timeout
        self._ttl = ttl
        self._prefetch = prefetch
        self._lookups: dict[str, _PendingLookup] = {}
        self._queue: list[_PendingLookup] = []
        self._changed = threading.Condition()
        self._stopped = False
        self.counts = LookupStats()
        self._thread = threading.Thread(target=self._work, name="moontide-lookups", daemon=True)
        self._thread.start()

    def ask(self, name: str, blocks: int, keys: Callable[[], Sequence[str]]) -> int | None:
        """Returns the number of stored blocks, from the first one up to the first gap; None if it is not known yet.

        ``keys`` returns their keys, the same number for each block. It is called in the background thread.
        """
        if blocks < 1:
            return 0
        now = time.monotonic()
        lookup = self._lookups.get(name)
        if lookup is not None and lookup.blocks == blocks:
            if lookup.found is not None and now - lookup.answered < self._ttl:
                return lookup.found
            if lookup.found is None and now - lookup.started < self._timeout:
                return None
            if lookup.found is None:
                self.counts.timed_out += 1
                lookup.found, lookup.answered = 0, now
                return 0
        self.counts.lookups += 1
        if not self._connection.available:
            self.counts.timed_out += 1
            return 0
        lookup = _PendingLookup(keys, blocks)
        self._lookups[name] = lookup
        with self._changed:
            self._queue.append(lookup)
            self._changed.notify()
        return None

    def forget(self, name: str) -> None:
        """Drops the lookup of a name."""
        self._lookups.pop(name, None)

    def forget_all(self) -> None:
        """Drops all cached results."""
        self._lookups.clear()

    def close(self) -> None:
        """Ends the thread after its current call."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(10)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                lookups, self._queue = self._queue, []
            try:
                self._run(lookups)
            except Exception as error:  # the thread must continue; a failed lookup counts as a miss
                LOG.exception("lookup failed")
                self._connection.mark_failed(str(error))
                self._finish([(lookup, 0) for lookup in lookups])

    def _run(self, lookups: list[_PendingLookup]) -> None:
        began = time.monotonic()
        store = self._connection.store()
        if store is None:
            self._finish([(lookup, 0) for lookup in lookups])
            return
        keys_of_each = [list(lookup.keys()) for lookup in lookups]
        keys = [key for own in keys_of_each for key in own]
        codes: list[int] = []
        for start in range(0, len(keys), _BATCH_KEYS):
            codes += store._exists_codes(keys[start : start + _BATCH_KEYS])
        error = next((code for code in codes if code < 0), None)
        if error is not None:
            self._connection.mark_failed(f"lookup failed with error {-error}")
        else:
            self._connection.mark_ok()
        results, at = [], 0
        for lookup, own in zip(lookups, keys_of_each, strict=True):
            keys_per_block = len(own) // lookup.blocks
            own_codes = codes[at : at + len(own)]
            first_missing = next((i for i, code in enumerate(own_codes) if code != 1), len(own_codes))
            results.append((lookup, first_missing // keys_per_block))
            at += len(own)
        self.counts.seconds += time.monotonic() - began
        self._finish(results)
        if self._prefetch:
            hits = [
                key
                for (lookup, found), own in zip(results, keys_of_each, strict=True)
                for key in own[: found * (len(own) // lookup.blocks)]
            ]
            try:
                for start in range(0, len(hits), _BATCH_KEYS):
                    store.prefetch(hits[start : start + _BATCH_KEYS])
            except Error as error:  # the lookups have their results
                self._connection.mark_failed(str(error))

    def _finish(self, results: list[tuple[_PendingLookup, int]]) -> None:
        now = time.monotonic()
        for lookup, found in results:
            self.counts.answered += 1
            self.counts.blocks += lookup.blocks
            self.counts.hit_blocks += found
            lookup.answered = now
            lookup.found = found
