"""Reading kernels: a bounded wait, and reads under a ledger cell.

The rule is the one of ``crates/heap/src/cell.rs``, and the owner's side of it runs there, on a CPU:

    reader                                   owner
    cell ← name                              word: READY → DEAD
    ─── fence, system scope ───              ─── fence(SeqCst) ───
    word READY(e)?  yes: bytes are mine      any cell = name?  yes: keep draining
                    no:  cell ← 0, miss                        no:  free, reuse

A cell belongs to one reader at a time, and only kernels of this process write it: a CPU store and a GPU atomic on one
word are not ordered on every bus.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from . import layout
from ._jit import jit
from .order import fence, look, pause, pointer, settle
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
def name_and_check(
    cell: tl.tensor, name: tl.tensor, header_word: tl.tensor, ready: tl.tensor, BACKEND: tl.constexpr
) -> tl.tensor:
    """Names the slot in the cell and looks at its word. Returns the word; unless ``ready``, the cell is vacant."""
    # AcqRel: it takes over the cell from whoever released it.
    tl.atomic_xchg(pointer(cell), name.to(tl.int64), sem="acq_rel", scope="sys")
    # The exchange is one thread's; behind the barrier it is in front of everybody's fence.
    tl.debug_barrier()
    # Pairs with the fence of the owner's scan.
    fence(BACKEND)
    found = look(header_word, BACKEND)
    if found != ready:
        vacate(cell, BACKEND)
    return found


@jit
def vacate(cell: tl.tensor, BACKEND: tl.constexpr) -> None:
    """Gives the slot back. Release: all reading of the bytes happens before; pairs with the acquire of the scan."""
    settle(BACKEND)
    tl.atomic_xchg(pointer(cell), tl.full([], 0, tl.int64), sem="release", scope="sys")


@jit
def wait_until_ready(
    bases: tl.tensor,
    owner: tl.int64,
    flag_offset: tl.int64,
    header_word: tl.int64,
    epoch: tl.int64,
    looks: tl.int64,
    status: tl.tensor,
    BACKEND: tl.constexpr,
) -> None:
    """One program. Waits until the producing kernels have published, for at most ``looks`` looks."""
    epoch = epoch.to(tl.int64)
    flag = tl.load(bases + owner) + flag_offset
    ready = (epoch << 2) | _READY
    outcome = tl.full([], _WAIT_TIMED_OUT, tl.int32)
    looked = tl.full([], 0, tl.int64)
    while (looked < looks) & (outcome == _WAIT_TIMED_OUT):
        header = (epoch << 2) | _WRITING
        if header_word != 0:
            header = look(header_word, BACKEND)
        # After the header: what is being committed, and shut for a moment, was published before.
        flagged = look(flag, BACKEND)
        published = flagged == ready
        if header_word == 0:
            # Of this version nothing but the flag is known; of a later one the flag says so.
            header = tl.where((flagged & ~3) == (epoch << 2), header, flagged)
        same_epoch = (header & ~3) == (epoch << 2)
        # Published goes before dead: a commit shuts the word for a moment, and it commits what was published. Whether
        # the bytes may be read is for the cell to say.
        alive = published | (header == ready) | (header == ((epoch << 2) | _WRITING))
        gone = (same_epoch & alive) == 0
        # Committed without a flag, by a host's put: as good.
        there = published | (header == ready)
        outcome = tl.where(gone, _WAIT_GONE, tl.where(there, _WAIT_OK, _WAIT_TIMED_OUT))
        looked += 1
        pause(BACKEND)
    tl.store(status, outcome)


@jit
def acquire_cell(
    cell: tl.int64, name: tl.int64, header_word: tl.int64, epoch: tl.int64, status: tl.tensor, BACKEND: tl.constexpr
) -> None:
    """One program. With OK the bytes stay as they are until ``release_cell``."""
    ready = (epoch.to(tl.int64) << 2) | _READY
    found = name_and_check(cell, name, header_word, ready, BACKEND)
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
    """Any number of programs. Copies out what an acquire before it in the stream has pinned; without a pin, nothing."""
    if tl.load(status) == _READ_OK:
        # What the acquire saw was seen by the caches of one multiprocessor; these programs run on others.
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
    """One program. Gives back what an acquire before it in the stream has pinned; without a pin, nothing."""
    if tl.load(status) == _READ_OK:
        vacate(cell, BACKEND)


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
    looks: tl.int64,
    target: tl.int64,
    status: tl.tensor,
    digest: tl.tensor,
    WIDE: tl.constexpr,
    DIGEST: tl.constexpr,
    BACKEND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program. Waits while the header says WRITING, acquires, copies everything, releases."""
    epoch = epoch.to(tl.int64)
    writing = (epoch << 2) | _WRITING
    ready = (epoch << 2) | _READY
    # Waits with the cell vacant: a reader that only waits must not keep a slot from being freed.
    looked = tl.full([], 1, tl.int64)
    header = look(header_word, BACKEND)
    while (looked < looks) & (header == writing):
        pause(BACKEND)
        header = look(header_word, BACKEND)
        looked += 1
    found = name_and_check(cell, name, header_word, ready, BACKEND)
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
        vacate(cell, BACKEND)
    tl.store(
        status, tl.where(found == ready, _READ_OK, tl.where(found == writing, _READ_TIMED_OUT, _READ_MISS))
    )
