"""Triton kernels that transfer records between the regions of GPUs: producers push pages, the last page publishes the
record, readers read under a ledger cell. ``docs/kernels.md`` describes the layout, the calls and the test coverage.

The kernels have no allocator, index or master: the node decides who may write where, and when a slot is reused.
"""

from __future__ import annotations

try:
    import numpy as _numpy  # noqa: F401
    import torch as _torch  # noqa: F401
    import triton as _triton  # type: ignore[import-untyped]  # noqa: F401
except ImportError as error:
    raise ImportError("moontide.kernels needs numpy, torch and triton: pip install 'moontide[kernels]'") from error

from .digest import digest_on_cpu
from .launch import acquire, copy, push, read, release, wait_ready
from .layout import (
    DEAD,
    DIGEST_AT,
    FLAG_BYTES,
    FREE,
    LEFT_AT,
    PAGE_BYTES,
    READY,
    WORD_AT,
    WRITING,
    Pin,
    Push,
    Read,
    Record,
    Wait,
    pages_left,
    word,
)

__all__ = [
    "DEAD",
    "DIGEST_AT",
    "FLAG_BYTES",
    "FREE",
    "LEFT_AT",
    "PAGE_BYTES",
    "READY",
    "WORD_AT",
    "WRITING",
    "Pin",
    "Push",
    "Read",
    "Record",
    "Wait",
    "acquire",
    "copy",
    "digest_on_cpu",
    "pages_left",
    "push",
    "read",
    "release",
    "wait_ready",
    "word",
]
