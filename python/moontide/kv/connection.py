"""Store connection that fails fast while the store is unavailable."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from moontide.errors import Error
from moontide.store import Store

LOG = logging.getLogger("moontide.kv")


class StoreConnection:
    """Circuit breaker around a ``Store``. After a failure it is unavailable for ``retry_after`` seconds, so that no
    request waits for a store that does not answer.

    The constructor does not connect. The first call of ``store`` does; it should come from a background thread.
    """

    def __init__(self, connect: Callable[[], Store], retry_after: float = 1.0) -> None:
        self._connect = connect
        self._retry_after = retry_after
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._unavailable_until = 0.0
        self._warned = False
        self._closed = False

    @property
    def available(self) -> bool:
        """Whether calls may use the store now. Does not block."""
        return not self._closed and time.monotonic() >= self._unavailable_until

    def store(self) -> Store | None:
        """Returns the store, or None if it is unavailable or cannot be reached. May block to connect."""
        if not self.available:
            return None
        with self._lock:
            if self._store is None and self.available:
                try:
                    self._store = self._connect()
                except Error as error:
                    self.mark_failed(str(error))
            return self._store

    def connect_in_background(self) -> None:
        """Connects in a background thread, so that the first call does not wait for the connection."""
        threading.Thread(target=self.store, name="moontide-connect", daemon=True).start()

    def mark_ok(self) -> None:
        """Records that the store answered."""
        if self._warned:
            self._warned = False
            LOG.warning("store available again")

    def mark_failed(self, reason: str) -> None:
        """Records that the store did not answer: it is unavailable for ``retry_after`` seconds. Logs a warning once,
        until the store answers again."""
        self._unavailable_until = time.monotonic() + self._retry_after
        if not self._warned:
            self._warned = True
            LOG.warning("store unavailable, next attempt in %.1f s: %s", self._retry_after, reason)

    def close(self) -> None:
        """Closes the connection. ``store`` returns None afterwards."""
        with self._lock:
            self._closed = True
            store, self._store = self._store, None
        if store is not None:
            store.close()
