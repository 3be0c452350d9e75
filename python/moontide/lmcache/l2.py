"""``MoontideL2``: saves LMCache's chunks in the store.

LMCache submits batches under its own lock and continues. When a batch is done, a file descriptor becomes readable and
LMCache fetches the results. A submission therefore only queues work. Lookups, loads and saves have separate threads,
because requests wait for lookups and loads, but not for saves.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from moontide.kv import Batch, Namespace
from moontide.kv.calls import Calls, CallStats, Settings

LOG = logging.getLogger("moontide.lmcache")

#: Maximum number of queued save batches. Further batches are not saved: LMCache holds memory for each.
_SAVES_WAITING_MAX = 256

#: Number of the batch, whether it succeeded, the error, and for each object whether it succeeded.
Completion = tuple[int, bool, str, list[bool] | None]


class MoontideL2:
    """L2 plugin that LMCache's ``native_plugin`` creates from ``adapter_params``. It does not import LMCache.

    LMCache's keys contain the model, the rank, the group of layers, the tokens of the chunk and the salt. They do not
    contain the element type or the version of the model. Servers in which these differ need a different ``namespace``
    or ``revision``; otherwise they read each other's chunks of equal length.
    """

    def __init__(self, *, load_threads: int = 2, save_threads: int = 1, **settings: Any) -> None:
        for name, threads in (("load_threads", load_threads), ("save_threads", save_threads)):
            if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {threads!r}")
        parsed = Settings.of(settings)
        self._prefix = Namespace(
            "lmcache", revision=parsed.revision, hashing="lmcache", more={"namespace": parsed.namespace}
        ).prefix
        self._calls = Calls(parsed)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._done: list[Completion] = []
        self._saves_waiting = 0
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lookup_pool = ThreadPoolExecutor(1, "moontide-lookups")
        self._load_pool = ThreadPoolExecutor(load_threads, "moontide-loads")
        self._save_pool = ThreadPoolExecutor(save_threads, "moontide-saves")

    # ---------------------------------------------------------------------------------------------- called by LMCache

    def event_fd(self) -> int:
        """Returns the file descriptor that becomes readable when a batch is done."""
        return self._wake

    def submit_batch_exists(self, keys: list[str]) -> int:
        """Looks up which chunks exist."""
        return self._begin(self._lookup_pool, len(keys), lambda: self._calls.exists(self._named(keys)))

    def submit_batch_get(self, keys: list[str], views: list[memoryview]) -> int:
        """Loads chunks into memory of LMCache. LMCache must not use the memory before it has fetched the result."""
        return self._begin(self._load_pool, len(keys), lambda: self._calls.load(len(keys), self._batch(keys, views)))

    def submit_batch_set(self, keys: list[str], views: list[memoryview]) -> int:
        """Saves chunks from memory of LMCache. The batch succeeds only if all chunks are saved."""
        with self._lock:
            full = self._saves_waiting >= _SAVES_WAITING_MAX
            self._saves_waiting += not full
        if full:
            return self._finish(next(self._numbers), [False] * len(keys), "too many saves are queued")

        def save() -> list[bool]:
            try:
                return self._calls.save(len(keys), self._batch(keys, views))
            finally:
                with self._lock:
                    self._saves_waiting -= 1

        return self._begin(self._save_pool, len(keys), save, all_or_none=True)

    def submit_batch_delete(self, keys: list[str]) -> int:
        """Removes chunks for all servers that share them."""
        return self._begin(self._save_pool, len(keys), lambda: self._calls.remove(self._named(keys)))

    def drain_completions(self) -> list[Completion]:
        """Returns the batches that ended since the last call."""
        # The descriptor first: batches that end meanwhile make it readable again.
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass
        with self._lock:
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Waits for the running batches, which have timeouts, and drops the queued ones."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for threads in (self._lookup_pool, self._load_pool, self._save_pool):
            threads.shutdown(wait=True, cancel_futures=True)
        LOG.info("%s", self._calls.counts)
        self._calls.close()
        os.close(self._wake)

    @property
    def counts(self) -> CallStats:
        """Counters of chunks."""
        return self._calls.counts

    # -------------------------------------------------------------------------------------------------------- internal

    def _named(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]

    def _batch(self, keys: Sequence[str], views: Sequence[memoryview]) -> Callable[[], Batch]:
        return lambda: Batch(self._named(keys), [[_address(view)] for view in views], [[view.nbytes] for view in views])

    def _begin(
        self, threads: ThreadPoolExecutor, objects: int, work: Callable[[], list[bool]], all_or_none: bool = False
    ) -> int:
        number = next(self._numbers)

        def run() -> None:
            outcome, reason = [False] * objects, ""
            try:
                outcome = work()
                if all_or_none and not all(outcome):
                    reason = f"{outcome.count(False)} of {objects} chunks were not saved"
            except Exception as error:  # LMCache would wait without end for a missing result
                LOG.exception("batch of %d chunks failed", objects)
                reason = str(error) or type(error).__name__
            self._finish(number, outcome, reason)

        threads.submit(run)
        return number

    def _finish(self, number: int, outcome: list[bool], reason: str) -> int:
        with self._lock:
            self._done.append((number, not reason, reason, outcome))
        os.eventfd_write(self._wake, 1)
        return number


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
