"""Blocking calls with timeouts, for inference engines that call from their own threads. The calls do not raise.

If the store is unavailable or hangs, one call takes ``lookup_timeout_ms`` (lookups) or ``transfer_timeout_s``
(transfers). For ``retry_after_s`` afterwards, calls return at once as if no object existed. No call waits for a
connection: a background thread connects.
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

from .connection import StoreConnection
from .transfers import Batch

#: Codes for a store that is unreachable or does not answer in time (see `moontide.errors`). All others are answers.
_UNAVAILABLE = frozenset((-300, -301, -304, -400, -401, -402))
#: Result while the store is unavailable: Unreachable.
_NOT_CALLED = -401
#: Codes of a put that has nothing to do: the object exists, or another client is writing it.
_ALREADY_EXISTS = frozenset((-101, -102))
#: Every replica of the object is corrupt.
_CORRUPT = -500
#: Timeout of connecting, in seconds. Longer than a lookup: a large cluster sends the addresses of many nodes.
_CONNECT_TIMEOUT_S = 3.0
#: Maximum number of keys that one call removes.
_REMOVE_BATCH = 4096


@dataclass(frozen=True)
class Settings:
    """Settings of the SGLang and LMCache backends. ``of`` rejects invalid values and names the setting."""

    #: "host:port" of the master [default: MOONTIDE_MASTER, or the default port of this host].
    master: str | None = None
    tenant: str = "default"
    #: Version of the model, if its name does not include it.
    revision: str = ""
    #: Part of all keys: engines with different values do not share objects.
    namespace: str = ""
    #: Number of replicas of an object. A put with fewer replicas succeeds.
    replicas: int = 1
    #: Time to live of an object in seconds, independent of its use [default: unlimited].
    ttl: float | None = None
    #: Timeout of the transfer of one batch, in seconds.
    transfer_timeout_s: float = 5.0
    #: Timeout of a lookup in milliseconds; a request waits for it.
    lookup_timeout_ms: float = 500.0
    #: Pause in seconds after a call that the store did not answer.
    retry_after_s: float = 1.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Parses the settings of a user. Raises ValueError for unknown settings and invalid values."""
        known = {field.name: field.default for field in fields(cls) if field.default is not MISSING}
        unknown = sorted(given.keys() - known.keys())
        if unknown:
            raise ValueError(f"unknown settings: {', '.join(unknown)}; known settings: {', '.join(known)}")
        for name, value in given.items():
            if value is None and known[name] is None:
                continue
            if name in ("master", "tenant", "revision", "namespace"):
                if not isinstance(value, str):
                    raise ValueError(f"{name} must be text, not {value!r}")
            elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a number above 0, not {value!r}")
            elif name == "replicas" and not isinstance(value, int):
                raise ValueError(f"replicas must be a whole number, not {value!r}")
        return cls(**given)


@dataclass
class CallStats:
    """Counters of objects."""

    looked_up: int = 0
    found: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    not_loaded: int = 0
    saved: int = 0
    not_saved: int = 0


class Calls:
    """Calls of the store by address. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        def connect(timeout: float) -> Callable[[], Store]:
            return lambda: Store(
                settings.master, tenant=settings.tenant, timeout=timeout, connect_timeout=_CONNECT_TIMEOUT_S
            )

        # Two connections, because lookups and transfers have different timeouts.
        self._lookups = StoreConnection(connect(settings.lookup_timeout_ms / 1000), settings.retry_after_s)
        self._transfers = StoreConnection(connect(settings.transfer_timeout_s), settings.retry_after_s)
        self._options = PutOptions(replicas=settings.replicas, replicas_min=1, ttl=settings.ttl)
        self.counts = CallStats()
        self._retry_after = settings.retry_after_s
        self._connected, self._tried, self._stop = threading.Event(), threading.Event(), threading.Event()
        self._connector = threading.Thread(target=self._connect, name="moontide-connect", daemon=True)
        self._connector.start()
        # Waits for the first attempt, so that the first request finds stored objects. Engines start slowly anyway.
        self._tried.wait(2 * _CONNECT_TIMEOUT_S)

    def _connect(self) -> None:
        while not self._stop.is_set():
            if self._lookups.store() is not None and self._transfers.store() is not None:
                self._connected.set()
            self._tried.set()
            if self._connected.is_set():
                return
            self._stop.wait(self._retry_after)

    def _store(self, connection: StoreConnection) -> Store | None:
        """Returns the store if it is available. Does not block."""
        return connection.store() if self._connected.is_set() else None

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Returns for each key whether the object exists; False for all if the store does not answer."""
        # If transfers are unavailable, a hit would be useless.
        store = self._store(self._lookups) if keys and self._transfers.available else None
        if store is None:
            return [False] * len(keys)
        codes = self._checked(self._lookups, len(keys), lambda: store._exists_codes(keys))
        found = [code == 1 for code in codes]
        self.counts.looked_up += len(keys)
        self.counts.found += sum(found)
        return found

    def load(self, objects: int, batch: Callable[[], Batch]) -> list[bool]:
        """Loads objects. Returns for each whether it was loaded; the memory of the others is undefined. Calls ``batch``
        only if the store is available."""
        store = self._store(self._transfers) if objects else None
        codes = [_NOT_CALLED] * objects
        if store is not None:
            made = batch()
            codes = self._checked(
                self._transfers,
                objects,
                lambda: store._get_addresses(made.keys, made.addresses, made.sizes, exact=True),
            )
            # Corrupt objects are useless, and while they exist no client can save them again.
            self.remove([key for key, code in zip(made.keys, codes, strict=True) if code == _CORRUPT])
        loaded = [code >= 0 for code in codes]
        self.counts.loaded += sum(loaded)
        self.counts.not_loaded += objects - sum(loaded)
        self.counts.loaded_bytes += sum(code for code in codes if code > 0)
        return loaded

    def save(self, objects: int, batch: Callable[[], Batch]) -> list[bool]:
        """Saves objects. Returns for each whether it is stored now. Does not write existing objects again."""
        store = self._store(self._transfers) if objects else None
        codes = [_NOT_CALLED] * objects
        if store is not None:
            made = batch()
            codes = self._checked(
                self._transfers,
                objects,
                lambda: store._put_addresses(made.keys, made.addresses, made.sizes, self._options),
            )
        saved = [code >= 0 or code in _ALREADY_EXISTS for code in codes]
        self.counts.saved += sum(saved)
        self.counts.not_saved += objects - sum(saved)
        return saved

    def remove(self, keys: Sequence[str | bytes]) -> list[bool]:
        """Removes objects. Returns for each whether it was removed."""
        removed: list[bool] = []
        store = self._store(self._transfers) if keys else None
        for at in range(0, len(keys) if store is not None else 0, _REMOVE_BATCH):
            assert store is not None
            batch = keys[at : at + _REMOVE_BATCH]
            try:
                removed += store.batch_remove(batch, force=True)
            except BatchError as error:
                removed += [outcome is True for outcome in error.outcomes]
            except Error as error:
                self._transfers.mark_failed(str(error))
                break
        return removed + [False] * (len(keys) - len(removed))

    def remove_all(self, prefix: str) -> bool:
        """Removes all objects whose keys have a prefix. Returns whether all were removed."""
        store = self._store(self._transfers)
        try:
            keys = None if store is None else store.keys(prefix)
        except Error as error:
            self._transfers.mark_failed(str(error))
            keys = None
        return keys is not None and all(self.remove(keys))

    def close(self) -> None:
        """Closes the connections."""
        self._stop.set()
        self._connector.join(2 * _CONNECT_TIMEOUT_S)
        self._lookups.close()
        self._transfers.close()

    @staticmethod
    def _checked(connection: StoreConnection, objects: int, call: Callable[[], list[int]]) -> list[int]:
        """Runs a call and returns a code for each object. Tells the connection whether the store answered."""
        try:
            codes = call()
        except Error as error:
            codes = [-error.code] * objects
        unavailable = sum(code in _UNAVAILABLE for code in codes)
        if unavailable == len(codes):
            connection.mark_failed(f"error {-codes[0]} for all of {len(codes)} objects")
        elif not unavailable:
            connection.mark_ok()
        return codes
