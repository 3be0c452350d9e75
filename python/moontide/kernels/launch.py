"""Plain functions around the kernels: they check, choose grids and pass addresses. They allocate nothing.

Everything that a call needs is passed in and may be used again and again: ``bases`` (int64, the address of each rank's
region in this process), ``status`` and ``digest`` (one number each, on the kernels' device). Calls go to the current
stream; a status may be read when the stream has come that far.

Regions, cells and header words are passed as addresses and never as tensors: they are mappings of memory that others
own and write, and none of it is torch's.
"""

from __future__ import annotations

import torch

from ._jit import INTERPRETED, WARPS, backend_of
from .layout import Pin, Record, as_i64
from .push import push_pages
from .read import acquire_cell, copy_pages, read_record, release_cell, wait_until_ready

PROGRAMS_MAX = 512
"""Of a launch: some for each of a large GPU's 132 or 304 multiprocessors. Those above take several pages."""

_VECTOR_BYTES = 16
# Elements at a time: four vectors of two words a thread on a GPU; in the interpreter a page at once, which is faster.
_BLOCK = 32_768 if INTERPRETED else 1024


def push(
    bases: torch.Tensor,
    record: Record,
    source: int | torch.Tensor,
    status: torch.Tensor,
    *,
    first_page: int = 0,
    pages: int | None = None,
    digest: bool = False,
    programs: int | None = None,
) -> None:
    """Writes pages of a record into its owner's region and publishes it if they are the last; status: ``Push``.

    ``source`` is what lies in these pages, from the beginning of ``first_page`` on. The host has set up the flag
    before, and holds the claim on the slot until the launch has ended.
    """
    _check(bases, status)
    count = record.pages - first_page if pages is None else pages
    address = _address(source, record.bytes_of(first_page, count))
    status.zero_()
    push_pages[(_programs(count, programs),)](
        bases,
        record.owner,
        record.payload_offset,
        record.flag_offset,
        record.bytes_total,
        record.page_bytes,
        record.pages,
        record.epoch,
        address,
        first_page,
        count,
        status,
        WIDE=address % _VECTOR_BYTES == 0,
        DIGEST=digest,
        BACKEND=backend_of(bases),
        BLOCK=_BLOCK,
        num_warps=WARPS,
    )


def wait_ready(
    bases: torch.Tensor, record: Record, header_word: int | None, status: torch.Tensor, *, looks: int
) -> None:
    """Waits in a kernel until all pages are pushed, for at most ``looks`` looks; status: ``Wait``. Without a header word it looks at
    the flag alone, and does not learn that a producer has died."""
    _check(bases, status)
    wait_until_ready[(1,)](
        bases,
        record.owner,
        record.flag_offset,
        header_word or 0,
        record.epoch,
        looks,
        status,
        BACKEND=backend_of(bases),
        num_warps=WARPS,
    )


def acquire(pin: Pin, epoch: int, status: torch.Tensor) -> None:
    """Pins a record of this version; status: ``Read``. ``copy`` and ``release`` with the same status go by it."""
    _check_status(status)
    backend = backend_of(status)
    acquire_cell[(1,)](pin.cell, as_i64(pin.name), pin.header_word, epoch, status, BACKEND=backend, num_warps=WARPS)


def copy(
    bases: torch.Tensor,
    record: Record,
    target: int | torch.Tensor,
    status: torch.Tensor,
    *,
    first_page: int = 0,
    pages: int | None = None,
    digest: torch.Tensor | None = None,
    programs: int | None = None,
) -> None:
    """Copies pages of a pinned record to ``target``, where ``first_page`` begins. Does nothing unless status is OK.

    The digests of these pages are added to ``digest``, an int64 that the caller has set to 0.
    """
    _check(bases, status, digest)
    count = record.pages - first_page if pages is None else pages
    address = _address(target, record.bytes_of(first_page, count))
    copy_pages[(_programs(count, programs),)](
        bases,
        record.owner,
        record.payload_offset,
        record.bytes_total,
        record.page_bytes,
        address,
        first_page,
        count,
        status,
        status if digest is None else digest,
        WIDE=address % _VECTOR_BYTES == 0,
        DIGEST=digest is not None,
        BACKEND=backend_of(bases),
        BLOCK=_BLOCK,
        num_warps=WARPS,
    )


def release(pin: Pin, status: torch.Tensor) -> None:
    """Gives back what ``acquire`` pinned. Does nothing unless status is OK."""
    _check_status(status)
    release_cell[(1,)](pin.cell, status, BACKEND=backend_of(status), num_warps=WARPS)


def read(
    bases: torch.Tensor,
    record: Record,
    pin: Pin,
    target: int | torch.Tensor,
    status: torch.Tensor,
    *,
    looks: int = 1,
    digest: torch.Tensor | None = None,
) -> None:
    """All in one program, for small records: waits for at most ``looks`` looks, pins, copies, gives back; ``Read``."""
    _check(bases, status, digest)
    address = _address(target, record.bytes_total)
    read_record[(1,)](
        bases,
        record.owner,
        record.payload_offset,
        record.bytes_total,
        record.page_bytes,
        record.pages,
        record.epoch,
        pin.cell,
        as_i64(pin.name),
        pin.header_word,
        looks,
        address,
        status,
        status if digest is None else digest,
        WIDE=address % _VECTOR_BYTES == 0,
        DIGEST=digest is not None,
        BACKEND=backend_of(bases),
        BLOCK=_BLOCK,
        num_warps=WARPS,
    )


def _check(bases: torch.Tensor, status: torch.Tensor, digest: torch.Tensor | None = None) -> None:
    if bases.dtype != torch.int64:
        raise TypeError(f"bases are int64, not {bases.dtype}")
    if digest is not None and digest.dtype != torch.int64:
        raise TypeError(f"a digest is int64, not {digest.dtype}")
    _check_status(status)


def _check_status(status: torch.Tensor) -> None:
    # The kernel would write four bytes of something else.
    if status.dtype != torch.int32:
        raise TypeError(f"a status is int32, not {status.dtype}")


def _address(bytes_of: int | torch.Tensor, length: int) -> int:
    if isinstance(bytes_of, int):
        return bytes_of
    if not bytes_of.is_contiguous() or bytes_of.nbytes < length:
        raise ValueError(f"{length} bytes in one piece are needed")
    return bytes_of.data_ptr()


def _programs(pages: int, wanted: int | None) -> int:
    return min(pages, PROGRAMS_MAX if wanted is None else wanted)
