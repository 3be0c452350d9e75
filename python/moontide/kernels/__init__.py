"""Triton kernels that move records between the regions of GPUs: producers push pages, the last one publishes, readers
read under a ledger cell. ``docs/kernels.md`` has the layout, the calls, and what has been run on what.

There is no allocator, index or master in here: who may write where, and when a slot is used again, is the node's.
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
    left,
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
    "left",
    "push",
    "read",
    "release",
    "wait_ready",
    "word",
]
