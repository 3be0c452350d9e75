"""Kernel ``push_pages``: producers write a record's pages into its owner's region, and the last one publishes it.

    every program: flag WRITING(e)? ─no─▶ STALE, nothing touched
                        │ yes
                   copy its pages
                        │ left −= its pages, by CAS that names the epoch, acq_rel
                   0 left? ─no─▶ PENDING
                        │ yes: acquired what all others released
                   flag WRITING(e) → READY(e), by CAS, release ─▶ PUBLISHED

What keeps a late program out of the next record's bytes is the claim that the producer's host holds on the slot until
its kernels have ended; no look at a flag could. The look in front finds the launches that are late altogether, and the
epoch in ``left`` keeps what is late from being counted. Each page is to be pushed once an epoch.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from . import layout
from ._jit import jit
from .order import look, pointer, settle
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
    """Pushes ``pages`` pages from ``first_page`` on; ``source`` is where the first of them begins."""
    # The interpreter makes 32-bit numbers of small ones, annotated or not.
    page_bytes = page_bytes.to(tl.int64)
    bytes_total = bytes_total.to(tl.int64)
    epoch = epoch.to(tl.int64)
    region = tl.load(bases + owner)
    flag = region + flag_offset
    writing = (epoch << 2) | _WRITING
    if look(flag, BACKEND) == writing:
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
            # Relaxed: the counting below releases it. It cannot name the epoch; the claim keeps it in its record.
            total = tl.sum(digest, axis=0).to(tl.int64)
            tl.atomic_add(pointer(flag + _DIGEST_AT), total, sem="relaxed", scope="sys")
        settle(BACKEND)
        missing = count_down(pointer(flag + _LEFT_AT), epoch, pages_total, done)
        outcome = tl.where(missing > 0, _PENDING, _STALE)
        if missing == 0:
            # Release: pairs with the acquire in `look`. The others' pages came to us by the acquire in `count_down`.
            found = tl.atomic_cas(pointer(flag), writing, (epoch << 2) | _READY, sem="release", scope="sys")
            outcome = tl.where(found == writing, _PUBLISHED, _STALE)
        tl.atomic_max(status, outcome, sem="relaxed", scope="gpu")
    else:
        tl.atomic_max(status, _STALE, sem="relaxed", scope="gpu")


@jit
def count_down(left: tl.tensor, epoch: tl.tensor, pages_total: tl.tensor, done: tl.tensor) -> tl.tensor:
    """Takes ``done`` pages off those that are missing. Returns how many are left, −1 if the epoch expects none of ours.

    A turn of the loop means that another program took off its pages meanwhile: there are fewer turns than pages.
    """
    # As `mark_of` in layout.py and crates/heap/src/flag.rs; the shift keeps its low 32 bits.
    mark = (epoch ^ ((epoch >> 40) * tl.full([], 0x9E37_79B1, tl.int64))) << 32
    expected = mark | pages_total.to(tl.int64)
    # Release: our pages are there before the count says so. Acquire: whoever brings it to 0 has the pages of all.
    found = tl.atomic_cas(left, expected, expected - done, sem="acq_rel", scope="sys")
    while (found != expected) & ((found & ~0xFFFF_FFFF) == mark) & ((found & 0xFFFF_FFFF) >= done):
        expected = found
        found = tl.atomic_cas(left, expected, expected - done, sem="acq_rel", scope="sys")
    return tl.where(found == expected, (expected & 0xFFFF_FFFF) - done, -1)
