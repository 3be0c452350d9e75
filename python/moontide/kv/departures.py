"""Which blocks have left the store, of those that others were told of: for engines that tell routers what they save."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from moontide._native import Departures as Feed
from moontide.errors import Error
from moontide.store import Store

from .door import LOG, Door

#: How many blocks are worked on in one go, and how long the thread then lets the engine's go on: they share one lock.
_AT_ONCE = 512
_PAUSE_S = 0.002
#: How long the feed is waited for at a time: so much later, at most, is a block looked at that was just announced.
_LISTEN_S = 0.25


@dataclass
class Counts:
    """What was announced, and what came of it."""

    announced: int = 0
    #: Blocks of which an object was gone.
    removed: int = 0
    #: Blocks that were given up because there were too many.
    forgotten: int = 0
    #: How often all blocks had to be looked for, because the feed had a gap or it was time.
    looked: int = 0


class Departures:
    """Remembers blocks that others were told of, and says which of them cannot be loaded any more.

    ``announced`` and ``take`` return at once and never fail; one thread of its own follows the store. A block is gone
    when the first of its objects is, is said to be gone once, and may be announced again. What the store tells only
    makes a block suspect: it is gone if the store, asked for its keys, does not have them all. So nothing is said to be
    gone that was saved again meanwhile, and a store that is away makes nothing go: it is asked again when it is back.

    ``keys`` makes the keys of a block, in the thread. At most ``most`` blocks are remembered; of more, those that were
    announced first are given up, and said to be gone: a router should rather not know of a block than believe in it for
    ever. Every ``again`` seconds all are looked for, in case anything was missed.
    """

    def __init__(
        self, door: Door, keys: Callable[[Hashable], Sequence[str]], most: int = 1 << 18, again: float = 600.0
    ) -> None:
        self._door = door
        self._keys = keys
        self._most = most
        self._again = again
        #: Blocks with the ids of their objects, in the order in which they were announced.
        self._blocks: dict[Hashable, tuple[bytes, ...]] = {}
        self._of_object: dict[bytes, Hashable] = {}
        #: Blocks that are to be looked for, in this order.
        self._suspects: dict[Hashable, None] = {}
        self._feed: Feed | None = None
        self._store: Store | None = None
        self._looked = time.monotonic()
        #: What the two threads hand to each other.
        self._lock = threading.Lock()
        self._new: dict[Hashable, None] = {}
        self._gone: dict[Hashable, None] = {}
        self._ends = threading.Event()
        self.counts = Counts()
        self._thread = threading.Thread(target=self._work, name="moontide-departures", daemon=True)
        self._thread.start()

    def announced(self, blocks: Iterable[Hashable]) -> None:
        """Others have been told that these blocks are in the store."""
        with self._lock:
            for block in blocks:
                self._new[block] = None
                # That was said of the time before.
                self._gone.pop(block, None)

    def take(self) -> list[Hashable]:
        """Blocks that are gone, since the last time. Tell others before ``announced`` is called for anything newer."""
        with self._lock:
            gone, self._gone = self._gone, {}
        return list(gone)

    def close(self) -> None:
        """Ends the thread."""
        self._ends.set()
        self._thread.join(10)

    # ------------------------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        while not self._ends.is_set():
            try:
                self._turn()
            except Error as error:
                self._door.failed(str(error))
            except Exception as error:  # whatever it is, the thread must go on, and the engine compute
                LOG.exception("departures were not followed")
                self._door.failed(str(error))
        self._leave()

    def _turn(self) -> None:
        store = self._door.store()
        if store is None:
            # Nothing is remembered by ids while there is no store to make them; what is announced waits.
            self._cut_waiting()
            self._ends.wait(_LISTEN_S)
            return
        if store is not self._store:
            self._leave()
            self._store, self._feed = store, store.departures()
        assert self._feed is not None
        heard = self._feed.next(_LISTEN_S)
        # What was announced before the store spoke has to be known before it is listened to.
        self._remember(store)
        ids, gap = heard or ([], False)
        self._suspects.update(dict.fromkeys(self._of_object[id] for id in ids if id in self._of_object))
        if gap or time.monotonic() - self._looked > self._again:
            self._suspect_all(store)
        if self._suspects:
            self._look(store)

    def _leave(self) -> None:
        feed, self._feed, self._store = self._feed, None, None
        if feed is not None:
            feed.close()

    def _cut_waiting(self) -> None:
        """However long the store is away, no more is kept than at other times."""
        with self._lock:
            excess = _first(self._new, len(self._new) - self._most)
            for block in excess:
                del self._new[block]
                self._gone[block] = None
        self.counts.forgotten += len(excess)

    def _remember(self, store: Store) -> None:
        """From now on the feed is looked through for them. They may have left before: that is looked for once."""
        with self._lock:
            new, self._new = self._new, {}
        for block in new:
            self._forget(block)
            self._name(store, block)
            self._suspects[block] = None
        self.counts.announced += len(new)
        excess = _first(self._blocks, len(self._blocks) - self._most)
        for block in excess:
            self._forget(block)
        self.counts.forgotten += len(excess)
        self._tell(excess)

    def _name(self, store: Store, block: Hashable) -> None:
        ids = tuple(store.object_id(key) for key in self._keys(block))
        self._blocks[block] = ids
        for id in ids:
            self._of_object[id] = block

    def _forget(self, block: Hashable) -> None:
        self._suspects.pop(block, None)
        for id in self._blocks.pop(block, ()):
            self._of_object.pop(id, None)

    def _suspect_all(self, store: Store) -> None:
        self._looked = time.monotonic()
        self.counts.looked += 1
        # Their names are others after everything of the tenant was removed.
        self._of_object.clear()
        for at, block in enumerate(list(self._blocks)):
            self._name(store, block)
            if at % _AT_ONCE == _AT_ONCE - 1:
                self._ends.wait(_PAUSE_S)
        self._suspects.update(dict.fromkeys(self._blocks))

    def _look(self, store: Store) -> None:
        """Asks for the keys of all suspects. Those that the store does not answer for stay suspect."""
        while self._suspects and not self._ends.is_set():
            some = [(block, list(self._keys(block))) for block in _first(self._suspects, _AT_ONCE)]
            there = iter(store.batch_exists([key for _, keys in some for key in keys]))
            gone = [block for block, keys in some if not all([next(there) for _ in keys])]
            self._door.worked()
            for block, _ in some:
                self._suspects.pop(block, None)
            for block in gone:
                self._forget(block)
            self.counts.removed += len(gone)
            self._tell(gone)
            if self._suspects:
                self._ends.wait(_PAUSE_S)

    def _tell(self, gone: list[Hashable]) -> None:
        with self._lock:
            # One that was announced again meanwhile is looked at anew.
            self._gone.update(dict.fromkeys(block for block in gone if block not in self._new))


def _first(blocks: Iterable[Hashable], count: int) -> list[Hashable]:
    return list(itertools.islice(blocks, max(0, count)))
