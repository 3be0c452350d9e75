"""Where a record's bytes and words lie in a device region, and what the words mean.

Needs neither Triton nor torch: the host's part in a test or a tool can be played with this alone.

    flag of a record, 64 bytes, little-endian, in its owner's region
    ┌────────┬────────┬────────┬──────────────────┐
    │ word   │ left   │ digest │ zeros            │
    │ u64 @0 │ u64 @8 │ u64@16 │ @24 … 63         │
    └────────┴────────┴────────┴──────────────────┘
    word   = epoch:62 | state:2                 as the header word of the store
    left   = mark of the epoch:32 | pages that are still missing:32
    digest = sum of the pages' digests, 0 if none were asked for
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

FREE, WRITING, READY, DEAD = 0, 1, 2, 3
"""States of a word; the numbers of ``moontide_types::record::State``."""

FLAG_BYTES = 64
WORD_AT, LEFT_AT, DIGEST_AT = 0, 8, 16

PAYLOAD_ALIGNMENT = 512
PAGE_BYTES = 256 * 1024
PAGE_BYTES_ALLOWED = (128 * 1024, 256 * 1024, 512 * 1024)
EPOCH_MAX = (1 << 62) - 1
PAGES_MAX = (1 << 32) - 1
"""``left`` has 32 bits for them."""

_U64 = (1 << 64) - 1
_I64_SIGN = 1 << 63


def word(epoch: int, state: int) -> int:
    """The word as it is stored: ``epoch << 2 | state``."""
    return epoch << 2 | state


def mark_of(epoch: int) -> int:
    """32 bits that tell apart the versions which one slot may have had: of its sequence and its term."""
    return (epoch ^ (epoch >> 40) * 0x9E37_79B1) & 0xFFFF_FFFF


def left(epoch: int, pages: int) -> int:
    """The counter as it is stored before the first page came."""
    return mark_of(epoch) << 32 | pages


def as_i64(bits: int) -> int:
    """The same 64 bits as a signed number, which is how kernels and torch hold them."""
    return (bits ^ _I64_SIGN) - _I64_SIGN


class Push(IntEnum):
    """What became of a launch of ``push``. The larger one wins where programs of a launch differ."""

    PENDING = 1
    """Its pages are there and counted; others are still missing."""
    PUBLISHED = 2
    """Its pages were the last: the flag says READY."""
    STALE = 3
    """The flag is not at this epoch, or expects no more pages. Nothing was counted and nothing published."""


class Wait(IntEnum):
    """What a bounded wait found."""

    OK = 1
    GONE = 2
    """The slot is dead, free or at another epoch: waiting longer is of no use."""
    TIMED_OUT = 3


class Read(IntEnum):
    """What became of a read under a ledger cell."""

    OK = 1
    MISS = 2
    """The header word does not say READY at this epoch. The cell is vacant."""
    TIMED_OUT = 3
    """It still said WRITING at this epoch after the last look. The cell is vacant."""


@dataclass(frozen=True, slots=True)
class Record:
    """A version of an object in its owner's region: places are offsets, because every process maps it elsewhere."""

    owner: int
    payload_offset: int
    flag_offset: int
    bytes_total: int
    epoch: int
    page_bytes: int = PAGE_BYTES

    def __post_init__(self) -> None:
        if self.bytes_total < 1 or self.owner < 0:
            raise ValueError(f"{self.bytes_total} bytes at rank {self.owner}")
        if self.page_bytes not in PAGE_BYTES_ALLOWED:
            raise ValueError(f"a page has {' or '.join(map(str, PAGE_BYTES_ALLOWED))} bytes, not {self.page_bytes}")
        if self.payload_offset < 0 or self.payload_offset % PAYLOAD_ALIGNMENT:
            raise ValueError(f"the payload at {self.payload_offset} is not on {PAYLOAD_ALIGNMENT} bytes")
        if self.flag_offset < 0 or self.flag_offset % FLAG_BYTES:
            raise ValueError(f"the flag at {self.flag_offset} is not on {FLAG_BYTES} bytes")
        if not 0 < self.epoch <= EPOCH_MAX:
            raise ValueError(f"no record has epoch {self.epoch}")
        if self.pages > PAGES_MAX:
            raise ValueError(f"{self.pages} pages are more than the flag can count")

    @property
    def pages(self) -> int:
        return -(-self.bytes_total // self.page_bytes)

    @property
    def last_page_bytes(self) -> int:
        return self.bytes_total - (self.pages - 1) * self.page_bytes

    def bytes_of(self, first_page: int, pages: int) -> int:
        """How many bytes a run of pages has."""
        if first_page < 0 or pages < 1 or first_page + pages > self.pages:
            raise ValueError(f"pages {first_page}..{first_page + pages} of {self.pages}")
        return min(pages * self.page_bytes, self.bytes_total - first_page * self.page_bytes)


@dataclass(frozen=True, slots=True)
class Pin:
    """A ledger cell and the slot it is to name. ``cell`` and ``header_word`` are addresses in this process."""

    cell: int
    name: int
    header_word: int

    def __post_init__(self) -> None:
        if self.cell % 8 or self.header_word % 8:
            raise ValueError("a cell and a header word lie on 8 bytes")
        if self.name == 0:
            raise ValueError("0 is a vacant cell and names nothing")
