"""Reading kernels: a bounded wait, and reads under a ledger cell.

The protocol is that of ``crates/heap/src/cell.rs``; the owner runs its side there, on a CPU:

    reader                                   owner
    cell ← name                              word: READY → DEAD
    ─── fence, system scope ───              ─── fence(SeqCst) ───
    word READY(e)?  yes: read the bytes      any cell = name?  yes: keep draining
                    no:  cell ← 0, miss                        no:  free, reuse

A cell belongs to one reader at a time, and only kernels of this process write it: a CPU store and a GPU atomic on the
same word are not ordered on every bus.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from . import layout
from ._jit import jit
from .memory_order import backoff, fence, load_acquire, pointer, release_fence
from .pages import copy_page

_WRITING = tl.constexpr(layout.WRITING)
_READY = tl.constexpr(layout.READY)
_WAIT_OK = tl.constexpr(int(layout.Wait.OK))
_WAIT_GONE = tl.constexpr(int(layout.Wait.GONE))
_WAIT_TIMED_OUT = tl.constexpr(int(layout.Wait.TIMED_OUT))
_READ_OK = tl.constexpr(int(layout.Read.OK))
_READ_MISS = tl.constexpr(int(layout.Read.MISS))
_READ_TIMED_OUT = tl.constexpr(int(layout.Read.TIMED_OUT))


@jit
def pin_and_check(
    cell: tl.tensor, name: tl.tensor, header_word: tl.tensor, ready: tl.tensor, BACKEND: tl.constexpr
) -> tl.tensor:
    """Pins the slot in the cell and loads its header word. Returns the word; unless it is ``ready``, the cell is
    free."""
    # AcqRel: takes over the cell from the reader that released it.
    tl.atomic_xchg(pointer(cell), name.to(tl.int64), sem="acq_rel", scope="sys")
    # One thread executes the exchange; the barrier orders it before the fences of all threads.
    tl.debug_barrier()
    # Pairs with the fence of the owner's scan.
    fence(BACKEND)
    found = load_acquire(header_word, BACKEND)
    if found != ready:
        clear_cell(cell, BACKEND)
    return found


@jit
def clear_cell(cell: tl.tensor, BACKEND: tl.constexpr) -> None:
    """Unpins the slot. Release: all reads of the bytes happen before; pairs with the acquire of the scan."""
    release_fence(BACKEND)
    tl.atomic_xchg(pointer(cell), tl.full([], 0, tl.int64), sem="release", scope="sys")


@jit
def wait_until_ready(
    bases: tl.tensor,
    owner: tl.int64,
    flag_offset: tl.int64,
    header_word: tl.int64,
    epoch: tl.int64,
    polls_max: tl.int64,
    status: tl.tensor,
    BACKEND: tl.constexpr,
) -> None:
    """One program. Waits until the producing kernels have published, for at most ``polls_max`` polls."""
    epoch = epoch.to(tl.int64)
    flag = tl.load(bases + owner) + flag_offset
    ready = (epoch << 2) | _READY
    outcome = tl.full([], _WAIT_TIMED_OUT, tl.int32)
    polls = tl.full([], 0, tl.int64)
    while (polls < polls_max) & (outcome == _WAIT_TIMED_OUT):
        header = (epoch << 2) | _WRITING
        if header_word != 0:
            header = load_acquire(header_word, BACKEND)
        # After the header: a commit closes the word briefly, and the flag was published before the commit.
        flagged = load_acquire(flag, BACKEND)
        published = flagged == ready
        if header_word == 0:
            # Without a header word only the flag is known; it shows a later version.
            header = tl.where((flagged & ~3) == (epoch << 2), header, flagged)
        same_epoch = (header & ~3) == (epoch << 2)
        # Published has priority over dead: a commit closes the word briefly, and it commits a published record. The
        # cell decides whether the bytes may be read.
        alive = published | (header == ready) | (header == ((epoch << 2) | _WRITING))
        gone = (same_epoch & alive) == 0
        # A put of a host commits without a flag.
        complete = published | (header == ready)
        outcome = tl.where(gone, _WAIT_GONE, tl.where(complete, _WAIT_OK, _WAIT_TIMED_OUT))
        polls += 1
        backoff(BACKEND)
    tl.store(status, outcome)


@jit
def acquire_cell(
    cell: tl.int64, name: tl.int64, header_word: tl.int64, epoch: tl.int64, status: tl.tensor, BACKEND: tl.constexpr
) -> None:
    """One program. With OK the bytes do not change until ``release_cell``."""
    ready = (epoch.to(tl.int64) << 2) | _READY
    found = pin_and_check(cell, name, header_word, ready, BACKEND)
    tl.store(status, tl.where(found == ready, _READ_OK, _READ_MISS))


@jit
def copy_pages(
    bases: tl.tensor,
    owner: tl.int64,
    payload_offset: tl.int64,
    bytes_total: tl.int64,
    page_bytes: tl.int64,
    target: tl.int64,
    first_page: tl.int64,
    pages: tl.int64,
    status: tl.tensor,
    digest: tl.tensor,
    WIDE: tl.constexpr,
    DIGEST: tl.constexpr,
    BACKEND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Any number of programs. Copies a record that an earlier acquire in the stream pinned; without a pin, nothing."""
    if tl.load(status) == _READ_OK:
        # The acquire invalidated the caches of one multiprocessor; these programs run on others.
        fence(BACKEND)
        page_bytes = page_bytes.to(tl.int64)
        bytes_total = bytes_total.to(tl.int64)
        from_payload = tl.load(bases + owner) + payload_offset
        total = tl.full([1], 0, tl.uint64)
        for page in range(tl.program_id(0), pages, tl.num_programs(0)):
            from_first = page * page_bytes
            begin = first_page * page_bytes + from_first
            length = tl.minimum(page_bytes, bytes_total - begin)
            total += copy_page(from_payload + begin, target + from_first, length, begin // 8, WIDE, DIGEST, BLOCK)
        if DIGEST:
            tl.atomic_add(digest, tl.sum(total, axis=0).to(tl.int64), sem="relaxed", scope="gpu")


@jit
def release_cell(cell: tl.int64, status: tl.tensor, BACKEND: tl.constexpr) -> None:
    """One program. Releases the pin of an earlier acquire in the stream; without a pin, nothing."""
    if tl.load(status) == _READ_OK:
        clear_cell(cell, BACKEND)


@jit
def read_record(
    bases: tl.tensor,
    owner: tl.int64,
    payload_offset: tl.int64,
    bytes_total: tl.int64,
    page_bytes: tl.int64,
    pages_total: tl.int64,
    epoch: tl.int64,
    cell: tl.int64,
    name: tl.int64,
    header_word: tl.int64,
    polls_max: tl.int64,
    target: tl.int64,
    status: tl.tensor,
    digest: tl.tensor,
    WIDE: tl.constexpr,
    DIGEST: tl.constexpr,
    BACKEND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program. Waits while the header is WRITING, acquires, copies all pages, releases."""
    epoch = epoch.to(tl.int64)
    writing = (epoch << 2) | _WRITING
    ready = (epoch << 2) | _READY
    # Waits with a free cell: a waiting reader must not prevent a slot from being freed.
    polls = tl.full([], 1, tl.int64)
    header = load_acquire(header_word, BACKEND)
    while (polls < polls_max) & (header == writing):
        backoff(BACKEND)
        header = load_acquire(header_word, BACKEND)
        polls += 1
    found = pin_and_check(cell, name, header_word, ready, BACKEND)
    if found == ready:
        page_bytes = page_bytes.to(tl.int64)
        bytes_total = bytes_total.to(tl.int64)
        from_payload = tl.load(bases + owner) + payload_offset
        total = tl.full([1], 0, tl.uint64)
        for page in range(0, pages_total):
            begin = page * page_bytes
            length = tl.minimum(page_bytes, bytes_total - begin)
            total += copy_page(from_payload + begin, target + begin, length, begin // 8, WIDE, DIGEST, BLOCK)
        if DIGEST:
            tl.store(digest, tl.sum(total, axis=0).to(tl.int64))
        clear_cell(cell, BACKEND)
    tl.store(
        status, tl.where(found == ready, _READ_OK, tl.where(found == writing, _READ_TIMED_OUT, _READ_MISS))
    )
