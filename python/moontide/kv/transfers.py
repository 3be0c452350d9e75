"""Background saves and loads of blocks, for engines that continue computing meanwhile."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from moontide._native import PutOptions
from moontide.store import Store

from .connection import LOG, StoreConnection

#: Codes for a store that does not answer. All others are answers, for example that an object does not exist, is
#: corrupt, or that there is no space; the store remains available after them.
_UNAVAILABLE = frozenset((-300, -301, -304, -400, -401, -402))
#: Every replica of the object is corrupt.
_CORRUPT = -500


@dataclass
class TransferStats:
    """Counters of transfers."""

    saves: int = 0
    saved_blocks: int = 0
    saved_bytes: int = 0
    save_failures: int = 0
    save_seconds: float = 0.0
    loads: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_failures: int = 0
    load_seconds: float = 0.0


@dataclass
class Batch:
    """Keys of objects, and for each object the addresses and sizes of its parts."""

    keys: Sequence[str]
    addresses: Sequence[Sequence[int]]
    sizes: Sequence[Sequence[int]]

    @property
    def bytes(self) -> int:
        """Size of all objects."""
        return sum(sum(parts) for parts in self.sizes)


@dataclass
class _Job:
    name: str
    batch: Callable[[], Batch]
    #: Called after a load, in the thread of the load.
    then: Callable[[], None] | None
    blocks: int
    #: Called after a save, in the thread of the save, with the indices of the objects that failed.
    on_done: Callable[[list[int]], None] | None = None
    done: threading.Event = field(default_factory=threading.Event)
    #: Indices of the objects that were not transferred.
    failed: list[int] = field(default_factory=list)


class Transfers:
    """Saves and loads by name. Only ``wait_saved``, ``close`` and ``Load.wait`` block.

    A failed save is dropped: the store is a cache. A failed load reports which objects are missing; their memory is
    undefined, and the engine must compute them. An object that does not match its digest counts as failed.
    """

    def __init__(
        self,
        connection: StoreConnection,
        options: PutOptions | None = None,
        save_threads: int = 1,
        load_threads: int = 1,
        waiting_max: int = 4096,
    ) -> None:
        self._connection = connection
        self._options = options
        self._waiting_max = waiting_max
        self._lock = threading.Lock()
        self._saving: dict[str, list[_Job]] = {}
        self._loaded: list[tuple[str, list[int]]] = []
        self.counts = TransferStats()
        self._saves = _Queue("moontide-saves", save_threads, self._save)
        self._loads = _Queue("moontide-loads", load_threads, self._load)

    # ------------------------------------------------------------------------------------------------------------ saves

    def save(
        self,
        name: str,
        blocks: int,
        batch: Callable[[], Batch],
        on_done: Callable[[list[int]], None] | None = None,
    ) -> bool:
        """Starts a save. Several saves can have the same name. Returns False if the store is unavailable or the queue
        is full.

        ``batch`` is called in the background. The memory must not change until the save ends (see `is_saving`). After
        the save, ``on_done`` is called in the background with the indices of the objects that were not saved; it is not
        called if this method returns False.
        """
        if not self._connection.available or len(self._saves) >= self._waiting_max:
            self.counts.save_failures += blocks
            return False
        job = _Job(name, batch, None, blocks, on_done)
        with self._lock:
            self._saving.setdefault(name, []).append(job)
        self._saves.add(job)
        return True

    def is_saving(self, name: str) -> bool:
        """Whether saves of this name are pending."""
        with self._lock:
            return name in self._saving

    def wait_saved(self, names: Iterable[str], timeout: float = 30.0) -> bool:
        """Waits until no save of these names is pending. Returns False after a timeout."""
        deadline = time.monotonic() + timeout
        with self._lock:
            jobs = [job for name in names for job in self._saving.get(name, ())]
        return all(job.done.wait(max(0.0, deadline - time.monotonic())) for job in jobs)

    def _save(self, job: _Job) -> None:
        job.failed = list(range(job.blocks))
        try:
            store = self._connection.store()
            if store is None:
                return
            began, batch = time.monotonic(), job.batch()
            codes = store._put_addresses(batch.keys, batch.addresses, batch.sizes, self._options)
            self.counts.save_seconds += time.monotonic() - began
            self.counts.saves += 1
            job.failed = [index for index, code in enumerate(codes) if code < 0]
            self.counts.saved_blocks += len(codes) - len(job.failed)
            self.counts.saved_bytes += sum(
                sum(sizes) for code, sizes in zip(codes, batch.sizes, strict=True) if code >= 0
            )
            self._update_connection(codes)
        finally:
            self.counts.save_failures += len(job.failed)
            if job.on_done is not None:
                job.on_done(job.failed)
            with self._lock:
                jobs = self._saving[job.name]
                jobs.remove(job)
                if not jobs:
                    del self._saving[job.name]
            job.done.set()

    # ------------------------------------------------------------------------------------------------------------ loads

    def load(
        self, name: str, blocks: int, batch: Callable[[], Batch], then: Callable[[], None] | None = None
    ) -> Load:
        """Starts a load. No other code may access the memory until the load ends."""
        job = _Job(name, batch, then, blocks)
        self._loads.add(job)
        return Load(job)

    def take_loaded(self) -> list[tuple[str, list[int]]]:
        """Returns the loads that ended since the last call: name, and indices of the objects that failed."""
        with self._lock:
            loaded, self._loaded = self._loaded, []
        return loaded

    def _load(self, job: _Job) -> None:
        job.failed = list(range(job.blocks))
        try:
            store = self._connection.store()
            if store is None:
                return
            began, batch = time.monotonic(), job.batch()
            codes = store._get_addresses(batch.keys, batch.addresses, batch.sizes, exact=True)
            if job.then is not None:
                job.then()
            job.failed = [index for index, code in enumerate(codes) if code < 0]
            self.counts.load_seconds += time.monotonic() - began
            self.counts.loads += 1
            self.counts.loaded_blocks += len(codes) - len(job.failed)
            self.counts.loaded_bytes += sum(code for code in codes if code > 0)
            self._update_connection(codes)
            self._remove_corrupt(store, [key for key, code in zip(batch.keys, codes, strict=True) if code == _CORRUPT])
        finally:
            self.counts.load_failures += len(job.failed)
            with self._lock:
                self._loaded.append((job.name, job.failed))
            job.done.set()

    # ------------------------------------------------------------------------------------------------------------- both

    def close(self, timeout: float = 10.0) -> None:
        """Finishes the pending transfers and ends the threads."""
        deadline = time.monotonic() + timeout
        self._saves.close(deadline)
        self._loads.close(deadline)

    def _remove_corrupt(self, store: Store, keys: list[str]) -> None:
        """Removes corrupt objects: while they exist, no client can save them again."""
        if keys:
            LOG.warning("removing %d objects that do not match their digests, e.g. %s", len(keys), keys[0])
            store.batch_remove(keys, force=True)

    def _update_connection(self, codes: Sequence[int]) -> None:
        """Marks the connection as failed if the store answered for no object, and as ok if it answered for all."""
        unavailable = [code for code in codes if code in _UNAVAILABLE]
        if codes and len(unavailable) == len(codes):
            self._connection.mark_failed(f"error {-unavailable[0]} for all of {len(codes)} objects")
        elif not unavailable:
            self._connection.mark_ok()


class Load:
    """A started load."""

    def __init__(self, job: _Job) -> None:
        self._job = job

    def wait(self, timeout: float) -> list[int] | None:
        """Waits for the end of the load. Returns the indices of the objects that failed, or None after a timeout."""
        return self._job.failed if self._job.done.wait(timeout) else None


class _Queue:
    """FIFO queue of jobs, with its threads."""

    def __init__(self, name: str, threads: int, work: Callable[[_Job], None]) -> None:
        self._work = work
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: _Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def close(self, deadline: float) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._stopped:
                    self._changed.wait()
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                self._work(job)
            except Exception:  # the thread must continue; the job itself was already finished
                LOG.exception("transfer of blocks of %s failed", job.name)
