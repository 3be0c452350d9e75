"""``MoontideL2``: LMCache's chunks in the store.

LMCache hands over batches under a lock of its own and goes on; when something is done, it is woken through a file
descriptor and fetches the outcomes. So a submission only queues work here. Questions, loads and saves have threads of
their own each, because a request waits for the first two and nobody for the third.
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
from moontide.kv.calls import Calls, Counts, Settings

LOG = logging.getLogger("moontide.lmcache")

#: How much is to be saved at most that waits for it. More is not saved: LMCache holds memory for each.
_SAVES_WAITING_MAX = 256

#: Its number, whether all went well, why not, and of each object whether it did.
Completion = tuple[int, bool, str, list[bool] | None]


class MoontideL2:
    """What LMCache's ``native_plugin`` makes of ``adapter_params``. It needs nothing of LMCache.

    LMCache's keys name the model, the rank, the group of layers, the chunk's tokens and the salt. They do not name the
    type of numbers or the version of the model: servers in which these differ need another ``namespace`` or
    ``revision``, or they would read each other's bytes wherever the length is equal.
    """

    def __init__(self, *, loaders: int = 2, savers: int = 1, **settings: Any) -> None:
        for name, threads in (("loaders", loaders), ("savers", savers)):
            if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
                raise ValueError(f"{name} is a whole number from 1 on, not {threads!r}")
        told = Settings.of(settings)
        self._prefix = Namespace(
            "lmcache", revision=told.revision, hashing="lmcache", more={"namespace": told.namespace}
        ).prefix
        self._calls = Calls(told)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._done: list[Completion] = []
        self._saves_waiting = 0
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._askers = ThreadPoolExecutor(1, "moontide-asks")
        self._loaders = ThreadPoolExecutor(loaders, "moontide-loads")
        self._savers = ThreadPoolExecutor(savers, "moontide-saves")

    # ---------------------------------------------------------------------------------------------- LMCache calls these

    def event_fd(self) -> int:
        """What becomes readable when something is done."""
        return self._wake

    def submit_batch_exists(self, keys: list[str]) -> int:
        """Asks which chunks there are."""
        return self._begin(self._askers, len(keys), lambda: self._calls.there(self._named(keys)))

    def submit_batch_get(self, keys: list[str], views: list[memoryview]) -> int:
        """Fetches chunks into memory that is LMCache's again when the outcome has been fetched."""
        return self._begin(self._loaders, len(keys), lambda: self._calls.load(len(keys), self._places(keys, views)))

    def submit_batch_set(self, keys: list[str], views: list[memoryview]) -> int:
        """Saves chunks from such memory. Well is only what is well for all of them."""
        with self._lock:
            full = self._saves_waiting >= _SAVES_WAITING_MAX
            self._saves_waiting += not full
        if full:
            return self._finish(next(self._numbers), [False] * len(keys), "too much is waiting to be saved")

        def save() -> list[bool]:
            try:
                return self._calls.save(len(keys), self._places(keys, views))
            finally:
                with self._lock:
                    self._saves_waiting -= 1

        return self._begin(self._savers, len(keys), save, all_or_none=True)

    def submit_batch_delete(self, keys: list[str]) -> int:
        """Removes chunks, for all servers that share them."""
        return self._begin(self._savers, len(keys), lambda: self._calls.remove(self._named(keys)))

    def drain_completions(self) -> list[Completion]:
        """What was done since the last call."""
        # The descriptor first: what is done meanwhile makes it readable again.
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass
        with self._lock:
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Waits for what is under way, which has deadlines; what still waits is dropped."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for threads in (self._askers, self._loaders, self._savers):
            threads.shutdown(wait=True, cancel_futures=True)
        LOG.info("%s", self._calls.counts)
        self._calls.close()
        os.close(self._wake)

    @property
    def counts(self) -> Counts:
        """Chunks that were asked for and moved."""
        return self._calls.counts

    # ---------------------------------------------------------------------------------------------------------- inside

    def _named(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]

    def _places(self, keys: Sequence[str], views: Sequence[memoryview]) -> Callable[[], Batch]:
        return lambda: Batch(self._named(keys), [[_address(view)] for view in views], [[view.nbytes] for view in views])

    def _begin(
        self, threads: ThreadPoolExecutor, objects: int, work: Callable[[], list[bool]], all_or_none: bool = False
    ) -> int:
        number = next(self._numbers)

        def run() -> None:
            outcome, why = [False] * objects, ""
            try:
                outcome = work()
                if all_or_none and not all(outcome):
                    why = f"{outcome.count(False)} of {objects} chunks were not saved"
            except Exception as error:  # whatever it is: an outcome that never comes would hang LMCache
                LOG.exception("a batch of %d chunks failed", objects)
                why = str(error) or type(error).__name__
            self._finish(number, outcome, why)

        threads.submit(run)
        return number

    def _finish(self, number: int, outcome: list[bool], why: str) -> int:
        with self._lock:
            self._done.append((number, not why, why, outcome))
        os.eventfd_write(self._wake, 1)
        return number


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
