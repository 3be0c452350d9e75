"""Direct pushes of pages between the ranks of one host: ``NanoKVCache``.

All ranks map the region of every rank. Each rank runs a node in its region, and rank 0 also runs the master. Any store
can connect to them. A producer allocates a record (``open_for_write``) and writes its pages, with ``plan.write`` or
with kernels. The last page sets a flag for which a consumer waits. No other process takes part, and there is no extra
copy.

>>> import os, tempfile
>>> from moontide.nano import NanoKVCache
>>> cache = NanoKVCache(8 << 20, path=os.path.join(tempfile.mkdtemp(), "world"), rank=0, ranks=1)
>>> cache.put("prefix", bytes(100_000))
>>> buffer = bytearray(100_000)
>>> cache.get_into("prefix", buffer)
>>> cache.get_location("nothing")
NOT_READY
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
from moontide._native import KernelCell, PendingRecord, PushWriter, RankStore
from moontide.errors import DeadlineExceeded, DeviceError, Gone, InvalidArgument, NoSpace, NotFound, TooLarge

if TYPE_CHECKING:
    from types import TracebackType

    from moontide import kernels

__all__ = ["NOT_READY", "NanoKVCache", "ObjMeta", "Ticket", "WritePlan"]

PAGE_BYTES: Final = 256 * 1024
#: Timeout of a put that waits for space, as for puts of the store.
PUT_TIMEOUT_S: Final = 5.0

_TICKET_FORMAT: Final = struct.Struct("<IIQIQQQQQ")


class _NotReady:
    """Result of ``get_location`` for an object that does not exist or is not complete."""

    def __repr__(self) -> str:
        return "NOT_READY"

    def __bool__(self) -> bool:
        return False


NOT_READY: Final = _NotReady()


@dataclass(frozen=True, slots=True)
class Ticket:
    """Location of a version of an object, valid on every rank: offsets in the owner's region, no addresses.

    It can be sent in any way, for example as ``bytes(ticket)`` over a socket of the engine.
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
        return _TICKET_FORMAT.pack(*astuple(self))

    @staticmethod
    def from_bytes(packed: bytes) -> Ticket:
        """Decodes a ticket. ``open_for_read`` checks whether its record exists."""
        if len(packed) != _TICKET_FORMAT.size:
            raise InvalidArgument(f"a ticket has {_TICKET_FORMAT.size} bytes, not {len(packed)}")
        return Ticket(*_TICKET_FORMAT.unpack(packed))

    @property
    def record(self) -> kernels.Record:
        """The location as an argument of kernels."""
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


class _TicketFields:
    """Properties of a ticket, shared by writer and reader of a record."""

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


class WritePlan(_TicketFields):
    """Allocated record that this process writes: with ``write``, or with kernels that push to ``ticket.record``.

    Pointers are valid in this process until the plan is committed or aborted. When all pages are written, the cache
    commits the plan automatically within milliseconds; ``cache.commit(key)`` commits it at once.
    """

    def __init__(self, push: PushWriter, key: str | bytes) -> None:
        self._push = push
        self.key = key
        self.ticket = Ticket(*push.ticket)
        #: Serializes writes and commits. The first commit determines the result of all later ones.
        self._ending = threading.Lock()
        self._ended = False
        self._error: moontide.Error | None = None

    @property
    def dst_rank(self) -> int:
        """Rank that owns the memory."""
        return self.ticket.rank

    @property
    def payload_ptr(self) -> int:
        return self._push.address

    @property
    def header_ptr(self) -> int | None:
        """Address of the record's header word for kernels; None if the device cannot access it (AMD devices cannot)."""
        return self._push.word_address

    @property
    def complete(self) -> bool:
        """Whether all pages are written."""
        return self._push.complete

    @property
    def seconds_left(self) -> float:
        """Seconds until the reservation expires."""
        return self._push.seconds_left

    def write(self, value: Any) -> None:
        """Writes all pages from this process: an array, a tensor, or bytes; in a cache on devices also a device tensor.
        A write from a device tensor first waits for kernels of this process. Kernels must not have written any page of
        the plan."""
        span = _device_span(value)
        with self._ending:
            if span is None:
                self._push.write(value)
            else:
                self._push.write_from_device(*span)

    def write_page(self, page: int, value: Any) -> None:
        """Writes one page from memory of this process: in any order, each page once."""
        with self._ending:
            self._push.write_page(page, value)

    def __enter__(self) -> WritePlan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Aborts the plan, unless all pages are written: then the cache commits it, or has done so."""
        with contextlib.suppress(moontide.Closed):
            if kind is not None or not self.complete:
                self.abort()

    def abort(self) -> None:
        """Frees the record; waiting readers get Gone. First waits for kernels of this process that write to it on a
        device."""
        self._push.abort()


class ObjMeta(_TicketFields):
    """Complete or incomplete object. Its memory is not reused until ``release`` or the end of a ``with`` block."""

    def __init__(self, record: PendingRecord, ticket: Ticket) -> None:
        self._record = record
        self.ticket = ticket

    @property
    def owner_rank(self) -> int:
        return self.ticket.rank

    @property
    def payload_ptr(self) -> int:
        """Address of the payload in this process."""
        return self._record.address

    @property
    def header_ptr(self) -> int | None:
        """Address of the record's header word for kernels; None if the device cannot access it (AMD devices cannot).
        Waiting kernels then use only the flag, and time out if the producer dies."""
        return self._record.word_address

    @property
    def ready(self) -> bool:
        """Whether all pages are written. Raises Gone if the record was aborted or its producer died."""
        progress = self._record.progress
        if progress == "gone":
            raise Gone("the producer died or aborted the record; compute the object, or wait for another producer")
        return progress == "complete"

    def wait(self, timeout: float) -> None:
        """Waits until all pages are written. Raises DeadlineExceeded, or Gone."""
        deadline = time.monotonic() + timeout
        polls = 0
        while not self.ready:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"not all {self.n_pages} pages were written within {timeout} s")
            polls += 1
            # Producers take microseconds; kernels and scheduling delays take milliseconds.
            time.sleep(0 if polls < 100 else 0.0002)

    def copy_into(self, dst: Any) -> None:
        """Copies the bytes to an array or a tensor of the same length; in a cache on devices also to a device tensor,
        after kernels of this process have ended."""
        span = _device_span(dst, to_write=True)
        if span is None:
            self._record.copy_into(dst)
        else:
            self._record.copy_to_device(*span)

    def release(self) -> None:
        """Releases the memory. First waits for kernels of this process that read it on a device."""
        self._record.release()

    def __enter__(self) -> ObjMeta:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class NanoKVCache:
    """Cache in the memory of all ranks. Every rank creates one with the same settings; the constructor waits for all
    ranks.

    - ``heap_bytes``: memory of each rank; ``page_bytes``: unit of pushes.
    - ``path``: name of the world, a Unix socket that rank 0 creates; ``rank``, ``ranks``: rank of this process, and
      number of ranks [default: from the variables ``MASTER_PORT``, ``RANK`` and ``WORLD_SIZE``, which torch launchers
      set].
    - ``device``: device for the records, such as ``"cuda:0"`` or ``"hip:1"``, by its index in this process (``"cuda"``
      is the first) [default: host memory]. All ranks or none must use a device. **Not tested on real devices**: see
      docs/devices.md.
    - ``watermarks``: if the used share of a rank's memory exceeds the first value, the least recently used objects are
      evicted until it is below the second.
    - ``write_timeout``: a plan that is not complete after this number of seconds expires. Until then other writers of
      its key get ``InProgress``, even if the plan is dropped: call ``abort``, or use a ``with`` block.
    - ``ca``, ``cert``, ``key``: files of TLS between the ranks, with the certificate of a tenant [default: from the
      variables ``MOONTIDE_CA``, ``MOONTIDE_CERT`` and ``MOONTIDE_KEY``, as for ``Store``; ``"none"``: no TLS].
      ``node_cert``, ``node_key``: those of the node of this rank, each rank with another one [``MOONTIDE_NODE_CERT``,
      ``MOONTIDE_NODE_KEY``]. ``master_cert``, ``master_key``: those of the master, on rank 0 [``MOONTIDE_MASTER_CERT``,
      ``MOONTIDE_MASTER_KEY``].

    Ranks write to each other's memory: run only trusted programs. Close rank 0 last: its master and its memory end with
    it, and almost nothing can be read afterwards.
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
        ca: str | os.PathLike[str] | None = None,
        cert: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        node_cert: str | os.PathLike[str] | None = None,
        node_key: str | os.PathLike[str] | None = None,
        master_cert: str | os.PathLike[str] | None = None,
        master_key: str | os.PathLike[str] | None = None,
    ) -> None:
        if master_rank != 0:
            raise InvalidArgument(f"master_rank must be 0, not {master_rank}")
        if page_bytes <= 0 or page_bytes % 512:
            raise InvalidArgument(f"page_bytes must be a multiple of 512, not {page_bytes}")
        if heap_bytes < 1 << 20:
            raise InvalidArgument(f"heap_bytes must be at least 1 MiB, not {heap_bytes}")
        if path is None:
            name = f"moontide-{os.getuid()}-{os.environ.get('MASTER_PORT', '0')}.world"
            path = os.path.join(tempfile.gettempdir(), name)
        self._rank_store = RankStore(
            os.fspath(path),
            _from_environment("RANK", rank),
            _from_environment("WORLD_SIZE", ranks),
            heap_bytes,
            device=device,
            watermarks=watermarks,
            write_timeout=write_timeout,
            timeout=timeout,
            ca=ca,
            cert=cert,
            key=key,
            node_cert=node_cert,
            node_key=node_key,
            master_cert=master_cert,
            master_key=master_key,
        )
        self.page_bytes = page_bytes
        self.heap_bytes = heap_bytes
        #: Client of the same objects, for all other calls.
        files: dict[str, Any] = {"ca": ca, "cert": cert, "key": key}
        given = {name: file for name, file in files.items() if file is not None}
        self.store = moontide.Store(self._rank_store.master, **given)
        self._plans: dict[bytes, WritePlan] = {}
        self._cells: dict[int, KernelCell] = {}
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._closed = False
        self._counts = dict.fromkeys(("plans", "committed", "lost", "bytes_tx", "bytes_rx", "t_plan_us"), 0)
        self._publisher: threading.Thread | None = None

    @property
    def rank(self) -> int:
        return self._rank_store.rank

    @property
    def ranks(self) -> int:
        return self._rank_store.ranks

    @property
    def bases(self) -> list[int]:
        """Base addresses of the ranks' regions in this process: ``pointer − bases[me] + bases[peer]`` is the same
        offset in the region of a peer."""
        return self._rank_store.bases

    # ---------------------------------------------------------------------------------------------------------- objects

    def put(self, key: str | bytes, tensor: Any, *, preferred_segment: int | None = None) -> None:
        """Stores an array, a tensor or bytes, copied by this process. Waits up to 5 s for space."""
        deadline = time.monotonic() + PUT_TIMEOUT_S
        while True:
            try:
                plan = self.open_for_write(key, _bytes_of(tensor), preferred_segment=preferred_segment)
                break
            except NoSpace:
                # The master evicts in the background.
                if time.monotonic() >= deadline:
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
        """Returns the bytes of an object: in ``dst``; by default in a new uint8 tensor, or as ``bytes`` if torch is not
        installed. Raises NotFound."""
        with self._located(key) as meta:
            buffer = _new_buffer(meta.bytes_total) if dst is None else dst
            meta.copy_into(buffer)
            self._count(bytes_rx=meta.bytes_total)
        return bytes(buffer) if isinstance(buffer, bytearray) and dst is None else buffer

    def get_into(self, key: str | bytes, dst: Any) -> None:
        """Copies an object to an array or a tensor of the same length. Raises NotFound."""
        self.get(key, dst=dst)

    def remove(self, key: str | bytes) -> None:
        """Removes an object. Current readers can continue; its memory is reused after they release it."""
        self.store.remove(key)

    def touch(self, key: str | bytes) -> None:
        """Marks an object as used, which delays its eviction."""
        self.store.touch(key)

    # ------------------------------------------------------------------------------------------------------------ plans

    def open_for_write(
        self, key: str | bytes, bytes_total: int, *, preferred_segment: int | None = None
    ) -> WritePlan:
        """Allocates a record for an object, in the memory of rank ``preferred_segment`` if it has space. Raises
        AlreadyExists, InProgress, NoSpace, or TooLarge."""
        if preferred_segment is not None and not 0 <= preferred_segment < self.ranks:
            raise InvalidArgument(f"preferred_segment must be a rank, 0 to {self.ranks - 1}, not {preferred_segment}")
        if bytes_total >= self.heap_bytes:
            raise TooLarge(
                f"object of {bytes_total} bytes does not fit into {self.heap_bytes} bytes of a rank; "
                "use more heap_bytes, or split the object"
            )
        started = time.perf_counter_ns()
        push = self._rank_store.open_for_write(key, bytes_total, self.page_bytes, preferred_segment)
        plan = WritePlan(push, key)
        with self._lock:
            self._plans[_name(key)] = plan
            counts = self._counts
            took = (time.perf_counter_ns() - started) // 1000
            counts["t_plan_us"] += (took - counts["t_plan_us"]) // 8 if counts["plans"] else took
            counts["plans"] += 1
            if self._publisher is None:
                self._publisher = threading.Thread(target=self._publish, name="moontide-nano", daemon=True)
                self._publisher.start()
        self._work.set()
        return plan

    def commit(self, key: str | bytes) -> None:
        """Commits a plan of this process whose pages are all written. The cache does it automatically soon after; a
        second commit does nothing. Raises NotReady while pages are missing, and Gone if the plan was lost."""
        with self._lock:
            plan = self._plans.get(_name(key))
        if plan is not None:
            self._commit(plan)
        elif not self.store.exists(key):
            raise Gone(f"there is no plan for {key!r}: it was never opened, was aborted, or has expired")

    def get_location(self, key: str | bytes) -> ObjMeta | _NotReady:
        """Returns the location of a complete object and keeps its memory; ``NOT_READY`` if there is none. Does not
        wait. Release the result soon."""
        found = self._rank_store.find(key, self.page_bytes)
        return NOT_READY if found is None else ObjMeta(found, Ticket(*found.ticket))

    def open_for_read(self, ticket: Ticket) -> ObjMeta:
        """Opens an object that another rank writes, by the ``ticket`` of its plan. Raises Gone if the record no longer
        exists."""
        record = self._rank_store.open_for_read(ticket._words())
        if record is None:
            raise Gone("the record of this ticket no longer exists: it was aborted, or removed after its commit")
        return ObjMeta(record, ticket)

    def pin(self, ticket: Ticket) -> kernels.Pin:
        """Returns a ledger cell for kernels that read a committed object. There is one cell for the memory of each
        rank, so only one kernel at a time can read each rank's memory."""
        from moontide import kernels

        # The address of the word is valid while the rank's memory is mapped, independent of the slot.
        with self.open_for_read(ticket) as meta:
            word = meta.header_ptr
        if word is None:
            raise DeviceError(
                "kernels of this device cannot access header words; hold the object with get_location during the read"
            )
        with self._lock:
            cell = self._cells.get(ticket.rank)
            if cell is None:
                cell = self._cells[ticket.rank] = self._rank_store.kernel_cell(ticket.rank)
        return kernels.Pin(cell=cell.address, name=RankStore.slot_ref(ticket._words()), header_word=word)

    # ------------------------------------------------------------------------------------------------------ maintenance

    def stats(self) -> dict[str, int]:
        """Returns the memory usage of this rank and counters of this process."""
        used, draining, total = self._rank_store.usage()
        with self._lock:
            counts = dict(self._counts)
            counts["plans_open"] = len(self._plans)
        return {"bytes_used": used, "bytes_draining": draining, "bytes_total": total} | counts

    def evict_until_below(self, usage_ratio: float) -> None:
        """Removes the oldest objects in this rank's memory until at most this share of it is in use. Objects that are
        being written or leased are not removed. An object that ``get_location`` holds loses its key, and its memory is
        freed when it is released (``bytes_draining``)."""
        if not 0 <= usage_ratio <= 1:
            raise InvalidArgument(f"usage_ratio must be 0 to 1, not {usage_ratio}")
        used, _, total = self._rank_store.usage()
        own: list[tuple[int, bytes, int]] = []
        for key in self.store.keys():
            found = self.store.stat(key)
            if found is not None and self._rank_store.rank_of(found["locations"][0]["node"]) == self.rank:
                own.append((found["version"], key, found["size"]))
        for _, key, size in sorted(own, key=lambda one: one[0]):
            if used <= usage_ratio * total:
                return
            with contextlib.suppress(moontide.Error):
                if self.store.remove(key):
                    used -= size

    def close(self) -> None:
        """Aborts open plans and frees this rank's memory; its objects are lost. Further calls do nothing."""
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
        self._rank_store.close()

    def __enter__(self) -> NanoKVCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --------------------------------------------------------------------------------------------------------- internal

    def _located(self, key: str | bytes) -> ObjMeta:
        meta = self.get_location(key)
        if isinstance(meta, _NotReady):
            raise NotFound(f"there is no complete object {key!r} in the memory of the ranks")
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
                    # Kernels may still write: the plan stays open.
                    raise
                except moontide.Error as error:
                    plan._error = error
                    self._count(lost=1)
                plan._ended = True
        self._forget(plan)
        if plan._error is not None:
            raise plan._error

    def _count(self, **increments: int) -> None:
        with self._lock:
            for name, number in increments.items():
                self._counts[name] += number

    def _publish(self) -> None:
        """Commits plans that kernels have completed. Runs in a background thread."""
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
                # Another thread can end a plan at any time, which raises Closed. An error of one plan must not end this
                # thread.
                try:
                    if plan.complete:
                        self._commit(plan)
                    elif plan.seconds_left <= 0:
                        # The reservation has expired. The memory is not reused until the writer drops the plan.
                        self._forget(plan)
                        self._count(lost=1)
                except (moontide.NotReady, DeviceError):
                    # Retried later: kernels may still write, or the device may recover.
                    pass
                except Exception:
                    self._forget(plan)
            time.sleep(0.001)


def _from_environment(name: str, given: int | None) -> int:
    if given is not None:
        return given
    found = os.environ.get(name)
    if found is None:
        raise InvalidArgument(f"pass rank and ranks, or set the variable {name}")
    return int(found)


def _new_buffer(size: int) -> Any:
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
    """Returns address and length of a value in device memory: a torch tensor, or an object with
    ``__cuda_array_interface__``. Returns None for host memory."""
    if getattr(value, "is_cuda", False):
        if not value.is_contiguous():
            raise InvalidArgument("a device tensor must be contiguous; call .contiguous() first")
        if value.is_conj() or value.is_neg():
            raise InvalidArgument(
                "a device tensor must not be a conjugate or negative view; call .resolve_conj().resolve_neg() first"
            )
        return value.data_ptr(), value.nbytes
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        return None
    address, is_read_only = interface["data"]
    shape, kind, strides = interface["shape"], interface["typestr"], interface.get("strides")
    # Other kinds are Python objects, or their size is not in bytes.
    if kind[1] not in "biufcV":
        raise InvalidArgument(f"a device array with items of type {kind!r} is not supported")
    size = int(kind[2:])
    if strides is not None and 0 not in shape:
        expected = size
        for length, stride in zip(reversed(shape), reversed(strides), strict=True):
            if length != 1 and stride != expected:
                raise InvalidArgument("a device array must be contiguous")
            expected *= length
    if interface.get("mask") is not None or (to_write and is_read_only):
        raise InvalidArgument("a device array must have no mask, and must be writable if it is written")
    return address, size * math.prod(shape)


def _name(key: str | bytes) -> bytes:
    """Returns the bytes of a key: text is encoded as UTF-8."""
    return key.encode() if isinstance(key, str) else key
