"""The way to the store, for programs that must go on without it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from moontide.errors import Error
from moontide.store import Store

LOG = logging.getLogger("moontide.kv")


class Door:
    """The store while it answers. After a failure nobody asks it for a while: no request should wait for a dead one.

    Made without connecting; that is done by whoever asks first, which should be a background thread.
    """

    def __init__(self, connect: Callable[[], Store], pause: float = 1.0) -> None:
        self._connect = connect
        self._pause = pause
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._shut_until = 0.0
        self._complained = False
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether it is worth asking. Costs nothing."""
        return not self._closed and time.monotonic() >= self._shut_until

    def store(self) -> Store | None:
        """The store, or nothing: it is not worth asking, or cannot be reached. May wait for a connection."""
        if not self.is_open:
            return None
        with self._lock:
            if self._store is None and self.is_open:
                try:
                    self._store = self._connect()
                except Error as error:
                    self.failed(str(error))
            return self._store

    def connect_early(self) -> None:
        """Connects in the background, so that the first who asks does not wait for it."""
        threading.Thread(target=self.store, name="moontide-connect", daemon=True).start()

    def worked(self) -> None:
        """It has answered."""
        if self._complained:
            self._complained = False
            LOG.warning("the store answers again")

    def failed(self, why: str) -> None:
        """It has not: nobody asks for a while. Said once, until it answers again."""
        self._shut_until = time.monotonic() + self._pause
        if not self._complained:
            self._complained = True
            LOG.warning("the store does not answer, and is left alone for %.1f s at a time: %s", self._pause, why)

    def close(self) -> None:
        """Ends the connection, and lets nobody in any more."""
        with self._lock:
            self._closed = True
            store, self._store = self._store, None
        if store is not None:
            store.close()
