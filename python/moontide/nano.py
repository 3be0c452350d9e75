"""Ranks of one host that push pages straight into each other's memory: ``NanoKVCache``.

Every rank lends a region to the others, runs a node on it, and rank 0 the master: ordinary ones, to which any store can
connect. A producer asks for a place (``open_for_write``), writes pages into it, by ``plan.write`` or by kernels, and the
last page raises a flag that a consumer is waiting for: nobody is in between, and nothing is copied on the way.

>>> import os, tempfile
>>> from moontide.nano import NanoKVCache
>>> cache = NanoKVCache(8 << 20, path=os.path.join(tempfile.mkdtemp(), "world"), rank=0, ranks=1)
>>> cache.put("prefix", bytes(100_000))
>>> room = bytearray(100_000)
>>> cache.get_into("prefix", room)
>>> cache.get_location("nothing")
NotReady
>>> cache.close()
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import tempfile
import threading
import time
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Final

import moontide
from moontide._native import Hop, HopAwaited, HopCell, HopPush
from moontide.errors import DeadlineExceeded, DeviceError, Gone, InvalidArgument, NoSpace, NotFound, TooLarge

if TYPE_CHECKING:
    from types import TracebackType

    from moontide import kernels

__all__ = ["NanoKVCache", "NotReady", "ObjMeta", "Ticket", "WritePlan"]

PAGE_BYTES: Final = 256 * 1024
#: How long a put waits for room, as puts of the store do.
PUT_WAITS_S: Final = 5.0

_PACKED: Final = struct.Struct("<IIQIQQQQQ")


class _NotReady:
    """What ``get_location`` says of an object that is not there, or not yet."""

    def __repr__(self) -> str:
        return "NotReady"

    def __bool__(self) -> bool:
        return False


NotReady: Final = _NotReady()


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where a version of an object is, for any rank: offsets into the owner's region, and no address.

    It travels by any means, such as ``bytes(ticket)`` over the engine's own socket.
    """

    rank: int
    segment: int
    generation: int
    slot: int
    epoch: int
    payload_offset: int
    bytes_total: int
    page_bytes: int
    flag_offset: int

    @property
    def n_pages(self) -> int:
        return -(-self.bytes_total // self.page_bytes)

    @property
    def last_page_bytes(self) -> int:
        return self.bytes_total - (self.n_pages - 1) * self.page_bytes

    def __bytes__(self) -> bytes:
        return _PACKED.pack(*astuple(self))

    @staticmethod
    def from_bytes(packed: bytes) -> Ticket:
        """The ticket of which these are the bytes. Whether it is worth anything is found out by ``expect``."""
        if len(packed) != _PACKED.size:
            raise InvalidArgument(f"a ticket has {_PACKED.size} bytes, these are {len(packed)}")
        return Ticket(*_PACKED.unpack(packed))

    @property
    def record(self) -> kernels.Record:
        """The same, as kernels take it."""
        from moontide import kernels

        return kernels.Record(
            owner=self.rank,
            payload_offset=self.payload_offset,
            flag_offset=self.flag_offset,
            bytes_total=self.bytes_total,
            epoch=self.epoch,
            page_bytes=self.page_bytes,
        )

    def _words(self) -> list[int]:
        return list(astuple(self))


class _Placed:
    """What is the same at both ends of a record: the numbers of its ticket."""

    ticket: Ticket

    @property
    def bytes_total(self) -> int:
        return self.ticket.bytes_total

    @property
    def page_bytes(self) -> int:
        return self.ticket.page_bytes

    @property
    def n_pages(self) -> int:
        return self.ticket.n_pages

    @property
    def last_page_bytes(self) -> int:
        return self.ticket.last_page_bytes

    @property
    def epoch(self) -> int:
        return self.ticket.epoch


class WritePlan(_Placed):
    """A place for an object, which this process fills: by ``write``, or by kernels that push to ``ticket.record``.

    Pointers are good in this process, until the plan is committed or aborted. When all pages are there, the cache commits
    it within milliseconds by itself; ``cache.commit(key)`` does so at once.
    """

    def __init__(self, push: HopPush, key: str | bytes) -> None:
        self._push = push
        self.key = key
        self.ticket = Ticket(*push.ticket)
        #: Whoever commits it first decides what becomes of it; the others are told the same.
        self._ending = threading.Lock()
        self._ended = False
        self._error: moontide.Error | None = None

    @property
    def dst_rank(self) -> int:
        """Whose memory it is."""
        return self.ticket.rank

    @property
    def payload_ptr(self) -> int:
        return self._push.address

    @property
    def header_ptr(self) -> int | None:
        """Where kernels find the word that the node writes about the record; None if this device's cannot see it (no AMD device's
        can)."""
        return self._push.word_address

    @property
    def complete(self) -> bool:
        """Whether all pages are there."""
        return self._push.complete

    @property
    def seconds_left(self) -> float:
        """Until the master takes the place back."""
        return self._push.seconds_left

    def write(self, value: Any) -> None:
        """Writes all pages from this process: an array, a tensor, or bytes; in a cache on devices also a device's tensor. There it
        waits for kernels of this process that may still be making it, and none of the pages may be a kernel's."""
        span = _device_span(value)
        with self._ending:
            if span is None:
                self._push.write(value)
            else:
                self._push.write_from_device(*span)

    def write_page(self, page: int, value: Any) -> None:
        """Writes one page from this process's memory, when it is there: in any order, each once."""
        with self._ending:
            self._push.write_page(page, value)

    def __enter__(self) -> WritePlan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gives the place back, unless all pages are there: then the cache commits it, or has."""
        with contextlib.suppress(moontide.Closed):
            if kind is not None or not self.complete:
                self.abort()

    def abort(self) -> None:
        """Gives the place back, and tells those who wait. Kernels of this process that write to it on a device are waited for."""
        self._push.abort()


class ObjMeta(_Placed):
    """An object, or one on its way, whose memory is not used for anything else until ``release``, or the end of a ``with``."""

    def __init__(self, awaited: HopAwaited, ticket: Ticket) -> None:
        self._awaited = awaited
        self.ticket = ticket

    @property
    def owner_rank(self) -> int:
        return self.ticket.rank

    @property
    def payload_ptr(self) -> int:
        """Where the bytes are in this process."""
        return self._awaited.address

    @property
    def header_ptr(self) -> int | None:
        """Where kernels find the word that the node writes about the record; None if this device's cannot see it (no AMD device's
        can). Kernels that wait then take the flag alone, and time out where they would learn that a producer has died."""
        return self._awaited.word_address

    @property
    def ready(self) -> bool:
        """Whether all pages are there. Raises Gone if they never will be."""
        progress = self._awaited.progress
        if progress == "gone":
            raise Gone("the producer has died or given up; compute it, or wait for another one")
        return progress == "complete"

    def wait(self, timeout: float) -> None:
        """Waits for the flag. Raises DeadlineExceeded, or Gone."""
        until = time.monotonic() + timeout
        looks = 0
        while not self.ready:
            if time.monotonic() >= until:
                raise DeadlineExceeded(f"not all {self.n_pages} pages have come within {timeout} s")
            looks += 1
            # Producers take microseconds, kernels and other machines' noise milliseconds.
            time.sleep(0 if looks < 100 else 0.0002)

    def copy_into(self, dst: Any) -> None:
        """Copies the bytes into an array or a tensor of the same length; in a cache on devices also into a device's, when kernels of
        this process that may still use it have ended."""
        span = _device_span(dst, to_write=True)
        if span is None:
            self._awaited.copy_into(dst)
        else:
            self._awaited.copy_to_device(*span)

    def release(self) -> None:
        """Lets go of the memory. Kernels of this process that read it on a device are waited for."""
        self._awaited.release()

    def __enter__(self) -> ObjMeta:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class NanoKVCache:
    """A rank's part of a cache in the memory of all ranks. All ranks make one, with the same settings; it waits for them.

    - ``heap_bytes``: memory of each rank; ``page_bytes``: what is pushed and counted at a time.
    - ``path``: the world's name, a socket that rank 0 makes; ``rank`` of ``ranks``. Left out, they come from the variables
      ``RANK``, ``WORLD_SIZE`` and ``MASTER_PORT`` that launchers of torch set.
    - ``device``: where the records are to be, such as ``"cuda:0"`` or ``"hip:1"``, by the number of a device in this process (``"cuda"`` is the
      first); left out, in memory of the host. All ranks, or none. **Not run on real devices by us**: docs/devices.md.
    - ``watermarks``: above the first share of its memory a rank's oldest untouched objects are evicted, down to the second.
    - ``write_timeout``: a plan that is not complete after so many seconds is taken back. Until then its key is ``InProgress`` to
      others, also if you drop it: ``abort`` it, or use it in a ``with``.

    Ranks write into each other's memory: run only programs that may do that. Close rank 0 last: its master and its memory end
    with it, and hardly anything can be read after that.
    """

    def __init__(
        self,
        heap_bytes: int,
        master_rank: int = 0,
        page_bytes: int = PAGE_BYTES,
        *,
        path: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        ranks: int | None = None,
        device: str | None = None,
        watermarks: tuple[float, float] = (0.95, 0.85),
        write_timeout: float = 30.0,
        timeout: float = 60.0,
    ) -> None:
        if master_rank != 0:
            raise InvalidArgument("the master is on rank 0")
        if page_bytes <= 0 or page_bytes % 512:
            raise InvalidArgument(f"page_bytes is a multiple of 512, not {page_bytes}")
        if heap_bytes < 1 << 20:
            raise InvalidArgument(f"heap_bytes is at least 1 MiB, not {heap_bytes}")
        if path is None:
            name = f"moontide-{os.getuid()}-{os.environ.get('MASTER_PORT', '0')}.world"
            path = os.path.join(tempfile.gettempdir(), name)
        self._hop = Hop(
            os.fspath(path),
            _from_environment("RANK", rank),
            _from_environment("WORLD_SIZE", ranks),
            heap_bytes,
            device=device,
            watermarks=watermarks,
            write_timeout=write_timeout,
            timeout=timeout,
        )
        self.page_bytes = page_bytes
        self.heap_bytes = heap_bytes
        #: An ordinary client of the same objects, for everything that is not in here.
        self.store = moontide.Store(self._hop.master)
        self._plans: dict[bytes, WritePlan] = {}
        self._cells: dict[int, HopCell] = {}
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._closed = False
        self._counts = dict.fromkeys(("plans", "committed", "lost", "bytes_tx", "bytes_rx", "t_plan_us"), 0)
        self._publisher: threading.Thread | None = None

    @property
    def rank(self) -> int:
        return self._hop.rank

    @property
    def ranks(self) -> int:
        return self._hop.ranks

    @property
    def bases(self) -> list[int]:
        """Where the ranks' regions lie in this process: ``pointer − bases[me] + bases[peer]`` is the same place at a peer."""
        return self._hop.bases

    # ---------------------------------------------------------------------------------------------------------- objects

    def put(self, key: str | bytes, tensor: Any, *, preferred_segment: int | None = None) -> None:
        """Stores an array or a tensor, or bytes, by a copy of this process. Waits some seconds for room."""
        until = time.monotonic() + PUT_WAITS_S
        while True:
            try:
                plan = self.open_for_write(key, _bytes_of(tensor), preferred_segment=preferred_segment)
                break
            except NoSpace:
                # The master evicts in the background.
                if time.monotonic() >= until:
                    raise
                time.sleep(0.005)
        try:
            plan.write(tensor)
        except BaseException:
            self._forget(plan)
            plan.abort()
            raise
        self._commit(plan)

    def get(self, key: str | bytes, *, dst: Any = None) -> Any:
        """The object's bytes: in ``dst``, which is returned; or in a new tensor of bytes, or, where there is no torch, as
        ``bytes``. Raises NotFound."""
        with self._located(key) as meta:
            room = _room(meta.bytes_total) if dst is None else dst
            meta.copy_into(room)
            self._count(bytes_rx=meta.bytes_total)
        return bytes(room) if isinstance(room, bytearray) and dst is None else room

    def get_into(self, key: str | bytes, dst: Any) -> None:
        """Copies the object into an array or a tensor of the same length. Raises NotFound."""
        self.get(key, dst=dst)

    def remove(self, key: str | bytes) -> None:
        """Removes an object. Who reads it may go on, and its memory is used again only after that."""
        self.store.remove(key)

    def touch(self, key: str | bytes) -> None:
        """Makes it be evicted later."""
        self.store.touch(key)

    # ------------------------------------------------------------------------------------------------------------ plans

    def open_for_write(
        self, key: str | bytes, bytes_total: int, *, preferred_segment: int | None = None
    ) -> WritePlan:
        """A place for an object, in the memory of rank ``preferred_segment`` if it has room. Raises AlreadyExists,
        InProgress, NoSpace, or TooLarge."""
        if preferred_segment is not None and not 0 <= preferred_segment < self.ranks:
            raise InvalidArgument(f"preferred_segment is a rank, 0 to {self.ranks - 1}, not {preferred_segment}")
        if bytes_total >= self.heap_bytes:
            raise TooLarge(f"{bytes_total} bytes in a memory of {self.heap_bytes}: give the ranks more heap_bytes, or split it")
        begun = time.perf_counter_ns()
        push = self._hop.open_for_write(key, bytes_total, self.page_bytes, preferred_segment)
        plan = WritePlan(push, key)
        with self._lock:
            self._plans[_name(key)] = plan
            counts = self._counts
            took = (time.perf_counter_ns() - begun) // 1000
            counts["t_plan_us"] += (took - counts["t_plan_us"]) // 8 if counts["plans"] else took
            counts["plans"] += 1
            if self._publisher is None:
                self._publisher = threading.Thread(target=self._publish, name="moontide-nano", daemon=True)
                self._publisher.start()
        self._work.set()
        return plan

    def commit(self, key: str | bytes) -> None:
        """Makes the store know a plan of this process whose pages are all there, which the cache does by itself soon: a second
        time it does nothing. Raises NotReady while kernels are still at it, and Gone if the plan was lost."""
        with self._lock:
            plan = self._plans.get(_name(key))
        if plan is not None:
            self._commit(plan)
        elif not self.store.exists(key):
            raise Gone(f"there is no plan for {key!r}: it was never opened, was aborted, or was not complete in time")

    def get_location(self, key: str | bytes) -> ObjMeta | _NotReady:
        """Where a complete object is, and keeps it there; ``NotReady``, at once, if there is none. Release it soon."""
        found = self._hop.find(key, self.page_bytes)
        return NotReady if found is None else ObjMeta(found, Ticket(*found.ticket))

    def expect(self, ticket: Ticket) -> ObjMeta:
        """What waits for an object that another rank is writing: its plan's ``ticket``. Raises Gone if that has ended."""
        awaited = self._hop.expect(ticket._words())
        if awaited is None:
            raise Gone("it has ended, and so has what could be read of it")
        return ObjMeta(awaited, ticket)

    def pin(self, ticket: Ticket) -> kernels.Pin:
        """For kernels that read a committed object under a ledger cell: one cell for each rank's memory, so one reading
        kernel at a time for each."""
        from moontide import kernels

        # The word's address is good for as long as the rank's memory is mapped; the slot need not stay for that.
        with self.expect(ticket) as meta:
            word = meta.header_ptr
        if word is None:
            raise DeviceError(
                "kernels of this device cannot see the node's words; hold the object by get_location while they read it"
            )
        with self._lock:
            cell = self._cells.get(ticket.rank)
            if cell is None:
                cell = self._cells[ticket.rank] = self._hop.kernel_cell(ticket.rank)
        return kernels.Pin(cell=cell.address, name=Hop.cell_name(ticket._words()), header_word=word)

    # ------------------------------------------------------------------------------------------------------ maintenance

    def stats(self) -> dict[str, int]:
        """Numbers of this rank: its memory, and what this process did."""
        used, draining, total = self._hop.usage()
        with self._lock:
            counts = dict(self._counts)
            counts["plans_open"] = len(self._plans)
        return {"bytes_used": used, "bytes_draining": draining, "bytes_total": total} | counts

    def evict_until_below(self, usage_ratio: float) -> None:
        """Removes the oldest objects in this rank's memory until less than this share of it is in use. Those that are being
        written, or that the master has leased to a reader, stay. What is held by ``get_location`` loses its key, and its memory comes back
        when it is released (``bytes_draining``)."""
        if not 0 <= usage_ratio <= 1:
            raise InvalidArgument(f"a share of the memory is 0 to 1, not {usage_ratio}")
        used, _, total = self._hop.usage()
        mine: list[tuple[int, bytes, int]] = []
        for key in self.store.keys():
            found = self.store.stat(key)
            if found is not None and self._hop.rank_of(found["places"][0]["node"]) == self.rank:
                mine.append((found["version"], key, found["size"]))
        for _, key, size in sorted(mine, key=lambda one: one[0]):
            if used <= usage_ratio * total:
                return
            with contextlib.suppress(moontide.Error):
                if self.store.remove(key):
                    used -= size

    def close(self) -> None:
        """Gives back open plans, and this rank's memory with all that is in it. A second time it does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            plans = list(self._plans.values())
            self._plans.clear()
            cells = list(self._cells.values())
            self._cells.clear()
        self._work.set()
        if self._publisher is not None and self._publisher is not threading.current_thread():
            self._publisher.join()
        for plan in plans:
            plan.abort()
        for cell in cells:
            cell.close()
        self.store.close()
        self._hop.close()

    def __enter__(self) -> NanoKVCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------------------- inside

    def _located(self, key: str | bytes) -> ObjMeta:
        meta = self.get_location(key)
        if isinstance(meta, _NotReady):
            raise NotFound(f"there is no object {key!r} in the ranks' memory")
        return meta

    def _forget(self, plan: WritePlan) -> None:
        with self._lock:
            if self._plans.get(_name(plan.key)) is plan:
                del self._plans[_name(plan.key)]

    def _commit(self, plan: WritePlan) -> None:
        with plan._ending:
            if not plan._ended:
                try:
                    if plan._push.commit():
                        self._count(committed=1, bytes_tx=plan.bytes_total)
                    else:
                        plan._error = Gone("the plan was aborted")
                except (moontide.NotReady, DeviceError):
                    # Kernels may still be writing: it stays a plan.
                    raise
                except moontide.Error as error:
                    plan._error = error
                    self._count(lost=1)
                plan._ended = True
        self._forget(plan)
        if plan._error is not None:
            raise plan._error

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, number in more.items():
                self._counts[name] += number

    def _publish(self) -> None:
        """Commits what kernels have completed, so that nobody has to come back for it."""
        while True:
            with self._lock:
                if self._closed:
                    return
                plans = dict(self._plans)
                if not plans:
                    self._work.clear()
            if not plans:
                self._work.wait()
                continue
            for plan in plans.values():
                # Its owner may end a plan at any time, which shows as Closed; whatever else is wrong with one is not to end
                # the others' thread.
                try:
                    if plan.complete:
                        self._commit(plan)
                    elif plan.seconds_left <= 0:
                        # The master has taken it back. Its memory is its writer's until that one lets go of the plan.
                        self._forget(plan)
                        self._count(lost=1)
                except (moontide.NotReady, DeviceError):
                    # A device that does not answer is asked again: kernels may be writing.
                    pass
                except Exception:
                    self._forget(plan)
            time.sleep(0.001)


def _from_environment(name: str, given: int | None) -> int:
    if given is not None:
        return given
    found = os.environ.get(name)
    if found is None:
        raise InvalidArgument(f"neither rank and ranks nor the variable {name} are given")
    return int(found)


def _room(size: int) -> Any:
    try:
        import torch
    except ImportError:
        return bytearray(size)
    return torch.empty(size, dtype=torch.uint8)


def _bytes_of(value: Any) -> int:
    span = _device_span(value)
    if span is not None:
        return span[1]
    found = getattr(value, "nbytes", None)
    return found if isinstance(found, int) else memoryview(value).nbytes


def _device_span(value: Any, *, to_write: bool = False) -> tuple[int, int] | None:
    """Address and length of what is in a device's memory: a tensor of torch, or what has ``__cuda_array_interface__``."""
    if getattr(value, "is_cuda", False):
        if not value.is_contiguous():
            raise InvalidArgument("a tensor of a device must be contiguous; call .contiguous() first")
        if value.is_conj() or value.is_neg():
            raise InvalidArgument("a tensor that is a conjugate or a negative view; call .resolve_conj().resolve_neg() first")
        return value.data_ptr(), value.nbytes
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        return None
    address, is_read_only = interface["data"]
    shape, kind, strides = interface["shape"], interface["typestr"], interface.get("strides")
    # Others have no bytes of their own, or count in other units.
    if kind[1] not in "biufcV":
        raise InvalidArgument(f"an array of a device with items of {kind!r}")
    size = int(kind[2:])
    if strides is not None and 0 not in shape:
        expected = size
        for length, stride in zip(reversed(shape), reversed(strides), strict=True):
            if length != 1 and stride != expected:
                raise InvalidArgument("an array of a device must be contiguous")
            expected *= length
    if interface.get("mask") is not None or (to_write and is_read_only):
        raise InvalidArgument("an array of a device must have no mask, and be writable to be written")
    return address, size * math.prod(shape)


def _name(key: str | bytes) -> bytes:
    """Text and its bytes are one key to the store."""
    return key.encode() if isinstance(key, str) else key
