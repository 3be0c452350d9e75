"""Functions that launch the kernels: they check arguments, choose grids and pass addresses. They allocate nothing.

The caller passes all buffers, and can reuse them: ``bases`` (int64, the address of each rank's region in this process),
``status`` and ``digest`` (one number each, on the device of the kernels). Calls go to the current stream; the status is
valid when the stream has reached that point.

Regions, cells and header words are passed as addresses, not as tensors: they are mappings of memory that other
processes own and write, and torch does not own any of it.
"""

from __future__ import annotations

import torch

from ._jit import INTERPRETED, WARPS, backend_of
from .layout import Pin, Record, as_i64
from .push import push_pages
from .read import acquire_cell, copy_pages, read_record, release_cell, wait_until_ready

PROGRAMS_MAX = 512
"""Maximum number of programs of a launch: a few for each of the 132 or 304 multiprocessors of a large GPU. With more
pages than programs, a program copies several pages."""

_VECTOR_BYTES = 16
# Elements per iteration: four vectors of two words per thread on a GPU; a whole page in the interpreter, which is
# faster.
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
    """Writes pages of a record to its owner's region, and publishes the record after the last page; status: ``Push``.

    ``source`` is the content of these pages, from the start of ``first_page`` on. The host must have initialized the
    flag before, and must hold the claim on the slot until the launch has ended.
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
    bases: torch.Tensor, record: Record, header_word: int | None, status: torch.Tensor, *, polls_max: int
) -> None:
    """Waits in a kernel until all pages are pushed, for at most ``polls_max`` polls; status: ``Wait``. Without a header
    word it polls only the flag, and does not detect the death of a producer."""
    _check(bases, status)
    wait_until_ready[(1,)](
        bases,
        record.owner,
        record.flag_offset,
        header_word or 0,
        record.epoch,
        polls_max,
        status,
        BACKEND=backend_of(bases),
        num_warps=WARPS,
    )


def acquire(pin: Pin, epoch: int, status: torch.Tensor) -> None:
    """Pins this version of a record; status: ``Read``. ``copy`` and ``release`` with the same status depend on it."""
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
    """Copies pages of a pinned record to ``target``, from ``first_page`` on. Does nothing unless the status is OK.

    Adds the digests of these pages to ``digest``, an int64 that the caller has set to 0.
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
    """Releases the pin of ``acquire``. Does nothing unless the status is OK."""
    _check_status(status)
    release_cell[(1,)](pin.cell, status, BACKEND=backend_of(status), num_warps=WARPS)


def read(
    bases: torch.Tensor,
    record: Record,
    pin: Pin,
    target: int | torch.Tensor,
    status: torch.Tensor,
    *,
    polls_max: int = 1,
    digest: torch.Tensor | None = None,
) -> None:
    """Reads a record in one program, for small records: waits for at most ``polls_max`` polls, pins, copies and
    releases; status: ``Read``."""
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
        polls_max,
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
        raise TypeError(f"bases must be int64, not {bases.dtype}")
    if digest is not None and digest.dtype != torch.int64:
        raise TypeError(f"digest must be int64, not {digest.dtype}")
    _check_status(status)


def _check_status(status: torch.Tensor) -> None:
    # The kernel writes four bytes.
    if status.dtype != torch.int32:
        raise TypeError(f"status must be int32, not {status.dtype}")


def _address(buffer: int | torch.Tensor, length: int) -> int:
    if isinstance(buffer, int):
        return buffer
    if not buffer.is_contiguous() or buffer.nbytes < length:
        raise ValueError(f"a contiguous tensor of at least {length} bytes is needed")
    return buffer.data_ptr()


def _programs(pages: int, requested: int | None) -> int:
    return min(pages, PROGRAMS_MAX if requested is None else requested)
