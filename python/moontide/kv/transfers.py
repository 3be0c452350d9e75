"""Blocks on their way: saves and loads in background threads, for engines that go on computing meanwhile."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from moontide._native import PutOptions
from moontide.store import Store

from .door import LOG, Door

#: Codes that say that nobody answers, or nobody who may. All others are answers: an object is not there or not whole,
#: or there is no room for it, and that is no reason to leave the store alone.
_AWAY = frozenset((-300, -301, -304, -400, -401, -402))
#: The bytes of an object do not fit its digest, on any node that has it.
_CORRUPT = -500


@dataclass
class Counts:
    """What was moved."""

    saves: int = 0
    saved_blocks: int = 0
    saved_bytes: int = 0
    failed_saves: int = 0
    save_seconds: float = 0.0
    loads: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    failed_loads: int = 0
    load_seconds: float = 0.0


@dataclass
class Batch:
    """Objects and their memory: of each its key, and where its parts are and how long."""

    keys: Sequence[str]
    addresses: Sequence[Sequence[int]]
    sizes: Sequence[Sequence[int]]

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return sum(sum(parts) for parts in self.sizes)


@dataclass
class _Job:
    name: str
    batch: Callable[[], Batch]
    #: After it was loaded, in the thread that loaded it.
    then: Callable[[], None] | None
    blocks: int
    #: When it was saved, in that thread, with what has failed.
    told: Callable[[list[int]], None] | None = None
    done: threading.Event = field(default_factory=threading.Event)
    #: Which of its objects were not moved.
    failed: list[int] = field(default_factory=list)


class Transfers:
    """Saves and loads by name. Nothing here waits for the store, except what says so.

    A save that fails is forgotten: it is a cache. A load that fails says which objects it has not: their memory may
    hold anything by then, and must be computed. Bytes that do not fit their digest count as failed.
    """

    def __init__(
        self, door: Door, options: PutOptions | None = None, savers: int = 1, loaders: int = 1, waiting_max: int = 4096
    ) -> None:
        self._door = door
        self._options = options
        self._waiting_max = waiting_max
        self._lock = threading.Lock()
        self._saving: dict[str, list[_Job]] = {}
        self._loaded: list[tuple[str, list[int]]] = []
        self.counts = Counts()
        self._saves = _Queue("moontide-saves", savers, self._save)
        self._loads = _Queue("moontide-loads", loaders, self._load)

    # ------------------------------------------------------------------------------------------------------------ saves

    def save(
        self,
        name: str,
        blocks: int,
        batch: Callable[[], Batch],
        told: Callable[[list[int]], None] | None = None,
    ) -> bool:
        """Begins to save; several saves may have one name. False: it is not worth it, or too much is waiting already.

        ``batch`` is made in the background. The memory must stay as it is until the save is over (see `saving`).
        ``told`` is then called there with the numbers of those that were not saved; not if the answer here is False.
        """
        if not self._door.is_open or len(self._saves) >= self._waiting_max:
            self.counts.failed_saves += blocks
            return False
        job = _Job(name, batch, None, blocks, told)
        with self._lock:
            self._saving.setdefault(name, []).append(job)
        self._saves.add(job)
        return True

    def saving(self, name: str) -> bool:
        """Whether saves of this name are under way."""
        with self._lock:
            return name in self._saving

    def wait_saved(self, names: Iterable[str], deadline: float = 30.0) -> bool:
        """Waits until no save of these names is under way. False: they are, still."""
        until = time.monotonic() + deadline
        with self._lock:
            jobs = [job for name in names for job in self._saving.get(name, ())]
        return all(job.done.wait(max(0.0, until - time.monotonic())) for job in jobs)

    def _save(self, job: _Job) -> None:
        job.failed = list(range(job.blocks))
        try:
            store = self._door.store()
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
            self._judge(codes)
        finally:
            self.counts.failed_saves += len(job.failed)
            if job.told is not None:
                job.told(job.failed)
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
        """Begins to load. Nobody else may touch the memory until it is over."""
        job = _Job(name, batch, then, blocks)
        self._loads.add(job)
        return Load(job)

    def loaded(self) -> list[tuple[str, list[int]]]:
        """Loads that are over, each once: its name, and which of its objects have failed."""
        with self._lock:
            loaded, self._loaded = self._loaded, []
        return loaded

    def _load(self, job: _Job) -> None:
        job.failed = list(range(job.blocks))
        try:
            store = self._door.store()
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
            self._judge(codes)
            self._clear_away(store, [key for key, code in zip(batch.keys, codes, strict=True) if code == _CORRUPT])
        finally:
            self.counts.failed_loads += len(job.failed)
            with self._lock:
                self._loaded.append((job.name, job.failed))
            job.done.set()

    # ------------------------------------------------------------------------------------------------------------- both

    def close(self, deadline: float = 10.0) -> None:
        """Finishes what is under way, and ends."""
        until = time.monotonic() + deadline
        self._saves.close(until)
        self._loads.close(until)

    def _clear_away(self, store: Store, keys: list[str]) -> None:
        """Nobody can use them, and while they are there nobody can save them anew."""
        if keys:
            LOG.warning("%d objects do not fit their digests and are removed, among them %s", len(keys), keys[0])
            store.batch_remove(keys, force=True)

    def _judge(self, codes: Sequence[int]) -> None:
        """Whether the store itself is in trouble."""
        trouble = [code for code in codes if code in _AWAY]
        if codes and len(trouble) == len(codes):
            self._door.failed(f"error {-trouble[0]} for all of {len(codes)} objects")
        elif not trouble:
            self._door.worked()


class Load:
    """A load that was begun."""

    def __init__(self, job: _Job) -> None:
        self._job = job

    def wait(self, deadline: float) -> list[int] | None:
        """Which objects have failed, when it is over; nothing if it is not over by then."""
        return self._job.failed if self._job.done.wait(deadline) else None


class _Queue:
    """Jobs in the order in which they came, and threads that do them."""

    def __init__(self, name: str, threads: int, work: Callable[[_Job], None]) -> None:
        self._work = work
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._ends = False
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

    def close(self, until: float) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._ends:
                    self._changed.wait()
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                self._work(job)
            except Exception:  # whatever it is, the thread must go on; the job's own books are closed already
                LOG.exception("moving blocks of %s failed", job.name)
