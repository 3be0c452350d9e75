"""Kernel ``push_pages``: producers write a record's pages to its owner's region, and the last page publishes the
record.

    every program: flag WRITING(e)? ─no─▶ STALE, nothing written
                        │ yes
                   copy its pages
                        │ left −= its pages, by CAS with the epoch tag, acq_rel
                   0 left? ─no─▶ PENDING
                        │ yes: acquired what all others released
                   flag WRITING(e) → READY(e), by CAS, release ─▶ PUBLISHED

The claim on the slot, which the producer's host holds until its kernels have ended, prevents a late program from
writing to the next record; a check of the flag cannot. The check at the start rejects launches that are late as a
whole, and the epoch tag in ``left`` prevents late pages from being counted. Each page must be pushed once per epoch.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from . import layout
from ._jit import jit
from .memory_order import load_acquire, pointer, release_fence
from .pages import copy_page

_WRITING = tl.constexpr(layout.WRITING)
_READY = tl.constexpr(layout.READY)
_LEFT_AT = tl.constexpr(layout.LEFT_AT)
_DIGEST_AT = tl.constexpr(layout.DIGEST_AT)
_PENDING = tl.constexpr(int(layout.Push.PENDING))
_PUBLISHED = tl.constexpr(int(layout.Push.PUBLISHED))
_STALE = tl.constexpr(int(layout.Push.STALE))


@jit
def push_pages(
    bases: tl.tensor,
    owner: tl.int64,
    payload_offset: tl.int64,
    flag_offset: tl.int64,
    bytes_total: tl.int64,
    page_bytes: tl.int64,
    pages_total: tl.int64,
    epoch: tl.int64,
    source: tl.int64,
    first_page: tl.int64,
    pages: tl.int64,
    status: tl.tensor,
    WIDE: tl.constexpr,
    DIGEST: tl.constexpr,
    BACKEND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Pushes ``pages`` pages from ``first_page`` on; ``source`` is the address of the first of them."""
    # The interpreter passes small numbers as 32-bit numbers, annotated or not.
    page_bytes = page_bytes.to(tl.int64)
    bytes_total = bytes_total.to(tl.int64)
    epoch = epoch.to(tl.int64)
    region = tl.load(bases + owner)
    flag = region + flag_offset
    writing = (epoch << 2) | _WRITING
    if load_acquire(flag, BACKEND) == writing:
        digest = tl.full([1], 0, tl.uint64)
        done = tl.full([], 0, tl.int64)
        for page in range(tl.program_id(0), pages, tl.num_programs(0)):
            from_first = page * page_bytes
            begin = first_page * page_bytes + from_first
            length = tl.minimum(page_bytes, bytes_total - begin)
            to = region + payload_offset + begin
            digest += copy_page(source + from_first, to, length, begin // 8, WIDE, DIGEST, BLOCK)
            done += 1
        if DIGEST:
            # Relaxed: the countdown below releases it. It has no epoch tag; the claim keeps it within its record.
            total = tl.sum(digest, axis=0).to(tl.int64)
            tl.atomic_add(pointer(flag + _DIGEST_AT), total, sem="relaxed", scope="sys")
        release_fence(BACKEND)
        missing = count_down(pointer(flag + _LEFT_AT), epoch, pages_total, done)
        outcome = tl.where(missing > 0, _PENDING, _STALE)
        if missing == 0:
            # Release: pairs with the acquire in `load_acquire`. The acquire in `count_down` made the pages of the other
            # programs visible here.
            found = tl.atomic_cas(pointer(flag), writing, (epoch << 2) | _READY, sem="release", scope="sys")
            outcome = tl.where(found == writing, _PUBLISHED, _STALE)
        tl.atomic_max(status, outcome, sem="relaxed", scope="gpu")
    else:
        tl.atomic_max(status, _STALE, sem="relaxed", scope="gpu")


@jit
def count_down(left: tl.tensor, epoch: tl.tensor, pages_total: tl.tensor, done: tl.tensor) -> tl.tensor:
    """Subtracts ``done`` from the missing pages. Returns how many are left, or −1 if the flag does not expect these
    pages.

    Each iteration of the loop means that another program subtracted its pages meanwhile: there are fewer iterations
    than pages.
    """
    # As `epoch_tag` in layout.py and crates/symmetric/src/ready_flag.rs; the shift keeps its low 32 bits.
    tag = (epoch ^ ((epoch >> 40) * tl.full([], 0x9E37_79B1, tl.int64))) << 32
    expected = tag | pages_total.to(tl.int64)
    # Release: the pages are written before they are counted. Acquire: the program that reaches 0 sees the pages of all.
    found = tl.atomic_cas(left, expected, expected - done, sem="acq_rel", scope="sys")
    while (found != expected) & ((found & ~0xFFFF_FFFF) == tag) & ((found & 0xFFFF_FFFF) >= done):
        expected = found
        found = tl.atomic_cas(left, expected, expected - done, sem="acq_rel", scope="sys")
    return tl.where(found == expected, (expected & 0xFFFF_FFFF) - done, -1)
