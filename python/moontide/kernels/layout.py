"""Layout of records and flags in a device region, and the meaning of their words.

Needs neither Triton nor torch, so that tests and tools can use it for the host's part.

    flag of a record, 64 bytes, little-endian, in its owner's region
    ┌────────┬────────┬────────┬──────────────────┐
    │ word   │ left   │ digest │ zeros            │
    │ u64 @0 │ u64 @8 │ u64@16 │ @24 … 63         │
    └────────┴────────┴────────┴──────────────────┘
    word   = epoch:62 | state:2                 as the header word of the store
    left   = epoch tag:32 | missing pages:32
    digest = sum of the pages' digests, 0 without digests
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
"""``left`` has 32 bits for the missing pages."""

_U64 = (1 << 64) - 1
_I64_SIGN = 1 << 63


def word(epoch: int, state: int) -> int:
    """Returns the stored word: ``epoch << 2 | state``."""
    return epoch << 2 | state


def epoch_tag(epoch: int) -> int:
    """Returns 32 bits of the sequence and the term of an epoch, which distinguish the versions of one slot."""
    return (epoch ^ (epoch >> 40) * 0x9E37_79B1) & 0xFFFF_FFFF


def pages_left(epoch: int, pages: int) -> int:
    """Returns the initial value of the counter ``left``."""
    return epoch_tag(epoch) << 32 | pages


def as_i64(bits: int) -> int:
    """Returns the same 64 bits as a signed number, as kernels and torch represent them."""
    return (bits ^ _I64_SIGN) - _I64_SIGN


class Push(IntEnum):
    """Result of a launch of ``push``. If programs of a launch differ, the largest value is the result."""

    PENDING = 1
    """The pages are written and counted; other pages are missing."""
    PUBLISHED = 2
    """The pages were the last ones: the flag is READY."""
    STALE = 3
    """The flag has another epoch, or expects no more pages. No page was counted, and nothing was published."""


class Wait(IntEnum):
    """Result of a bounded wait."""

    OK = 1
    GONE = 2
    """The slot is dead, free or at another epoch; do not wait again."""
    TIMED_OUT = 3


class Read(IntEnum):
    """Result of a read under a ledger cell."""

    OK = 1
    MISS = 2
    """The header word is not READY at this epoch. The cell is free."""
    TIMED_OUT = 3
    """The header word was still WRITING at this epoch after the last poll. The cell is free."""


@dataclass(frozen=True, slots=True)
class Record:
    """A version of an object in its owner's region. It has offsets, because every process maps the region at another
    address."""

    owner: int
    payload_offset: int
    flag_offset: int
    bytes_total: int
    epoch: int
    page_bytes: int = PAGE_BYTES

    def __post_init__(self) -> None:
        if self.bytes_total < 1 or self.owner < 0:
            raise ValueError(f"invalid record: {self.bytes_total} bytes on rank {self.owner}")
        if self.page_bytes not in PAGE_BYTES_ALLOWED:
            raise ValueError(f"page_bytes must be {' or '.join(map(str, PAGE_BYTES_ALLOWED))}, not {self.page_bytes}")
        if self.payload_offset < 0 or self.payload_offset % PAYLOAD_ALIGNMENT:
            raise ValueError(f"payload_offset {self.payload_offset} is not a multiple of {PAYLOAD_ALIGNMENT}")
        if self.flag_offset < 0 or self.flag_offset % FLAG_BYTES:
            raise ValueError(f"flag_offset {self.flag_offset} is not a multiple of {FLAG_BYTES}")
        if not 0 < self.epoch <= EPOCH_MAX:
            raise ValueError(f"epoch {self.epoch} is invalid")
        if self.pages > PAGES_MAX:
            raise ValueError(f"{self.pages} pages exceed the limit of {PAGES_MAX}")

    @property
    def pages(self) -> int:
        return -(-self.bytes_total // self.page_bytes)

    @property
    def last_page_bytes(self) -> int:
        return self.bytes_total - (self.pages - 1) * self.page_bytes

    def bytes_of(self, first_page: int, pages: int) -> int:
        """Returns the number of bytes of consecutive pages."""
        if first_page < 0 or pages < 1 or first_page + pages > self.pages:
            raise ValueError(f"pages {first_page}..{first_page + pages} are out of range; the record has {self.pages}")
        return min(pages * self.page_bytes, self.bytes_total - first_page * self.page_bytes)


@dataclass(frozen=True, slots=True)
class Pin:
    """A ledger cell, and the name of the slot that it pins. ``cell`` and ``header_word`` are addresses in this
    process."""

    cell: int
    name: int
    header_word: int

    def __post_init__(self) -> None:
        if self.cell % 8 or self.header_word % 8:
            raise ValueError("cell and header_word must be multiples of 8")
        if self.name == 0:
            raise ValueError("name must not be 0, which means a free cell")
