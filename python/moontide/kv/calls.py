"""Calls made in place, for engines that have threads of their own for it: nothing is raised, and nothing takes long.

A store that is away or hangs costs ``patience_ms`` (questions) or ``deadline_s`` (bytes) once; while it is left alone,
calls answer at once that there is nothing. No call waits for a connection: that is made in the background.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from moontide._native import PutOptions
from moontide.errors import BatchError, Error
from moontide.store import Store

from .door import Door
from .transfers import Batch

#: Codes of a store that cannot be reached, or does not answer in time (see `moontide.errors`). All others are answers.
_AWAY = frozenset((-300, -301, -304, -400, -401, -402))
#: What is answered for it without asking.
_NOT_ASKED = -401
#: Codes of a put that has nothing to do: the object is there, or somebody is putting it.
_THERE_ALREADY = frozenset((-101, -102))
#: The bytes of an object do not fit its digest, on any node that has it.
_CORRUPT = -500
#: How long it may take to connect. More than a question, for a cluster of many nodes has much to say.
_CONNECT_S = 3.0
#: How many keys one call removes at most.
_REMOVED_AT_ONCE = 4096


@dataclass(frozen=True)
class Settings:
    """How a store is reached and used. ``of`` refuses what makes no sense, by name."""

    #: "host:port" of the master; unless said, MOONTIDE_MASTER, or the default port of this host.
    master: str | None = None
    tenant: str = "default"
    #: The model's version, if its name does not say it.
    revision: str = ""
    #: Whatever else should keep engines apart.
    namespace: str = ""
    #: How many nodes keep an object. Fewer are better than none: it is a cache.
    replicas: int = 1
    #: Seconds after which an object may go, however often it is used; never unless said.
    ttl: float | None = None
    #: How long it may take to move the bytes of one batch.
    deadline_s: float = 5.0
    #: How long the question may take whether objects are there: a request waits for the answer.
    patience_ms: float = 500.0
    #: How long a store that did not answer is left alone.
    pause_s: float = 1.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """From what a user wrote. Raises ValueError that says what is wrong."""
        known = {field.name: field.default for field in fields(cls) if field.default is not MISSING}
        unknown = sorted(given.keys() - known.keys())
        if unknown:
            raise ValueError(f"unknown settings: {', '.join(unknown)}. There are: {', '.join(known)}")
        for name, value in given.items():
            if value is None and known[name] is None:
                continue
            if name in ("master", "tenant", "revision", "namespace"):
                if not isinstance(value, str):
                    raise ValueError(f"{name} is text, not {value!r}")
            elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name} is a number above 0, not {value!r}")
            elif name == "replicas" and not isinstance(value, int):
                raise ValueError(f"replicas is a whole number, not {value!r}")
        return cls(**given)


@dataclass
class Counts:
    """Objects that were asked for and moved."""

    asked: int = 0
    found: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    not_loaded: int = 0
    saved: int = 0
    not_saved: int = 0


class Calls:
    """The store's calls by address. Threads may share it."""

    def __init__(self, settings: Settings) -> None:
        def connect(deadline: float) -> Callable[[], Store]:
            return lambda: Store(settings.master, tenant=settings.tenant, deadline=deadline, connect=_CONNECT_S)

        # Two ways to one store, because a question and a gigabyte may take so differently long.
        self._asking = Door(connect(settings.patience_ms / 1000), settings.pause_s)
        self._moving = Door(connect(settings.deadline_s), settings.pause_s)
        self._options = PutOptions(replicas=settings.replicas, replicas_min=1, ttl=settings.ttl)
        self.counts = Counts()
        self._pause = settings.pause_s
        self._connected, self._tried, self._ends = threading.Event(), threading.Event(), threading.Event()
        self._connects = threading.Thread(target=self._connect, name="moontide-connects", daemon=True)
        self._connects.start()
        # Engines are slow to start anyway, and should find what there is from their first request on.
        self._tried.wait(2 * _CONNECT_S)

    def _connect(self) -> None:
        while not self._ends.is_set():
            if self._asking.store() is not None and self._moving.store() is not None:
                self._connected.set()
            self._tried.set()
            if self._connected.is_set():
                return
            self._ends.wait(self._pause)

    def _store(self, door: Door) -> Store | None:
        """The store if it is worth asking, at once."""
        return door.store() if self._connected.is_set() else None

    def there(self, keys: Sequence[str]) -> list[bool]:
        """Which objects there are; none if the store does not say."""
        # What could not be moved need not be found.
        store = self._store(self._asking) if keys and self._moving.is_open else None
        if store is None:
            return [False] * len(keys)
        codes = self._judged(self._asking, len(keys), lambda: store._exists_codes(keys))
        found = [code == 1 for code in codes]
        self.counts.asked += len(keys)
        self.counts.found += sum(found)
        return found

    def load(self, objects: int, batch: Callable[[], Batch]) -> list[bool]:
        """Which objects came. The memory of the others may hold anything. ``batch`` is made only if it is needed."""
        store = self._store(self._moving) if objects else None
        codes = [_NOT_ASKED] * objects
        if store is not None:
            moved = batch()
            codes = self._judged(
                self._moving,
                objects,
                lambda: store._get_addresses(moved.keys, moved.addresses, moved.sizes, exact=True),
            )
            # Nobody can use these, and while they are there nobody can save them anew.
            self.remove([key for key, code in zip(moved.keys, codes, strict=True) if code == _CORRUPT])
        came = [code >= 0 for code in codes]
        self.counts.loaded += sum(came)
        self.counts.not_loaded += objects - sum(came)
        self.counts.loaded_bytes += sum(code for code in codes if code > 0)
        return came

    def save(self, objects: int, batch: Callable[[], Batch]) -> list[bool]:
        """Which objects are there now. What is there already is not written again."""
        store = self._store(self._moving) if objects else None
        codes = [_NOT_ASKED] * objects
        if store is not None:
            moved = batch()
            codes = self._judged(
                self._moving,
                objects,
                lambda: store._put_addresses(moved.keys, moved.addresses, moved.sizes, self._options),
            )
        saved = [code >= 0 or code in _THERE_ALREADY for code in codes]
        self.counts.saved += sum(saved)
        self.counts.not_saved += objects - sum(saved)
        return saved

    def remove(self, keys: Sequence[str | bytes]) -> list[bool]:
        """Which objects were there and are not any more."""
        removed: list[bool] = []
        store = self._store(self._moving) if keys else None
        for at in range(0, len(keys) if store is not None else 0, _REMOVED_AT_ONCE):
            assert store is not None
            some = keys[at : at + _REMOVED_AT_ONCE]
            try:
                removed += store.batch_remove(some, force=True)
            except BatchError as error:
                removed += [outcome is True for outcome in error.outcomes]
            except Error as error:
                self._moving.failed(str(error))
                break
        return removed + [False] * (len(keys) - len(removed))

    def remove_all(self, prefix: str) -> bool:
        """Removes all objects whose keys begin so. Whether that was done."""
        store = self._store(self._moving)
        try:
            keys = None if store is None else store.keys(prefix)
        except Error as error:
            self._moving.failed(str(error))
            keys = None
        return keys is not None and all(self.remove(keys))

    def close(self) -> None:
        """Ends the connections."""
        self._ends.set()
        self._connects.join(2 * _CONNECT_S)
        self._asking.close()
        self._moving.close()

    @staticmethod
    def _judged(door: Door, objects: int, call: Callable[[], list[int]]) -> list[int]:
        """A code for each object; the door learns whether the store answers."""
        try:
            codes = call()
        except Error as error:
            codes = [-error.code] * objects
        away = sum(code in _AWAY for code in codes)
        if away == len(codes):
            door.failed(f"error {-codes[0]} for all of {len(codes)} objects")
        elif not away:
            door.worked()
        return codes
